"""Static arguments: found by jit's rules, taken out of a call, and put back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sdy_jax.annotate.argument_errors import unhashable
from sdy_jax.annotate.arguments import Parameters
from sdy_jax.annotate.user_function import function_signature
from sdy_jax.errors import ArgumentError, with_article


@dataclass(frozen=True, slots=True)
class StaticParameters:
    """The static parameters of a function, by position (negative: from the end of a call) and by name."""

    positions: tuple[int, ...]
    names: tuple[str, ...]
    parameters: tuple[str, ...] = ()
    """The names of all positional parameters; empty where their number is not fixed."""

    @classmethod
    def of(cls, fun: Callable[..., Any], numbers: Any, names: Any) -> StaticParameters:
        """As in jit: where only positions or only names are given, the parameter is static however it is passed."""
        positional = _positional(fun)
        given, named = _listed("static_argnums", numbers, int), _listed("static_argnames", names, str)
        count = len(positional)
        given = tuple(n % count if -count <= n < 0 else n for n in given)
        if names is None:
            named = tuple(name for i, name in enumerate(positional) if i in given and name not in _unnamed(fun))
        elif numbers is None:
            given = tuple(i for i, name in enumerate(positional) if name in named)
        return cls(given, named, positional)

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
        self._check_hashable(statics)
        dynamic = tuple(a for i, a in enumerate(args) if i not in positions)
        return dynamic, {name: v for name, v in kwargs.items() if name not in self.names}, statics

    def _check_hashable(self, statics: Statics) -> None:
        given: list[tuple[int | str, Any]] = [*statics.positional, *statics.named]
        for place, value in given:
            try:
                hash(value)
            except TypeError:
                raise unhashable(self._name(place), value) from None

    def _name(self, place: int | str) -> str:
        if isinstance(place, str):
            return f"`{place}`"
        return f"`{self.parameters[place]}`" if place < len(self.parameters) else f"at position {place}"


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
        """A key with the types of the values: 1, 1.0 and True are equal but not the same."""
        return (self, tuple(type(value) for _, value in (*self.positional, *self.named)))

    def merged(self, dynamic: Sequence[Any]) -> list[Any]:
        """Static and dynamic positional arguments in their order."""
        rest, values = iter(dynamic), dict(self.positional)
        return [values[i] if i in values else next(rest) for i in range(len(dynamic) + len(values))]


def _listed(name: str, given: Any, single: type) -> tuple[Any, ...]:
    listed = (
        ()
        if given is None
        else (given,)
        if isinstance(given, single) or not isinstance(given, Iterable)
        else tuple(given)
    )
    if not all(isinstance(entry, single) or (single is int and hasattr(entry, "__index__")) for entry in listed):
        raise ArgumentError(f"{name}={given!r}; expected {with_article(single)}, or a sequence of them")
    return listed


def _positional(fun: Callable[..., Any]) -> tuple[str, ...]:
    """The names of the positional parameters; empty where their number is not fixed or not known."""
    signature = function_signature(fun)
    if signature is None or any(p.kind == p.VAR_POSITIONAL for p in signature.parameters.values()):
        return ()
    return Parameters.of(fun).positional


def _unnamed(fun: Callable[..., Any]) -> frozenset[str]:
    """The parameters that cannot be passed by name."""
    signature = function_signature(fun)
    parameters = signature.parameters.values() if signature else ()
    return frozenset(p.name for p in parameters if p.kind == p.POSITIONAL_ONLY)
