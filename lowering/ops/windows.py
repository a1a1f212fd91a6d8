"""Windows: pooling (reduce_window), select_and_scatter, and the pads before them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.mlir import ir

from sdy_jax.ir.graph import Op, Value
from sdy_jax.ir.meshes import AxisRef, axes_size
from sdy_jax.ir.shardings import OpShardingRule, TensorMapping
from sdy_jax.lowering.ops.collectives import reductions
from sdy_jax.lowering.ops.collectives.packing import all_reduce_bytes
from sdy_jax.lowering.ops.elementwise import identity, is_identity, known_scalar, reduction_kind
from sdy_jax.lowering.ops.re_emission import numpy_dtype, re_emit, scope_name
from sdy_jax.lowering.ops.reductions import cumulative, cumulative_strategies, scanned
from sdy_jax.lowering.ops.registry import (
    Inside,
    LocalOp,
    Shards,
    Strategy,
    emitter,
    folds,
    pass_through_factors,
    strategies,
)
from sdy_jax.lowering.ops.shards import Axes, block_shape, cut, factors_of_dims, fetch, is_leader, offset, redistribute
from sdy_jax.lowering.reshard.strip_reads import (
    Reads,
    Scattered,
    Window,
    contracted_reads,
    scattered_reads,
    window_reads,
)
from sdy_jax.lowering.reshard.strips import StripPlan
from sdy_jax.shardy.rules.op_attributes import (
    WindowDimension,
    convolution_dimension_numbers,
    convolution_window,
    padding,
    window,
)

# Windows over split dimensions: what a strategy states about them, and how a device runs its own.
#
# An emitter fetches one dimension after the other, so what it sends for the second one includes what it fetched for
# the first: the corners.


@dataclass(frozen=True, slots=True)
class WindowFetch:
    """A dimension of a tensor that is split along `factor`; `plan(window, shards)` brings what the devices read."""

    dim: int
    factor: int
    window: Window
    plan: Callable[[Window, int], StripPlan]


def read_by_windows(window: Window, shards: int) -> StripPlan:
    return window_reads(window, shards).plan


def read_by_elements(window: Window, shards: int) -> StripPlan:
    return contracted_reads(window, shards).plan


@dataclass(frozen=True, slots=True)
class _Sent:
    """The elements that a device sends in the last one of some fetches of one tensor."""

    shape: tuple[int, ...]
    mapping: TensorMapping
    fetches: tuple[WindowFetch, ...]

    def __call__(self, shards: Shards) -> float:
        lengths = list(block_shape(self.shape, self.mapping, shards))
        *before, last = self.fetches
        for earlier in before:
            if self._shards(earlier, shards) > 1:
                lengths[earlier.dim] = self._plan(earlier, shards).length
        lengths[last.dim] = self._plan(last, shards).wire_elements
        return math.prod(lengths)

    def _shards(self, fetch: WindowFetch, shards: Shards) -> int:
        return math.prod([shards[f] for f in self.mapping[fetch.dim]])

    def _plan(self, fetch: WindowFetch, shards: Shards) -> StripPlan:
        return fetch.plan(fetch.window, self._shards(fetch, shards))


def whole_window(size: int, window: WindowDimension) -> Window:
    """How an op reads a dimension of `size` elements."""
    w = window
    return Window(size, w.size, w.stride, w.low, w.high, w.base_dilation, w.window_dilation)


def padding_text(paddings: Iterable[tuple[int, int]]) -> str:
    """The attribute `padding` of an op with windows, from (low, high) per dimension."""
    pairs = [list(pair) for pair in paddings]
    return f"dense<{pairs}> : tensor<{len(pairs)}x2xi64>"


def array_text(numbers: Iterable[int]) -> str:
    """An attribute that is an array of integers."""
    return f"array<i64: {', '.join(map(str, numbers))}>"


def fetched(tensor: int, shape: Sequence[int], mapping: TensorMapping, fetches: Sequence[WindowFetch]) -> list[Inside]:
    """What an emitter sends that runs these fetches in turn.

    Args:
        tensor: the index of the operand.
        shape: its global shape.
        mapping: its dimensions in the op's rule.
    """
    return [
        Inside(
            "collective_permute", frozenset([f.factor]), tensor, _Sent(tuple(shape), mapping, tuple(fetches[: i + 1]))
        )
        for i, f in enumerate(fetches)
    ]


@dataclass(frozen=True, slots=True)
class LocalWindow:
    """One dimension over which windows move, as a device runs them: `reads` is None where the dimension is whole."""

    dim: int
    window: Window
    axes: Axes
    reads: Reads | None

    @classmethod
    def of(cls, local: LocalOp, dim: int, window: Window, contracted: bool) -> LocalWindow:
        """The window over a dimension of the first operand, whose own elements may be split instead of the results."""
        axes = local.operand_axes(0, dim)
        reads = contracted_reads if contracted else window_reads
        return cls(dim, window, axes, reads(window, axes_size(axes, local.mesh.mesh)) if axes else None)

    @classmethod
    def over_whole(cls, local: LocalOp, dim: int, window: Window, axes: Axes) -> LocalWindow:
        """A window whose elements are split along `axes`, over a dimension that every device has whole."""
        return cls(dim, window, axes, contracted_reads(window, axes_size(axes, local.mesh.mesh), is_whole=True))

    @property
    def _padding(self) -> tuple[int, int] | None:
        """What the local op pads where it also dilates, so that it does not compute with fill values."""
        return self.reads.padding if self.reads is not None and self.reads.dilation > 1 else None

    def fetched(self, local: LocalOp, x: jax.Array, fill: Any) -> jax.Array:
        """What the local op runs over."""
        if self.reads is None:
            return x
        if self._padding is None:
            return fetch(local, x, self.dim, self.axes, self.reads, fill)
        return redistribute(local, [x], self.dim, self.axes, self.reads.plan, fill)

    def local_window(self, x: jax.Array) -> Window:
        """How the local op moves over what was fetched."""
        size = x.shape[self.dim]
        if self.reads is None:
            return replace(self.window, size=size)
        low, high = self._padding or (0, 0)
        dilation = 1 if self._padding is None else self.reads.dilation
        local = replace(self.window, size=size, window=self.reads.window)
        return replace(local, low=low, high=high, base_dilation=dilation)

    def kept(self, local: LocalOp, result: jax.Array, dim: int) -> jax.Array:
        """This device's part of what the local op computed, along a dimension of the result."""
        if self.reads is None or self._padding is None or self.reads.starts is None:
            return result
        return cut(local, result, dim, self.axes, self.reads.starts, self.reads.block)


