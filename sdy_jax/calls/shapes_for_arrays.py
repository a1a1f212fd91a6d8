"""A shape where the type of an array is expected: `plan((64, 128))`.

jax takes a tuple for a tree of numbers, which it may be, so the function is traced with these. Where that fails, what
was most likely meant is added to the error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def explaining_shapes(method: F) -> F:
    """For a method that takes the arguments of a user's function: its errors say of each that looks like a shape."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            for note in _notes(args, kwargs):
                error.add_note(note)
            raise

    return call  # type: ignore[return-value]


def _notes(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[str]:
    for name, value in (*((f"argument {n}", value) for n, value in enumerate(args)), *kwargs.items()):
        if isinstance(value, (tuple, list)) and value and all(type(size) is int and size > 0 for size in value):
            yield (
                f"note: {name} is {value!r}: {len(value)} number{'s' * (len(value) > 1)}; for an array of that shape "
                f"give jax.ShapeDtypeStruct({tuple(value)}, jax.numpy.float32)"
            )
