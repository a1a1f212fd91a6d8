"""Jaxprs of which all equations, those of inner jaxprs too, become others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr  # type: ignore[attr-defined, unused-ignore]  # one class in jax 0.12


class Rewriting:
    """What all equations become. A jaxpr that occurs several times becomes one other; where nothing changes all is as
    it was.

    Args:
        equation: gives what stands for an equation, whose parameters are rewritten.
        effects: gives the effects that stand for those of a jaxpr.
        concerns: whether anything of a jaxpr with such effects may change.
    """

    def __init__(
        self,
        equation: Callable[[Any], Sequence[Any]],
        effects: Callable[[Any], Any] = lambda found: found,
        concerns: Callable[[Any], bool] = lambda found: True,
    ):
        self._equation, self._effects, self._concerns = equation, effects, concerns
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

    def _jaxpr(self, jaxpr: Any) -> Any:
        eqns = [new for eqn in jaxpr.eqns for new in self._equation(self._with_parameters(eqn))]
        is_same = len(eqns) == len(jaxpr.eqns) and all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True))
        return jaxpr if is_same else jaxpr.replace(eqns=eqns, effects=self._effects(jaxpr.effects))

    def _with_parameters(self, eqn: Any) -> Any:
        parameters = {name: self.of(value) for name, value in eqn.params.items()}
        is_same = all(parameters[name] is value for name, value in eqn.params.items())
        return eqn if is_same else eqn.replace(params=parameters)


def _rebuilt(changed: list[Any], before: Sequence[Any]) -> Any:
    """A parameter that is a sequence with other items; the same one where nothing has changed."""
    if all(new is old for new, old in zip(changed, before, strict=True)):
        return before
    kind: Any = type(before)
    return kind(*changed) if hasattr(before, "_fields") else kind(changed)
