"""The record of a propagation, from which `why` and the debug-info pass explain the sharding of a value.

The engine records one `Event` for each successful propagation of an op; `history.py` derives steps from them later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sdy_jax.ir.graph import Op, Value
from sdy_jax.representation.mesh import AxisRef
from sdy_jax.representation.rule import OpShardingRule
from sdy_jax.representation.sharding import TensorSharding

if TYPE_CHECKING:
    from sdy_jax.propagation.worklist import WorklistEntry


@dataclass(frozen=True, slots=True)
class FunctionResult:
    """The sharding attribute of result `index` of a function: a value id that no `Value` stands for."""

    function: Op
    index: int


ShardedValue = Value | FunctionResult

Event = tuple["WorklistEntry", tuple[int, ...], Any, Any, int, int]
"""One successful propagation of one op: the entry, the numbers of its tensors' shardings before, directions, strategy,
level and user priority."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A factor of one of an op's tensors got axes: it had `before`, now `axes`.

    Tensors are numbered operands first, then results; `dim` is the target's dimension that the factor belongs to.
    `source` is the first tensor that had all of `axes` already, None if no single one had.
    """

    factor: int
    dim: int
    before: tuple[AxisRef, ...]
    axes: tuple[AxisRef, ...]
    source: int | None
    target: int


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One successful propagation of one op.

    `number` counts from 0; `level` is the op priority (0 to 4), `priority` the user priority. `tensors` are the value
    ids of operands and results (0: a value that cannot have a sharding), `before` their shardings as the op saw them,
    `written` the tensors that changed with the shardings that were stored.
    """

    number: int
    entry: WorklistEntry
    level: int
    priority: int
    rule: OpShardingRule
    before: tuple[TensorSharding | None, ...]
    spreads: tuple[Spread, ...]
    written: tuple[tuple[int, TensorSharding], ...]

    @property
    def op(self) -> Op:
        return self.entry.op

    @property
    def tensors(self) -> tuple[int, ...]:
        return self.entry.value_ids

    @property
    def num_operands(self) -> int:
        return len(self.rule.operand_mappings)
