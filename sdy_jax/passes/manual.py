"""Shardings at the border of a manual computation: outside, manual axes lead each dimension; inside, only free axes.

`clean_manual_axes` completes the shardings there.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend.mlir import ir

from sdy_jax.errors import ShardingError
from sdy_jax.ir.locations import source_line
from sdy_jax.ir.operations import body_of, manual_axes, module_meshes, named
from sdy_jax.ir.stored_shardings import list_of, mesh_of
from sdy_jax.representation.attributes import manual_axes_to_attribute, shardings_to_attribute
from sdy_jax.representation.axes import set_difference, sort_and_merge
from sdy_jax.representation.mesh import AxisRef, Mesh
from sdy_jax.representation.sharding import TensorSharding


def clean_manual_axes(module: ir.Operation) -> None:
    """Sorts manual axes in mesh order and adds the unmentioned ones to each sharding's replicated axes."""
    meshes = module_meshes(module)
    for op in named(module, "sdy.manual_computation"):
        _clean(op, meshes)


def _clean(op: ir.Operation, meshes: dict[str, Mesh]) -> None:
    manual = manual_axes(op)
    lists = {name: list_of(op, name) for name in ("in_shardings", "out_shardings")}
    common = _common_mesh([s for shardings in lists.values() for s in shardings if s], meshes)
    if common is None:
        if manual and len(body_of(op).operations) > 1:
            raise ShardingError(
                f"manual computation with manual axes {list(manual)} but without in_shardings and "
                f"out_shardings, at {source_line(op.location)}; to fix: give it a sharding"
            )
        return
    mesh = meshes[common] if isinstance(common, str) else common
    ordered = tuple(sorted(manual, key=mesh.positions.__getitem__))
    op.attributes["manual_axes"] = manual_axes_to_attribute(ordered, op.context)
    for (name, shardings), values in zip(lists.items(), (op.operands, op.results), strict=True):
        if name not in op.attributes:
            continue
        cleaned = [
            _complete(s, ordered, common, mesh) if isinstance(v.type, ir.ShapedType) else s
            for s, v in zip(shardings, values, strict=True)
            if s
        ]
        op.attributes[name] = shardings_to_attribute(tuple(cleaned), op.context)


def _common_mesh(shardings: Sequence[TensorSharding], meshes: dict[str, Mesh]) -> str | Mesh | None:
    """The first mesh that is not empty, else the first."""
    for sharding in shardings:
        if not mesh_of(meshes, sharding).is_empty:
            return sharding.mesh
    return shardings[0].mesh if shardings else None


def _complete(sharding: TensorSharding, manual: Sequence[str], common: str | Mesh, mesh: Mesh) -> TensorSharding:
    used = [axis for axes in sharding.axes for axis in axes]
    used += [*sharding.replicated_axes, *sharding.unreduced_axes]
    missing = set_difference([AxisRef(name) for name in manual], used, mesh)
    if not missing:
        return sharding
    replicated = sort_and_merge([*sharding.replicated_axes, *missing], mesh)
    return TensorSharding(common, sharding.dimensions, replicated, sharding.unreduced_axes, sharding.reduction)
