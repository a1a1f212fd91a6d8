"""Windows: pooling and its like, and what scatters to the elements that windows select.

Along a split dimension a device reads of its neighbours what its windows reach (`strips/wants.py`). A dimension with
a single window is reduced: each shard has a term. For select_and_scatter a device computes all windows that touch its
block of the operand, and keeps what falls into the block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sdy_jax.ir.graph import Op
from sdy_jax.lowering.emission.local_op import LocalOp, emitter
from sdy_jax.lowering.emission.re_emission import re_emit
from sdy_jax.lowering.emission.redistribute import cut, redistribute
from sdy_jax.lowering.strategies.cumulative import cumulative, cumulative_strategies, scanned
from sdy_jax.lowering.strategies.monoids import identity, is_identity, reduction_kind
from sdy_jax.lowering.strategies.one_window import is_one_window, one_window_strategy, put_into_selected
from sdy_jax.lowering.strategies.registry import Strategy, pass_through_factors, strategies
from sdy_jax.lowering.strategies.shards import factors_of_dims, is_leader
from sdy_jax.lowering.strategies.split_window import (
    Fetch,
    LocalWindow,
    array_text,
    fetched,
    padding_text,
    read_by_elements,
    read_by_windows,
    whole_window,
)
from sdy_jax.lowering.strips.strip_plan import StripPlan
from sdy_jax.lowering.strips.window_reads import Scattered, Window, scattered_reads
from sdy_jax.op_rules.op_attributes import padding, window
from sdy_jax.representation.mesh import axes_size
from sdy_jax.representation.rule import OpShardingRule


def _windows(op: Op) -> dict[int, Window]:
    """Per dimension in which elements meet, how windows move over it."""
    shape = op.operands[0].shape or ()
    return {d: whole_window(shape[d], w) for d, w in enumerate(window(op)) if not w.is_trivial or w.base_dilation != 1}


@strategies("stablehlo.reduce_window")
def _window_strategies(op: Op, rule: OpShardingRule) -> list[Strategy]:
    along = cumulative(op)
    if along is not None:
        return cumulative_strategies(op, rule, along)
    windows, kind = _windows(op), reduction_kind(op.blocks[0])
    mapping, inputs = rule.operand_mappings[0], range(len(op.results))
    fetches = [
        Fetch(dim, factor, found, read_by_elements if factor in rule.reduction else read_by_windows)
        for dim, found in windows.items()
        if (factor := _split_factor(rule, dim)) is not None and (factor not in rule.reduction or kind)
    ]
    split = frozenset(found.factor for found in fetches)
    inside = [i for k in inputs for i in fetched(k, op.operands[k].shape or (), mapping, fetches)]
    kept = pass_through_factors(rule) - factors_of_dims(mapping, windows)
    return [Strategy("along_windows", kept | split, split & rule.reduction, kind or "sum", tuple(inside))]


def _split_factor(rule: OpShardingRule, dim: int) -> int | None:
    """The factor of a dimension of windows, if it can be split with the result's, or be reduced."""
    (factor,) = rule.operand_mappings[0][dim]
    is_shared = factor in rule.reduction or factor in rule.result_mappings[0][dim]
    return factor if rule.factor_sizes[factor] > 1 and is_shared else None


_LAX: dict[str, Callable[..., jax.Array]] = {"sum": lax.add, "max": lax.max, "min": lax.min}
"""The combiners for which lax has a primitive of its own when the initial value is the identity."""


@emitter("stablehlo.reduce_window")
def _reduce_window(local: LocalOp, *operands: jax.Array) -> jax.Array | list[jax.Array]:
    """Initial values count once per window, so identities stand for what is missing; where a body has none that is
    known, the initial values, which StableHLO takes for padding."""
    along = cumulative(local.op)
    if along is not None:
        return scanned(local, along, operands[0])
    op, kind = local.op, reduction_kind(local.op.blocks[0])
    count = len(op.results)
    inputs, inits = list(operands[:count]), list(operands[count:])
    fills = [identity(kind, v.dtype) for v in op.results] if kind else inits
    dims = [
        LocalWindow.of(local, dim, found, contracted=not local.result_axes(0, dim))
        for dim, found in _windows(op).items()
    ]
    for dim in dims:
        inputs = [dim.fetched(local, x, fill) for x, fill in zip(inputs, fills, strict=True)]
    windows = {dim.dim: dim.local_window(inputs[0]) for dim in dims}
    if count == 1 and kind in _LAX and is_identity(op.operands[1], kind):
        results = [_lax_reduce_window(kind, inputs[0], fills[0], windows)]
    else:
        results = _re_emitted(local, inputs, _once(local, inits, fills), windows)
    for dim in dims:
        results = [dim.kept(local, x, dim.dim) for x in results]
    return results


def _once(local: LocalOp, inits: Sequence[jax.Array], neutral: Sequence[Any]) -> list[jax.Array]:
    """The initial values, which only one of the devices that have a term of the same result may use."""
    dims = range(local.op.operands[0].rank)
    axes = [a for d in dims if not local.result_axes(0, d) for a in local.operand_axes(0, d)]
    return [jnp.where(is_leader(local, axes), x, e) for x, e in zip(inits, neutral, strict=True)] if axes else [*inits]


