"""Memoised functions of what lives in an MLIR context."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")


class _Caches(threading.local):
    """What a thread remembers of each memoised function, and the one context that its entries are of."""

    def __init__(self) -> None:
        self.context: Any = None
        self.clear: list[Callable[[], None]] = []

    def enter(self, context: Any) -> None:
        if context is not self.context:
            for clear in self.clear:
                clear()
            self.context = context


_caches = _Caches()


def cached_in_context(function: Callable[P, T]) -> Callable[P, T]:
    """Memoises a function whose last argument is an attribute, a type or a context.

    An attribute keeps its whole context alive, and with it all modules in there: a thread's entries of a context go as
    soon as it asks for a value of another one. Threads that plan at once are in contexts of their own.
    """

    def in_context(*arguments: Any) -> Any:
        last = arguments[-1]
        _caches.enter(getattr(last, "context", last))
        return function(*arguments)  # type: ignore[call-arg]

    class OfThread(threading.local):
        def __init__(self) -> None:
            self.remembered = lru_cache(maxsize=4096)(in_context)
            _caches.clear.append(self.remembered.cache_clear)

    of_thread = OfThread()

    @wraps(function)
    def found(*arguments: Any) -> Any:
        return of_thread.remembered(*arguments)

    return cast(Callable[P, T], found)
