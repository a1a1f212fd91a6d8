"""Calls with symbolic sizes, as `jax.export` makes them: a plan is for sizes that are numbers, so these are jit's
program, with the shardings that are stated."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding

from sdy_jax.annotate.arguments import Leaf, match_prefix
from sdy_jax.calls.formats import stated_sharding
from sdy_jax.calls.planned_function import PlannedFunction
from sdy_jax.calls.statics import Statics
from sdy_jax.plan.warn import warn_of
from sdy_jax.representation.named import AnyMesh
from sdy_jax.runtime.function_mesh import auto_mesh


def with_stated_shardings(function: PlannedFunction) -> Callable[..., Any]:
    """The user's function, its shardings as constraints."""

    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, tree, statics = function.given(args, kwargs)
        mesh = function.mesh_of(leaves)
        dynamic, named = jax.tree.unflatten(tree, _constrained(leaves, mesh, "in_shardings"))
        around = mesh if any(_has_type(leaf.value) for leaf in leaves) else auto_mesh(mesh)
        with jax.sharding.use_abstract_mesh(around.abstract_mesh):
            result = function.traced.inner(statics, mesh)(*dynamic, **named)
            stated = match_prefix(function.options.out_shardings, result, "result", "out_shardings")
            values = _constrained(stated, around, "out_shardings")
        return jax.tree.unflatten(jax.tree.structure(result), values)

    return run


def ahead(function: PlannedFunction, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a stage, types with the shardings that are stated for them. Warns that there is no plan."""
    leaves, tree, statics = function.given(args, kwargs)
    mesh = function.mesh_of(leaves)
    warn_of(
        [
            f"{function.name} has arguments of symbolic sizes, for which nothing is planned: XLA partitions the "
            "program, by the shardings that are stated; for a plan per size, partition what sdy_jax.load reads of it"
        ]
    )
    dynamic, named = jax.tree.unflatten(tree, [_described(leaf, mesh) for leaf in leaves])
    return tuple(statics.merged(dynamic)), {**named, **dict(statics.named)}


def of_results(function: PlannedFunction, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """`out_shardings` for jit: those that are stated."""
    dynamic, named, statics = function.split(args, kwargs)
    held = functools.partial(_with_statics, run, statics)
    types = jax.eval_shape(held, *dynamic, **named)
    mesh = function.mesh_of(function.given(args, kwargs)[0])
    leaves = match_prefix(function.options.out_shardings, types, "result", "out_shardings")
    return jax.tree.unflatten(jax.tree.structure(types), [stated_sharding(leaf, mesh) for leaf in leaves])


def _with_statics(run: Callable[..., Any], statics: Statics, /, *dynamic: Any, **named: Any) -> Any:
    return run(*statics.merged(dynamic), **named, **dict(statics.named))


def _described(leaf: Leaf, mesh: AnyMesh) -> Any:
    sharding = stated_sharding(leaf, mesh, "in_shardings")
    is_type = isinstance(leaf.value, jax.ShapeDtypeStruct)
    return leaf.value.update(sharding=sharding) if is_type and sharding is not None else leaf.value


def _constrained(leaves: Sequence[Leaf], mesh: AnyMesh, where: str) -> list[Any]:
    pairs = [(leaf.value, stated_sharding(leaf, mesh, where)) for leaf in leaves]
    return [x if sharding is None else _under_constraint(x, sharding) for x, sharding in pairs]


def _under_constraint(x: Any, sharding: NamedSharding) -> Any:
    if not _has_type(x):
        return jax.lax.with_sharding_constraint(x, NamedSharding(auto_mesh(sharding.mesh), sharding.spec))
    return jax.sharding.reshard(x, sharding)


def _has_type(x: Any) -> bool:
    return AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types
