"""The part of a mesh that a pipeline runs on: its axis, and the `shard_map` that is manual on it alone."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any

import jax

from sdy_jax.annotate.site import current_mesh
from sdy_jax.errors import ShardingError, UnsupportedError
from sdy_jax.jax_internals.contexts import context_mesh
from sdy_jax.representation.named import mesh_from_jax


@dataclass(frozen=True)
class Region:
    """Where a pipeline runs.

    Attributes:
        mesh: the mesh for `shard_map`; None for that of the context.
        axis: the axis with the stages.
        stages: its size.
        alone: whether a stage is one device.
    """

    mesh: Any
    axis: str
    stages: int
    alone: bool

    def mapped(self, fun: Callable[..., Any], in_specs: Any, out_specs: Any, scope: str = "") -> Callable[..., Any]:
        """A function of blocks as one of whole arrays, in a name scope."""
        names = {self.axis}
        inside = jax.shard_map(
            fun, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, axis_names=names, check_vma=False
        )

        @wraps(fun)
        def scoped(*args: Any) -> Any:
            with jax.named_scope(scope) if scope else nullcontext():
                return inside(*args)

        return jax.jit(scoped)  # eagerly, jax maps over all axes only

    def traced(self, fun: Callable[..., Any], types: Sequence[Any]) -> Any:
        """A function as a jaxpr with the types and the mesh that it sees in the region, and its results' types.

        What it closes over are the jaxpr's constants.
        """
        found = []

        def inside(*xs: Any) -> None:
            found.append(jax.make_jaxpr(lambda *ys: fun(*ys), return_shape=True)(*xs))

        jax.eval_shape(self.mapped(inside, jax.P(), jax.P()), *types)
        return found[0]


def region_of(axis: str, mesh: Any) -> Region:
    """The region for an axis of a mesh: that given, the partition's, or the context's.

    Raises:
        ShardingError: there is no mesh, it has no such axis, or the code around is manual on it.
        UnsupportedError: it has Explicit axes.
    """
    partition, around = current_mesh(), jax.sharding.get_abstract_mesh()
    if mesh is not None and partition is not None and mesh_from_jax(mesh) != partition:
        raise ShardingError(f"pipeline on {mesh_from_jax(mesh)} in a function partitioned on {partition}")
    if mesh is None and around.empty:
        mesh = context_mesh()
    known = around if mesh is None or not around.empty else mesh
    if known is None or known.empty:
        raise ShardingError("pipeline: there is no mesh; to fix: pass mesh=, or call it under jax.set_mesh")
    _check_axis(axis, known)
    manual = set(map(str, known.manual_axes)) if known is around else set()
    if axis in manual:
        raise ShardingError(f"pipeline: axis is {axis!r}, on which the code around is manual")
    if jax.sharding.AxisType.Explicit in known.axis_types:
        raise UnsupportedError(_EXPLICIT)
    others = (size for name, size in known.shape.items() if name != axis)
    return Region(None if known is around else mesh, axis, known.shape[axis], all(size == 1 for size in others))


_EXPLICIT = (
    "pipeline: the mesh has Explicit axes; to fix: call pipeline in a function under jax.sharding.auto_axes, with all "
    "arrays that it reads as arguments, those of the layer too"
)


def _check_axis(axis: Any, mesh: Any) -> None:
    if axis not in mesh.axis_names:
        near = difflib.get_close_matches(str(axis), map(str, mesh.axis_names), 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
        raise ShardingError(f"pipeline: axis is {axis!r}; {hint}the axes of the mesh are {axes}")
