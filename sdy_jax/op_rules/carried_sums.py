"""Sums that loops carry: values to which a loop adds, in whole or in parts, and with which it does nothing else.

    repeat:  part = dynamic_slice(sums, i);  sums = dynamic_update_slice(sums, part + term, i)

Such a sum may be partial while the loop runs, and is reduced once behind it. See
docs/explanation/strategies.md#partial-sums.
"""

from __future__ import annotations

from collections.abc import Iterator

from sdy_jax.ir.graph import Op, Value
from sdy_jax.op_rules.dataflow import DataFlowEdge, edges_of
from sdy_jax.op_rules.linearity import LINEAR, Linear

_LOOP = "stablehlo.while"
_PASSING = {
    Linear.DATA: range(1),
    Linear.EVERY: None,
    Linear.SUMMANDS: None,
    Linear.BRANCHES: range(1, 3),
    Linear.UPDATED: range(2),
}
"""The operands through which a sum goes on as one; None for any."""


def is_carried_sum(edge: DataFlowEdge) -> bool:
    """Whether an edge is that of a loop which only adds to what it carries."""
    inner = [target for target in edge.targets if target is not edge.owner]
    return bool(inner) and all(_only_adds(edge, inner))


def _only_adds(edge: DataFlowEdge, carried: list[Value]) -> Iterator[bool]:
    """Of each use of what is carried, and of what becomes of that, whether the sum goes on there, or back."""
    left, seen = list(carried), set[Value]()
    while left:
        value = left.pop()
        if value in seen:
            continue
        seen.add(value)
        for op, index in value.uses:
            if (op, index) in edge.slots:
                yield True
                continue
            further = _passed_on(op, index)
            yield further is not None
            left += further or ()


def _passed_on(op: Op, index: int) -> tuple[Value, ...] | None:
    """The values that are sums as an operand of an op is one; None where it does something else with it."""
    if op.name == _LOOP:
        inner = next((each for each in edges_of(op) if (op, index) in each.slots), None)
        return (inner.owner,) if inner is not None and is_carried_sum(inner) else None
    by_kind = LINEAR.get(op.key, {})
    how = by_kind.get("*") or by_kind.get("sum")
    if how is None or how not in _PASSING:
        return None
    allowed = _PASSING[how]
    return tuple(op.results) if allowed is None or index in allowed else None
