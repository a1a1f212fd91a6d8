"""What is decided about one op: the problem with the shardings around it, the ways to run it, and the choice."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from sdy_jax.lowering.cost import CostModel
from sdy_jax.lowering.factors import Assignment, Axes
from sdy_jax.lowering.strategies.registry import Strategy
from sdy_jax.representation.axes import overlaps, sort_and_merge
from sdy_jax.representation.mesh import Mesh
from sdy_jax.representation.rule import OpShardingRule
from sdy_jax.representation.sharding import TensorSharding


class Tensor(NamedTuple):
    """What the choice must know of an operand or result: its shape, bytes per element and sharding.

    `share`: how often it is resharded for each time that the op runs, less than once where it comes into a loop.
    """

    shape: tuple[int, ...]
    itemsize: float
    sharding: TensorSharding
    share: float = 1.0


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


@dataclass(frozen=True, slots=True)
class Choice:
    """How an op runs: its strategy, and the sharding that each operand must and each result will have."""

    strategy: Strategy
    assignment: Assignment
    operands: tuple[TensorSharding, ...]
    results: tuple[TensorSharding, ...]
    gathered: tuple[int, ...] = ()
    """Factors whose tensors are sharded along them but that the op cannot run split along."""
    inside: tuple[InsideCollective, ...] = ()


@dataclass(frozen=True)
class Problem:
    """One op with the shardings around it. `results` carry the declared shardings.

    `carried`: the operands that must be partial for the results to be so; none where partial operands must be reduced.
    """

    rule: OpShardingRule
    strategies: tuple[Strategy, ...]
    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    mesh_name: str
    mesh: Mesh
    costs: CostModel
    carried: frozenset[int] = frozenset()

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.operands + self.results

    @cached_property
    def partial_axes(self) -> Axes:
        """The axes along which carried operands are partial, in mesh order; none if they are parts of one another."""
        if not self.carried:
            return ()
        found = list(dict.fromkeys(a for i in self.carried for a in self.operands[i].sharding.unreduced_axes))
        apart = not any(overlaps(a, b) for a, b in itertools.combinations(found, 2))
        return sort_and_merge(found, self.mesh) if apart else ()

    @property
    def partial_kind(self) -> str:
        return next(
            self.operands[i].sharding.reduction for i in self.carried if self.operands[i].sharding.unreduced_axes
        )
