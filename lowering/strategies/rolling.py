"""`sdy_jax.roll`: rotations of a dimension by an offset that is known at run time.

    %0 = stablehlo.custom_call @sdy_jax.roll(%x, %start) {dimension = 0 : i64, is_back = false}
      : (tensor<1024x64xf32>, tensor<i32>) -> tensor<1024x64xf32>

is what `jnp.roll` makes of a traced shift: x twice in a row, and the 1024 rows from `start` on, clamped to [0, 1024].
With `is_back` it is its gradient, which turns back. As one op it needs no exchange for the joined value, of which no
device needs more than a block.

A device wants a block that lies in two, at the same distance from each device's own: q whole blocks and r elements on.
By steps, blocks are sent on by 1, 2, 4, ... devices, and kept where q has that bit; then each device takes what lacks
from its neighbour. That is log2(g) + 1 blocks on the wire, where an all_gather has g - 1.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.mlir import ir

from sdy_jax.ir.graph import Op
from sdy_jax.lowering.collectives import data_movement
from sdy_jax.lowering.emission.local_op import LocalOp, emitter
from sdy_jax.lowering.emission.names import scope_name
from sdy_jax.lowering.strategies.monoids import is_identity
from sdy_jax.lowering.strategies.registry import Inside, Shards, Strategy, folds, pass_through_factors, strategies
from sdy_jax.lowering.strategies.shards import block_shape, clamped, factors_of_dims
from sdy_jax.op_rules.slicing import ROLL, rolled_dim
from sdy_jax.representation.mesh import AxisRef, axes_size
from sdy_jax.representation.rule import OpShardingRule


@folds("stablehlo.dynamic_slice")
def _fold_roll(op: Op) -> bool:
    dim, joined = rolled_dim(op), op.operands[0].defining_op
    if dim is None or joined is None:
        return False
    _replace(op, joined.mlir.operands[0], op.mlir.operands[1 + dim], dim, is_back=False)
    return True


@folds("stablehlo.add")
def _fold_gradient(op: Op) -> bool:
    """The gradient of such a slice: a value put among zeros of twice its size, whose halves are added."""
    low, high = (value.defining_op for value in op.operands)
    if low is None or high is None or not low.name == high.name == "stablehlo.slice":
        return False
    update = low.operands[0].defining_op
    if low.operands[0] is not high.operands[0] or update is None or update.name != "stablehlo.dynamic_update_slice":
        return False
    shape, zeros = op.results[0].shape or (), update.operands[0]
    dims = [d for d, (n, m) in enumerate(zip(shape, zeros.shape or (), strict=True)) if n != m]
    if len(dims) != 1 or not is_identity(zeros, "sum") or update.operands[1].shape != shape:
        return False
    (dim,) = dims
    intervals = {(half.ints("start_indices")[dim], half.ints("limit_indices")[dim]) for half in (low, high)}
    if intervals != {(0, shape[dim]), (shape[dim], 2 * shape[dim])}:
        return False
    _replace(op, update.mlir.operands[1], update.mlir.operands[2 + dim], dim, is_back=True)
    return True


def _replace(op: Op, x: ir.Value, start: ir.Value, dim: int, is_back: bool) -> None:
    old = op.results[0].mlir
    attributes = {
        "call_target_name": ir.StringAttr.get(ROLL, old.context),
        "dimension": ir.IntegerAttr.get(ir.IntegerType.get_signless(64, old.context), dim),
        "is_back": ir.BoolAttr.get(is_back, old.context),
    }
    if "sdy.sharding" in op.mlir.attributes:
        attributes["sdy.sharding"] = op.mlir.attributes["sdy.sharding"]
    roll = ir.Operation.create(
        "stablehlo.custom_call",
        results=[old.type],
        operands=[x, start],
        attributes=attributes,
        loc=op.mlir.location,
        ip=ir.InsertionPoint(op.mlir),
    )
    old.replace_all_uses_with(roll.results[0])


@strategies(ROLL)
def _roll_strategies(op: Op, rule: OpShardingRule) -> list[Strategy]:
    mapping = rule.operand_mappings[0]
    moved = factors_of_dims(mapping, [op.int("dimension")])

    def sent(shards: Shards) -> int:
        count = math.prod(shards[f] for f in moved)
        block = math.prod(block_shape(op.operands[0].shape or (), mapping, shards))
        return (len(_steps(count)) + 1) * block if count > 1 else 0

    inside = Inside("collective_permute", moved, 0, sent)
    splittable = pass_through_factors(rule) | moved
    return [Strategy("by_steps", splittable, inside=(inside,), work=frozenset(), dividing=moved)]


def _steps(shards: int) -> list[int]:
    """The powers of two of which distances to other shards are sums."""
    return [1 << bit for bit in range((shards - 1).bit_length())]


@emitter(ROLL)
def _roll(local: LocalOp, x: jax.Array, start: jax.Array) -> jax.Array:
    dim = local.op.int("dimension")
    axes, size = local.operand_axes(0, dim), (local.op.operands[0].shape or ())[dim]
    begin = clamped(start, size)
    if local.op.flag("is_back"):
        begin = size - begin
    if not axes:
        return _interval(x, x, begin, dim)
    with jax.named_scope(scope_name(local.op.name, axes, local.op.source)):
        return _by_steps(local, x, begin % size, dim, axes)


def _by_steps(local: LocalOp, x: jax.Array, begin: jax.Array, dim: int, axes: tuple[AxisRef, ...]) -> jax.Array:
    blocks, rest = begin // x.shape[dim], begin % x.shape[dim]
    for step in _steps(axes_size(axes, local.mesh.mesh)):
        x = jnp.where((blocks & step) > 0, _from_ahead(local, x, axes, step), x)
    return _interval(x, _from_ahead(local, x, axes, 1), rest, dim)


def _from_ahead(local: LocalOp, x: jax.Array, axes: tuple[AxisRef, ...], distance: int) -> jax.Array:
    """The block of the device that is so far ahead, round and round."""
    shards = axes_size(axes, local.mesh.mesh)
    return data_movement.permuted(x, axes, [((t + distance) % shards, t) for t in range(shards)], local.mesh)


def _interval(x: jax.Array, following: jax.Array, begin: jax.Array, dim: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(lax.concatenate([x, following], dim), begin, x.shape[dim], dim)
