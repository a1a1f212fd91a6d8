"""Index maps: which dimensions of an array follow which dimensions of a grid.

An index map takes the indices of a grid step to those of a block. An entry that is exactly the index of grid dimension
`a` *follows* it; one that is `a // g` follows its major part, blocks of `g` steps; one that repeats every `g` steps
does not tell such parts apart. Anything else that mentions `a` is *odd* to it.

    lambda b, h, i, j: (b, h // 4, where(i > j, j, 0), 0)

The first dimension follows `b`, the second one `h` in fours; the third is odd to `i` and `j`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from jax.extend.core import Literal

from sdy_jax.kernels.integers import Known, evaluate, value_of

_MOST_STEPS = 1 << 16
"""The extent up to which an entry is evaluated for each index. Given: no device has as many parts to share out."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One index of a block.

    Attributes:
        mentions: the grid dimensions on which it depends.
        follows: the grid dimension that it follows, or None.
        steps: how many steps of that dimension have one index; of one that repeats, after how many it does.
        repeats: the grid dimension of whose major parts it knows nothing, or None.
    """

    mentions: frozenset[int] = frozenset()
    follows: int | None = None
    steps: int = 1
    repeats: int | None = None

    def is_odd_to(self, dim: int) -> bool:
        """Whether it mentions a grid dimension and neither follows nor repeats it."""
        return dim in self.mentions and self.follows != dim and self.repeats != dim


def entries(jaxpr: Any, grid: Sequence[Any]) -> tuple[Entry, ...]:
    """The entries of an index map, whose jaxpr takes the grid's indices, then refs of scalars.

    Args:
        jaxpr: the map.
        grid: the extents; what is no integer is not known.
    """
    return tuple([_entry(jaxpr, out, grid) for out in jaxpr.outvars])


def _entry(jaxpr: Any, out: Any, grid: Sequence[Any]) -> Entry:
    if isinstance(out, Literal):
        return Entry()
    indices = {x: dim for dim, x in enumerate(jaxpr.invars[: len(grid)])}
    if out in indices:
        return Entry(frozenset([indices[out]]), indices[out])
    needed, equations = {out}, []
    for equation in reversed(jaxpr.eqns):
        if needed.intersection(equation.outvars):
            equations.append(equation)
            needed.update(x for x in equation.invars if not isinstance(x, Literal))
    mentions = frozenset(indices[x] for x in needed if x in indices)
    reads = needed.intersection(jaxpr.invars[len(grid) :])
    if reads or len(mentions) != 1:
        return Entry(mentions)
    (dim,) = mentions
    extent = grid[dim]
    if not isinstance(extent, int) or extent > _MOST_STEPS:
        return Entry(mentions)
    known: Known = {jaxpr.invars[dim]: np.arange(extent)}
    for equation in reversed(equations):
        evaluate(equation, known)
    table = value_of(out, known)
    return Entry(mentions) if table is None else _of_table(dim, np.broadcast_to(table, (extent,)))


def _of_table(dim: int, table: np.ndarray) -> Entry:
    """The entry that has these values along the grid dimension that it mentions."""
    steps = np.arange(len(table))
    if len(table) and (table == table[0]).all():
        return Entry()
    if not table[0]:
        size = int(np.argmax(table != 0))
        if (table == steps // size).all():
            return Entry(frozenset([dim]), dim, size)
    period = _period(tuple(table.tolist()))
    return Entry(frozenset([dim]), None, period, dim) if period < len(table) else Entry(frozenset([dim]))


@lru_cache(maxsize=256)
def _period(table: tuple[int, ...]) -> int:
    """After how many steps a table repeats itself; its length if it does not."""
    length = len(table)
    for size in range(1, length // 2 + 1):
        if not length % size and table == table[:size] * (length // size):
            return size
    return length
