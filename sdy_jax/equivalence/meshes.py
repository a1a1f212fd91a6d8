"""The meshes on which a program is verified, and programs and arguments scaled down to fit them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.extend.mlir import ir

from sdy_jax.annotate.program import Program
from sdy_jax.calls.partitioned_function import PartitionedFunction
from sdy_jax.equivalence.subject import size_of_mesh, traced_program
from sdy_jax.equivalence.verification import Trial
from sdy_jax.errors import ShardingError, UnsupportedError
from sdy_jax.ir.attributes import mesh_from_attribute, mesh_to_attribute
from sdy_jax.ir.meshes import Mesh, MeshAxis
from sdy_jax.ir.operations import body_of, copied, named, top_level
from sdy_jax.lowering.targets.cost_model import CostModel

# The meshes on which a program is verified, and the program on another mesh than its own.

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


# Arguments that fit a mesh that is scaled down: what is for 256 devices would keep four busy for long.
#
# Sizes shrink one by one, largest first, each wherever arguments have it, as long as the function still takes them: a
# function may say its sizes itself, or that one is a product of two others.

_LEAST = 16
"""Sizes that are not shrunk below this. Chosen: they are still split in several ways."""

_MOST = 1 << 8
"""Sizes from which arguments of large meshes are shrunk. Chosen: products of smaller ones run at once."""


@dataclass(frozen=True)
class Smaller:
    """The arguments of a call, some of whose sizes are smaller: `sizes` has new ones by old ones."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    sizes: dict[int, int]
    share: float = 1.0
    """How many of the elements are left."""

    @property
    def notes(self) -> list[str]:
        """What is to be said of it."""
        said = ", ".join(f"{old} as {new}" for old, new in self.sizes.items())
        return [f"arguments are made up with smaller sizes: {said}"] if said else []

    def trial(self, trial: Trial) -> Trial:
        """The trial by costs that fit: what does not depend on the size of arrays is less by as much as these are."""
        costs = trial.costs
        if costs is None or self.share == 1.0:
            return trial
        return replace(trial, costs=_scaled(costs, self.share))


def smaller_arguments(
    function: PartitionedFunction[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Smaller:
    """The arguments of a function, smaller ones if its mesh is large and it takes them; of arrays the first elements,
    or types, where integers may be indices."""
    devices = size_of_mesh(function, args, kwargs)
    found = Smaller(args, kwargs, {})
    if devices <= MOST_DEVICES:
        return found
    leaves, tree = jax.tree.flatten((args, kwargs))
    sizes = sorted({n for leaf in leaves for n in _shape(leaf) if n >= _MOST}, reverse=True)
    for size in sizes:
        other = max(_LEAST, size * MOST_DEVICES // devices)
        changed = [_resized(leaf, size, other) for leaf in jax.tree.leaves((found.args, found.kwargs))]
        new_args, new_kwargs = jax.tree.unflatten(tree, changed)
        if _takes(function, new_args, new_kwargs):
            found = Smaller(new_args, new_kwargs, {**found.sizes, size: other})
    share = _elements(jax.tree.leaves((found.args, found.kwargs))) / max(_elements(leaves), 1)
    return replace(found, share=share)


def _takes(function: PartitionedFunction[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    try:
        traced_program(function, args, kwargs)
    except Exception:  # what a function raises for sizes that it does not take is its own
        return False
    return True


def _shape(leaf: Any) -> tuple[int, ...]:
    return tuple(getattr(leaf, "shape", ()))


def _elements(leaves: Sequence[Any]) -> float:
    return float(sum(np.prod(_shape(leaf)) for leaf in leaves))


def _resized(leaf: Any, size: int, other: int) -> Any:
    shape = _shape(leaf)
    if size not in shape:
        return leaf
    new = tuple(other if n == size else n for n in shape)
    if isinstance(leaf, jax.ShapeDtypeStruct) or not jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact):
        return jax.ShapeDtypeStruct(new, leaf.dtype)
    return np.asarray(leaf)[tuple(slice(0, n) for n in new)]


def _scaled(costs: CostModel, share: float) -> CostModel:
    per_axis = {name: _times(getattr(costs, name), share) for name in ("latency", "start")}
    return replace(costs, launch=costs.launch * share, product_launch=costs.product_launch * share, **per_axis)


def _times(rate: Any, share: float) -> Any:
    return rate * share if isinstance(rate, (int, float)) else {axis: value * share for axis, value in rate}
