"""The meshes that the mesh and shard ops of a module are about."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jax.extend.mlir import ir

from sdy_jax.dialects.ops import NOUNS
from sdy_jax.dialects.view import is_dialect_op, view


@dataclass(frozen=True, slots=True)
class DeviceMesh:
    """A `mesh.mesh` or `shard.grid`. The size of an axis is None where the text says `?`."""

    dialect: str
    symbol: str
    shape: tuple[int | None, ...]

    @property
    def noun(self) -> str:
        return NOUNS[self.dialect]

    @property
    def rank(self) -> int:
        return len(self.shape)

    def group_size(self, axes: Sequence[int]) -> int | None:
        """How many devices differ along these axes alone; None where that is not known, or there are none at all."""
        sizes = [self.shape[axis] for axis in axes]
        return math.prod(size for size in sizes if size) if all(sizes) else None

    def __str__(self) -> str:
        return "x".join("?" if size is None else str(size) for size in self.shape)


def device_meshes(module: ir.Operation) -> Mapping[tuple[str, str], DeviceMesh]:
    """The meshes at the top of a module, by dialect and symbol; the first where several have one name.

    Raises:
      RuleError: a mesh op lacks its name or shape.
    """
    found: dict[tuple[str, str], DeviceMesh] = {}
    for op in module.regions[0].blocks[0].operations:
        if is_dialect_op(op.operation) and (mesh := view(op.operation)).name == "mesh":
            found.setdefault(
                (mesh.dialect, mesh["sym_name"]), DeviceMesh(mesh.dialect, mesh["sym_name"], mesh["shape"])
            )
    return found
