"""Answers that are asked for again by each form of a program, and with each border that is tried for it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


class Memo:
    """What was computed once with some costs on some mesh. A key says all else that its answer depends on, and what
    kind of answer it is; nobody changes an answer."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[Hashable, Any] = {}

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` returned when it was first called with this key."""
        if key not in self._known:
            self._known[key] = make()
        found: T = self._known[key]
        return found
