"""The decision about one op as data: the problem (the op and the shardings around it), candidates, the choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sdy_jax.lowering.analysis.cuts import Cuts
from sdy_jax.lowering.analysis.factors import Assignment, are_apart
from sdy_jax.lowering.analysis.fusion import Touched
from sdy_jax.lowering.costs.cost_model import CostModel
from sdy_jax.lowering.strategies.registry import Strategy
from sdy_jax.representation.axes import sort_and_merge
from sdy_jax.representation.mesh import Axes, Mesh
from sdy_jax.representation.rule import OpShardingRule
from sdy_jax.representation.sharding import TensorSharding


class Tensor(NamedTuple):
    """An operand or result: its shape, bytes per element and sharding.

    `share`: reshards per execution of the op. Below 1 for a value that enters a loop, as it is resharded once before
    the loop; 0 for a value that every device can compute without communication.
    `materialized`: the shardings in which an operand is materialized, if they are not just `sharding`.
    """

    shape: tuple[int, ...]
    itemsize: float
    sharding: TensorSharding
    share: float = 1.0
    materialized: tuple[TensorSharding, ...] = ()


@dataclass(frozen=True, slots=True)
class InsideCollective:
    """A collective that the op performs itself on one block of a tensor (of operands, then results).

    `is_exact`: `wire_bytes` is what a device sends, not only what the kind of collective would.
    """

    kind: str
    axes: Axes
    tensor: int
    wire_bytes: float
    time: float
    is_exact: bool = False


class StrategyAssignment(NamedTuple):
    """A candidate: a strategy with axes for each factor; along the axes `partial`, carried operands stay unreduced."""

    strategy: Strategy
    assignment: Assignment
    partial: Axes = ()


class Choice(NamedTuple):
    """How an op runs: the shardings required of operands, then those produced for results.

    `gathered`: factors along which operands are sharded and the op cannot run sharded, so that their axes are gathered.
    `inside`: the collectives that the op performs itself. `strategy`: that of a choice for the whole program, if it is
    not the one that was chosen for the op alone.
    """

    shardings: tuple[TensorSharding, ...]
    gathered: tuple[int, ...] = ()
    inside: tuple[InsideCollective, ...] = ()
    strategy: Strategy | None = None


class OpProblem(NamedTuple):
    """One op with the shardings around it. `tensors`: operands, then results with their declared shardings.

    `carried`: the indices of the operands that must be unreduced for the results to be unreduced; empty where unreduced
    operands must be reduced before the op. `shares_work`: whether no work is repeated that some candidate shares out.
    `touched`: what the op reads from memory and writes to it. `cuts`: where axes may be cut.
    """

    rule: OpShardingRule
    strategies: tuple[Strategy, ...]
    tensors: tuple[Tensor, ...]
    mesh_name: str
    mesh: Mesh
    costs: CostModel
    carried: frozenset[int] = frozenset()
    shares_work: bool = False
    touched: tuple[Touched, ...] = ()
    cuts: Cuts | None = None

    @property
    def partial_axes(self) -> Axes:
        """The axes along which carried operands are unreduced, in mesh order; none if some of these axes overlap."""
        if not self.carried:
            return ()
        found = list(dict.fromkeys(a for i in self.carried for a in self.tensors[i].sharding.unreduced_axes))
        return sort_and_merge(found, self.mesh) if are_apart(found) else ()

    @property
    def partial_kind(self) -> str:
        shardings = [self.tensors[i].sharding for i in self.carried]
        return next(sharding.reduction for sharding in shardings if sharding.unreduced_axes)
