"""Sort along a split dimension, and the largest elements along one (top_k)."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.mlir import ir

from sdy_jax.base.jax_calls import jit
from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.ir.meshes import AxisRef, axes_size
from sdy_jax.ir.shardings import OpShardingRule
from sdy_jax.lowering.ops.collectives import movement, reductions
from sdy_jax.lowering.ops.elementwise import expression
from sdy_jax.lowering.ops.re_emission import numpy_dtype, re_emit, scope_name
from sdy_jax.lowering.ops.registry import Inside, LocalOp, Shards, Strategy, emitter, pass_through_factors, strategies
from sdy_jax.lowering.ops.shards import block_shape, mask_padding, offset
from sdy_jax.runtime.evaluation import apart

# Sort: along a split dimension by exchanging blocks between pairs of shards, in the order of Batcher's bitonic
# sorter.
#
# Of 2, 4, 8, ... neighbouring shards, sorted by halves upwards and downwards, pairs compare their blocks element by
# element, and keep the lower or the upper ones; then every shard sorts its block. That needs a power of two of shards
# (https://doi.org/10.1145/1468075.1468121); blocks of another number are gathered. The exchange is not stable by
# itself: the global index travels as a last key where the order of equal elements can be seen. Padding comes last: it
# is known by its index, or has the largest value there is. (Zeros of both signs are equal to a sort, and so are NaNs:
# where only keys are sorted, their order may be another one.) A comparator that is not lax's can be told neither of
# an index nor of padding: where it is to be stable, or where shards are unequal, blocks are gathered.


@strategies("stablehlo.sort")
def _sort_strategies(op: Op, rule: OpShardingRule) -> list[Strategy]:
    keys = _num_keys(op)
    if not op.operands[0].shape or (keys is None and not _may_exchange(op)):
        return [Strategy("along_factors", pass_through_factors(rule))]
    [factor] = rule.mappings[0][_dimension(op)]

    def exchanged(shards: Shards, kind: str, itemsize: float, tensor: int) -> float:
        rounds = len(_rounds(shards[factor]))
        if (kind == "all_gather") != (not rounds):
            return 0
        block = math.prod(block_shape(op.operands[0].shape or (), rule.mappings[0], shards))
        return (rounds or shards[factor] - 1) * block * itemsize / op.operands[tensor].itemsize

    def rounds(shards: Shards) -> int:
        return len(_rounds(shards[factor])) or 1

    sent = [(n, v.itemsize) for n, v in enumerate(op.operands)]
    if keys is not None and _needs_index(op, keys):
        sent.append((0, 4))
    inside = [
        Inside(
            kind, frozenset({factor}), n, functools.partial(exchanged, kind=kind, itemsize=itemsize, tensor=n), rounds
        )
        for kind in ("collective_permute", "all_gather")
        for n, itemsize in sent
    ]
    splittable, dividing = pass_through_factors(rule) | {factor}, frozenset({factor} if keys is None else ())
    return [Strategy("merge_blocks", splittable, inside=tuple(inside), work=rule.factors_of[0], dividing=dividing)]


def _may_exchange(op: Op) -> bool:
    """Whether elements may be sorted by a comparator that is not lax's, without an index: where their order does not
    matter if they are equal, or where nobody can tell them apart."""
    if not op.flag("is_stable"):
        return True
    body, [value, *others] = op.blocks[0], op.operands
    compared = body.terminator.operands[0].defining_op
    plain = compared is not None and compared.name == "stablehlo.compare" and compared.operands == body.arguments
    return plain and not others and value.dtype.lstrip("u").startswith("i")


def _dimension(op: Op) -> int:
    return op.int("dimension", -1) % max(op.operands[0].rank, 1)


@functools.lru_cache(maxsize=256)
def _rounds(shards: int) -> tuple[tuple[int, int], ...]:
    """The rounds of the bitonic sorter, as (length of the sequences that are merged, distance of the pairs); none for
    other numbers of shards than powers of two."""
    if shards & (shards - 1):
        return ()
    powers = [1 << k for k in range(1, shards.bit_length())]
    return tuple((length, length >> k) for length in powers for k in range(1, length.bit_length()))


def _needs_index(op: Op, keys: int) -> bool:
    """Whether elements that compare equal can be told apart, and no operand tells their order."""
    return len(op.operands) > keys and _index_operand(op, keys) is None


def _index_operand(op: Op, keys: int) -> int | None:
    """An operand beside the keys that numbers the elements, as in an argsort."""
    found = (n for n in range(keys, len(op.operands)) if _numbers(op.operands[n], _dimension(op)))
    return next(found, None)


def _numbers(value: Value, dim: int) -> bool:
    """Whether a value is an iota along a dimension, perhaps with a reshard in between."""
    op = value.defining_op
    while op is not None and op.name.startswith("sdy.") and len(op.operands) == 1:
        op = op.operands[0].defining_op
    return op is not None and op.name == "stablehlo.iota" and op.int("iota_dimension") == dim


@emitter("stablehlo.sort")
def _sort(local: LocalOp, *operands: jax.Array) -> list[jax.Array]:
    op, keys = local.op, _num_keys(local.op)
    if not operands[0].ndim or not local.operand_axes(0, _dimension(op)):
        return _sorted(local, operands, _dimension(op), keys, op.flag("is_stable"))
    return _exchanged(local, operands, None) if keys is None else _sorted_over_shards(local, operands, keys)


def _sorted(
    local: LocalOp, operands: Sequence[jax.Array], dim: int, keys: int | None, is_stable: bool = False
) -> list[jax.Array]:
    """Operands sorted along a dimension: by their first ones in lax's order, or by the op's own comparator."""
    if keys is not None:
        return list(lax.sort(tuple(operands), dimension=dim, is_stable=is_stable, num_keys=keys))
    shapes, attributes = [x.shape for x in operands], {"dimension": f"{dim} : i64"}
    return re_emit(local, *operands, result_shapes=shapes, attributes=attributes)


def _sorted_over_shards(local: LocalOp, operands: Sequence[jax.Array], keys: int) -> list[jax.Array]:
    """Sorts with the index, if there is one, behind the keys."""
    dim = _dimension(local.op)
    masked = [mask_padding(local, n, x, [dim], last_of(x.dtype)) for n, x in enumerate(operands[:keys])]
    rest, used = list(operands[keys:]), _index_operand(local.op, keys)
    if not rest:
        return _exchanged(local, masked, keys)
    dtype = jnp.dtype(jnp.int32) if used is None else operands[used].dtype
    index = lax.broadcasted_iota(dtype, operands[0].shape, dim)
    index += offset(local, local.operand_axes(0, dim), index.shape[dim]).astype(dtype)
    if used is not None:
        del rest[used - keys]
    found = _exchanged(local, [*masked, index, *rest], keys + 1)
    index = found.pop(keys)
    if used is not None:
        found.insert(used, index)
    return found


def last_of(dtype: Any) -> jax.Array:
    """What a sort in lax's order puts behind everything else, or beside what is equal to it."""
    if not jnp.issubdtype(dtype, jnp.inexact):
        return jnp.asarray(reductions.identity("min", dtype))
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    nan = jnp.array(complex(math.nan, math.nan) if is_complex else math.nan, dtype)
    return jnp.where(jnp.isnan(nan), nan, reductions.identity("min", dtype).astype(dtype))