# select_and_scatter with a single window over all that is split, as in the gradient of global max pooling.
#
# Nothing of the operand moves: the shards find out by reductions of one value per result of the pooling which element
# is selected, and the one that has it puts the source there.
#
# The op goes through the window in order, and keeps what it has selected as long as that compares with the next
# element (>= for a maximum, so the first of equal ones wins). A NaN is taken over and given up at once, so that only
# what follows the last NaN counts.

_ORDERS = {"GE": ("max", "min"), "LE": ("min", "min"), "GT": ("max", "max"), "LT": ("min", "max")}
"""By comparison: which value is selected, and at which position among equal ones."""


def is_one_window(windows: Mapping[int, Window]) -> bool:
    """Whether one window lies inside of the operand along each of these dimensions."""
    return all(w.result_size == 1 and w.low <= 0 and w.high <= 0 for w in windows.values())


def one_window_strategy(
    op: Op, rule: OpShardingRule, windows: Mapping[int, Window], passing: frozenset[int]
) -> Strategy:
    """The operand split along `windows`, too: values, positions and those of NaN are reduced among its shards."""
    mapping, sources, _ = rule.operand_mappings
    split, source, (value, position) = factors_of_dims(mapping, windows), op.operands[1], _order(op)

    def reduced(kind: str, itemsize: float, dtype: str) -> Inside:
        def sent(shards: Shards) -> float:
            block, count = block_shape(source.shape or (), sources, shards), math.prod(shards[f] for f in split)
            return all_reduce_bytes(kind, block, itemsize, dtype, count) / source.itemsize

        return Inside("all_reduce", split, 1, sent)

    found = [reduced(value, source.itemsize, source.dtype), reduced(position, 4, "i32")]
    if _is_floating(op):
        found.append(reduced("max", 4, "i32"))
    return Strategy("one_window", passing | split, inside=tuple(found))


def put_into_selected(
    local: LocalOp, operand: jax.Array, source: jax.Array, init: jax.Array, windows: Mapping[int, Window]
) -> jax.Array:
    """This device's block of the result."""
    kind = reduction_kind(local.op.blocks[1])
    assert kind is not None, "the strategy splits ops of a known kind only"
    axes = [axis for dim in windows for axis in local.operand_axes(0, dim)]
    position, is_inside = _positions(local, operand, windows)
    with jax.named_scope(scope_name(local.op.name, axes, local.op.source)):
        selected = _selected(local, operand, position, is_inside, axes, windows)
    is_selected = is_inside & (position == selected)
    return jnp.where(is_selected, reductions.combined(kind, init, source), init)


