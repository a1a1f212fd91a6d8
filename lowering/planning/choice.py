"""What is decided about one op: the problem with the shardings around it, the ways to run it, and the choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sdy_jax.lowering.planning.factors import Assignment, Axes, are_apart
from sdy_jax.lowering.reshard.cost import CostModel
from sdy_jax.lowering.strategies.registry import Strategy
from sdy_jax.representation.axes import sort_and_merge
from sdy_jax.representation.mesh import Mesh
from sdy_jax.representation.rule import OpShardingRule
from sdy_jax.representation.sharding import TensorSharding


class Tensor(NamedTuple):
    """What the choice must know of an operand or result: its shape, bytes per element and sharding.

    `share`: how often it is resharded for each time that the op runs, less than once where it comes into a loop,
    never where every device makes it for itself.
    `copies`: where an operand really is, if that is not just where it is expected.
    """

    shape: tuple[int, ...]
    itemsize: float
    sharding: TensorSharding
    share: float = 1.0
    copies: tuple[TensorSharding, ...] = ()


@dataclass(frozen=True, slots=True)
class InsideCollective:
    """A collective that the op performs itself on one block of a tensor (of operands, then results)."""

    kind: str
    axes: Axes
    tensor: int
    wire_bytes: float
    time: float


class Way(NamedTuple):
    """One way to run an op; `partial` are the axes along which its carried operands stay unreduced."""

    strategy: Strategy
    assignment: Assignment
    partial: Axes = ()


class Choice(NamedTuple):
    """How an op runs: the sharding that each operand must have, then the one that each result will have."""

    shardings: tuple[TensorSharding, ...]
    gathered: tuple[int, ...] = ()
    """Factors whose tensors are sharded along them but that the op cannot run split along."""
    inside: tuple[InsideCollective, ...] = ()


class Problem(NamedTuple):
    """One op with the shardings around it. `tensors` are operands, then results, which carry the declared shardings.

    `carried`: the operands that must be partial for the results to be so; none where partial operands must be reduced.
    """

    rule: OpShardingRule
    strategies: tuple[Strategy, ...]
    tensors: tuple[Tensor, ...]
    mesh_name: str
    mesh: Mesh
    costs: CostModel
    carried: frozenset[int] = frozenset()

    @property
    def partial_axes(self) -> Axes:
        """The axes along which carried operands are partial, in mesh order; none if they are parts of one another."""
        if not self.carried:
            return ()
        found = list(dict.fromkeys(a for i in self.carried for a in self.tensors[i].sharding.unreduced_axes))
        return sort_and_merge(found, self.mesh) if are_apart(found) else ()

    @property
    def partial_kind(self) -> str:
        shardings = [self.tensors[i].sharding for i in self.carried]
        return next(sharding.reduction for sharding in shardings if sharding.unreduced_axes)
