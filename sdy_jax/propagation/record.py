"""The record of a propagation, from which `why` and the debug-info pass explain the sharding of a value.

The engine records one `Event` for each successful propagation of an op; `history.py` derives steps from them later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sdy_jax.ir.graph import Op
from sdy_jax.representation.rule import OpShardingRule
from sdy_jax.representation.sharding import TensorSharding

if TYPE_CHECKING:
    from sdy_jax.propagation.worklist import WorklistEntry

from sdy_jax.propagation.spread import Spread

Event = tuple["WorklistEntry", tuple[int, ...], Any, Any, int, int]
"""One successful propagation of one op: the entry, the numbers of its tensors' shardings before, directions, strategy,
level and user priority."""


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