def _selected(
    local: LocalOp,
    x: jax.Array,
    position: jax.Array,
    counts: jax.Array,
    axes: Sequence[AxisRef],
    windows: Mapping[int, Window],
) -> jax.Array:
    """The position of what is selected, one for each element of the source."""
    nowhere, last_nan = -1, None
    if _is_floating(local.op):
        last_nan = _reduced(local, jnp.where(counts & jnp.isnan(x), position, nowhere), "max", axes, windows)
        counts = counts & (position > last_nan)
    value_kind, position_kind = _order(local.op)
    worst, unplaced = (reductions.identity(*of) for of in ((value_kind, x.dtype), (position_kind, jnp.int32)))
    best = _reduced(local, jnp.where(counts, x, worst), value_kind, axes, windows)
    found = _reduced(local, jnp.where(counts & (x == best), position, unplaced), position_kind, axes, windows)
    return found if last_nan is None else jnp.where(last_nan == _end(windows), last_nan, found)


def _reduced(
    local: LocalOp, x: jax.Array, kind: str, axes: Sequence[AxisRef], windows: Mapping[int, Window]
) -> jax.Array:
    """One element for the window, of the shards of all devices along the axes."""
    reduce = jnp.max if kind == "max" else jnp.min
    return reductions.all_reduce(reduce(x, axis=tuple(windows), keepdims=True), axes, kind, local.mesh)


def _positions(local: LocalOp, x: jax.Array, windows: Mapping[int, Window]) -> tuple[jax.Array, jax.Array]:
    """The order of the elements in the window, as int32, and which elements lie in it."""
    position, is_inside = jnp.zeros(x.shape, jnp.int32), jnp.ones(x.shape, bool)
    for dim, of_dim in windows.items():
        index = lax.broadcasted_iota(jnp.int32, x.shape, dim)
        index += offset(local, local.operand_axes(0, dim), x.shape[dim])
        position = position * of_dim.size + index
        is_inside &= (index >= -of_dim.low) & (index < of_dim.window - of_dim.low)
    return position, is_inside


def _end(windows: Mapping[int, Window]) -> int:
    """The position of the window's last element."""
    position = 0
    for of_dim in windows.values():
        position = position * of_dim.size + of_dim.window - of_dim.low - 1
    return position


def _order(op: Op) -> tuple[str, str]:
    compare = op.blocks[0].terminator.operands[0].defining_op
    assert compare is not None, "the strategy splits ops that select by a comparison only"
    return _ORDERS[compare.text("comparison_direction")]


def _is_floating(op: Op) -> bool:
    return bool(jnp.issubdtype(numpy_dtype(op.operands[0].dtype), jnp.floating))


# Windows: pooling and its like, and what scatters to the elements that windows select.
#
# Along a split dimension a device reads of its neighbours what its windows reach (`reshard/strip_reads.py`). A
# dimension with a single window is reduced: each shard has a term. For select_and_scatter a device computes all
# windows that touch its block of the operand, and keeps what falls into the block.


def _windows_by_dim(op: Op) -> dict[int, Window]:
    """Per dimension in which elements meet, how windows move over it."""
    shape = op.operands[0].shape or ()
    return {d: whole_window(shape[d], w) for d, w in enumerate(window(op)) if not w.is_trivial or w.base_dilation != 1}


