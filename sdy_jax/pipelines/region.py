"""The part of a mesh that a pipeline runs on: its axis, and the `shard_map` that is manual on it alone."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import jax

from sdy_jax.annotate.site import current_mesh
from sdy_jax.errors import ShardingError
from sdy_jax.jax_internals.contexts import context_mesh, mesh_in_context
from sdy_jax.jax_internals.jit import jit
from sdy_jax.pipelines.explicit_types import on_mesh, split_over
from sdy_jax.representation.named import mesh_from_jax
from sdy_jax.representation.types import explicit_axes


@dataclass(frozen=True)
class Region:
    """Where a pipeline runs.

    Attributes:
        mesh: the mesh for `shard_map`; None for that of the context.
        axis: the axis with the stages.
        stages: its size.
        alone: whether a stage is one device.
        planned: whether `sdy.partition` plans what runs in it.
        around: the mesh whose types arrays have outside of it, if it has Explicit axes.
    """

    mesh: Any
    axis: str
    stages: int
    alone: bool
    planned: bool
    around: Any

    @property
    def context(self) -> AbstractContextManager[Any]:
        """In which arrays outside of it have their types: with the mesh, where that is of none yet."""
        return nullcontext() if self.around is None or self.mesh is None else mesh_in_context(self.mesh)

    def mapped(self, fun: Callable[..., Any], in_specs: Any, out_specs: Any, scope: str = "") -> Callable[..., Any]:
        """A function of blocks as one of whole arrays, in a name scope."""
        names = {self.axis}
        inside = jax.shard_map(
            fun, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, axis_names=names, check_vma=False
        )

        @wraps(fun)
        def scoped(*args: Any) -> Any:
            with jax.named_scope(scope) if scope else nullcontext():
                return inside(*(args if self.around is None else split_over(self.axis, in_specs, args)))

        run = jit(scoped)  # eagerly, jax maps over all axes only

        def called(*args: Any) -> Any:
            with self.context:
                return run(*args)

        return called

    def traced(self, fun: Callable[..., Any], types: Sequence[Any]) -> Any:
        """A function as a jaxpr with the types and the mesh that it sees in the region, and its results' types.

        What it closes over are the jaxpr's constants. Where these have types on Explicit axes, it sees those, and the
        mesh around the region: to jax, types on a mesh that is manual on an axis are others.
        """
        if self.around is not None:
            return jax.make_jaxpr(fun, return_shape=True)(*types)
        found = []

        def inside(*xs: Any) -> None:
            found.append(jax.make_jaxpr(lambda *ys: fun(*ys), return_shape=True)(*xs))

        jax.eval_shape(self.mapped(inside, jax.P(), jax.P()), *types)
        return found[0]

    def outside(self, fun: Callable[..., Any], *args: Any) -> Any:
        """What a function makes of arrays, in the region, by the types that these have outside of it.

        Derivatives of it cross the border as well, so that what they keep has the region's types.
        """
        if self.around is None:
            return fun(*args)
        run = jax.custom_vjp(partial(self._crossed, fun))
        run.defvjp(partial(self.outside, partial(jax.vjp, fun)), partial(self.outside, _pulled))
        return run(*args)

    def _crossed(self, fun: Callable[..., Any], *args: Any) -> Any:
        inside = jax.sharding.get_abstract_mesh()
        with jax.sharding.use_abstract_mesh(self.around):
            made = fun(*on_mesh(args, self.around))
        return on_mesh(made, inside)


def _pulled(pull: Callable[..., Any], cotangents: Any) -> Any:
    """Cotangents, and None for what has none."""
    return jax.tree.map(lambda x: None if x.dtype == jax.dtypes.float0 else x, pull(cotangents))


def region_of(axis: str, mesh: Any) -> Region:
    """The region for an axis of a mesh: that given, the partition's, or the context's.

    Raises:
        ShardingError: there is no mesh, it has no such axis, or the code around is manual on it.
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
    others = (size for name, size in known.shape.items() if name != axis)
    typed = getattr(known, "abstract_mesh", known) if explicit_axes(known) else None
    mesh = None if known is around else mesh
    return Region(mesh, axis, known.shape[axis], all(size == 1 for size in others), partition is not None, typed)


def _check_axis(axis: Any, mesh: Any) -> None:
    if axis not in mesh.axis_names:
        near = difflib.get_close_matches(str(axis), map(str, mesh.axis_names), 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
        raise ShardingError(f"pipeline: axis is {axis!r}; {hint}the axes of the mesh are {axes}")
