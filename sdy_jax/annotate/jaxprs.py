"""The equations of a traced function, those of its inner functions too: listed, located, and rewritten."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jax.extend.core import (  # type: ignore[attr-defined, unused-ignore]  # one class in jax 0.12
    ClosedJaxpr,
    Jaxpr,
    Literal,
    Var,
)

from sdy_jax.base.jax_meshes import effects_on_axes, mapped_axes
from sdy_jax.ir.jax_shardings import AnyMesh, own_type
from sdy_jax.ir.locations import PACKAGE, is_in_library

# The equations of a traced function, those of its inner functions too: their lines, and the mapped axes they name.

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


# Jaxprs of which all equations and types, those of inner jaxprs too, become others.


class Rewriting:
    """What all equations become. A jaxpr that occurs several times becomes one other; where nothing changes all is as
    it was.

    Args:
        equation: gives what stands for an equation, whose parameters are rewritten.
        effects: gives the effects that stand for those of a jaxpr.
        concerns: whether anything of a jaxpr with such effects may change.
        types: gives the type that stands for that of a value; None leaves all as they are.
    """

    def __init__(
        self,
        equation: Callable[[Any], Sequence[Any]],
        effects: Callable[[Any], Any] = lambda found: found,
        concerns: Callable[[Any], bool] = lambda found: True,
        types: Callable[[Any], Any] | None = None,
    ):
        self._equation, self._effects, self._concerns, self._types = equation, effects, concerns, types
        self._known: dict[int, tuple[Any, Any]] = {}
        """By id the jaxprs, so that they stay alive, and what they become."""

    def of(self, x: Any) -> Any:
        """What stands for a jaxpr, or for a parameter that may hold some."""
        if isinstance(x, tuple | list):
            return _rebuilt([self.of(each) for each in x], x)
        if not isinstance(x, Jaxpr | ClosedJaxpr) or not self._concerns(x.effects):
            return x
        if id(x) not in self._known:
            self._known[id(x)] = x, self._jaxpr(x) if isinstance(x, Jaxpr) else self._closed(x)
        return self._known[id(x)][1]

    def _closed(self, x: Any) -> Any:
        jaxpr = self.of(x.jaxpr)
        return x if jaxpr is x.jaxpr else x.replace(jaxpr=jaxpr)

    def _jaxpr(self, before: Any) -> Any:
        jaxpr = before if self._types is None else _retyped(before, self._types)
        eqns = [new for eqn in jaxpr.eqns for new in self._equation(self._with_parameters(eqn))]
        is_same = len(eqns) == len(jaxpr.eqns) and all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True))
        return jaxpr if is_same else jaxpr.replace(eqns=eqns, effects=self._effects(jaxpr.effects))

    def _with_parameters(self, eqn: Any) -> Any:
        parameters = {name: self.of(value) for name, value in eqn.params.items()}
        is_same = all(parameters[name] is value for name, value in eqn.params.items())
        return eqn if is_same else eqn.replace(params=parameters)


def _retyped(jaxpr: Any, types: Callable[[Any], Any]) -> Any:
    """A jaxpr whose values have other types; the same one where none has."""
    own = [*jaxpr.constvars, *jaxpr.invars, *(v for e in jaxpr.eqns for v in e.outvars)]
    read = [*jaxpr.outvars, *(v for e in jaxpr.eqns for v in e.invars)]
    changed = {v: Var(aval) for v in own if (aval := types(v.aval)) is not v.aval}
    if not changed and all(types(v.aval) is v.aval for v in read):
        return jaxpr

    def of(values: Sequence[Any]) -> list[Any]:
        return [_retyped_literal(v, types) if isinstance(v, Literal) else changed.get(v, v) for v in values]

    def effects_of(effects: Any) -> Any:
        inputs = [(e, changed.get(getattr(e, "input", None))) for e in effects]
        return type(effects)(e if new is None else e.replace(input=new) for e, new in inputs)

    eqns = [e.replace(invars=of(e.invars), outvars=of(e.outvars), effects=effects_of(e.effects)) for e in jaxpr.eqns]
    variables = {name: of(getattr(jaxpr, name)) for name in ("constvars", "invars", "outvars")}
    return jaxpr.replace(**variables, eqns=eqns, effects=effects_of(jaxpr.effects))


def _retyped_literal(literal: Any, types: Callable[[Any], Any]) -> Any:
    """A literal of another type; its value may know its own."""
    aval = types(literal.aval)
    return literal if aval is literal.aval else Literal(np.asarray(literal.val, aval.dtype), aval)


def _rebuilt(changed: list[Any], before: Sequence[Any]) -> Any:
    """A parameter that is a sequence with other items; the same one where nothing has changed."""
    if all(new is old for new, old in zip(changed, before, strict=True)):
        return before
    kind: Any = type(before)
    return kind(*changed) if hasattr(before, "_fields") else kind(changed)
