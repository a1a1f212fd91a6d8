"""Loops of a kernel's body: how many trips they make, as far as that is known before it runs.

A loop that counts up to a bound makes as many trips as lie between. One whose bound is not known may read a table of
scalars, each step of the grid from a place of its own: then it ends where the next step's part begins at the latest.

    table of 8 x 64 places; step b reads b * 64 + 4 i + (0, 1, 2, 3) in trip i: 16 trips at most
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.extend.core import Literal

from sdy_jax.kernels.integers import value_of


@dataclass(eq=False, slots=True)
class Table:
    """An operand of scalars that a kernel reads by their places, with its elements where they are known."""

    shape: tuple[int, ...]
    values: np.ndarray | None = None


Value = np.ndarray | Table | None


@dataclass(slots=True)
class CountedLoop:
    """A loop whose counter goes from `start` by `step`, as long as it is below a bound."""

    counter: int
    step: int
    start: np.ndarray | None
    bound: np.ndarray | None

    @property
    def trips(self) -> np.ndarray | None:
        """How many trips it makes, where that is known."""
        if self.start is None or self.bound is None:
            return None
        trips: np.ndarray = np.maximum(-(-(self.bound - self.start) // self.step), 0)
        return trips


def counted_loop(
    condition: Any, body: Any, constants: Sequence[Value], carry: Sequence[Value], offset: int
) -> CountedLoop | None:
    """The loop with this condition and body as one that counts; None for others. `offset`: the constants of its body,
    which come before what it carries."""
    inner, inside = condition.jaxpr, body.jaxpr
    made = [e for e in inner.eqns if inner.outvars[0] in e.outvars]
    if len(made) != 1 or made[0].primitive.name not in ("lt", "gt"):
        return None
    counter, bound = made[0].invars if made[0].primitive.name == "lt" else reversed(made[0].invars)
    places = {x: i for i, x in enumerate(inner.invars)}
    if isinstance(counter, Literal) or (index := places.get(counter, -1) - len(constants)) < 0:
        return None
    added = next((e for e in inside.eqns if inside.outvars[index] in e.outvars), None)
    if added is None or added.primitive.name != "add" or added.invars[0] is not inside.invars[offset + index]:
        return None
    step = value_of(added.invars[1], {})
    if step is None or int(step) < 1:
        return None
    start = carry[index]
    limit = value_of(bound, {})
    if limit is None and bound in places:
        place = places[bound] - len(constants)
        is_kept = place < 0 or inside.outvars[place] is inside.invars[offset + place]
        value = constants[places[bound]] if place < 0 else carry[place]
        limit = value if is_kept and isinstance(value, np.ndarray) else None
    return CountedLoop(index, int(step), start if isinstance(start, np.ndarray) else None, limit)


def rooms(table: Table, a: Sequence[np.ndarray | None], b: Sequence[np.ndarray | None]) -> Iterator[int]:
    """Per dimension of a table that is read at `a`, and one trip later at `b`, the trips up to the next step's place,
    or to its end."""
    for size, first, second in zip(table.shape, a, b, strict=True):
        if first is None or second is None or not np.all(second - first == np.ravel(second - first)[0]):
            continue
        stride = int(np.ravel(second - first)[0])
        if stride > 0:
            places = np.unique(first)
            room = np.diff(places).min() if len(places) > 1 else size - places[0]
            yield max(1, -(-int(room) // stride))


def unchanged(carry: Sequence[Value], kept: Sequence[bool]) -> list[Value]:
    """What a loop carries, without what changes in its trips."""
    return [x if stays else None for x, stays in zip(carry, kept, strict=True)]


def kept_by(body: Any, first: int, count: int) -> list[bool]:
    """Which of the values that a loop carries its body returns as they were."""
    inner = getattr(body, "jaxpr", body)
    return [inner.outvars[i] is inner.invars[first + i] for i in range(count)]
