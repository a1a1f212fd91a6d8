"""Several meshes of the same devices, of which a call takes the one with the best plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from sdy_jax.annotate.arguments import SPEC_TYPES
from sdy_jax.annotate.automatic import AUTO
from sdy_jax.calls.trials import best_of
from sdy_jax.errors import ShardingError
from sdy_jax.lowering.costs.cost_model import CostModel
from sdy_jax.plan.estimates.compared_meshes import ComparedMesh
from sdy_jax.plan.plan import Plan
from sdy_jax.representation.mesh import Mesh
from sdy_jax.representation.named import AnyMesh, mesh_from_jax
from sdy_jax.runtime.function_mesh import checked_mesh
from sdy_jax.runtime.layouts import layout_of


def meshes_of(given: Any) -> tuple[AnyMesh, ...]:
    """The meshes that are given as `mesh=`; none where that is left out.

    Raises:
        ShardingError: one of them is no mesh, or there is none in a list.
    """
    if given is None:
        return ()
    if isinstance(given, (list, tuple)) and not given:
        raise ShardingError("mesh=[] has no mesh; give one, or several of the same devices")
    if isinstance(given, (list, tuple)) and any(isinstance(each, (AnyMesh, Mesh)) for each in given):
        return tuple(map(checked_mesh, given))
    return (checked_mesh(given),)


def check_meshes(meshes: Sequence[AnyMesh], specs: Any, costs: CostModel | None) -> None:
    """
    Args:
        meshes: as given, of which the planner is to take one.
        specs: `in_shardings` and `out_shardings`.
        costs: the cost model, where one is given.

    Raises:
        ShardingError: they have other devices; nothing is left to the planner; or rates say nothing of an axis.
    """
    if len(meshes) < 2:
        return
    first, *others = meshes
    for number, mesh in enumerate(others, 1):
        if _devices(mesh) != _devices(first):
            raise ShardingError(
                f"mesh[{number}], {mesh_from_jax(mesh)}, has other devices than mesh[0], {mesh_from_jax(first)}; "
                "expected meshes of the same devices in other shapes, of which the planner takes one"
            )
    if not any(spec is AUTO for spec in jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, SPEC_TYPES))):
        raise ShardingError(
            f"mesh= has {len(meshes)} meshes, of which the planner takes one where it chooses layouts, too; to fix: "
            "in_shardings=AUTO, out_shardings=AUTO, or some entries of them; or give one mesh"
        )
    _check_rates(meshes, costs)


def _devices(mesh: AnyMesh) -> Any:
    return {*mesh.devices.flat} if isinstance(mesh, jax.sharding.Mesh) else mesh.size


def _check_rates(meshes: Sequence[AnyMesh], costs: CostModel | None) -> None:
    if costs is None or isinstance(costs.bandwidth, (int, float)) or not costs.bandwidth:
        return
    for number, mesh in enumerate(meshes):
        unknown = [name for name in mesh.axis_names if name not in dict(costs.bandwidth)]
        if unknown:
            raise ShardingError(
                f"costs= has no bandwidth for the axis {unknown[0]!r} of mesh[{number}], {mesh_from_jax(mesh)}; to "
                "fix: give the axes of all meshes, as CostModel.of_machine(name, axes) takes them, or leave costs out"
            )


def on_devices(meshes: Sequence[AnyMesh], values: Iterable[Any], around: Any) -> list[AnyMesh]:
    """The meshes on the devices of the first array, or of the mesh `around` the call, that lies on one of them; else
    themselves."""
    if all(isinstance(mesh, jax.sharding.Mesh) for mesh in meshes):
        return list(meshes)
    known = {mesh_from_jax(mesh) for mesh in meshes}
    found = [own.mesh for own in map(layout_of, values) if own is not None] + [around]
    devices = [each for each in found if isinstance(each, jax.sharding.Mesh) and mesh_from_jax(each) in known]
    return [_on(mesh, devices[0].devices) for mesh in meshes] if devices else list(meshes)


def _on(mesh: AnyMesh, devices: np.ndarray) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(devices.reshape(mesh.axis_sizes), mesh.axis_names, axis_types=mesh.axis_types)


def best_plan(meshes: Sequence[AnyMesh], planned: Callable[[int], Plan]) -> tuple[int, Plan]:
    """The mesh with the best plan, the first of those, and the plan, which says what all of them take.

    Args:
        meshes: the meshes.
        planned: makes the plan on one of them. Only the best one is kept while others are made.

    Raises:
        MemoryLimitError: no plan fits on any of them; that on the one with the least.
    """
    number, plan, compared = best_of(
        len(meshes),
        lambda number: _planned_on(meshes[number], number, planned),
        lambda number, plan: plan.compared,
        lambda number, error: ComparedMesh.refused(mesh_from_jax(meshes[number]), error),
    )
    return number, replace(plan, meshes=compared)


def _planned_on(mesh: AnyMesh, number: int, planned: Callable[[int], Plan]) -> Plan:
    """The plan on a mesh; errors name the mesh, of several."""
    where = f"on mesh[{number}], {mesh_from_jax(mesh)}"
    try:
        return planned(number)
    except ShardingError as error:
        if type(error) is not ShardingError:
            raise
        raise ShardingError(f"{where}: {error}; all meshes of mesh=[...] need the axes that are stated") from error
    except Exception as error:
        error.add_note(f"raised {where}, one of those that are given as mesh=[...]")
        raise
