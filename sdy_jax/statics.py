"""Static arguments: which they are, by jit's rules, and taking them out of a call and putting them back."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sdy_jax.errors import SdyError


@dataclass(frozen=True, slots=True)
class StaticParameters:
    """The static parameters of a function, by position (negative: from the end of a call) and by name."""

    positions: tuple[int, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, fun: Callable[..., Any], numbers: Any, names: Any) -> StaticParameters:
        """As in jit: where only positions or only names are given, the parameter is static however it is passed."""
        positional = _positional(fun)
        given, named = _listed(numbers, int), _listed(names, str)
        count = len(positional)
        given = tuple(n % count if -count <= n < 0 else n for n in given)
        if names is None:
            named = tuple(name for i, name in enumerate(positional) if i in given)
        elif numbers is None:
            given = tuple(i for i, name in enumerate(positional) if name in named)
        return cls(given, named)

    def split(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], Statics]:
        """Positional and keyword arguments without the static ones, and the static ones.

        Raises:
            SdyError: a static argument cannot be hashed.
        """
        count = len(args)
        positions = {n % count for n in self.positions if -count <= n < count}
        statics = Statics(
            tuple((i, args[i]) for i in sorted(positions)),
            tuple((name, kwargs[name]) for name in sorted(self.names) if name in kwargs),
        )
        statics.check_hashable()
        dynamic = tuple(a for i, a in enumerate(args) if i not in positions)
        return dynamic, {name: v for name, v in kwargs.items() if name not in self.names}, statics


@dataclass(frozen=True, slots=True)
class Statics:
    """The static arguments of a call: (position, value) and (name, value) pairs."""

    positional: tuple[tuple[int, Any], ...]
    named: tuple[tuple[str, Any], ...]

    @property
    def positions(self) -> frozenset[int]:
        return frozenset(i for i, _ in self.positional)

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells calls apart; 1, 1.0 and True are equal but not the same."""
        return (self, tuple(type(value) for _, value in (*self.positional, *self.named)))

    def check_hashable(self) -> None:
        for place, value in (*self.positional, *self.named):
            try:
                hash(value)
            except TypeError:
                name = f"`{place}`" if isinstance(place, str) else f"at position {place}"
                raise SdyError(
                    f"the static argument {name} is a {type(value).__name__}, which cannot be hashed; a plan is kept "
                    "per value of the static arguments, so give something hashable (a tuple for a list)"
                ) from None

    def merged(self, dynamic: Sequence[Any]) -> list[Any]:
        """Static and dynamic positional arguments in their order."""
        rest, values = iter(dynamic), dict(self.positional)
        return [values[i] if i in values else next(rest) for i in range(len(dynamic) + len(values))]


def _listed(given: Any, single: type) -> tuple[Any, ...]:
    return (given,) if isinstance(given, single) else tuple(given or ())


def _positional(fun: Callable[..., Any]) -> tuple[str, ...]:
    """The names of the positional parameters; empty where their number is not fixed or not known."""
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):
        return ()
    if any(p.kind == inspect.Parameter.VAR_POSITIONAL for p in parameters):
        return ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in parameters if p.kind in kinds)
