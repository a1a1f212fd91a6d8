"""Sort: along a split dimension by exchanging blocks between pairs of shards.

Every shard sorts its block. Then pairs of shards merge theirs, of which one keeps the lower and the other one the
upper half, in the order of the pairs of Batcher's bitonic sorter (https://doi.org/10.1145/1468075.1468121), which needs
a power of two of shards; blocks of another number are gathered. The exchange is not stable by itself: the global index
travels as a last key where the order of equal elements can be seen. Padding comes last: it is known by its index, or
has the largest value there is. (Zeros of both signs are equal to a sort, and so are NaNs: where only keys are sorted,
their order may be another one.)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.lowering.emission import lax_collectives
from sdy_jax.lowering.emission.local_op import LocalOp, emitter
from sdy_jax.lowering.emission.names import scope_name
from sdy_jax.lowering.emission.reemitted import numpy_dtype, re_emit
from sdy_jax.lowering.strategies.monoids import expression
from sdy_jax.lowering.strategies.registry import Inside, Shards, Strategy, pass_through_factors, strategies
from sdy_jax.lowering.strategies.shards import block_shape, mask_padding, offset
from sdy_jax.representation.mesh import Axes, axes_size
from sdy_jax.representation.rule import OpShardingRule
from sdy_jax.runtime.apart import apart


@strategies("stablehlo.sort")
def _sort_strategies(op: Op, rule: OpShardingRule) -> list[Strategy]:
    """Comparators that are not lax's cannot be told of padding."""
    keys = _num_keys(op)
    if keys is None or not op.operands[0].shape:
        return [Strategy("along_factors", pass_through_factors(rule))]
    [factor] = rule.mappings[0][_dimension(op)]

    def exchanged(shards: Shards, kind: str, itemsize: float, tensor: int) -> float:
        rounds = len(_rounds(shards[factor]))
        if (kind == "all_gather") != (not rounds):
            return 0
        block = math.prod(block_shape(op.operands[0].shape or (), rule.mappings[0], shards))
        return (rounds or shards[factor] - 1) * block * itemsize / op.operands[tensor].itemsize

    sent = [(n, v.itemsize) for n, v in enumerate(op.operands)]
    if _needs_index(op, keys):
        sent.append((0, 4))
    inside = [
        Inside(kind, frozenset({factor}), n, functools.partial(exchanged, kind=kind, itemsize=itemsize, tensor=n))
        for kind in ("collective_permute", "all_gather")
        for n, itemsize in sent
    ]
    splittable = pass_through_factors(rule) | {factor}
    return [Strategy("merge_blocks", splittable, inside=tuple(inside), work=rule.factors_of[0])]


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
    if keys is None:
        return re_emit(local, *operands)
    if operands[0].ndim and local.operand_axes(0, _dimension(op)):
        return _sorted_over_shards(local, operands, keys)
    return _sorted(operands, _dimension(op), keys, op.flag("is_stable"))


def _sorted(operands: Sequence[jax.Array], dim: int, keys: int, is_stable: bool = False) -> list[jax.Array]:
    return list(lax.sort(tuple(operands), dimension=dim, is_stable=is_stable, num_keys=keys))


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
        return jnp.asarray(lax_collectives.identity("min", dtype))
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    nan = jnp.array(complex(math.nan, math.nan) if is_complex else math.nan, dtype)
    return jnp.where(jnp.isnan(nan), nan, lax_collectives.identity("min", dtype).astype(dtype))


def _exchanged(local: LocalOp, operands: Sequence[jax.Array], keys: int) -> list[jax.Array]:
    """This device's block of the sorted dimension."""
    dim = _dimension(local.op)
    axes, block = local.operand_axes(0, dim), operands[0].shape[dim]
    rounds = _rounds(axes_size(axes, local.mesh.mesh))
    with jax.named_scope(scope_name(local.op.name, axes, local.op.source)):
        if not rounds:
            gathered = [lax_collectives.all_gather(x, _along(dim, axes, x.ndim), local.mesh) for x in operands]
            start = offset(local, axes, block)
            return [lax.dynamic_slice_in_dim(x, start, block, dim) for x in _sorted(gathered, dim, keys)]
        found = _sorted(operands, dim, keys)
        for length, distance in rounds:
            found = _merged(local, found, keys, length, distance)
        return found


def _merged(local: LocalOp, operands: Sequence[jax.Array], keys: int, length: int, distance: int) -> list[jax.Array]:
    """One half of the elements of a pair of shards."""
    dim = _dimension(local.op)
    axes, block = local.operand_axes(0, dim), operands[0].shape[dim]
    pairs, me = [(t, t ^ distance) for t in range(axes_size(axes, local.mesh.mesh))], local.block_index(axes)
    others = [lax_collectives.permuted(x, axes, pairs, local.mesh) for x in operands]
    both = [lax.concatenate([x, y], dim) for x, y in zip(operands, others, strict=True)]
    keeps_lower = ((me & length) == 0) == ((me & distance) == 0)
    start = jnp.where(keeps_lower, jnp.int32(0), jnp.int32(block))
    return [lax.dynamic_slice_in_dim(x, start, block, dim) for x in _sorted(both, dim, keys)]


def _along(dim: int, axes: Axes, rank: int) -> list[Axes]:
    return [axes if d == dim else () for d in range(rank)]


def _num_keys(op: Op) -> int | None:
    """How many operands lax's own comparator compares, if the op's is that one; else None."""
    dtypes, found = tuple(v.dtype for v in op.operands), expression(op.blocks[0])
    return next((n for n in range(1, len(dtypes) + 1) if _comparator(dtypes, n) == found), None)


@functools.cache
def _comparator(dtypes: tuple[str, ...], num_keys: int) -> tuple[str, ...]:
    """What lax.sort compares by, for operands of these element types."""
    operands = [jax.ShapeDtypeStruct((2,), numpy_dtype(dtype)) for dtype in dtypes]

    def lowered() -> tuple[str, ...]:
        module = jax.jit(lambda *xs: lax.sort(xs, num_keys=num_keys)).lower(*operands).compiler_ir("stablehlo")
        graph = Graph(module.operation)  # type: ignore[union-attr]
        return expression(next(op for op in graph.main.walk() if op.name == "stablehlo.sort").blocks[0])

    return apart(lowered)
