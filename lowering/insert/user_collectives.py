"""The sdy collectives that the user wrote: they keep their place and kind.

Each runs from the sharding stated for its operand to its own `out_sharding`. One that cannot (a size that does not
divide, a reduction whose operand is not stated to be unreduced) only states the sharding of its result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from sdy_jax.errors import ShardingError
from sdy_jax.ir.graph import Op, Value
from sdy_jax.lowering.emission.wire_bytes import sent_by_step
from sdy_jax.lowering.interface.collective_record import Moved
from sdy_jax.lowering.reshard.plan import Collective
from sdy_jax.lowering.reshard.states import padded_block
from sdy_jax.lowering.targets.rates import wire_bytes
from sdy_jax.lowering.targets.tiles import last_cut
from sdy_jax.representation.attributes import reduction_from_attributes
from sdy_jax.representation.axes import set_difference
from sdy_jax.representation.mesh import Axes, Mesh, axes_size
from sdy_jax.representation.sdy_collectives import (
    APPENDING,
    COLLECTIVE_OPS,
    FLAT,
    REDUCING,
    REDUCING_OPS,
    SdyCollective,
    collective_from_attributes,
    sharding_after,
)
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.representation.verify_collectives import leads_to_blocks, verify_counted_once


@dataclass(frozen=True, slots=True)
class UserCollective:
    """A user's collective as it runs: the collective, the sharding of its operand, and that of its result."""

    collective: SdyCollective
    source: TensorSharding
    target: TensorSharding

    def moved(self, value: Value, mesh: Mesh) -> Moved:
        """The record of the collective for a value."""
        collective, shape = self.collective, value.shape or ()
        cut = padded_block(shape, self.source.shard_counts(mesh), self.target.shard_counts(mesh))
        before, after = (value.itemsize * math.prod(s) for s in (cut, self.target.local_shape(shape, mesh)))
        axes = (
            collective.all_axes
            if collective.kind != "collective_permute"
            else _permuted(self.source, self.target, mesh)
        )
        wire = wire_bytes(collective.kind, axes_size(axes, mesh), before, after)
        step = Collective(collective, self.target, wire, self.source.reduction)
        reduction = step.reduction if collective.kind in REDUCING else ""
        last = last_cut(shape, self.source.shard_counts(mesh), self.target.shard_counts(mesh))
        return Moved(collective.summary, self.target, sent_by_step(step, value, mesh), reduction, last)


def is_user_collective(op: Op) -> bool:
    """Whether the op is one of the sdy collectives."""
    return op.name in COLLECTIVE_OPS


def is_reduction(op: Op) -> bool:
    """Whether the op reduces values of several devices."""
    return op.name in REDUCING_OPS


def user_collective(
    op: Op, sources: Iterable[TensorSharding], target: TensorSharding, mesh: Mesh
) -> UserCollective | None:
    """A collective with the stated result `target`, from the first of `sources` that it fits; None if it fits none."""
    collective = _without_size_one(collective_from_attributes(op.name, op.attributes), mesh)
    if not collective.all_axes and collective.kind != "collective_permute":
        return None
    combines = reduction_from_attributes(op.attributes)
    for source in sources:
        for each in (collective, _restated(collective, source, target, mesh)):
            if _leads(each, combines, source, target, mesh) and _joins_blocks(op.results[0], source, target, mesh):
                return UserCollective(each, source, target)
    return None


def _restated(collective: SdyCollective, source: TensorSharding, target: TensorSharding, mesh: Mesh) -> SdyCollective:
    """The collective of this kind between two shardings. It says its axes in those of another mesh, if the shardings
    were on that before they were expressed on this one."""

    def less(axes: Axes, others: Axes) -> Axes:
        return set_difference(axes, others, mesh)

    if collective.kind == "all_reduce":
        return replace(collective, axes=less(source.unreduced_axes, target.unreduced_axes))
    if collective.kind == "replicated_to_unreduced":
        return replace(collective, axes=less(target.unreduced_axes, source.unreduced_axes))
    before, after = (target, source) if collective.kind in APPENDING else (source, target)
    lists = tuple(map(less, before.axes, after.axes))
    params = tuple((lists[dim], dim, to) for _, dim, to in collective.params)
    return replace(collective, axes=lists if collective.axes else (), params=params)


def _without_size_one(collective: SdyCollective, mesh: Mesh) -> SdyCollective:
    """Without axes of size one, which shardings are rid of."""

    def larger(axes: Axes) -> Axes:
        return tuple(axis for axis in axes if axis.name not in mesh.axis_names or axis.size(mesh) > 1)

    if collective.kind in FLAT:
        return replace(collective, axes=larger(collective.axes))
    params = tuple((axes, a, b) for given, a, b in collective.params if (axes := larger(given)))
    return replace(collective, axes=tuple(map(larger, collective.axes)), params=params)


def _leads(
    collective: SdyCollective, combines: str, source: TensorSharding, target: TensorSharding, mesh: Mesh
) -> bool:
    """Whether the collective takes one sharding to the other without adding any partial sum twice."""
    if collective.kind == "collective_permute":
        same = source.unreduced_axes == target.unreduced_axes and source.reduction == target.reduction
        return same and source.shard_counts(mesh) == target.shard_counts(mesh)
    if source.mesh != target.mesh or (collective.kind in REDUCING and combines != source.reduction):
        return False
    if source.unreduced_axes and target.unreduced_axes and source.reduction != target.reduction:
        return False
    try:
        verify_counted_once(collective, source, mesh, "")
        after = sharding_after(collective, source, mesh)
    except ShardingError:
        return False
    return after.axes == target.axes and after.unreduced_axes == target.unreduced_axes


def _joins_blocks(value: Value, source: TensorSharding, target: TensorSharding, mesh: Mesh) -> bool:
    counts = zip(value.shape or (), source.shard_counts(mesh), target.shard_counts(mesh), strict=True)
    return all(leads_to_blocks(*each) for each in counts)


def _permuted(source: TensorSharding, target: TensorSharding, mesh: Mesh) -> Axes:
    """The axes along which a permutation moves blocks; none if every block stays."""
    if source.same_layout_as(target):
        return ()
    lists = [axes for sharding in (source, target) for axes in (*sharding.axes, sharding.unreduced_axes)]
    return tuple(dict.fromkeys(axis for axes in lists for axis in axes))