def _exchanged(local: LocalOp, operands: Sequence[jax.Array], keys: int | None) -> list[jax.Array]:
    """This device's block of the sorted dimension."""
    dim = _dimension(local.op)
    axes = local.operand_axes(0, dim)
    count, me = axes_size(axes, local.mesh.mesh), local.block_index(axes)
    with jax.named_scope(scope_name(local.op.name, axes, local.op.source)):
        if not _rounds(count):
            return _gathered(local, operands, keys)
        found = _turned(_sorted(local, operands, dim, keys), dim, (me & 1) != 0)
        for length, distance in _rounds(count):
            # Groups of `length` shards are sorted downwards where a larger group is to hold its upper half then.
            downwards = (me & length) != 0
            found = _compared(local, found, keys, distance, ((me & distance) != 0) != downwards)
            if distance == 1:
                found = _sorted(local, found, dim, keys)
                found = found if length == count else _turned(found, dim, downwards)
        return found


def _gathered(local: LocalOp, operands: Sequence[jax.Array], keys: int | None) -> list[jax.Array]:
    dim = _dimension(local.op)
    axes, block = local.operand_axes(0, dim), operands[0].shape[dim]
    gathered = [movement.all_gather(x, movement.along(x, dim, axes), local.mesh) for x in operands]
    start = offset(local, axes, block)
    return [lax.dynamic_slice_in_dim(x, start, block, dim) for x in _sorted(local, gathered, dim, keys)]


def _turned(operands: Sequence[jax.Array], dim: int, downwards: jax.Array) -> list[jax.Array]:
    return [jnp.where(downwards, jnp.flip(x, dim), x) for x in operands]