@strategies("stablehlo.reduce_window")
def _window_strategies(op: Op, rule: OpShardingRule) -> list[Strategy]:
    along = cumulative(op)
    if along is not None:
        return cumulative_strategies(op, rule, along)
    windows, kind = _windows_by_dim(op), reduction_kind(op.blocks[0])
    mapping, inputs = rule.operand_mappings[0], range(len(op.results))
    fetches = [
        WindowFetch(dim, factor, found, read_by_elements if factor in rule.reduction else read_by_windows)
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
        for dim, found in _windows_by_dim(op).items()
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
    windows, (mapping, sources, _) = _windows_by_dim(op), rule.operand_mappings
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
        fetches = [WindowFetch(dim, factor, windows[dim], plan) for dim, factor in split.items()]
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
    paddings, reads, windows = list(padding(op)), dict[int, Scattered](), _windows_by_dim(op)
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


# Windows over padded operands: the pad becomes the window's own padding and base dilation.
#
# A pad by itself makes other blocks than its operand has, and moves most of it there. jax pads before a window in the
# gradients of pooling, and users do before convolutions.


class _Pad(NamedTuple):
    """A pad by a known value that takes nothing away: the op, and (low, high, interior) per dimension."""

    op: Op
    paddings: tuple[tuple[int, int, int], ...]

    @property
    def operand(self) -> ir.Value:
        """What the module says now: another fold may have replaced it."""
        return self.op.mlir.operands[0]


def _pad(value: Value, fill: np.ndarray | None) -> _Pad | None:
    """The pad by `fill` that a value is the result of."""
    op = value.defining_op
    if op is None or op.name != "stablehlo.pad" or fill is None:
        return None
    known = known_scalar(op.operands[1])
    columns = (op.ints(name) for name in ("edge_padding_low", "edge_padding_high", "interior_padding"))
    pad = _Pad(op, tuple(zip(*columns, strict=True)))
    is_fill = known is not None and known.tobytes() == np.asarray(fill, known.dtype).tobytes()
    return pad if is_fill and min(n for dim in pad.paddings for n in dim) >= 0 else None


def _over_operand(of_dim: WindowDimension, low: int, high: int, interior: int) -> WindowDimension:
    """The window over the pad's operand that is this one over its result."""
    base = of_dim.base_dilation
    return replace(
        of_dim, low=of_dim.low + low * base, high=of_dim.high + high * base, base_dilation=base * (interior + 1)
    )


def _over_operands(found: Sequence[WindowDimension], pad: _Pad) -> list[WindowDimension]:
    return [_over_operand(of_dim, *padding) for of_dim, padding in zip(found, pad.paddings, strict=True)]


def _edit(op: Op, operands: Mapping[int, ir.Value], attributes: Mapping[str, str]) -> None:
    for index, value in operands.items():
        op.mlir.operands[index] = value
    for name, text in attributes.items():
        op.mlir.attributes[name] = ir.Attribute.parse(text, op.mlir.context)


@folds("stablehlo.convolution")
def _fold_into_convolution(op: Op) -> bool:
    dims = convolution_dimension_numbers(op)
    pad = _pad(op.operands[0], _zero(op.operands[0].dtype))
    if pad is None or any(any(pad.paddings[d]) for d in (dims.input_batch, dims.input_feature)):
        return False
    spatial = _Pad(pad.op, tuple(pad.paddings[d] for d in dims.input_spatial))
    found = _over_operands(convolution_window(op), spatial)
    dilations = array_text(of_dim.base_dilation for of_dim in found)
    _edit(op, {0: pad.operand}, {"padding": _padding_text(found), "lhs_dilation": dilations})
    return True


@folds("stablehlo.reduce_window")
def _fold_into_reduce_window(op: Op) -> bool:
    kind, count = reduction_kind(op.blocks[0]), len(op.results)
    if kind is None or not all(is_identity(init, kind) for init in op.operands[count:]):
        return False
    pads = [_pad(value, identity(kind, value.dtype)) for value in op.operands[:count]]
    first = pads[0]
    if first is None or any(pad is None or pad.paddings != first.paddings for pad in pads):
        return False
    found = _over_operands(window(op), first)
    operands = {i: pad.operand for i, pad in enumerate(pads) if pad is not None}
    dilations = array_text(of_dim.base_dilation for of_dim in found)
    _edit(op, operands, {"padding": _padding_text(found), "base_dilations": dilations})
    return True


@folds("stablehlo.select_and_scatter")
def _fold_into_select_and_scatter(op: Op) -> bool:
    """A pad before it together with the slice behind it that takes the padding away."""
    pad, (result,) = _pad(op.operands[0], fill_of_selected(op)), op.results
    if pad is None or len(result.uses) != 1 or any(interior for _, _, interior in pad.paddings):
        return False
    slice_, found = result.uses[0][0], _over_operands(window(op), pad)
    starts = tuple(low for low, _, _ in pad.paddings)
    is_cut = slice_.name == "stablehlo.slice" and slice_.ints("start_indices") == starts
    if not is_cut or slice_.results[0].shape != pad.op.operands[0].shape or set(slice_.ints("strides")) - {1}:
        return False
    _edit(op, {0: pad.operand}, {"padding": _padding_text(found)})
    result.mlir.set_type(pad.operand.type)
    if "sdy.sharding" in slice_.mlir.attributes:
        op.mlir.attributes["sdy.sharding"] = slice_.mlir.attributes["sdy.sharding"]
    slice_.results[0].mlir.replace_all_uses_with(result.mlir)
    return True


def _zero(dtype: str) -> np.ndarray | None:
    return None if dtype == "i1" else identity("sum", dtype)


def _padding_text(found: Sequence[WindowDimension]) -> str:
    return padding_text((of_dim.low, of_dim.high) for of_dim in found)
