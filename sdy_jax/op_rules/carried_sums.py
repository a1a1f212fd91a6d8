"""Sums that loops carry: values to which a loop adds, in whole or in parts, and with which it does nothing else.

    repeat:  part = dynamic_slice(sums, i);  sums = dynamic_update_slice(sums, part + term, i)

Such a sum may be partial while the loop runs, and is reduced once behind it. See
docs/explanation/strategies.md#partial-sums.
"""

from __future__ import annotations

from collections.abc import Container

from sdy_jax.ir.graph import Op, Value
from sdy_jax.op_rules.dataflow import DataFlowEdge, loop_edge
from sdy_jax.op_rules.linearity import LINEAR, Linear

_LOOP = "stablehlo.while"
_ADDING = frozenset(("stablehlo.add", "stablehlo.subtract", _LOOP))
_PASSING = {
    Linear.DATA: range(1),
    Linear.EVERY: None,
    Linear.SUMMANDS: None,
    Linear.BRANCHES: range(1, 3),
    Linear.UPDATED: range(2),
}
"""The operands through which a sum goes on as one; None for any."""


def is_carried_sum(edge: DataFlowEdge) -> bool:
    """Whether an edge is that of a loop which only adds to what it carries.

    One that writes parts anew adds nothing: what a scan stacks is as many bytes to reduce part by part, and is not held
    whole until then.
    """
    inner = [target for target in edge.targets if target is not edge.owner]
    reached, left, adds = dict.fromkeys(inner), list(inner), False
    while left:
        for op, index in left.pop().uses:
            if (op, index) in edge.slots:
                continue
            further = _passed_on(op, index)
            if further is None:
                return False
            adds |= op.name in _ADDING
            left += [value for value in further if value not in reached]
            reached |= dict.fromkeys(further)
    return adds and all(_is_updated_by_sums(value, reached) for value in reached)


def _is_updated_by_sums(value: Value, sums: Container[Value]) -> bool:
    """Whether a value is no update of a sum by something else."""
    op = value.defining_op
    return op is None or _linear(op) is not Linear.UPDATED or all(operand in sums for operand in op.operands[:2])


def _passed_on(op: Op, index: int) -> tuple[Value, ...] | None:
    """The values that are sums as an operand of an op is one; None where it does something else with it."""
    if op.name == _LOOP:
        inner = loop_edge(op, index)
        return (inner.owner,) if is_carried_sum(inner) else None
    how = _linear(op)
    if how is None or how not in _PASSING:
        return None
    allowed = _PASSING[how]
    return tuple(op.results) if allowed is None or index in allowed else None


def _linear(op: Op) -> Linear | None:
    by_kind = LINEAR.get(op.key, {})
    return by_kind.get("*") or by_kind.get("sum")
