"""Memoised functions of what lives in an MLIR context."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, ClassVar, ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")


class _Caches:
    """All memoised functions, and the one context that their entries are of."""

    context: Any = None
    clear: ClassVar[list[Callable[[], None]]] = []

    @classmethod
    def enter(cls, context: Any) -> None:
        if context is not cls.context:
            for clear in cls.clear:
                clear()
            cls.context = context


def cached_in_context(function: Callable[P, T]) -> Callable[P, T]:
    """Memoises a function whose last argument is an attribute, a type or a context.

    An attribute keeps its whole context alive, and with it all modules in there: the entries of a context go as soon as
    a value of another one is asked for.
    """

    @lru_cache(maxsize=4096)
    @wraps(function)
    def remembered(*arguments: Any) -> Any:
        last = arguments[-1]
        _Caches.enter(getattr(last, "context", last))
        return function(*arguments)  # type: ignore[call-arg]

    _Caches.clear.append(remembered.cache_clear)
    return cast(Callable[P, T], remembered)
