"""Values as devices hold them, as plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from sdy_jax.ir.tensor_types import itemsize
from sdy_jax.plan.record.border import RecordedTensor
from sdy_jax.representation.mesh import Mesh
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.representation.type_text import axis_name, dtype_name, type_text


class Tensors:
    """Makes records of values.

    Args:
        mesh_name: of the program's mesh.
        meshes: all meshes by name.
    """

    def __init__(self, mesh_name: str, meshes: Mapping[str, Mesh]):
        self._mesh_name, self._meshes = mesh_name, meshes
        self._known: dict[object, RecordedTensor] = {}

    def of(self, dtype: str, shape: Sequence[int] | None, sharding: TensorSharding | None) -> RecordedTensor:
        """A value of an MLIR element type and a global shape; None for what is no tensor."""
        key = dtype, None if shape is None else tuple(shape), sharding
        if key not in self._known:
            self._known[key] = self._made(dtype, key[1], sharding)
        return self._known[key]

    def type(self, dtype: str, shape: Sequence[int] | None, sharding: TensorSharding | None) -> str:
        """The text of the type alone."""
        if sharding is not None and shape is not None and sharding.rank != len(shape):  # all of it on one device
            sharding = None
        return type_text(dtype, shape, sharding, self._mesh_name)

    def _made(self, dtype: str, shape: tuple[int, ...] | None, sharding: TensorSharding | None) -> RecordedTensor:
        type_ = self.type(dtype, shape, sharding)
        if shape is None:
            return RecordedTensor(type_, dtype)
        mesh = self._meshes.get(str(sharding.mesh)) if sharding is not None else None
        local = shape if sharding is None or mesh is None else sharding.local_shape(shape, mesh)
        axes = sharding.axes if sharding is not None else ((),) * len(shape)
        unreduced = sharding.unreduced_axes if sharding is not None else ()
        return RecordedTensor(
            type_,
            dtype_name(dtype),
            shape,
            tuple(tuple(map(axis_name, each)) for each in axes),
            tuple(map(axis_name, unreduced)),
            tuple(local),
            math.prod(local) * itemsize(dtype),
        )
