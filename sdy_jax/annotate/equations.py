"""The equations of a traced function, those of its inner functions too: their lines, and the mapped axes they name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr  # type: ignore[attr-defined, unused-ignore]  # one class in jax 0.12

from sdy_jax.ir.hidden_frames import PACKAGE
from sdy_jax.ir.locations import is_in_library
from sdy_jax.jax_internals.named_axes import effects_on_axes, mapped_axes
from sdy_jax.representation.named import AnyMesh
from sdy_jax.representation.types import own_type

_NAMES = ("axis_name", "axes")
"""The parameters by which collectives name axes."""


def all_equations(x: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """The equations in a jaxpr, or in a parameter that may hold some; those of each jaxpr once."""
    seen = set() if seen is None else seen
    if isinstance(x, tuple | list):
        for each in x:
            yield from all_equations(each, seen)
    if not isinstance(x, Jaxpr | ClosedJaxpr) or id(x) in seen:
        return
    seen.add(id(x))
    for equation in x.eqns:
        yield equation
        for parameter in equation.params.values():
            yield from all_equations(parameter, seen)


def has_types_on(jaxpr: Any, mesh: AnyMesh) -> bool:
    """Whether types inside of a function show how values are split on the Explicit axes of a mesh."""
    return any(own_type(x.aval, mesh) is not None for equation in all_equations(jaxpr) for x in equation.outvars)


def named_axes(jaxpr: Any) -> list[str]:
    """The axes over which a function communicates that `jax.vmap`s around it name."""
    known, found = mapped_axes(), effects_on_axes(jaxpr.effects)
    if known:  # jax 0.10 says nothing of ppermute in effects
        parameters = (e.params.get(name, ()) for e in all_equations(jaxpr) for name in _NAMES)
        found |= {each for given in parameters for each in _listed(given) if each in known}
    return sorted(map(str, found))


def _listed(given: Any) -> tuple[Any, ...]:
    names = given if isinstance(given, tuple | list) else (given,)
    return tuple(name for name in names if isinstance(name, str))


def line_of(equation: Any) -> str:
    """The innermost line of the user's code that made an equation."""
    traceback = equation.source_info.traceback
    frames = traceback.frames if traceback is not None else ()
    users = (
        frame for frame in frames if not is_in_library(frame.file_name) and not frame.file_name.startswith(PACKAGE)
    )
    return next((f"{frame.file_name}:{frame.line_num}" for frame in users), "")
