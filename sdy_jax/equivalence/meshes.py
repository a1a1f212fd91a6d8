"""The meshes on which a program is verified, and the program on another mesh than its own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from jax.extend.mlir import ir

from sdy_jax.annotate.program import Program
from sdy_jax.errors import ShardingError, UnsupportedError
from sdy_jax.ir.operations import body_of, copied, named, top_level
from sdy_jax.representation.attributes import mesh_from_attribute, mesh_to_attribute
from sdy_jax.representation.mesh import Mesh, MeshAxis

MOST_DEVICES = 16
"""Larger meshes are scaled down. Chosen: virtual devices are threads, of which a machine runs a few at once."""


def scaled_down(mesh: Mesh) -> Mesh:
    """The mesh, or one with as many axes of more than one device, each as small as that allows."""
    if mesh.size <= MOST_DEVICES:
        return replace(mesh, device_ids=())
    return Mesh(tuple(MeshAxis(axis.name, min(axis.size, 2)) for axis in mesh.axes))


def uneven(mesh: Mesh) -> Mesh | None:
    """A mesh of other sizes, which few sizes divide: three devices along the largest axis, two along others, one where
    these would be too many. None where there is no such mesh."""
    if mesh.size < 2:
        return None
    largest = max(range(len(mesh.axes)), key=lambda i: mesh.axes[i].size)
    sizes = [3 if i == largest else min(axis.size, 2) for i, axis in enumerate(mesh.axes)]
    for i in reversed(range(len(sizes))):
        if Mesh(tuple(MeshAxis(str(k), n) for k, n in enumerate(sizes))).size > MOST_DEVICES and i != largest:
            sizes[i] = 1
    found = Mesh(tuple(MeshAxis(axis.name, n) for axis, n in zip(mesh.axes, sizes, strict=True)))
    return found if found.axes != mesh.axes else None


def resized(mesh: Mesh, sizes: Mapping[str, int] | Mesh) -> Mesh:
    """The mesh with other sizes of some axes.

    Raises:
        ShardingError: it has no such axis.
    """
    given = sizes.sizes if isinstance(sizes, Mesh) else dict(sizes)
    unknown = [name for name in given if name not in mesh.sizes]
    if unknown:
        known = ", ".join(mesh.axis_names) or "none"
        raise ShardingError(f"meshes: there is no axis {unknown[0]!r}; the function's mesh has {known}")
    wrong = [name for name, size in given.items() if not isinstance(size, int) or size < 1]
    if wrong:
        raise ShardingError(f"meshes: axis {wrong[0]!r} is {given[wrong[0]]!r}; expected a number of devices")
    return Mesh(tuple(MeshAxis(axis.name, given.get(axis.name, axis.size)) for axis in mesh.axes))


_PART = re.compile(r'":\(\d+\)\d+')


def on_mesh(program: Program, name: str, mesh: Mesh) -> Program:
    """A program whose mesh has other sizes.

    Raises:
        UnsupportedError: it is about the sizes of its own mesh: it splits by parts of axes, has blocks of devices as in
            the body of a `jax.shard_map`, or another mesh.
    """
    if program.mesh.axes == mesh.axes:
        return program
    module = copied(program.module)
    meshes = top_level(module, "sdy.mesh")
    about = (
        (bool(named(module, "sdy.manual_computation")), "computes on blocks of its own mesh"),
        (bool(_PART.search(module.get_asm(large_elements_limit=0))), "splits by parts of axes"),
        (any(_axes(op) not in ((), program.mesh.axes) for op in meshes), "speaks of several meshes"),
    )
    for is_so, what in about:
        if is_so:
            raise UnsupportedError(f"{program.name} {what}, so that it is of no other mesh")
    own = [op for op in meshes if _axes(op)]
    for op in own:
        op.attributes["mesh"] = mesh_to_attribute(mesh, module.context)
    if not own:
        _declare(module, name, mesh)
    return replace(program, module=module, mesh=mesh, mesh_name=name)


def _axes(op: ir.Operation) -> tuple[MeshAxis, ...]:
    return mesh_from_attribute(op.attributes["mesh"]).axes


def _declare(module: ir.Operation, name: str, mesh: Mesh) -> None:
    attributes = {"sym_name": ir.StringAttr.get(name, module.context), "mesh": mesh_to_attribute(mesh, module.context)}
    with module.context, ir.Location.unknown(module.context):
        ir.Operation.create("sdy.mesh", [], [], attributes, ip=ir.InsertionPoint.at_block_begin(body_of(module)))
