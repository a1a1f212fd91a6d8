"""Vectors and tables of costs that are stored once per content, and the operations on them, each done once.

Equal layers have equal vectors and tables, so what is done for one is looked up for the others. Costs are whole numbers
of a small unit in floats: sums are exact, in any order. Whatever reaches `LIMIT` is impossible and becomes exactly
`IMPOSSIBLE`; so differences of two impossible costs are 0 and never NaN.

Vectors and tables are normalised: their minimum is 0, and so is that of each row and column of a table. What was
subtracted is handed on, from tables to vectors, from vectors to a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from sdy_jax.lowering.planner.solve.pbqp import Costs, Indices, identity

AT_ONCE = 1 << 16
"""Sums that numpy makes in one go: half a megabyte, which caches hold. Measured (2026-11): two tables of 25 x 25 are
minimised out in a third of the time that it takes row by row. No result depends on it."""

IMPOSSIBLE = 2.0**44
LIMIT = 2.0**43
"""Given by 53 bits: possible costs are below 2^42, so some hundred impossible ones are added exactly."""

DENSE = 1 << 10
"""Tables of that many pairs of candidates are not factored by ports: indexing would cost more than it saves. Measured
(2026-11, `scripts/bench_bytes --only lstm`): with none a step of an LSTM on 2 x 4 is planned in 5.1 s, for 4.1. No
result depends on it."""

MIN = np.minimum.reduce
"""As the method `min` of arrays, which takes twice as long for short ones."""

T = TypeVar("T")


SMALL = 1 << 12
"""Bytes of arrays that are a key themselves, so that keys are compared without numpy. Measured (2026-11): a flax step
of 12 layers has 22,000 such comparisons, a tenth of the solver's time. No result depends on it."""


def content(array: NDArray[Any], *others: NDArray[Any] | None) -> Hashable:
    """Arrays as a key."""
    arrays = array, *others
    if sum([each.nbytes for each in arrays if each is not None]) <= SMALL:
        if all(each is None for each in others):  # as of most
            return array.shape, array.tobytes(), len(others)
        return tuple([None if each is None else (each.shape, each.tobytes()) for each in arrays])
    return _LargeContent(arrays, hash(tuple([None if array is None else _summary(array) for array in arrays])))


def _summary(array: NDArray[Any]) -> Hashable:
    """What tells most arrays apart: all of a large one takes ten times as long to hash as to sum."""
    return array.shape, float(np.add.reduce(array, axis=None)), array[0].tobytes(), array[-1].tobytes()


class _LargeContent:
    """Arrays as a key, which has no copy of them: those of a mixture of experts on 32 x 8 chips would take 0.4 GiB, as
    the tables do (2026-11)."""

    __slots__ = ("_arrays", "_hash")

    def __init__(self, arrays: tuple[NDArray[Any] | None, ...], hashed: int):
        self._arrays, self._hash = arrays, hashed

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _LargeContent) or len(self._arrays) != len(other._arrays):
            return False
        return all(
            a is b or (a is not None and b is not None and np.array_equal(a, b))
            for a, b in zip(self._arrays, other._arrays, strict=True)
        )


class Vector:
    """A cost per candidate. Compared by identity: equal contents are one object."""

    __slots__ = ("is_zero", "values")

    def __init__(self, values: Costs):
        self.values, self.is_zero = values, not np.count_nonzero(values)

    def __len__(self) -> int:
        return len(self.values)


class Choices:
    """A list of candidate indices: those kept."""

    __slots__ = ("indices",)

    def __init__(self, indices: Indices):
        self.indices = indices


class CostTable:
    """A cost per pair of candidates, `core[rows[a], cols[b]]`; where there are no ports, `core[a, b]`."""

    __slots__ = ("cols", "core", "rows", "shape")

    def __init__(self, core: Costs, rows: Indices | None, cols: Indices | None):
        self.core, self.rows, self.cols = core, rows, cols
        self.shape = (
            core.shape[0] if rows is None else len(rows),
            core.shape[1] if cols is None else len(cols),
        )

    def by_row(self, per_port: Any) -> Any:
        """What is known per row port, per candidate."""
        return per_port if self.rows is None else per_port[self.rows]

    def by_col(self, per_port: Any) -> Any:
        return per_port if self.cols is None else per_port[self.cols]

    def column(self, b: int) -> Costs:
        """The costs of all rows beside candidate b of the columns."""
        found: Costs = self.by_row(self.core[:, b if self.cols is None else self.cols[b]])
        return found

    def dense(self) -> Costs:
        rows = self.core if self.rows is None else self.core[self.rows]
        return rows if self.cols is None else rows[:, self.cols]


