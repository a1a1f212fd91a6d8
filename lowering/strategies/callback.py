"""Callbacks to the host: one device runs them, with whole operands, and gives their results to the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from sdy_jax.ir.custom_ops import CALLBACK, CALLBACK_ON_BLOCKS, INSPECTED, Callback, function_of
from sdy_jax.ir.graph import Op, Value
from sdy_jax.lowering.collectives.reductions import all_reduce
from sdy_jax.lowering.emission.local_op import LocalOp, emitter
from sdy_jax.lowering.emission.wire_bytes import all_reduce_bytes
from sdy_jax.lowering.strategies.manual import manual_axes_around
from sdy_jax.lowering.strategies.registry import WHOLE, Sent, Strategy, Whole, pass_through_factors, sends, strategies
from sdy_jax.representation.axes import braces
from sdy_jax.representation.mesh import AxisRef, Mesh, axes_size
from sdy_jax.representation.rule import OpShardingRule
from sdy_jax.representation.sdy_collectives import CollectiveSummary
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.runtime.mesh import RefinedMesh


@strategies(CALLBACK, CALLBACK_ON_BLOCKS)
def _callback(op: Op, rule: OpShardingRule) -> list[Strategy]:
    """On blocks as they come, in equal shards, or on whole values."""
    factors = pass_through_factors(rule)
    return [Strategy("callback", factors, work=frozenset(), dividing=factors)]


WHOLE[CALLBACK] = Whole(
    "one device calls the host, with whole values",
    "give it a sum or a part of the value, or call it with what each device holds, in jax.shard_map (jax.debug: "
    "partitioned=True)",
)


@strategies(INSPECTED)
def _inspected(op: Op, rule: OpShardingRule) -> list[Strategy]:
    return [Strategy("inspected", pass_through_factors(rule), work=frozenset())]


@emitter(INSPECTED)
def _say_sharding(local: LocalOp, x: jax.Array) -> list[jax.Array]:
    return list(_callback_of(local).run(local.mesh, local.operand_shardings[0]))


@sends(CALLBACK)
def _sent(op: Op, mesh: Mesh, operands: Sequence[TensorSharding]) -> list[Sent]:
    """The results go from the device that has them to all that share them."""
    axes = _shared_axes(op, mesh)
    if axes_size(axes, mesh) == 1:
        return []
    summary = CollectiveSummary("all_reduce", axes, braces(axes))
    group = axes_size(axes, mesh)
    results = [Sent(summary, index, _bytes_of(value, group)) for index, value in enumerate(op.results)]
    whether_it_failed = [Sent(summary, 0, all_reduce_bytes("sum", (), 4, "i32", group))]
    return results + whether_it_failed if results else []


def _bytes_of(value: Value, group: int) -> float:
    """What a device sends of a result; that of two bytes as four (`_from_one`)."""
    itemsize = 4 if value.itemsize == 2 else value.itemsize
    return all_reduce_bytes("sum", value.shape or (), itemsize, value.dtype, group)


def _shared_axes(op: Op, mesh: Mesh) -> tuple[AxisRef, ...]:
    """The axes along which all devices have the same values: all that the code around is not manual on."""
    manual = {axis.name for axis in manual_axes_around(op)}
    return tuple(AxisRef(name) for name in mesh.axis_names if name not in manual)


@emitter(CALLBACK_ON_BLOCKS)
def _on_blocks(local: LocalOp, *operands: jax.Array) -> list[jax.Array]:
    return list(_callback_of(local).run(*operands))


@emitter(CALLBACK)
def _on_whole_values(local: LocalOp, *operands: jax.Array) -> list[jax.Array]:
    own, mesh = _callback_of(local), replace(local.mesh, device_permutation=())
    axes = _shared_axes(local.op, mesh.mesh)
    results = _run_on_one(own, axes, mesh, operands)
    if own.checked is None:
        return results
    *values, flag = results
    return list(own.checked(values, flag))


def _run_on_one(
    own: Callback, axes: Sequence[AxisRef], mesh: RefinedMesh, operands: Sequence[jax.Array]
) -> list[jax.Array]:
    """The results of the device that calls, on all along the axes."""
    if axes_size(axes, mesh.mesh) == 1:
        return list(own.run(*operands))
    types = jax.eval_shape(own.run, *operands)
    results = lax.cond(
        mesh.index(axes) == own.position,
        lambda *xs: tuple(own.run(*xs)),
        lambda *_: tuple(jnp.zeros(x.shape, x.dtype) for x in types),
        *operands,
    )
    return [_from_one(x, axes, mesh) for x in results]


def _from_one(x: jax.Array, axes: Sequence[AxisRef], mesh: RefinedMesh) -> jax.Array:
    """What one device holds and all others have zeros for; its bits are added, as sums lose the sign of zero.

    Numbers of two bytes become wider: accelerators do not reduce such integers.
    """
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return lax.complex(*(_from_one(part, axes, mesh) for part in (x.real, x.imag)))
    bits = x
    if jnp.issubdtype(x.dtype, jnp.floating):
        bits = lax.bitcast_convert_type(x, f"uint{jnp.finfo(x.dtype).bits}")
    wide = bits.astype(jnp.uint32) if x.dtype.itemsize == 2 else bits
    whole = all_reduce(wide, axes, "sum", mesh).astype(bits.dtype)
    return whole if bits is x else lax.bitcast_convert_type(whole, x.dtype)


def _callback_of(local: LocalOp) -> Callback:
    own: Callback = function_of(local.op.text("backend_config"), local.op.mlir.context, local.op.source)
    return own
