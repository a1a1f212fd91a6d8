"""Calls of `partition` as of its neighbours: options of `jax.shard_map` and `pjit`, a mesh by position, and typos."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import jax

from sdy_jax.errors import ArgumentError, with_article
from sdy_jax.representation.mesh import Mesh

F = TypeVar("F", bound=Callable[..., Any])

_MEANT = {
    "in_specs": ("in_shardings", "jax.shard_map's; here a spec says how the whole array is split"),
    "out_specs": ("out_shardings", "jax.shard_map's; here a spec says how the whole array is split"),
    "in_axis_resources": ("in_shardings", "an old name of pjit's"),
    "out_axis_resources": ("out_shardings", "an old name of pjit's"),
    "static_args": ("static_argnames", ""),
    "donate": ("donate_argnums", ""),
    "devices": ("mesh", "jax.make_mesh takes devices"),
}
"""Options of others: ours, and whose they are."""

_WITHOUT = {
    "axis_names": "jax.shard_map's: every axis of the mesh may be used; sdy.manual_computation is manual on some",
    "check_vma": "jax.shard_map's",
    "check_rep": "jax.shard_map's",
    "abstracted_axes": "jax.jit's, and deprecated there",
}
"""Options of others that have no use here."""

_MESHES = (jax.sharding.Mesh, jax.sharding.AbstractMesh, Mesh)


def with_known_options(known: Collection[str]) -> Callable[[F], F]:
    """For a function of one positional argument and these options: refuses what it does not take, with what would be
    right."""

    def decorator(fun: F) -> F:
        @functools.wraps(fun)
        def call(*args: Any, **options: Any) -> Any:
            problem = _misplaced(args) or _unknown(known, options)
            if problem:
                raise ArgumentError(f"{fun.__name__} {problem}")
            return fun(*args, **options)

        return call  # type: ignore[return-value]

    return decorator


def _misplaced(args: tuple[Any, ...]) -> str:
    if args and isinstance(args[0], _MESHES):
        return "got a mesh in place of the function; to fix: write partition(fun, mesh=mesh), or @partition(mesh=mesh)"
    if len(args) > 1:
        is_mesh = isinstance(args[1], _MESHES)
        given = "a mesh" if is_mesh else with_article(type(args[1]))
        fixed = "partition(fun, mesh=mesh)" if is_mesh else "it by the option's name"
        return f"takes the function by position, and options by name; it got {given} as well; to fix: write {fixed}"
    return ""


def _unknown(known: Collection[str], options: dict[str, Any]) -> str:
    for name in options:
        if name in _WITHOUT:
            return f"has no option {name!r}, which is {_WITHOUT[name]}; to fix: leave it out"
        if name in _MEANT:
            ours, whose = _MEANT[name]
            return f"has no option {name!r}{f' ({whose})' if whose else ''}; to fix: write {ours}="
        if name not in (*known, "fun"):
            near = difflib.get_close_matches(name, known, 1)
            meant = f"; did you mean {near[0]}=?" if near else f"; it has {', '.join(known)}"
            return f"has no option {name!r}{meant}"
    return ""
