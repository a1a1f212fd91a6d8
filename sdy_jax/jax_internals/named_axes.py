"""Axes that something around a function names, and functions over the axes of a mesh.

* `NamedAxisEffect`, `get_axis_env`: of a function that uses an axis which a `jax.vmap` around it names.
* `extend_axis_env_nd`, `_check_vma`, `SPMDAxisContext` and `jaxpr_subcomp`: a function of blocks that names axes of
  another mesh of the same devices than the `shard_map` around it.
* `remove_explicit_mesh_axis_names`: a `shard_map` is to be over all axes of its mesh under `vmap`, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from jax._src import config
from jax._src.core import NamedAxisEffect, extend_axis_env_nd, get_axis_env, remove_explicit_mesh_axis_names
from jax._src.sharding_impls import SPMDAxisContext
from jax.interpreters import mlir

from sdy_jax.jax_internals.lowering import listed_replica_groups, lowered_in_place


def effects_on_axes(found: Set[Any]) -> set[Any]:
    """The axes over which a function communicates that something around it names, by its effects."""
    return {effect.name for effect in found if isinstance(effect, NamedAxisEffect)}


def mapped_axes() -> set[Any]:
    """The axes that `jax.vmap`s and the like around this trace name."""
    return {*get_axis_env().axis_sizes}


def without_named_axes(found: Set[Any]) -> Set[Any]:
    """The effects without those of communicating over axes."""
    return {effect for effect in found if not isinstance(effect, NamedAxisEffect)}


@contextmanager
def in_manual_axes(mesh: Any) -> Iterator[None]:
    """Lets what is traced name the axes of a mesh, as in a `shard_map` over all of them."""
    with extend_axis_env_nd(list(mesh.shape.items())), config._check_vma(False):
        yield


def lowered_on_mesh(ctx: mlir.LoweringRuleContext, mesh: Any, jaxpr: Any, xs: Sequence[Any]) -> Sequence[Any]:
    """Lowers a closed jaxpr without constants whose names of axes are those of `mesh`, all of them manual."""
    context = ctx.module_context.replace(axis_context=SPMDAxisContext(mesh, frozenset(mesh.axis_names)))
    with in_manual_axes(mesh), listed_replica_groups():
        return lowered_in_place(ctx, context, jaxpr.jaxpr, xs)


def with_all_axes() -> AbstractContextManager[Any]:
    """Lets `shard_map` be over all axes of a mesh, also under a `vmap` over a dimension that is split on Explicit axes:
    jax takes these from it before it knows whether its body is along them."""
    mapped: AbstractContextManager[Any] = remove_explicit_mesh_axis_names(get_axis_env().explicit_mesh_axis_names)
    return mapped
