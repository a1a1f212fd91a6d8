"""Functions of rooms above that rooms below call, and rooms that others know of only by what they register.

A room below declares what it calls, with its type; `cli/extensions` says, where every room is in sight, which module
offers it, and which modules register rules, emitters, passes and checks in the registries of rooms below. Both are
imported when they are first used, so that `import sdy_jax` need not wait for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib import import_module
from typing import Any, Generic, TypeVar

F = TypeVar("F")

Function = TypeVar("Function", bound=Callable[..., Any])

_OFFERED: dict[str, str] = {}
"""Per name of a function, its module."""

_REGISTERING: list[str] = []


def offer(functions: Mapping[str, str], registering: Iterable[str]) -> None:
    """Says which modules offer functions, by their names, and which register something when they are imported."""
    _OFFERED.update(functions)
    _REGISTERING.extend(registering)


class Extension(Generic[Function]):
    """A function of a room above, by its name, for a method or option that is nothing but this function."""

    def __init__(self, name: str):
        self._name = name

    @property
    def function(self) -> Function:
        """The function itself."""
        return getattr(import_module(_OFFERED[self._name]), self._name)  # type: ignore[no-any-return]

    def takes(self, function: Function) -> None:
        """Does nothing: type checkers see whether a function is of the declared type."""


@cache
def load_extensions() -> None:
    """Imports what registers itself, once."""
    for module in _REGISTERING:
        import_module(module)


def registered(table: dict[str, F], names: Iterable[str], what: str) -> Callable[[F], F]:
    """A decorator that puts a function into a table under each of some names; `what` two of one name would be."""

    def register(function: F) -> F:
        for name in names:
            assert name not in table, f"two {what} for {name}"
            table[name] = function
        return function

    return register
