"""The attribute that says which axis went from which tensor of an op to which others, in which step.

What is filed where is as in Shardy, its quirks included.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Op
from sdy_jax.ir.operations import pre_order
from sdy_jax.ir.stored_shardings import entries_of, set_entry
from sdy_jax.op_rules.registry import INSTALLED_IS_NEW
from sdy_jax.passes.transfers import Transfer
from sdy_jax.propagation.value_ids import EDGES
from sdy_jax.representation.attributes import propagation_edges_to_attribute, sharding_from_attribute
from sdy_jax.representation.axes import natural_order
from sdy_jax.representation.mesh import AxisRef
from sdy_jax.representation.propagation_edges import AxisSpread, EdgeValue, PropagationEdges, PropagationStep

PROPAGATION_EDGES = "sdy.propagation_edges"
SUNK_EDGES = ("sdy.block_arg_propagation_edges", "sdy.result_propagation_edges")


def next_step(module: ir.Operation) -> int:
    """One more than the largest step that is written in the module."""
    numbers: list[int] = []
    for op in pre_order(module):
        for text in _edge_texts(op):
            numbers += map(int, re.findall(r"\bstep-(\d+)", text))
    return max(numbers, default=-1) + 1


def _edge_texts(op: ir.Operation) -> Iterator[str]:
    attributes = op.attributes
    for name in (PROPAGATION_EDGES, *SUNK_EDGES):
        if name in attributes:
            yield str(attributes[name])
    if op.name == "func.func" and "res_attrs" in attributes:
        entries = entries_of(op, "res_attrs")
        yield from (str(entry[PROPAGATION_EDGES]) for entry in entries if PROPAGATION_EDGES in entry)


def write_edges(found: Iterable[Transfer]) -> None:
    """Stores transfers at their ops. Those at main's return all go to result 0, as in Shardy.

    Before jaxlib 0.12 the dialect lets a data-flow edge speak of its own operand only: what other sources took part in
    is left out.
    """
    by_op: dict[Op, dict[tuple[AxisRef, EdgeValue, EdgeValue], int]] = {}
    for t in found:
        source, target = (t.source, t.target)
        if not INSTALLED_IS_NEW and t.op.name in EDGES and max(source.index, target.index) > 0:
            continue
        if t.op.name == "func.return":
            source, target = EdgeValue(source.side, 0), EdgeValue(target.side, 0)
        by_op.setdefault(t.op, {}).setdefault((t.axis, source, target), t.step)
    for op, steps in by_op.items():
        attribute = propagation_edges_to_attribute(propagation_edges_of(steps), op.mlir.context)
        if op.name == "func.return":
            assert op.parent is not None
            set_entry(op.parent.mlir, "res_attrs", 0, PROPAGATION_EDGES, attribute)
        else:
            op.mlir.attributes[PROPAGATION_EDGES] = attribute


def write_constraint_edges(module: ir.Operation, applied: Sequence[ir.Operation]) -> None:
    """Stores one step for each constraint that gave its input its sharding."""
    source, target = EdgeValue("result", 0), EdgeValue("operand", 0)
    for step, op in enumerate(applied, next_step(module)):
        axes = [axis for d in sharding_from_attribute(op.attributes["sharding"]).dimensions for axis in d.axes]
        if axes:
            edges = propagation_edges_of({(axis, source, target): step for axis in axes})
            op.attributes[PROPAGATION_EDGES] = propagation_edges_to_attribute(edges, op.context)


def propagation_edges_of(steps: dict[tuple[AxisRef, EdgeValue, EdgeValue], int]) -> PropagationEdges:
    """The attribute's value from the first step of each (axis, source, target)."""
    by_step: dict[int, dict[tuple[AxisRef, EdgeValue], list[EdgeValue]]] = {}
    for (axis, source, target), step in steps.items():
        by_step.setdefault(step, {}).setdefault((axis, source), []).append(target)

    def order(value: EdgeValue) -> tuple[str, int]:
        return value.side, value.index  # operands first

    return PropagationEdges(
        tuple(
            PropagationStep(
                step,
                tuple(
                    AxisSpread(axis, source, tuple(sorted(targets, key=order)))
                    for (axis, source), targets in sorted(spreads.items(), key=lambda item: natural_order(item[0][0]))
                ),
            )
            for step, spreads in sorted(by_step.items())
        )
    )
