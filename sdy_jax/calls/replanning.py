"""Why a partitioned function is planned again: what calls before had otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from sdy_jax.annotate.arguments import Leaf
from sdy_jax.calls.arguments import Arguments
from sdy_jax.jax_internals.contexts import Settings, trace_settings
from sdy_jax.representation.named import AnyMesh, mesh_from_jax
from sdy_jax.representation.type_text import array_text


def changes(arguments: Arguments, before: Iterable[tuple[Any, ...]]) -> str:
    """What distinguishes arguments from those of earlier calls, by their keys: from the nearest of them.

    Example:
        "batch['x']: f32[32,256] for f32[64,256]"
    """
    nearest = min([list(_changes(arguments, key)) for key in before], key=len)
    return ", ".join(nearest)


def _changes(arguments: Arguments, key: tuple[Any, ...]) -> Iterator[str]:
    mesh, tree, types, statics, are_typed, shown, settings = key
    yield from (f"{name}: {now} for {old}" for name, now, old in _differences(trace_settings(), settings))
    if mesh != arguments.mesh:
        yield f"on {arguments.mesh} for {mesh}"
    if are_typed != arguments.are_typed:
        yield f"{'with' if arguments.are_typed else 'without'} types that show shardings"
    if statics != arguments.statics.key:
        yield "other static arguments"
    if tree != arguments.tree:
        yield "another structure of the arguments"
        return
    for leaf, new, old in zip(arguments.leaves, arguments.key[2], types, strict=True):
        if new != old:
            yield f"{leaf.path}: {_type(leaf, new)} for {_type(leaf, old)}"
    for leaf, mesh_shown, before in zip(arguments.leaves, arguments.shown, shown, strict=True):
        if mesh_shown != before:
            yield f"{leaf.path}: {_on(mesh_shown)} for {_on(before)}"


def _differences(now: Settings, before: Settings) -> Iterator[tuple[str, Any, Any]]:
    """The settings of jax that changed, with both values."""
    for (name, new), (_, old) in zip(now, before, strict=True):
        if new != old:
            yield name, new, old


def _on(shown: AnyMesh | None) -> str:
    return "a type on no mesh" if shown is None else f"a type on the mesh {mesh_from_jax(shown)}"


def _type(leaf: Leaf, type_: Sequence[Any]) -> str:
    shape, dtype, weak, spec, shown, *_, is_on_host = type_
    text = array_text(leaf.value.update(shape=shape, dtype=dtype))
    text += f" whose type shows {shown.spec}" if shown is not None else ""
    text += " on the host" if is_on_host else ""
    return text + (" of weak type" if weak else "") + (f" in {spec}" if spec is not None else "")