class Pool:
    """All vectors and tables of one solve. `has_impossible`: whether any of their costs is; few problems have such, and
    the others need not look out for them, which took a tenth of the solver's time (2026-11)."""

    def __init__(self) -> None:
        self.has_impossible = False
        self._interned: dict[Hashable, Any] = {}
        self._done: dict[Hashable, Any] = {}

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` returned when it was first called with this key."""
        if key not in self._done:
            self._done[key] = make()
        found: T = self._done[key]
        return found

    def vector(self, values: Costs) -> Vector:
        key = content(values)
        found: Vector = self._interned.get(key) or self._new(key, Vector(values))
        return found

    def choices(self, indices: Indices) -> Choices:
        key = ("choices", content(indices))
        found: Choices = self._interned.get(key) or self._new(key, Choices(indices))
        return found

    def table(self, core: Costs, rows: Indices | None = None, cols: Indices | None = None) -> CostTable:
        """The table with this content; small ones lose their ports, large ones the ports that no candidate has."""
        made = CostTable(core, rows, cols)
        if made.shape[0] * made.shape[1] <= DENSE:
            made = CostTable(np.ascontiguousarray(made.dense()), None, None)
        else:
            made = _compact(made)
        key = content(made.core, made.rows, made.cols)
        found: CostTable = self._interned.get(key) or self._new(key, made)
        return found

    def _new(self, key: Hashable, made: T) -> T:
        self._interned[key] = made
        return made

    def total(self, a: Vector, b: Vector) -> tuple[Vector, float]:
        """The sum, normalised, and what was subtracted."""
        return self.once(("total", a, b), lambda: self.normal(self._capped(a.values + b.values)))

    def normal(self, values: Costs) -> tuple[Vector, float]:
        """The vector with a minimum of 0, and what was subtracted."""
        least = float(MIN(values))
        return self.vector(self._clamped(values - least, values)), least

    def picked(self, vector: Vector, choices: Choices) -> Vector:
        """The costs of the chosen candidates, as they are."""
        return self.once(("picked", vector, choices), lambda: self.vector(vector.values[choices.indices]))

    def turned(self, table: CostTable) -> CostTable:
        """The transpose."""
        return self.once(("turned", table), lambda: self._turned(table))

    def _turned(self, table: CostTable) -> CostTable:
        made = CostTable(table.core.T, table.cols, table.rows)  # a view: tables are large
        key = content(made.core, made.rows, made.cols)
        found: CostTable = self._interned.get(key) or self._new(key, made)
        return found

    def rows_of(self, table: CostTable, choices: Choices) -> CostTable:
        """The chosen rows, in their order; a row may be chosen several times."""
        return self.once(("rows", table, choices), lambda: self._rows_of(table, choices))

    def _rows_of(self, table: CostTable, choices: Choices) -> CostTable:
        rows = choices.indices if table.rows is None else table.rows[choices.indices]
        return self.table(table.core, rows, table.cols)

    def part_of(self, table: CostTable, rows: Choices, cols: Choices) -> CostTable:
        """The chosen rows and columns, in their order."""
        return self.once(("part", table, rows, cols), lambda: self._part_of(table, rows, cols))

    def _part_of(self, table: CostTable, rows: Choices, cols: Choices) -> CostTable:
        first = rows.indices if table.rows is None else table.rows[rows.indices]
        second = cols.indices if table.cols is None else table.cols[cols.indices]
        return self.table(table.core, first, second)

    def joined(self, a: CostTable, b: CostTable) -> CostTable:
        """The sum of two tables of the same nodes."""
        return self.once(("joined", a, b), lambda: self._joined(a, b))

    def _joined(self, a: CostTable, b: CostTable) -> CostTable:
        rows, first_rows = _pairs(a.rows, b.rows, a.shape[0], b.core.shape[0])
        cols, first_cols = _pairs(a.cols, b.cols, a.shape[1], b.core.shape[1])
        core = _at(a, first_rows, first_cols) + _at(b, first_rows, first_cols)
        return self.table(self._capped(core), rows, cols)

    def split(self, table: CostTable) -> tuple[Vector, Vector, CostTable | None]:
        """What the rows cost in any case, then the columns, and the rest; None where nothing is left."""
        return self.once(("split", table), lambda: self._split(table))

    def _split(self, table: CostTable) -> tuple[Vector, Vector, CostTable | None]:
        core = table.core
        rows = MIN(core, axis=1)
        rest = core - rows[:, None]
        if not self.has_impossible or np.maximum.reduce(core, axis=None) < LIMIT:
            cols = MIN(rest)
            rest -= cols
        else:
            rest = self._clamped(rest, core)
            rest[rows >= LIMIT] = 0.0
            cols = MIN(rest)
            rest = self._clamped(rest - cols, rest)
            rest[:, cols >= LIMIT] = 0.0
        left = self.table(rest, table.rows, table.cols) if np.count_nonzero(rest) else None
        return self.vector(table.by_row(rows)), self.vector(table.by_col(cols)), left

    def minimised(self, vector: Vector, table: CostTable) -> Vector:
        """Per column, the least that a row costs with it."""
        return self.once(("minimised", vector, table), lambda: self._minimised(vector, table))

    def _minimised(self, vector: Vector, table: CostTable) -> Vector:
        own = least_per_port(vector.values, table.rows, len(table.core))
        least = MIN(own[:, None] + table.core)
        return self.vector(np.ascontiguousarray(table.by_col(self._capped(least))))

    def minimised_out(self, vector: Vector, a: CostTable, b: CostTable) -> CostTable:
        """Per pair of columns of two tables, the least that a common row costs with both."""
        return self.once(("out", vector, a, b), lambda: self._minimised_out(vector, a, b))

    def _minimised_out(self, vector: Vector, a: CostTable, b: CostTable) -> CostTable:
        own, left, right = vector.values, a.core, b.core
        if a.rows is not None or b.rows is not None:
            pairs, first = _pairs(_ports(a), _ports(b), len(own), len(right))
            own = least_per_port(own, pairs, len(first))
            left, right = left[_ports(a)[first]], right[_ports(b)[first]]
        paid = (own[:, None] + left).T
        least = np.empty((len(paid), right.shape[1]))
        for some in parts(len(paid), right.size):
            np.minimum.reduce(paid[some, :, None] + right, axis=1, out=least[some])
        return self.table(self._capped(least), a.cols, b.cols)

    def excess(self, table: CostTable) -> Costs:
        """Per pair of rows, by how much the first can cost more than the second, over all columns."""
        return self.once(("excess", table), lambda: _excess(table))

    def _clamped(self, lowered: Costs, before: Costs) -> Costs:
        """The costs after a subtraction, where what was impossible before still is."""
        return np.where(before >= LIMIT, IMPOSSIBLE, lowered) if self.has_impossible else lowered

    def _capped(self, costs: Costs) -> Costs:
        """The costs, where what reaches the limit is impossible."""
        if np.maximum.reduce(costs, axis=None) < LIMIT:
            return costs
        self.has_impossible = True
        return np.where(costs >= LIMIT, IMPOSSIBLE, costs)


def _ports(table: CostTable) -> Indices:
    return identity(table.shape[0]) if table.rows is None else table.rows


def least_per_port(values: Costs, ports: Indices | None, count: int) -> Costs:
    """The least cost of the candidates with each port; impossible where no candidate has it."""
    if ports is None:
        return values
    least = np.full(count, IMPOSSIBLE)
    np.minimum.at(least, ports, values)
    return least


def _compact(table: CostTable) -> CostTable:
    core, rows, cols = table.core, table.rows, table.cols
    if rows is not None and (used := _used(rows, len(core))) is not None:
        core, rows = core[used], np.searchsorted(used, rows)
    if cols is not None and (used := _used(cols, core.shape[1])) is not None:
        core, cols = core[:, used], np.searchsorted(used, cols)
    return CostTable(np.ascontiguousarray(core), rows, cols)


def _used(ports: Indices, count: int) -> Indices | None:
    """The ports that a candidate has, in ascending order; None where these are all."""
    used = np.flatnonzero(np.bincount(ports, minlength=count))
    return used if len(used) < count else None


def _pairs(a: Indices | None, b: Indices | None, count: int, ports: int) -> tuple[Indices | None, Indices]:
    """Ports for pairs of ports, and a candidate that has each."""
    if a is None or b is None:
        return None, np.arange(count)
    _, first, pairs = np.unique(a * ports + b, return_index=True, return_inverse=True)
    return pairs, first


def _at(table: CostTable, rows: Indices, cols: Indices) -> Costs:
    """The costs of these rows and columns."""
    rows = rows if table.rows is None else table.rows[rows]
    cols = cols if table.cols is None else table.cols[cols]
    return table.core[rows][:, cols]


def _excess(table: CostTable) -> Costs:
    core, columns = table.core, np.ascontiguousarray(table.core.T)
    found = np.empty((len(core), len(core)))
    for some in parts(len(core), core.size):
        np.maximum.reduce(core[some, :, None] - columns, axis=1, out=found[some])
    return found if table.rows is None else found[np.ix_(table.rows, table.rows)]


def parts(length: int, size: int) -> list[slice]:
    """The indices of a list in which every one stands for so many sums, cut into parts that are summed at once."""
    step = max(1, AT_ONCE // size)
    return [slice(first, first + step) for first in range(0, length, step)]
