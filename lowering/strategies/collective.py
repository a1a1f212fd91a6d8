"""Emitters of the sdy collectives: each under a scope that names it and the source line that caused it.

A dimension that does not divide is padded before it is cut into blocks, and rid of the padding where it is whole again.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import lax

from sdy_jax.lowering.collectives import data_movement, lax_collectives, reductions
from sdy_jax.lowering.collectives.packing import PackedCollective, run_together
from sdy_jax.lowering.collectives.rings import Gathered, Product, Ring
from sdy_jax.lowering.emission.local_op import LocalOp, emitter
from sdy_jax.lowering.emission.redistribute import relaid
from sdy_jax.lowering.strategies.manual import apart_along, manual_axes_around
from sdy_jax.lowering.strategies.shards import lengthened
from sdy_jax.representation.attributes import reduction_from_attributes
from sdy_jax.representation.mesh import axes_size
from sdy_jax.representation.sdy_collectives import (
    BUCKET,
    BY_STRIPS,
    COLLECTIVE_OPS,
    PACKED,
    RING,
    UNREDUCING,
    SdyCollective,
    collective_from_attributes,
)
from sdy_jax.representation.sharding import TensorSharding


@emitter(*(COLLECTIVE_OPS - {"sdy.collective_permute"}))
def _collective(local: LocalOp, x: jax.Array) -> jax.Array | Gathered:
    if RING in local.op.attributes:
        return _in_ring(local, x)
    if not x.size:
        return lax.full(local.result_shape(), 0, x.dtype)  # lax does not gather what has no elements
    said = _said(local)
    result, reduction = local.result_shardings[0], reduction_from_attributes(local.op.attributes)
    if said.kind in UNREDUCING and result is not None:
        reduction = result.reduction
    x, order = _padded(local, x), _turned_before(local)
    if order is None:
        return _trimmed(local, lax_collectives.run_collective(said, x, reduction, local.mesh))
    back = sorted(range(len(order)), key=order.__getitem__)
    found = reductions.reduce_scatter(x.transpose(back), [said.axes[d] for d in back], reduction, local.mesh)
    return _trimmed(local, found.transpose(order))


def _turned_before(local: LocalOp) -> Sequence[int] | None:
    """The permutation by which what a collective left is transposed before an op scatters it, in lanes: XLA joins both
    into a scatter along another dimension, of which it may make an all-reduce. Scattered first, it is what it seems."""
    op, turn = local.op, local.op.operands[0].defining_op
    if (
        op.name != "sdy.reduce_scatter"
        or not local.mesh.forms.in_lanes
        or turn is None
        or turn.name != "stablehlo.transpose"
    ):
        return None
    maker = turn.operands[0].defining_op
    return turn.ints("permutation") if maker is not None and maker.name in COLLECTIVE_OPS else None


def _in_ring(local: LocalOp, x: jax.Array | Product) -> jax.Array | Gathered:
    """What a product takes, or has made, in a ring."""
    said = collective_from_attributes(local.op.name, local.op.attributes)
    dim = next(dim for dim, axes in enumerate(said.axes) if axes)
    ring = Ring(said.axes[dim], local.mesh)
    return x.scattered(dim, ring) if isinstance(x, Product) else Gathered(x, dim, ring)


@emitter("sdy.collective_permute")
def _collective_permute(local: LocalOp, x: jax.Array) -> jax.Array:
    return data_movement.collective_permute(x, *_ends(local), local.mesh)


@emitter(BUCKET)
def _bucket(members: Sequence[LocalOp], operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Collectives that run as one."""
    reduction, packs = reduction_from_attributes(members[0].op.attributes), PACKED in members[0].op.attributes
    pairs = list(zip(members, operands, strict=True))
    given = [PackedCollective(_padded(local, x), _said(local), *_ends(local)) for local, x in pairs]
    found = run_together(given, reduction, members[0].mesh, packs)
    return [_trimmed(local, x) for local, x in zip(members, found, strict=True)]


def _said(local: LocalOp) -> SdyCollective:
    return collective_from_attributes(local.op.name, local.op.attributes)


def _ends(local: LocalOp) -> tuple[TensorSharding, TensorSharding]:
    """The shardings between which a collective runs, with blocks of their own for devices that hold other values."""
    target = local.result_shardings[0]
    assert target is not None
    source = local.operand_shardings[0] or TensorSharding.replicated(target.mesh, target.rank)
    apart = manual_axes_around(local.op)
    return apart_along(source, apart), apart_along(target, apart)


@emitter(f"sdy.{BY_STRIPS}")
def _reshard(local: LocalOp, x: jax.Array) -> jax.Array:
    return relaid(local, x) if x.size else lax.full(local.result_shape(), 0, x.dtype)


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
