"""The integer arithmetic of kernels: what is known of a jaxpr's integers, index maps, and loops that are counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from jax.extend.core import Literal

# The integer arithmetic of index maps and conditions, on NumPy arrays: what is known of a jaxpr's variables.
#
# A variable whose value depends on what is not known has none.

Known = dict[Any, np.ndarray]
"""The variables of a jaxpr whose values are known; arrays of one shape, or scalars."""


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Rounded towards zero, as `lax.div`."""
    whole: np.ndarray = np.abs(a) // np.where(b == 0, 1, np.abs(b)) * np.sign(a) * np.sign(b)
    return whole


INTEGER_FUNCTIONS: Mapping[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "neg": np.negative,
    "abs": np.abs,
    "sign": np.sign,
    "min": np.minimum,
    "max": np.maximum,
    "div": _quotient,
    "rem": lambda a, b: np.fmod(a, np.where(b == 0, 1, b)),
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "not": lambda a: ~a,
    "shift_left": np.left_shift,
    "shift_right_arithmetic": np.right_shift,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "select_n": lambda which, *cases: np.choose(np.asarray(which, np.int64), cases),
}
"""What primitives are on integers, by their names in jaxprs."""


_KINDS = "biu"
"""Booleans and integers, signed or not: what this arithmetic is of."""


def value_of(x: Any, known: Known) -> np.ndarray | None:
    """The value of a variable or literal, if it is known."""
    return np.asarray(x.val) if isinstance(x, Literal) else known.get(x)


def evaluate(equation: Any, known: Known) -> None:
    """Adds the results of an equation to what is known, if they follow from it."""
    values = [value_of(x, known) for x in equation.invars]
    name = equation.primitive.name
    if name in ("jit", "pjit", "closed_call"):
        for x, found in zip(equation.outvars, _inside(equation.params["jaxpr"].jaxpr, values), strict=True):
            if found is not None:
                known[x] = found
        return
    if any(value is None or value.dtype.kind not in _KINDS for value in values):
        return
    if any(x.aval.shape for x in equation.outvars):
        return
    if name == "convert_element_type":
        found = np.asarray(values[0]).astype(equation.params["new_dtype"])
        if found.dtype.kind in _KINDS:
            known[equation.outvars[0]] = found
    elif name in INTEGER_FUNCTIONS:
        known[equation.outvars[0]] = INTEGER_FUNCTIONS[name](*values)


def _inside(jaxpr: Any, values: Sequence[np.ndarray | None]) -> list[np.ndarray | None]:
    known = {x: value for x, value in zip(jaxpr.invars, values, strict=True) if value is not None}
    for equation in jaxpr.eqns:
        evaluate(equation, known)
    return [value_of(x, known) for x in jaxpr.outvars]


# Index maps: which dimensions of an array follow which dimensions of a grid.
#
# An index map takes the indices of a grid step to those of a block. An entry that is exactly the index of grid
# dimension `a` *follows* it; one that is `a // g` follows its major part, blocks of `g` steps; one that repeats every
# `g` steps does not tell such parts apart. Anything else that mentions `a` is *odd* to it.
#
#     lambda b, h, i, j: (b, h // 4, where(i > j, j, 0), 0)
#
# The first dimension follows `b`, the second one `h` in fours; the third is odd to `i` and `j`.

_MOST_STEPS = 1 << 16
"""The extent up to which an entry is evaluated for each index. Given: no device has as many parts to share out."""


@dataclass(frozen=True, slots=True)
class IndexEntry:
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


def entries(jaxpr: Any, grid: Sequence[Any]) -> tuple[IndexEntry, ...]:
    """The entries of an index map, whose jaxpr takes the grid's indices, then refs of scalars.

    Args:
        jaxpr: the map.
        grid: the extents; what is no integer is not known.
    """
    return tuple([_entry(jaxpr, out, grid) for out in jaxpr.outvars])


def _entry(jaxpr: Any, out: Any, grid: Sequence[Any]) -> IndexEntry:
    if isinstance(out, Literal):
        return IndexEntry()
    indices = {x: dim for dim, x in enumerate(jaxpr.invars[: len(grid)])}
    if out in indices:
        return IndexEntry(frozenset([indices[out]]), indices[out])
    needed, equations = {out}, []
    for equation in reversed(jaxpr.eqns):
        if needed.intersection(equation.outvars):
            equations.append(equation)
            needed.update(x for x in equation.invars if not isinstance(x, Literal))
    mentions = frozenset(indices[x] for x in needed if x in indices)
    reads = needed.intersection(jaxpr.invars[len(grid) :])
    if reads or len(mentions) != 1:
        return IndexEntry(mentions)
    (dim,) = mentions
    extent = grid[dim]
    if not isinstance(extent, int) or extent > _MOST_STEPS:
        return IndexEntry(mentions)
    known: Known = {jaxpr.invars[dim]: np.arange(extent)}
    for equation in reversed(equations):
        evaluate(equation, known)
    table = value_of(out, known)
    return IndexEntry(mentions) if table is None else _of_table(dim, np.broadcast_to(table, (extent,)))


def _of_table(dim: int, table: np.ndarray) -> IndexEntry:
    """The entry that has these values along the grid dimension that it mentions."""
    steps = np.arange(len(table))
    if len(table) and (table == table[0]).all():
        return IndexEntry()
    if not table[0]:
        size = int(np.argmax(table != 0))
        if (table == steps // size).all():
            return IndexEntry(frozenset([dim]), dim, size)
    period = _period(tuple(table.tolist()))
    return IndexEntry(frozenset([dim]), None, period, dim) if period < len(table) else IndexEntry(frozenset([dim]))


@lru_cache(maxsize=256)
def _period(table: tuple[int, ...]) -> int:
    """After how many steps a table repeats itself; its length if it does not."""
    length = len(table)
    for size in range(1, length // 2 + 1):
        if not length % size and table == table[:size] * (length // size):
            return size
    return length


# Loops of a kernel's body: how many trips they make, as far as that is known before it runs.
#
# A loop that counts up to a bound makes as many trips as lie between. One whose bound is not known may read a table
# of scalars, each step of the grid from a place of its own: then it ends where the next step's part begins at the
# latest.
#
#     table of 8 x 64 places; step b reads b * 64 + 4 i + (0, 1, 2, 3) in trip i: 16 trips at most


@dataclass(eq=False, slots=True)
class ScalarTable:
    """An operand of scalars that a kernel reads by their places, with its elements where they are known."""

    shape: tuple[int, ...]
    values: np.ndarray | None = None


Value = np.ndarray | ScalarTable | None


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


def rooms(table: ScalarTable, a: Sequence[np.ndarray | None], b: Sequence[np.ndarray | None]) -> Iterator[int]:
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
