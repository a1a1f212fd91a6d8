"""How a device lays out the dimensions of what is combined with arguments.

Arrays have one layout at the border of a program. Inside, a compiler chooses what suits an op best: what is gathered
has the gathered dimension outermost, what a product makes may be transposed, and what is computed with that element by
element lies likewise. So one gradient has a weight and both its moments copied into its layout, before anything else,
and the new ones copied back. What results are computed of together with arguments, element by element, is therefore
laid out as arrays are at the border.

So is what is changed in part, read, and kept, as the keys and values of earlier tokens: else a product that wants them
in another order has the whole array copied before the change, and again after it. Steps of decoding took 0.37 to 0.9 of
the time so (libtpu 0.0.51, 2026-11).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.interpreters import mlir

from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.ir.operations import RESHAPING
from sdy_jax.op_rules.elementwise_table import ELEMENTWISE
from sdy_jax.representation.sdy_collectives import COLLECTIVE_OPS
from sdy_jax.runtime.forms import Forms
from sdy_jax.runtime.identity_ops import identity_op

_FREE = frozenset(("stablehlo.broadcast_in_dim", "sdy.all_slice"))
"""Ops whose results lie as what they are combined with, or as their operand, for nothing."""


_UPDATE = "stablehlo.dynamic_update_slice"
_UPDATES = frozenset((_UPDATE, "stablehlo.scatter"))
"""Ops that change a part of their first operand."""


_REGISTER = 4
"""Bytes. Measured (2026-11, libtpu 0.0.51): constraints on float32 compile, those on complex64 do not."""


def laid_out_as_arrays(graph: Graph) -> frozenset[Value]:
    """What lies as arrays do at the border."""
    return combined_with_arguments(graph) | frozenset(_updates(graph))


def _updates(graph: Graph) -> Iterator[Value]:
    """What is changed in part, read, and kept: returned by its block, or a layer of something larger."""
    for op in graph.ops:
        if op.name in _UPDATES and len(op.results) == 1:
            kept = [_is_kept(user, index) for user, index in op.results[0].uses]
            if any(kept) and not all(kept):
                yield op.results[0]


def _is_kept(user: Op, index: int) -> bool:
    if user.name in RESHAPING:
        return any(_is_kept(*use) for use in user.results[0].uses)
    if user.name == _UPDATE:
        return index == 1
    return user.block is not None and user is user.block.terminator


def combined_with_arguments(graph: Graph) -> frozenset[Value]:
    """What ops that are not element-wise make, and results, or what is moved to be results, are computed of together
    with arguments, or with slices of these."""
    beside: dict[Value, list[Value]] = {}
    stack = [value for result in graph.outputs for value in _before_moves(result)]
    while stack:
        value = stack.pop()
        if value not in beside:
            beside[value] = [v for v in _element_wise_operands(value) if v.rank == value.rank]
            stack += beside[value]
    for value, operands in [(value, tuple(operands)) for value, operands in beside.items()]:
        for operand in operands:
            beside[operand].append(value)
    found, stack = set[Value](), [v for v in beside if v.rank > 1 and _is_argument(v)]
    while stack:
        value = stack.pop()
        if value not in found:
            found.add(value)
            stack += beside[value]
    return frozenset(filter(_has_layout_of_its_own, found))


def _before_moves(result: Value) -> Iterator[Value]:
    """A result, and what collectives make it of."""
    yield result
    while result.defining_op is not None and result.defining_op.name in COLLECTIVE_OPS:
        result = result.defining_op.operands[0]
        yield result


def _element_wise_operands(value: Value) -> Sequence[Value]:
    op = value.defining_op
    return op.operands if op is not None and op.name in ELEMENTWISE else ()


def _is_argument(value: Value) -> bool:
    op = value.defining_op
    return op is None or (op.name == "sdy.all_slice" and _is_argument(op.operands[0]))


def _has_layout_of_its_own(value: Value) -> bool:
    op = value.defining_op
    return op is not None and bool(op.operands) and op.name not in ELEMENTWISE and op.name not in _FREE


def as_at_border(x: jax.Array, device: jax.Device, forms: Forms) -> jax.Array:
    """The array, laid out as arrays of its shape are where they enter or leave programs; as it is where its elements
    lie in two registers: what XLA makes of such elements it does not make of a constraint on their layout."""
    if forms.in_halves and x.dtype.itemsize > _REGISTER:
        return x
    try:
        layout = Layout.from_pjrt_layout(device.client.get_default_layout(x.dtype, x.shape, device))
    except jax.errors.JaxRuntimeError:  # not known there
        return x
    (laid_out,) = border_layout_p.bind(x, layout=Layout(layout.major_to_minor))
    return laid_out  # type: ignore[no-any-return]


def _lowered(ctx: mlir.LoweringRuleContext, x: Any, *, layout: Layout) -> Any:
    if ctx.module_context.lowering_parameters.for_export:
        return [x]
    return mlir.lower_fun(lambda x: with_layout_constraint(x, layout), multiple_results=False)(ctx, x)


border_layout_p = identity_op("border_layout_constraint", lowered=_lowered, mapped=lambda axis_data, layout: False)
"""`with_layout_constraint`, except in what is exported, where its custom call has no meaning that lasts, and in
batches, which have another dimension."""
