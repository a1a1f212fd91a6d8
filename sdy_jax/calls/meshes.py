"""The mesh of a call: that of shardings, `jax.set_mesh` or arguments, or the one of several with the best plan."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

from sdy_jax.annotate.arguments import AUTO, SPEC_TYPES, Leaf
from sdy_jax.annotate.jaxprs import all_equations
from sdy_jax.annotate.site import Decisions, deciding
from sdy_jax.base.errors import ArgumentError, MemoryLimitError, ShardingError
from sdy_jax.base.jax_tracing import context_mesh
from sdy_jax.ir.jax_shardings import AnyMesh, explicit_axes, mesh_from_jax
from sdy_jax.ir.meshes import Mesh
from sdy_jax.lowering.targets.cost_model import CostModel
from sdy_jax.plan.estimates import ComparedDecisions, ComparedMesh, Decided
from sdy_jax.plan.plan import Plan
from sdy_jax.runtime.boundary import as_named, as_stated, layout_of
from sdy_jax.runtime.meshes import checked_mesh

# The mesh of a function that is given none: that of its shardings, of `jax.set_mesh`, of its arguments, or inside.

_KNOWN = (NamedSharding, SingleDeviceSharding)


def stated_mesh(*specs: Any) -> AnyMesh | None:
    """The mesh of the first `NamedSharding` in trees of specifications, of those on devices if there are any; else one
    for the first sharding of another kind on several devices; else the device of the first `SingleDeviceSharding`."""
    stated = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, (NamedSharding, Format)))
    shardings = [spec.sharding if isinstance(spec, Format) else spec for spec in stated]
    single = (as_named(s, ()) for s in shardings if isinstance(s, SingleDeviceSharding))
    others = (as_stated(s) for s in shardings if isinstance(s, Sharding) and not isinstance(s, _KNOWN))
    found = _first_mesh(shardings) or _first_abstract_mesh(shardings)
    return found or _first_mesh(others) or _first_mesh(single)


def mesh_with_device(mesh: Any, device: jax.Device | None, backend: str | None) -> Any:
    """The mesh of a function for which jit's options `device` or `backend` are given, which are deprecated.

    Raises:
        ArgumentError: both are given.
        ShardingError: the mesh has other devices.
    """
    if device is None and backend is None:
        return mesh
    if device is not None and backend is not None:
        raise ArgumentError(
            f"device={device} and backend={backend!r} both say where the function runs; to fix: leave one out"
        )
    warnings.warn(
        "device= and backend= are deprecated, as they are in jax.jit: the mesh says where a partitioned function runs",
        DeprecationWarning,
        stacklevel=3,
    )
    devices = jax.devices(backend) if device is None else [device]
    if mesh is None:
        return jax.sharding.Mesh(np.array(devices[:1]), ("device",))
    if isinstance(mesh, jax.sharding.Mesh) and {*mesh.devices.flat} <= {*devices}:
        return mesh
    given = f"device={device}" if backend is None else f"backend={backend!r}"
    raise ShardingError(f"{given}, and the mesh {mesh_from_jax(checked_mesh(mesh))} has others; to fix: leave it out")


def mesh_of_call(values: Iterable[Any], inside: Callable[[], AnyMesh | None] = lambda: None) -> AnyMesh:
    """The mesh of `jax.set_mesh`, else that of the first value whose type has Explicit axes, of `with mesh:`, of the
    first value that lies on a mesh, or whose type is on one; else that which is stated `inside` of the function.

    Raises:
        ShardingError: there is none.
    """
    values, set_mesh = list(values), jax.sharding.get_abstract_mesh()
    layouts = [own for own in map(layout_of, values) if own is not None]
    typed = _first_mesh(own for own in layouts if explicit_axes(own.mesh))
    if set_mesh.empty and typed is not None:  # `with mesh:` says nothing of types
        return checked_mesh(typed)
    around: AnyMesh | None = context_mesh()
    if around is None or around.empty or (set_mesh.empty and _are_elsewhere(layouts, around)):
        around = _first_mesh(layouts) or set_mesh
    if around.empty:
        around = _first_abstract_mesh(map(_sharding_of, values)) or inside() or around
    return checked_mesh(around)


def _are_elsewhere(layouts: Sequence[NamedSharding], around: AnyMesh) -> bool:
    """Whether the first value on a mesh is on other devices than those of `with mesh:`, which says nothing of it."""
    first = _first_mesh(layouts)
    return first is not None and isinstance(around, jax.sharding.Mesh) and _devices(first) != _devices(around)


def mesh_inside(jaxpr: Any) -> jax.sharding.Mesh | None:
    """The one mesh on devices that a traced function states: in constraints, moves of arrays, `shard_map`s and calls.

    None where there is none, or there are several, of which nothing says which the results are on.
    """
    parameters = [x for e in all_equations(jaxpr) for x in jax.tree.leaves([*e.params.values()], is_leaf=_says_mesh)]
    stated = [x.mesh if isinstance(x, NamedSharding) else x for x in parameters if _says_mesh(x)]
    meshes = {mesh for mesh in stated if isinstance(mesh, jax.sharding.Mesh) and not mesh.empty}
    return next(iter(meshes)) if len(meshes) == 1 else None


def _says_mesh(x: Any) -> bool:
    return isinstance(x, (NamedSharding, jax.sharding.Mesh))


def check_context(name: str, mesh: AnyMesh) -> None:
    """
    Raises:
        ShardingError: the mesh in context has another number of devices, which jax does not let a function change.
    """
    around = jax.sharding.get_abstract_mesh()
    if not around.empty and around.size != mesh.size:
        raise ShardingError(
            f"{name} is partitioned on the mesh {mesh_from_jax(mesh)}, and called where jax.set_mesh says "
            f"{mesh_from_jax(around)}, which has another number of devices; to fix: state one of them only"
        )


def type_beside_context(leaves: Iterable[Leaf]) -> ShardingError | None:
    """The error about an argument whose type is on another mesh than that in context, where one of these has Explicit
    axes: jit raises one where the argument is used, and lets it be moved or passed through."""
    around = jax.sharding.get_abstract_mesh()
    for leaf in leaves:
        sharding = None if around.empty else _sharding_of(leaf.value)
        own = sharding.mesh.abstract_mesh if isinstance(sharding, NamedSharding) else around
        if own != around and not own.empty and (explicit_axes(own) or explicit_axes(around)):
            return ShardingError(
                f"`{leaf.path}` is on the mesh {own}, and jax.set_mesh says {around}; to fix: place it there, by "
                "jax.device_put(x, PartitionSpec(...)), or set its mesh"
            )
    return None


def _first_mesh(shardings: Iterable[Any]) -> jax.sharding.Mesh | None:
    meshes = (s.mesh for s in shardings if isinstance(s, NamedSharding))
    return next((mesh for mesh in meshes if isinstance(mesh, jax.sharding.Mesh) and not mesh.empty), None)


def _first_abstract_mesh(shardings: Iterable[Any]) -> jax.sharding.AbstractMesh | None:
    meshes = (s.mesh for s in shardings if isinstance(s, NamedSharding))
    return next((mesh for mesh in meshes if isinstance(mesh, jax.sharding.AbstractMesh) and not mesh.empty), None)


def _sharding_of(x: Any) -> Any:
    """What the type of a value says of its sharding."""
    return getattr(getattr(x, "aval", x), "sharding", None)


# Several plans of a call, of which it takes the best one.


class Compared(Protocol):
    """What a plan takes."""

    @property
    def rank(self) -> tuple[bool, float]: ...


C = TypeVar("C", bound=Compared)


def best_of(
    count: int,
    planned: Callable[[int], Plan],
    compared: Callable[[int, Plan], C],
    refused: Callable[[int, MemoryLimitError], C],
) -> tuple[int, Plan, tuple[C, ...]]:
    """The number of the best plan, of equal ones the first, the plan, and what all of them take.

    Args:
        count: how many there are.
        planned: makes one of them. Only the best one is kept while others are made.
        compared: what one takes.
        refused: what one takes that does not fit.

    Raises:
        MemoryLimitError: none fits; that of the one that holds least.
    """
    best: tuple[int, Plan] | None = None
    found, problems = list[C](), list[MemoryLimitError]()
    for number in range(count):
        try:
            plan = planned(number)
        except MemoryLimitError as error:
            found.append(refused(number, error))
            problems.append(error.with_traceback(None))  # which keeps what it was raised in
        else:
            found.append(compared(number, plan))
            best = (number, plan) if best is None or found[-1].rank < found[best[0]].rank else best
            del plan
        gc.collect()  # what is left of a plan refers to itself
    if best is None:
        raise min(problems, key=lambda problem: problem.least)
    return *best, tuple(found)


def best_decided(choices: Sequence[Decisions], planned: Callable[[], Plan]) -> Plan:
    """The best plan with some of the decisions, of equal ones the first; it says what all of them take.

    Raises:
        MemoryLimitError: as of `best_of`.
    """

    def planned_with(number: int) -> Plan:
        with deciding(choices[number]):
            return planned()

    number, plan, compared = best_of(
        len(choices),
        planned_with,
        lambda number, plan: ComparedDecisions(choices[number], plan.time, plan.memory.peak, plan.memory.fits),
        lambda number, error: ComparedDecisions.refused(choices[number], error),
    )
    return replace(plan, decided=Decided(choices[number], compared))


# Several meshes of the same devices, of which a call takes the one with the best plan.


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
    for number, mesh in enumerate(meshes):
        (costs or CostModel()).check_axes(mesh_from_jax(mesh), f"mesh[{number}]")


def _devices(mesh: AnyMesh) -> Any:
    return {*mesh.devices.flat} if isinstance(mesh, jax.sharding.Mesh) else mesh.size


def meshes_of_arrays(meshes: Sequence[AnyMesh], values: Iterable[Any], around: Any) -> list[AnyMesh]:
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