def _compared(
    local: LocalOp, operands: Sequence[jax.Array], keys: int | None, distance: int, keeps_upper: jax.Array
) -> list[jax.Array]:
    """Of each element and the one in its place on the other shard of a pair, the lower or the upper one."""
    axes = local.operand_axes(0, _dimension(local.op))
    pairs = [(t, t ^ distance) for t in range(axes_size(axes, local.mesh.mesh))]
    others = [movement.permuted(x, axes, pairs, local.mesh) for x in operands]
    # Both shards look at the same pairs in the same order, so that of two that are equal neither keeps both.
    is_first = (local.block_index(axes) & distance) == 0
    compared = slice(keys)
    first, second = (
        [jnp.where(is_first == own, x, y) for x, y in zip(operands[compared], others[compared], strict=True)]
        for own in (True, False)
    )
    if keys is None:
        ordered = _sorted(local, [jnp.stack(pair) for pair in zip(first, second, strict=True)], 0, None)
        return [jnp.where(keeps_upper, x[1], x[0]) for x in ordered]
    takes_other = _is_less(second, first) != (is_first == keeps_upper)
    return [jnp.where(takes_other, y, x) for x, y in zip(operands, others, strict=True)]


def _is_less(some: Sequence[jax.Array], others: Sequence[jax.Array]) -> jax.Array:
    """Whether elements come before others in lax's order: by their first key, which among equal ones the next decides;
    NaN comes last."""
    pairs = [pair for x, y in zip(some, others, strict=True) for pair in zip(_parts(x), _parts(y), strict=True)]
    found = _comes_before(*pairs.pop())
    for x, y in reversed(pairs):
        found = _comes_before(x, y) | (found & ~_comes_before(y, x))
    return found


def _parts(x: jax.Array) -> tuple[jax.Array, ...]:
    return (x.real, x.imag) if jnp.issubdtype(x.dtype, jnp.complexfloating) else (x,)


def _comes_before(x: jax.Array, y: jax.Array) -> jax.Array:
    return (x < y) | ((y != y) & (x == x)) if jnp.issubdtype(x.dtype, jnp.floating) else x < y


def _num_keys(op: Op) -> int | None:
    """How many operands lax's own comparator compares, if the op's is that one; else None."""
    dtypes, found = tuple(v.dtype for v in op.operands), expression(op.blocks[0])
    return next((n for n in range(1, len(dtypes) + 1) if _comparator(dtypes, n) == found), None)


@functools.cache
def _comparator(dtypes: tuple[str, ...], num_keys: int) -> tuple[str, ...]:
    """What lax.sort compares by, for operands of these element types."""
    operands = [jax.ShapeDtypeStruct((2,), numpy_dtype(dtype)) for dtype in dtypes]

    def lowered() -> tuple[str, ...]:
        module = jit(lambda *xs: lax.sort(xs, num_keys=num_keys)).lower(*operands).compiler_ir("stablehlo")
        graph = Graph(module.operation)  # type: ignore[union-attr]
        return expression(next(op for op in graph.main.walk() if op.name == "stablehlo.sort").blocks[0])

    return apart(lowered)


# The largest elements along a dimension: shards send their candidates, among which every device chooses again.
#
# `k` of the global largest elements are among the `k` largest of each shard. Equal elements are chosen in the order
# of their indices, which is the order in which the shards' candidates are joined.


def candidate_strategies(op: Op, rule: OpShardingRule, dim: int, passing: frozenset[int]) -> list[Strategy]:
    """Values and indices of the candidates are gathered, if any are asked for."""
    [factor] = rule.mappings[0][dim]
    k = (op.results[0].shape or ())[dim]

    def candidates(shards: Shards) -> float:
        block = list(block_shape(op.operands[0].shape or (), rule.mappings[0], shards))
        block[dim] = min(block[dim], k)
        return (shards[factor] - 1) * math.prod(block)

    gathered = range(2 if k else 0)
    inside = tuple(Inside("all_gather", frozenset({factor}), len(op.operands) + n, candidates) for n in gathered)
    splittable = (passing - set(rule.mappings[-1][dim])) | {factor}
    return [Strategy("candidates", splittable, inside=inside, work=rule.factors_of[0])]


@strategies("chlo.top_k")
def _top_k_strategies(op: Op, rule: OpShardingRule) -> list[Strategy]:
    passing = pass_through_factors(rule)
    if not _is_lax(op):
        return [Strategy("along_factors", passing)]
    return candidate_strategies(op, rule, op.operands[0].rank - 1, passing)


