"""Objects that remember their hash."""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")


def hash_once(cls: type[T]) -> type[T]:
    """Decorates a frozen dataclass without slots whose objects are parts of many keys: each is hashed once."""
    compute = cls.__hash__

    def remembered(self: T) -> int:
        known = self.__dict__
        if "_hash" not in known:
            known["_hash"] = compute(self)
        return known["_hash"]  # type: ignore[no-any-return]

    def state(self: T) -> dict[str, Any]:
        """For pickling: strings have other hashes in other processes."""
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    cls.__hash__ = remembered  # type: ignore[method-assign, assignment]
    cls.__getstate__ = state  # type: ignore[method-assign, assignment]
    return cls
