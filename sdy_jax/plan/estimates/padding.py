"""What padding holds: values of a partitioned program that lie in blocks which do not divide them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sdy_jax.ir.graph import Graph
from sdy_jax.lowering.emission.emit import value_shardings
from sdy_jax.representation.mesh import Mesh
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.representation.type_text import type_text


@dataclass(frozen=True, slots=True)
class PaddedValue:
    """A value in padded blocks: its type with axes, where it is made, and the bytes of padding per device, the average
    over the devices."""

    type: str
    source: str
    bytes: float


def padded_values(graph: Graph) -> tuple[PaddedValue, ...]:
    """The padded values of a partitioned program, in program order."""
    found = []
    for value, sharding in value_shardings(graph).items():
        mesh = graph.meshes.get(str(sharding.mesh))
        if value.shape is None or mesh is None or not _is_padded(value.shape, sharding, mesh):
            continue
        shards = math.prod(sharding.shard_counts(mesh))
        wasted = math.prod(sharding.local_shape(value.shape, mesh)) - math.prod(value.shape) / shards
        op = value.defining_op
        found.append(
            PaddedValue(type_text(value.dtype, value.shape, sharding), op.source if op else "", value.itemsize * wasted)
        )
    return tuple(found)


def _is_padded(shape: tuple[int, ...], sharding: TensorSharding, mesh: Mesh) -> bool:
    return any(n % count for n, count in zip(shape, sharding.shard_counts(mesh), strict=True))
