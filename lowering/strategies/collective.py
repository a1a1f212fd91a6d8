"""Emitters of the sdy collectives: each under a scope that names it and the source line that caused it.

A dimension that does not divide is padded before it is cut into blocks, and rid of the padding where it is whole again.
"""

from __future__ import annotations

import jax
from jax import lax

from sdy_jax.lowering.emission import lax_collectives
from sdy_jax.lowering.emission.local_op import LocalOp, emitter
from sdy_jax.lowering.strategies.manual import apart_along, manual_axes_around
from sdy_jax.lowering.strategies.shards import lengthened
from sdy_jax.representation.attributes import reduction_from_attributes
from sdy_jax.representation.mesh import axes_size
from sdy_jax.representation.sdy_collectives import SdyCollective, collective_from_attributes
from sdy_jax.representation.sharding import TensorSharding


@emitter("sdy.all_gather")
def _all_gather(local: LocalOp, x: jax.Array) -> jax.Array:
    return _trimmed(local, lax_collectives.all_gather(x, _collective(local).axes, local.mesh))


@emitter("sdy.all_slice")
def _all_slice(local: LocalOp, x: jax.Array) -> jax.Array:
    return lax_collectives.all_slice(_padded(local, x), _collective(local).axes, local.mesh)


@emitter("sdy.all_to_all")
def _all_to_all(local: LocalOp, x: jax.Array) -> jax.Array:
    return _trimmed(local, lax_collectives.all_to_all(_padded(local, x), _collective(local).params, local.mesh))


@emitter("sdy.collective_permute")
def _collective_permute(local: LocalOp, x: jax.Array) -> jax.Array:
    source, target = local.operand_shardings[0], local.result_shardings[0]
    assert target is not None
    source = source or TensorSharding.replicated(target.mesh, target.rank)
    apart = manual_axes_around(local.op)  # along these, devices hold values of their own
    return lax_collectives.collective_permute(x, apart_along(source, apart), apart_along(target, apart), local.mesh)


@emitter("sdy.all_reduce")
def _all_reduce(local: LocalOp, x: jax.Array) -> jax.Array:
    return lax_collectives.all_reduce(x, _collective(local).axes, _kind(local), local.mesh)


@emitter("sdy.reduce_scatter")
def _reduce_scatter(local: LocalOp, x: jax.Array) -> jax.Array:
    return lax_collectives.reduce_scatter(_padded(local, x), _collective(local).axes, _kind(local), local.mesh)


@emitter("sdy.replicated_to_unreduced")
def _replicated_to_unreduced(local: LocalOp, x: jax.Array) -> jax.Array:
    return lax_collectives.replicated_to_unreduced(x, _collective(local).axes, _kind_to_come(local), local.mesh)


@emitter("sdy.sharded_to_unreduced")
def _sharded_to_unreduced(local: LocalOp, x: jax.Array) -> jax.Array:
    axes = _collective(local).axes
    return _trimmed(local, lax_collectives.sharded_to_unreduced(x, axes, _kind_to_come(local), local.mesh))


def _padded(local: LocalOp, x: jax.Array) -> jax.Array:
    """The operand, with dimensions as long as all the blocks together into which they are cut."""
    mesh, blocks = local.mesh.mesh, local.result_shape()
    for dim, block in enumerate(blocks):
        before, after = (axes_size(axes(0, dim), mesh) for axes in (local.operand_axes, local.result_axes))
        missing = block * (after // before) - x.shape[dim]
        if missing > 0:
            x = lengthened(x, dim, missing)
    return x


def _trimmed(local: LocalOp, x: jax.Array) -> jax.Array:
    """The result without the padding of dimensions that are whole now."""
    shape = local.result_shape()
    return x if x.shape == shape else lax.slice(x, (0,) * x.ndim, shape)


def _collective(local: LocalOp) -> SdyCollective:
    return collective_from_attributes(local.op.name.removeprefix("sdy."), local.op.attributes)


def _kind(local: LocalOp) -> str:
    return reduction_from_attributes(local.op.attributes)


def _kind_to_come(local: LocalOp) -> str:
    """The reduction kind of the unreduced value that a conversion makes."""
    (result,) = local.result_shardings
    assert result is not None
    return result.reduction
