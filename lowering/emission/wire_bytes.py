"""Bytes that collectives on local arrays send: the counterpart of `collectives.py`, in numbers.

Shapes are those of one device's blocks; `group` is the number of devices that a collective joins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from sdy_jax.ir.graph import Value
from sdy_jax.lowering.collectives.data_movement import permutation_pairs
from sdy_jax.lowering.collectives.reductions import gathers_partials, has_native_all_reduce
from sdy_jax.lowering.emission.re_emission import numpy_dtype
from sdy_jax.lowering.reshard.plan import Collective
from sdy_jax.lowering.targets.rates import wire_bytes
from sdy_jax.representation.mesh import Mesh, axes_size
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.runtime.mesh import RefinedMesh


def sent_by_step(step: Collective, value: Value, mesh: Mesh) -> float:
    """What a device sends in one step of a reshard of a value."""
    if step.kind != "all_reduce":
        return step.wire_bytes
    shape = step.result.local_shape(value.shape or (), mesh)
    return all_reduce_bytes(step.reduction, shape, value.itemsize, value.dtype, axes_size(step.op.axes, mesh))


def sent_at_border(value: Value, sharding: TensorSharding, mesh: Mesh, meshes: Mapping[str, Mesh]) -> float:
    """What a device sends to bring an argument from `mesh`, that of the `shard_map`, to its own, or a result back."""
    axes = [*(axis for axes in sharding.axes for axis in axes), *sharding.unreduced_axes]
    refined = RefinedMesh.of(mesh, axes).with_meshes(meshes)
    if not refined.on(sharding.mesh).device_permutation:
        return 0.0
    pairs = permutation_pairs(replace(sharding, mesh=mesh), sharding, refined)
    if all(sender == receiver for sender, receiver in pairs):
        return 0.0
    return value.itemsize * math.prod(sharding.local_shape(value.shape or (), mesh))


def all_reduce_bytes(kind: str, shape: Sequence[int], itemsize: float, dtype: str, group: int) -> float:
    """What a device sends in `collectives.all_reduce`; `dtype` is MLIR's."""
    if has_native_all_reduce(kind, numpy_dtype(dtype)):
        block = itemsize * math.prod(shape)
        return wire_bytes("all_reduce", group, block, block)
    return reduce_by_bytes(shape, itemsize, group)


def reduce_by_bytes(shape: Sequence[int], itemsize: float, group: int, is_used: bool = True) -> float:
    """What a device sends in `collectives.all_reduce_by`, which is made of moves, for one array.

    A result that `is_used` by nothing takes part in the reduction of chunks, but is not gathered again.
    """
    size = math.prod(shape)
    if gathers_partials(size, group):
        return gathered_bytes(itemsize * size, group)
    chunks = itemsize * -(-size // group) * group
    return wire_bytes("all_reduce" if is_used else "all_to_all", group, chunks, chunks)


def gathered_bytes(block: float, group: int) -> float:
    """What a device sends in an all_gather of blocks."""
    return wire_bytes("all_gather", group, block, group * block)
