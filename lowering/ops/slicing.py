"""Ops that cut, shift and join along dimensions at stated positions: slices, pads, reversals, concatenations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import permutations

import jax
from jax import lax
from jax.extend.mlir import ir

from sdy_jax.ir.graph import Op
from sdy_jax.ir.meshes import axes_size
from sdy_jax.ir.shardings import OpShardingRule
from sdy_jax.lowering.ops.elementwise import WITHOUT_ZERO, sum_kind
from sdy_jax.lowering.ops.registry import (
    Inside,
    LocalOp,
    Shards,
    Strategy,
    emitter,
    pass_through_factors,
    runs_part_by_part,
    strategies,
)
from sdy_jax.lowering.ops.shards import (
    block_shape,
    factors_of_dims,
    fetch,
    redistribute,
    resized_factors,
    reversed_,
    shards_of_dims,
    sliced,
)
from sdy_jax.lowering.reshard.strip_reads import (
    Fetch,
    Piece,
    Pieces,
    Reads,
    StridedSlice,
    Window,
    concatenate_plan,
    joint_fetch,
    reverse_plan,
    slice_plan,
    window_reads,
)
from sdy_jax.lowering.reshard.strips import Source, StripPlan
from sdy_jax.shardy.rules.slicing import PADDINGS, PIECES

# Ops that cut and shift along dimensions, at positions that the program states: slices, pads, reversals.
#
# Along a sharded dimension the devices send each other the strips that they lack (`reshard/strips.py`). Dimensions
# are moved one after the other: whole ones that shrink, then sharded ones in the order that sends least, then whole
# ones that grow.

runs_part_by_part("stablehlo.pad")
runs_part_by_part("stablehlo.slice", sizes="limit_indices")

PlanOf = Callable[[int, int], StripPlan]
"""The strips that move along a dimension, given as its index, in some number of shards."""


_MAX_ORDERED = 3
"""The most split dimensions of which all orders are compared. Guessed, a guard: orders are the factorial of that."""


def by_strips(op: Op, rule: OpShardingRule, dims: Sequence[int], plan_of: PlanOf) -> Strategy:
    """An op on one operand that moves strips along `dims`."""
    mapping = rule.operand_mappings[0]

    def inside(dim: int) -> Inside:
        def sent(shards: Shards) -> int:
            return dict(_sent_in_order(op, dims, plan_of, shards_of_dims(mapping, shards))).get(dim, 0)

        return Inside("collective_permute", factors_of_dims(mapping, [dim]), 0, sent)

    splittable = pass_through_factors(rule) | factors_of_dims(mapping, dims)
    return Strategy("by_strips", splittable, inside=tuple(map(inside, dims)), work=frozenset())


def _sent_in_order(op: Op, dims: Iterable[int], plan_of: PlanOf, shards: Sequence[int]) -> list[tuple[int, int]]:
    """Those of `dims` that are split, in the order in which least is sent, with the elements that a device sends."""
    split = [d for d in dims if shards[d] > 1]
    orders = permutations(split) if len(split) <= _MAX_ORDERED else [split]
    return min(
        (_sent_by(op, order, plan_of, shards) for order in orders), key=lambda found: sum(sent for _, sent in found)
    )


def _sent_by(op: Op, order: Iterable[int], plan_of: PlanOf, shards: Sequence[int]) -> list[tuple[int, int]]:
    """The split dimensions in this order, with what is sent along each after those before it have changed."""
    old, new = (
        [-(-n // k) for n, k in zip(v.shape or (), shards, strict=True)] for v in (op.operands[0], op.results[0])
    )
    block = [a if k > 1 else min(a, b) for k, a, b in zip(shards, old, new, strict=True)]
    found = []
    for dim in order:
        row = math.prod([n for d, n in enumerate(block) if d != dim])
        found.append((dim, row * plan_of(dim, shards[dim]).wire_elements))
        block[dim] = new[dim]
    return found


def moved_along(
    local: LocalOp, x: jax.Array, dims: Sequence[int], plan_of: PlanOf, move: Callable[[jax.Array, int], jax.Array]
) -> jax.Array:
    """A local operand moved along each of `dims`: whole ones that shrink, sharded ones, whole ones that grow."""
    sizes = list(zip(local.op.operands[0].shape or (), local.op.results[0].shape or (), strict=True))
    shards = [_shards(local, d) for d in range(len(sizes))]
    whole = [d for d in dims if not local.operand_axes(0, d)]
    split = [dim for dim, _ in _sent_in_order(local.op, dims, plan_of, shards)]
    shrinking = [d for d in whole if sizes[d][1] <= sizes[d][0]]
    growing = [d for d in whole if d not in shrinking]
    for dim in (*shrinking, *split, *growing):
        x = move(x, dim)
    return x


def _shards(local: LocalOp, dim: int) -> int:
    return axes_size(local.operand_axes(0, dim), local.mesh.mesh)


# --- slices ---


def _cut_dims(op: Op) -> list[int]:
    sizes = zip(op.operands[0].shape or (), op.results[0].shape or (), strict=True)
    return [d for d, (n, m) in enumerate(sizes) if n != m]


def _interval(op: Op, dim: int) -> tuple[int, int, int]:
    """Start, limit and stride."""
    return op.ints("start_indices")[dim], op.ints("limit_indices")[dim], op.ints("strides")[dim]


def _sliced(op: Op, dim: int, shards: int) -> StridedSlice:
    return slice_plan((op.operands[0].shape or ())[dim], shards, *_interval(op, dim))


@strategies("stablehlo.slice")
def _slice_strategies(op: Op, rule: OpShardingRule) -> list[Strategy]:
    """Few elements of a large dimension are cheaper as a partial sum, to which their owners contribute."""
    dims = _cut_dims(op)
    strips = by_strips(op, rule, dims, lambda dim, shards: _sliced(op, dim, shards).plan)
    if not dims or op.results[0].dtype in WITHOUT_ZERO:
        return [strips]
    summed = resized_factors(op, rule)
    return [strips, Strategy("own_part", strips.splittable, summed, sum_kind(op.results[0].dtype), work=frozenset())]


@emitter("stablehlo.slice")
def _slice(local: LocalOp, operand: jax.Array) -> jax.Array:
    op = local.op

    def move(x: jax.Array, dim: int) -> jax.Array:
        axes = local.operand_axes(0, dim)
        if not axes:
            return lax.slice_in_dim(x, *_interval(op, dim), dim)
        plan = _sliced(op, dim, _shards(local, dim))
        return sliced(local, x, dim, axes, plan, own_part=not local.result_axes(0, dim))

    return moved_along(local, operand, _cut_dims(op), lambda dim, shards: _sliced(op, dim, shards).plan, move)


# --- pads ---


def _padded_dims(op: Op) -> list[int]:
    """A pad by (1, -1) keeps the size and still shifts."""
    paddings = [op.ints(name) for name in PADDINGS]
    return [d for d in range(op.operands[0].rank or 0) if any(p[d] for p in paddings)]


def _padding(op: Op, dim: int) -> tuple[int, int, int]:
    low, high, interior = (op.ints(name)[dim] for name in PADDINGS)
    return low, high, interior


def _padded(op: Op, dim: int, shards: int) -> Reads:
    low, high, interior = _padding(op, dim)
    size = (op.operands[0].shape or ())[dim]
    return window_reads(Window(size, low=low, high=high, base_dilation=interior + 1), shards)


@strategies("stablehlo.pad")
def _pad_strategies(op: Op, rule: OpShardingRule) -> list[Strategy]:
    return [by_strips(op, rule, _padded_dims(op), lambda dim, shards: _padded(op, dim, shards).plan)]


@emitter("stablehlo.pad")
def _pad(local: LocalOp, operand: jax.Array, value: jax.Array) -> jax.Array:
    op = local.op

    def move(x: jax.Array, dim: int) -> jax.Array:
        axes = local.operand_axes(0, dim)
        if axes:
            return fetch(local, x, dim, axes, _padded(op, dim, _shards(local, dim)), value)
        return lax.pad(x, value, [_padding(op, dim) if d == dim else (0, 0, 0) for d in range(x.ndim)])

    return moved_along(local, operand, _padded_dims(op), lambda dim, shards: _padded(op, dim, shards).plan, move)


# --- reversals ---


def _reversed(op: Op, dim: int, shards: int) -> StripPlan:
    return reverse_plan((op.operands[0].shape or ())[dim], shards)


def _turned(op: Op, shards: Sequence[int]) -> list[int]:
    """The split dimensions that are reversed and divide. One permute turns them all: in the order of all their axes, a
    block comes from as far before the end as the device is behind the start."""
    sizes = op.operands[0].shape or ()
    return [d for d in op.ints("dimensions") if shards[d] > 1 and not sizes[d] % shards[d]]


@strategies("stablehlo.reverse")
def _reverse_strategies(op: Op, rule: OpShardingRule) -> list[Strategy]:
    mapping, dims = rule.operand_mappings[0], op.ints("dimensions")

    def turned(shards: Shards) -> int:
        counts = shards_of_dims(mapping, shards)
        return math.prod(block_shape(op.operands[0].shape or (), mapping, shards)) if _turned(op, counts) else 0

    def shifted(dim: int, shards: Shards) -> int:
        counts = shards_of_dims(mapping, shards)
        rest = [d for d in dims if d not in _turned(op, counts)]
        return dict(_sent_in_order(op, rest, partial(_reversed, op), counts)).get(dim, 0)

    factors = [factors_of_dims(mapping, [dim]) for dim in dims]
    moved = frozenset[int]().union(*factors)
    pairs = zip(dims, factors, strict=True)
    inside = (
        Inside("collective_permute", moved, 0, turned),
        *(Inside("collective_permute", found, 0, partial(shifted, dim)) for dim, found in pairs),
    )
    return [Strategy("by_strips", pass_through_factors(rule) | moved, inside=inside, work=frozenset())]


@emitter("stablehlo.reverse")
def _reverse(local: LocalOp, operand: jax.Array) -> jax.Array:
    op, dims = local.op, local.op.ints("dimensions")
    turned = _turned(op, [_shards(local, d) for d in range(operand.ndim)])
    if turned:
        axes = [axis for dim in turned for axis in local.operand_axes(0, dim)]
        shards = axes_size(axes, local.mesh.mesh)
        plan = reverse_plan(operand.shape[turned[0]] * shards, shards)
        operand = redistribute(local, [operand], turned[0], axes, plan, None)
    shifted = [d for d in dims if d not in turned]

    def move(x: jax.Array, dim: int) -> jax.Array:
        axes = local.operand_axes(0, dim)
        if axes:
            return reversed_(local, x, dim, axes, _reversed(op, dim, _shards(local, dim)))
        return lax.rev(x, (dim,))

    return lax.rev(moved_along(local, operand, shifted, partial(_reversed, op), move), turned)


# Concatenations.
#
# Along a sharded dimension the blocks of the result are made of strips of all operands' blocks.

runs_part_by_part("stablehlo.concatenate")


def _sizes(op: Op, dim: int) -> tuple[int, ...]:
    return tuple([(value.shape or ())[dim] for value in op.operands])


@strategies("stablehlo.concatenate")
def _concatenate_strategies(op: Op, rule: OpShardingRule) -> list[Strategy]:
    dim, mapping = op.int("dimension"), rule.result_mappings[0]
    joined = frozenset(mapping[dim])

    def sent(shards: Shards) -> int:
        row = block_shape(op.results[0].shape or (), mapping, shards)
        elements = concatenate_plan(_sizes(op, dim), shards[mapping[dim][0]]).wire_elements
        return elements * _product(row, dim)

    inside = Inside("collective_permute", joined, len(op.operands), sent)
    return [Strategy("by_strips", pass_through_factors(rule) | joined, inside=(inside,), work=frozenset())]


def _product(shape: tuple[int, ...], without: int) -> int:
    """The elements of a row: all dimensions but one."""
    rest = 1
    for d, n in enumerate(shape):
        rest *= 1 if d == without else n
    return rest


@emitter("stablehlo.concatenate")
def _concatenate(local: LocalOp, *operands: jax.Array) -> jax.Array:
    dim = local.op.int("dimension")
    axes = local.result_axes(0, dim)
    if not axes:
        return lax.concatenate(operands, dim)
    plan = concatenate_plan(_sizes(local.op, dim), axes_size(axes, local.mesh.mesh))
    return redistribute(local, operands, dim, axes, plan, None)


# `sdy_jax.pieces`: results that are pieces of the same operands along one dimension, from one exchange.
#
#     %0:2 = stablehlo.custom_call @sdy_jax.pieces(%x, %zero) {dimension = 0 : i64,
#         pieces = [array<i64: 1, 0, 1, 0, 0, 1023>, array<i64: 0, 1, 1022>]}
#       : (tensor<1024x64xf32>, tensor<f32>) -> (tensor<1024x64xf32>, tensor<1022x64xf32>)
#
# Every entry of `pieces` is a result: operand, start and length of each piece. The last operand may be a scalar,
# which fills its pieces whatever their start. Operands whose index is in `whole` are not split along the dimension,
# so that nothing of them is sent.


def attributes(
    dim: int, results: Sequence[Pieces], whole: Sequence[bool], context: ir.Context
) -> dict[str, ir.Attribute]:
    """The attributes of an op; `whole` says it of each operand but the scalar."""
    fill = len(whole)
    numbers = ([n for p in pieces for n in (fill if p.operand is None else p.operand, *p[1:])] for pieces in results)
    return {
        "call_target_name": ir.StringAttr.get(PIECES, context),
        "dimension": ir.IntegerAttr.get(ir.IntegerType.get_signless(64, context), dim),
        "pieces": ir.ArrayAttr.get([ir.DenseI64ArrayAttr.get(list(ns), context) for ns in numbers], context),
        "whole": ir.DenseI64ArrayAttr.get([i for i, is_whole in enumerate(whole) if is_whole], context),
    }


def _results(op: Op) -> tuple[Pieces, ...]:
    found = []
    for entry in ir.ArrayAttr(op.attributes["pieces"]):
        numbers = list(ir.DenseI64ArrayAttr(entry))
        triples = zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)
        found.append(tuple(Piece(k if op.operands[k].rank else None, start, length) for k, start, length in triples))
    return tuple(found)


def _fetch(op: Op, shards: int) -> Fetch:
    dim, whole = op.int("dimension"), op.ints("whole")
    sizes = [v.shape[dim] for v in op.operands if v.shape]
    return fetch_of(sizes, [i in whole for i in range(len(sizes))], _results(op), shards)


def fetch_of(sizes: Sequence[int], whole: Sequence[bool], results: Sequence[Pieces], shards: int) -> Fetch:
    """What brings these results of operands of these sizes along the dimension, in some number of shards."""
    pairs = zip(sizes, whole, strict=True)
    sources = tuple(Source.whole(n) if is_whole else Source.split(n, shards) for n, is_whole in pairs)
    return joint_fetch(sources, tuple(results), shards)


@strategies(PIECES)
def _pieces_strategies(op: Op, rule: OpShardingRule) -> list[Strategy]:
    dim, result = op.int("dimension"), len(op.operands)
    mapping = rule.result_mappings[0]
    moved = frozenset(mapping[dim])

    def sent(shards: Shards) -> int:
        row = block_shape(op.results[0].shape or (), mapping, shards)
        elements = _fetch(op, shards[mapping[dim][0]]).plan.wire_elements
        return elements * math.prod(n for d, n in enumerate(row) if d != dim)

    inside = Inside("collective_permute", moved, result, sent)
    return [Strategy("by_strips", pass_through_factors(rule) | moved, inside=(inside,), work=frozenset())]


@emitter(PIECES)
def _pieces(local: LocalOp, *operands: jax.Array) -> list[jax.Array]:
    dim = local.op.int("dimension")
    tensors = [x for x in operands if x.ndim]
    fill = operands[-1] if operands[-1].ndim == 0 else None
    axes = local.result_axes(0, dim)
    if not axes:
        return [_assembled(tensors, pieces, dim, fill) for pieces in _results(local.op)]
    fetch = _fetch(local.op, axes_size(axes, local.mesh.mesh))
    block = redistribute(local, tensors, dim, axes, fetch.plan, fill)
    intervals = zip(fetch.starts, fetch.lengths, strict=True)
    return [lax.slice_in_dim(block, start, start + length, axis=dim) for start, length in intervals]


def _assembled(tensors: Sequence[jax.Array], pieces: Pieces, dim: int, fill: jax.Array | None) -> jax.Array:
    """A result of whole operands."""
    return lax.concatenate([_piece(tensors, piece, dim, fill) for piece in pieces], dim)


def _piece(tensors: Sequence[jax.Array], piece: Piece, dim: int, fill: jax.Array | None) -> jax.Array:
    if piece.operand is not None:
        return lax.slice_in_dim(tensors[piece.operand], piece.start, piece.start + piece.length, axis=dim)
    assert fill is not None, "pieces without an operand come with a scalar"
    shape = [piece.length if d == dim else n for d, n in enumerate(tensors[0].shape)]
    return lax.full(shape, fill, tensors[0].dtype)