def _lax_reduce_window(kind: str, x: jax.Array, init: Any, windows: Mapping[int, Window]) -> jax.Array:
    dims = [windows.get(d, Window(n)) for d, n in enumerate(x.shape)]
    return lax.reduce_window(
        x,
        init,
        _LAX[kind],
        window_dimensions=[w.window for w in dims],
        window_strides=[w.stride for w in dims],
        padding=[(w.low, w.high) for w in dims],
        base_dilation=[w.base_dilation for w in dims],
        window_dilation=[w.window_dilation for w in dims],
    )


def _re_emitted(
    local: LocalOp, inputs: Sequence[jax.Array], inits: Sequence[jax.Array], windows: Mapping[int, Window]
) -> list[jax.Array]:
    dims = [windows.get(d, Window(n)) for d, n in enumerate(inputs[0].shape)]
    attributes = {
        "window_dimensions": array_text(w.window for w in dims),
        "base_dilations": array_text(w.base_dilation for w in dims),
        "padding": padding_text((w.low, w.high) for w in dims),
    }
    shapes = [[w.result_size for w in dims]] * len(inputs)
    return re_emit(local, *inputs, *inits, result_shapes=shapes, attributes=attributes if dims else {})


# Scattering to selected elements.


@strategies("stablehlo.select_and_scatter")
def _select_and_scatter_strategies(op: Op, rule: OpShardingRule) -> list[Strategy]:
    windows, (mapping, sources, _) = _windows(op), rule.operand_mappings
    kept = pass_through_factors(rule) - factors_of_dims(mapping, windows) - factors_of_dims(sources, windows)
    if _is_reduction(op, windows):
        return [one_window_strategy(op, rule, windows, kept)]
    split = {
        dim: mapping[dim][0]
        for dim, found in windows.items()
        if mapping[dim] == sources[dim] and rule.factor_sizes[mapping[dim][0]] > 1
        if reduction_kind(op.blocks[1]) and (fill_of_selected(op) is not None or not (found.low or found.high))
    }
    inside = []
    for tensor, plan in enumerate((_read_operand, _read_source)):
        fetches = [Fetch(dim, factor, windows[dim], plan) for dim, factor in split.items()]
        inside += fetched(tensor, op.operands[tensor].shape or (), mapping, fetches)
    return [Strategy("along_windows", kept | frozenset(split.values()), inside=tuple(inside))]


def _is_reduction(op: Op, windows: Mapping[int, Window]) -> bool:
    """Whether there is one window, of which shards can find out together what is selected."""
    is_known = fill_of_selected(op) is not None and reduction_kind(op.blocks[1]) is not None
    return bool(windows) and is_known and is_one_window(windows)


def _read_operand(window: Window, shards: int) -> StripPlan:
    return scattered_reads(window, shards).operand


def _read_source(window: Window, shards: int) -> StripPlan:
    return scattered_reads(window, shards).source


def fill_of_selected(op: Op) -> Any:
    """A value that wins over no other one; None for bodies of which none is known."""
    body = op.blocks[0]
    compare = body.terminator.operands[0].defining_op
    if compare is None or compare.name != "stablehlo.compare" or compare.operands != body.arguments:
        return None
    dtype = op.operands[0].dtype
    kind = {"GE": "max", "GT": "max", "LE": "min", "LT": "min"}.get(compare.text("comparison_direction"))
    return identity(kind, dtype) if kind and "complex" not in dtype else None


@emitter("stablehlo.select_and_scatter")
def _select_and_scatter(local: LocalOp, operand: jax.Array, source: jax.Array, init: jax.Array) -> jax.Array:
    """Where it is known what wins over nothing, padding is made of that, so that no number depends on what is split."""
    op, size = local.op, local.operand_shape(0)
    fill, neutral = fill_of_selected(op), identity(reduction_kind(op.blocks[1]) or "sum", op.results[0].dtype)
    paddings, reads, windows = list(padding(op)), dict[int, Scattered](), _windows(op)
    if _is_reduction(op, windows) and any(local.operand_axes(0, dim) for dim in windows):
        return put_into_selected(local, operand, source, init, windows)
    for dim, found in windows.items():
        if axes := local.operand_axes(0, dim):
            reads[dim] = scattered_reads(found, axes_size(axes, local.mesh.mesh))
            operand = redistribute(local, [operand], dim, axes, reads[dim].operand, 0 if fill is None else fill)
            source = redistribute(local, [source], dim, axes, reads[dim].source, neutral)
            paddings[dim] = (0, 0)
    is_padded = fill is not None and min((n for pair in paddings for n in pair), default=0) >= 0
    if is_padded:
        operand = lax.pad(operand, fill, [(low, high, 0) for low, high in paddings])
        paddings = [(0, 0)] * operand.ndim
    attributes = {"padding": padding_text(paddings)}
    (result,) = re_emit(local, operand, source, init, result_shapes=[operand.shape], attributes=attributes)
    for dim, found in windows.items():
        if dim in reads:
            result = cut(local, result, dim, local.operand_axes(0, dim), reads[dim].starts, reads[dim].block)
        elif is_padded:
            result = lax.slice_in_dim(result, found.low, found.low + size[dim], axis=dim)
    return result
