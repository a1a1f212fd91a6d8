"""What happened during propagation, for whoever wants to know why a value is sharded as it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from sdy_jax.graph import Op, Value
from sdy_jax.representation.mesh import AxisRef
from sdy_jax.representation.sharding import TensorSharding


@dataclass(frozen=True, slots=True)
class FunctionResult:
    """The sharding attribute of result `index` of a function: a place that no `Value` stands for."""

    function: Op
    index: int


Place = Value | FunctionResult


@dataclass(frozen=True, slots=True)
class Spread:
    """Axes that an op gave to one of its tensors along one factor; `source` is the tensor they came from, if one had
    all of them."""

    factor: int
    axes: tuple[AxisRef, ...]
    source: Place | None
    target: Place


@dataclass(frozen=True, slots=True)
class Step:
    """One successful propagation of one op.

    `level` is the op priority (0 to 4), `priority` the user priority; `written` the new sharding per changed place.
    """

    op: Op
    level: int
    priority: int
    spreads: tuple[Spread, ...]
    written: tuple[tuple[Place, TensorSharding], ...]


class Recorder(Protocol):
    """Receives each step in the order in which they happen."""

    def step(self, step: Step) -> None: ...
