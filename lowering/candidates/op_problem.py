"""The decision about one op as data: its kind, the problem (with the shardings around it), candidates, how it runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
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


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """An op without its shardings: ops of one kind have equal decisions under equal shardings.

    `tensors`: shape and bytes per element of operands, then results. `multiplies`: whether the op is a product, a
    convolution or a kernel, or as dear, so that its work may not be repeated. `touched`: what ops of the kind read from
    memory and write to it, where that has a price. Compared by identity, so that keys are cheap.
    """

    rule: OpShardingRule
    strategies: tuple[Strategy, ...]
    tensors: tuple[tuple[tuple[int, ...], float], ...]
    multiplies: bool
    touched: tuple[Touched, ...] = ()


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
    """A strategy with axes for each factor; along the axes `partial`, carried operands stay unreduced.

    What is priced of it is a `BoundedCandidate` where an op is decided alone, and a `Candidate` of the model, which has
    the layouts that follow and knows no problem, where the whole program is.
    """

    strategy: Strategy
    assignment: Assignment
    partial: Axes = ()


Shardings = tuple[TensorSharding, ...]
"""The shardings of an op's operands, then of its results."""


class Decision(NamedTuple):
    """How an op runs, decided alone or planned: its kind, the shardings required of operands, then those produced for
    results.

    `gathered`: factors along which operands are sharded and the op cannot run sharded, so that their axes are gathered.
    `inside`: the collectives that the op performs itself. `strategy`: that of a choice for the whole program, if it is
    not the one that was chosen for the op alone. `at_rest`: operands and results are in these shardings already, and
    there is nothing to report.
    """

    kind: Kind
    shardings: Shardings
    gathered: tuple[int, ...] = ()
    inside: tuple[InsideCollective, ...] = ()
    strategy: Strategy | None = None
    at_rest: bool = False

    @property
    def rule(self) -> OpShardingRule:
        return self.kind.rule


class OpProblem(NamedTuple):
    """An op of a kind with the shardings around it, all on one mesh. `tensors`: operands, then results with their
    declared shardings.

    `carried`: the indices of the operands that must be unreduced for the results to be unreduced; empty where unreduced
    operands must be reduced before the op. `cuts`: where axes may be cut.
    """

    kind: Kind
    tensors: tuple[Tensor, ...]
    mesh: Mesh
    costs: CostModel
    carried: frozenset[int] = frozenset()
    cuts: Cuts | None = None

    @property
    def rule(self) -> OpShardingRule:
        return self.kind.rule

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        return self.kind.strategies

    @property
    def mesh_name(self) -> str | Mesh:
        return self.tensors[0].sharding.mesh

    @property
    def shares_work(self) -> bool:
        """Whether no work is repeated that some candidate shares out."""
        return self.kind.multiplies and not self.costs.repeat_work

    def by_rule(self, rule: OpShardingRule, strategies: tuple[Strategy, ...]) -> OpProblem:
        """The problem by another rule of the op, of which these strategies speak."""
        return self._replace(kind=replace(self.kind, rule=rule, strategies=strategies))

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