def _is_lax(op: Op) -> bool:
    return op.results[1].dtype == "i32" and op.flag("is_stable", True)


@emitter("chlo.top_k")
def _top_k(local: LocalOp, operand: jax.Array) -> list[jax.Array]:
    op, dim, k = local.op, operand.ndim - 1, local.op.int("k")
    if not _is_lax(op):
        return re_emit(local, operand)
    axes = local.operand_axes(0, dim)
    if not axes or not k:
        return list(lax.top_k(operand, k))
    lowest = jnp.asarray(reductions.identity("max", operand.dtype))
    operand = mask_padding(local, 0, operand, [dim], lowest)
    block = operand.shape[dim]
    values, indices = lax.top_k(operand, min(k, block))
    values, indices = _joined(local, [values, indices + offset(local, axes, block)], dim, axes)
    values, chosen = lax.top_k(values, k)
    return [values, jnp.take_along_axis(indices, chosen, dim, mode="clip")]


def _joined(local: LocalOp, parts: Sequence[jax.Array], dim: int, axes: Sequence[AxisRef]) -> list[jax.Array]:
    along = movement.along(parts[0], dim, axes)
    with jax.named_scope(scope_name(local.op.name, axes, local.op.source)):
        return [movement.all_gather(x, along, local.mesh) for x in parts]


# The approximate ones of lax.


class _Approximate(NamedTuple):
    """The settings of an `ApproxTopK` call."""

    dim: int
    settings: dict[str, str]

    def changed(self, **settings: str) -> dict[str, str]:
        """The attributes of a call that is different in some of them."""
        listed = ", ".join(f"{name} = {text}" for name, text in (self.settings | settings).items())
        return {"mhlo.backend_config": f"{{{listed}}}"}


def _approximate(op: Op) -> _Approximate | None:
    """The settings of a call; None for other calls, and for those that have none."""
    config = op.attributes.get("mhlo.backend_config")
    if op.text("call_target_name") != "ApproxTopK" or not isinstance(config, ir.DictAttr) or len(op.operands) != 4:
        return None
    settings = {named.name: str(named.attr) for named in config}
    if "reduction_dim" not in settings:
        return None
    return _Approximate(ir.IntegerAttr(config["reduction_dim"]).value, settings)


def approximate_strategies(op: Op, rule: OpShardingRule, passing: frozenset[int]) -> list[Strategy] | None:
    """Those of a custom call that looks for the largest elements; None for other calls."""
    found = _approximate(op)
    if found is None:
        return None
    searched, chosen = (frozenset(mapping[found.dim]) for mapping in (rule.mappings[0], rule.mappings[-1]))
    if searched == chosen or found.settings.get("aggregate_to_topk") != "true":
        # Of as many elements as there are the rule says that they pass; but they come in their order.
        return [Strategy("along_batches", passing - searched)]
    return candidate_strategies(op, rule, found.dim, passing)


def approximate_top_k(local: LocalOp, *operands: jax.Array) -> list[jax.Array]:
    """The results of such a call along a split dimension; nothing for all other calls."""
    found = _approximate(local.op)
    axes = local.operand_axes(0, found.dim) if found else ()
    if found is None or not axes:
        return []
    dim, size, inits = found.dim, (local.op.operands[0].shape or ())[found.dim], operands[2:]
    parts = [mask_padding(local, n, x, [dim], inits[n]) for n, x in enumerate(operands[:2])]
    shape = local.result_shape()
    if shape[dim] < parts[0].shape[dim]:
        whole_size = (
            {}
            if found.settings.get("reduction_input_size_override", "-1") != "-1 : i64"
            else {"reduction_input_size_override": f"{size} : i64"}
        )
        parts = _largest(local, dim, parts, inits, found.changed(**whole_size))
    joined = _joined(local, parts, dim, axes)
    again = {"recall_target": "1.0 : f32", "reduction_input_size_override": "-1 : i64"}
    return _largest(local, dim, joined, inits, found.changed(**again))


def _largest(
    local: LocalOp, dim: int, parts: Sequence[jax.Array], inits: Sequence[jax.Array], attributes: dict[str, str]
) -> list[jax.Array]:
    """The largest of some values, with their indices, by their positions: where XLA finds these counted from 0 it takes
    equal elements in their order, as it does of the whole array."""
    values, indices = parts
    positions = lax.broadcasted_iota(indices.dtype, values.shape, dim)
    values, positions = re_emit(local, values, positions, *inits, attributes=attributes)
    return [values, jnp.take_along_axis(indices, positions, dim, mode="clip")]
