"""The values that `jax.ad_checkpoint.checkpoint_name` names.

jax lowers such a name to nothing, so they are found by the line and the type of what is named, in the traced jaxpr."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jax.extend.core import Jaxpr

from sdy_jax.annotate.equations import line_of
from sdy_jax.representation.type_text import array_text

Marks = Mapping[str, frozenset[tuple[str, str]]]
"""Source lines and types without axes, by name."""


def checkpoint_names(jaxpr: Any) -> Marks:
    """The names in a closed jaxpr, those of its inner ones too; nothing where there is none."""
    found: dict[str, frozenset[tuple[str, str]]] = {}
    for name, mark in _names(jaxpr.jaxpr if hasattr(jaxpr, "jaxpr") else jaxpr):
        found[name] = found.get(name, frozenset()) | {mark}
    return found


def all_marks(jaxpr: Any) -> frozenset[tuple[str, str]]:
    """Those of all names in a closed jaxpr."""
    return frozenset[tuple[str, str]]().union(*checkpoint_names(jaxpr).values())


def _names(jaxpr: Any) -> Iterator[tuple[str, tuple[str, str]]]:
    if not isinstance(jaxpr, Jaxpr):
        return
    makers: dict[Any, Any] = {variable: equation for equation in jaxpr.eqns for variable in equation.outvars}
    for equation in jaxpr.eqns:
        if equation.primitive.name == "name":
            (variable,) = equation.invars
            maker = makers.get(variable, equation)
            yield equation.params["name"], (line_of(maker), array_text(variable.aval))
        for inner in _inner(equation.params.values()):
            yield from _names(inner)


def _inner(parameters: Any) -> Iterator[Any]:
    for parameter in parameters:
        for each in parameter if isinstance(parameter, (tuple, list)) else (parameter,):
            yield each.jaxpr if hasattr(each, "jaxpr") else each
