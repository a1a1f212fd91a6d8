"""Slices of element-wise ops on pads become element-wise ops on slices of pads.

The gradient of a padded stencil adds pads up and cuts the sum to the size of what was padded. The padded size lies in
other blocks, to which every pad would move its operand and from which the slice would move the sum back. A slice of a
pad is a shift.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.op_rules.predicates import is_elementwise
from sdy_jax.op_rules.slicing import PADDINGS

_SLICE, _PAD, _BROADCAST = "stablehlo.slice", "stablehlo.pad", "stablehlo.broadcast_in_dim"
_DEPTH = 16
"""How many element-wise ops deep pads are looked for. Guessed, a guard: gradients of stencils are chains of additions,
one per point."""


def slice_early(graph: Graph) -> Graph:
    """Moves slices along split dimensions before the element-wise ops that make what they cut, where these read pads.
    Returns the graph of the module; what was replaced has no users in it."""
    found = [op for op in graph.ops if _cuts(op) and _is_cut_along_split(op) and _reads_pads(op)]
    for op in found:
        op.results[0].mlir.replace_all_uses_with(_early(op.operands[0], op))
    return Graph(graph.module) if found else graph


def _cuts(op: Op) -> bool:
    """Whether an op takes some neighbouring elements of its operand: a slice, or a pad that only takes away."""
    if op.name == _PAD:
        return not any(n > 0 for name in PADDINGS for n in op.ints(name))
    return op.name == _SLICE and all(stride == 1 for stride in op.ints("strides"))


def _is_cut_along_split(op: Op) -> bool:
    result, operand = op.results[0], op.operands[0]
    sizes = zip(operand.shape or (), result.shape or (), strict=True)
    axes = result.sharding.axes if result.sharding else ()
    return any(n != m and split for (n, m), split in zip(sizes, axes, strict=False))


def _reads_pads(op: Op) -> bool:
    value = op.operands[0]
    leaves = list(_leaves(value, _DEPTH)) if _is_own(value) else [value]
    pads = [leaf.defining_op for leaf in leaves if leaf.defining_op is not None and leaf.defining_op.name == _PAD]
    return (
        len(pads) > 0
        and value not in leaves
        and all(_is_filled(leaf) or (leaf.defining_op in pads and len(leaf.uses) == 1) for leaf in leaves)
        and all(_axes(pad.operands[0]) == _axes(op.results[0]) for pad in pads)
    )


def _axes(value: Value) -> object:
    return (value.sharding.mesh, value.sharding.axes) if value.sharding else None


def _leaves(value: Value, depth: int) -> Iterator[Value]:
    """The values that element-wise ops make `value` of."""
    if not depth or not _is_own(value):
        yield value
        return
    op = value.defining_op
    assert op is not None
    for operand in op.operands:
        if operand.rank:
            yield from _leaves(operand, depth - 1)


def _is_own(value: Value) -> bool:
    """Whether an element-wise op makes the value, for one user."""
    op = value.defining_op
    return op is not None and is_elementwise(op) and not op.name.startswith("sdy.") and len(value.uses) == 1


def _is_filled(value: Value) -> bool:
    op = value.defining_op
    return op is not None and op.name == _BROADCAST and not op.operands[0].rank


def _early(value: Value, cut: Op) -> ir.Value:
    """What a slice takes of a value, computed from what it takes of others."""
    op = value.defining_op
    assert op is not None
    if op.name == _PAD:
        return _like(cut, value, [value.mlir, *(scalar.mlir for scalar in cut.operands[1:])], cut)
    if op.name == _BROADCAST:
        return _like(op, value, [op.operands[0].mlir], cut)
    return _like(op, value, [_early(v, cut) if v.rank else v.mlir for v in op.operands], cut)


def _like(op: Op, value: Value, operands: Sequence[ir.Value], cut: Op) -> ir.Value:
    """An op like another one, with results of the slice's size."""
    shape = list(cut.results[0].shape or ())
    type_ = ir.RankedTensorType.get(shape, value.mlir.type.element_type, loc=op.mlir.location)
    new = ir.Operation.create(
        op.name,
        results=[type_],
        operands=list(operands),
        attributes=op.attributes,
        loc=op.mlir.location,
        ip=ir.InsertionPoint(cut.mlir),
    )
    return new.results[0]
