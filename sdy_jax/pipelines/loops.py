"""Tables as loops run them: trips, links between stages, and buffers with slots by lifetimes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from sdy_jax.annotate.pipeline_schedules import Cell, Kind, Row, Timetable, Trip
from sdy_jax.pipelines.jaxprs import Leaves
from sdy_jax.pipelines.region import zeros_of

# Tables as loops run them: of which trips, and over which links rows send. Plain Python, no jax.
#
# Four stages, a loop per line, with the links over which its rows send:
#
#     F0 - F3    none, 1, 1-2, 1-3
#     B0 F4 ...  backward 3, 2-3             two trips, in which links still fill
#     B2 F6 ...  backward 1-3, forward 1-3   as many as there are: in these all links send both ways
#     B5 F9 ...  forward 2-3, 3              two trips, in which links run dry
#     B7 - B9    1-3, 1-2, 1
#     B10        none
#
# Where stages have several rounds, the last one sends to the first in turns of as many rows as there are stages.
# There a turn is some loops, and a loop around them goes through the turns: so a table has no more loops for more
# microbatches.

Links = frozenset[int]
"""Those of `Row.links`."""


@dataclass(frozen=True, slots=True)
class Loop:
    """Consecutive trips whose rows are of the same kinds.

    Attributes:
        trips: the rows.
        links: over which links rows of each kind send, by trip.
    """

    trips: tuple[Trip, ...]
    links: Mapping[Kind, tuple[Links, ...]]

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Those of the rows of a trip, in order."""
        return tuple(row.kind for row in self.trips[0])

    @property
    def form(self) -> Hashable:
        """What loops with the same body have in common."""
        return len(self.trips), tuple(self.links.items())


@dataclass(frozen=True, slots=True)
class Cycle:
    """Consecutive loops that come several times.

    Attributes:
        turns: the loops of each time, of the same forms.
    """

    turns: tuple[tuple[Loop, ...], ...]


def cycles(loops: Sequence[Loop]) -> Iterator[Cycle]:
    """Loops in cycles; those that come once are cycles of one turn."""
    known = dict[Hashable, int]()
    forms = [known.setdefault(loop.form, len(known)) for loop in loops]
    while forms:
        widths = range(1, max(2, len(forms) // 2 + 1))
        width = max(widths, key=lambda width: width * (_turns(forms, width) - 1))
        end = width * _turns(forms, width)
        yield Cycle(tuple(tuple(loops[start : start + width]) for start in range(0, end, width)))
        loops, forms = loops[end:], forms[end:]


def _turns(forms: Sequence[int], width: int) -> int:
    """How often the first ones, of some number, come in turn."""
    return next(n for n in itertools.count(1) if forms[n * width : (n + 1) * width] != forms[:width])


def exact_loops(table: Timetable) -> tuple[Loop, ...]:
    """Loops whose rows send over no link but those over which another stage takes something.

    Where links differ from row to row, a row sends in a branch of its own, beside which nothing runs. So trips in which
    all links are crossed are other loops, but for a single such row alone between others. A forward row that no stage
    sends before is in the loop of those after it, as nothing runs beside what these send. A backward row that no stage
    sends after is a loop of its own: what follows may run beside it.
    """
    trips, every = _trips(table), frozenset[int]().union(*(row.links for row in table.rows))

    def crosses_all_alone(n: int) -> bool:
        return 0 <= n < len(trips) and len(trips[n]) == 1 and trips[n][0].links == every

    def alike(n: int) -> list[Hashable]:
        rows = trips[n]
        if len(rows) > 1:
            return [(row.kind, bool(row.links), row.links == every) for row in rows]
        is_steady = crosses_all_alone(n) and (crosses_all_alone(n - 1) or crosses_all_alone(n + 1))
        return [(rows[0].kind, rows[0].kind is Kind.FORWARD or bool(rows[0].links), is_steady)]

    loops = [tuple(trips[n] for n in numbers) for _, numbers in itertools.groupby(range(len(trips)), key=alike)]
    return tuple(Loop(loop, {row.kind: _links(loop, n) for n, row in enumerate(loop[0])}) for loop in loops)


def fewest_loops(table: Timetable) -> tuple[Loop, ...]:
    """Loops for where each one that adds to gradients reduces them: all links are crossed where some are, also those
    over which nobody takes anything, and last backward rows are in the loop of those before them."""

    def alike(trip: Trip) -> list[Hashable]:
        return [(row.kind, row.kind is Kind.BACKWARD or bool(row.links)) for row in trip]

    def links(loop: tuple[Trip, ...], n: int) -> tuple[Links, ...]:
        return (frozenset[int]().union(*_links(loop, n)),) * len(loop)

    loops = [tuple(loop) for _, loop in itertools.groupby(_trips(table), key=alike)]
    return tuple(Loop(loop, {row.kind: links(loop, n) for n, row in enumerate(loop[0])}) for loop in loops)


def _links(loop: tuple[Trip, ...], n: int) -> tuple[Links, ...]:
    return tuple(trip[n].links for trip in loop)


def _trips(table: Timetable) -> tuple[Trip, ...]:
    """Where stages send, trips begin with their backward rows here: so both directions have a row to travel beside in
    each trip that has both."""
    crosses = any(row.links for row in table.rows)
    return tuple(map(tuple, _from_backward_rows(table.rows))) if crosses else table.trips


def _from_backward_rows(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Rows in trips that begin with a backward row, where there is one, or with what the last trip has already."""
    trip: list[Row] = []
    for row in rows:
        if trip and (row.kind is Kind.BACKWARD or row.kind in {each.kind for each in trip}):
            yield trip
            trip = []
        trip.append(row)
    yield trip


# Where a stage keeps what it needs again later, as columns of a table: slots of buffers, found from lifetimes.


@dataclass(frozen=True, slots=True)
class Columns:
    """What a stage needs to know of one row; a slot of -1 is none.

    Attributes:
        active: whether the stage does anything.
        microbatch, round, group: on what.
        kept: where it puts what a later kind of row reads: backward rows from forward ones, weights' rows from backward
            ones.
        read: from where it reads that.
        result: where a forward row of the last group puts its result, and its backward row reads it.
    """

    active: int = False
    microbatch: int = 0
    round: int = 0
    group: int = 0
    kept: int = -1
    read: int = -1
    result: int = -1


class Slots:
    """Slots for a table, as few as the stage that needs most of them can do with.

    Attributes:
        columns: of all rows, by time and stage.
        kept: how many slots hold what rows of a kind keep for others.
        results: how many hold results that wait for their backward row.
    """

    def __init__(self, table: Timetable):
        keeping = {kind: _numbered(_lifetimes(table, kind, user)) for kind, user in _USERS.items()}
        last = table.stages * table.rounds - 1
        turned = (each for each in _lifetimes(table, Kind.FORWARD, Kind.BACKWARD) if table.group(*each[2:]) == last)
        results = _numbered(turned)
        self._table, self._keeping, self._results = table, keeping, results
        self.kept = {kind: _size(numbers) for kind, numbers in keeping.items()}
        self.results = _size(results)
        self.columns = tuple(
            tuple(self._of_cell(row.kind, stage, cell) for stage, cell in enumerate(row.cells)) for row in table.rows
        )

    def _of_cell(self, kind: Kind, stage: int, cell: Cell | None) -> Columns:
        if cell is None:
            return Columns()
        key = stage, cell
        return Columns(
            active=True,
            microbatch=cell.microbatch,
            round=cell.round,
            group=self._table.group(stage, cell),
            kept=self._keeping[kind].get(key, -1) if kind in self._keeping else -1,
            read=self._keeping[_MAKERS[kind]].get(key, -1) if kind in _MAKERS else -1,
            result=self._results.get(key, -1),
        )


_USERS = {Kind.FORWARD: Kind.BACKWARD, Kind.BACKWARD: Kind.WEIGHTS}
_MAKERS = {user: kind for kind, user in _USERS.items()}

Lifetime = tuple[int, int, int, Cell]
"""First and last time, stage, and what is kept of which cell."""
Numbers = dict[tuple[int, Cell], int]


def _lifetimes(table: Timetable, kind: Kind, user: Kind) -> Iterator[Lifetime]:
    """What rows of one kind keep for those of another."""
    for (each, stage, cell), time in table.times.items():
        if each is kind and (user, stage, cell) in table.times:
            yield time, table.times[user, stage, cell], stage, cell


def _numbered(lifetimes: Iterator[Lifetime]) -> Numbers:
    """A slot for each lifetime, on each stage as few as overlap; a slot is free in the row after its last one."""
    found: Numbers = {}
    ends: dict[int, list[int]] = {}
    for first, last, stage, cell in sorted(lifetimes, key=lambda each: each[:3]):
        taken = ends.setdefault(stage, [])
        slot = next((i for i, end in enumerate(taken) if end < first), len(taken))
        taken[slot : slot + 1] = [last]
        found[stage, cell] = slot
    return found


def _size(numbers: Numbers) -> int:
    return 1 + max(numbers.values(), default=-1)


# Buffers of arrays: reading, writing and adding at a place that is known when they run.

# Slices at a place that is known when they run, as `lax.dynamic_slice` and `lax.dynamic_update_slice`, but no place
# is negative.
#
# They have a rule of their own for `vmap`: slices of many arrays at one place are one slice with one more dimension.
# By jax's rule they are gathers and scatters, also where the place is one.

slice_p = Primitive("dynamic_slice")
"""Of a buffer, and where the slice begins in each dimension. Plans and profiles call it by its name."""
update_p = Primitive("dynamic_update_slice")
"""Of a buffer, a slice to write into it, and where it begins in each dimension."""


def slice_of(buffer: Any, starts: Sequence[Any], sizes: Sequence[int]) -> Any:
    """The slice of some sizes that begins at `starts`, an index for each dimension."""
    return slice_p.bind(buffer, *starts, slice_sizes=tuple(sizes))


def with_slice(buffer: Any, part: Any, starts: Sequence[Any]) -> Any:
    """A buffer with another slice, which begins at `starts`, an index for each dimension."""
    return update_p.bind(buffer, part, *starts)


def _slice(buffer: Any, *starts: Any, slice_sizes: Sequence[int]) -> Any:
    return lax.dynamic_slice(buffer, starts, slice_sizes, allow_negative_indices=False)


def _update(buffer: Any, part: Any, *starts: Any) -> Any:
    return lax.dynamic_update_slice(buffer, part, starts, allow_negative_indices=False)


def _mapped(primitive: Primitive, plain: Callable[..., Any], arrays: int) -> Callable[..., Any]:
    """The rule for `vmap` of a primitive of some arrays, and a place in them, that is a function in lax."""

    def batch(axis: Any, args: Any, dims: Any, **sizes: Any) -> tuple[Any, int | None]:
        if all(dim is None for dim in dims):
            return primitive.bind(*args, **sizes), None
        if any(dim is not None for dim in dims[arrays:]):
            return jax.vmap(partial(plain, **sizes), dims)(*args), 0
        front = partial(batching.bdim_at_front, size=axis.size, mesh_axis=axis.explicit_mesh_axis)
        whole = map(front, args[:arrays], dims)
        more = {name: (axis.size, *each) for name, each in sizes.items()}
        return primitive.bind(*whole, np.int32(0), *args[arrays:], **more), 0

    return batch


def _slice_tangent(primals: Any, tangents: Any, *, slice_sizes: Sequence[int]) -> tuple[Any, Any]:
    (buffer, *starts), (tangent, *_) = primals, tangents
    made = slice_of(buffer, starts, slice_sizes)
    return made, _zero(made) if _is_zero(tangent) else slice_of(tangent, starts, slice_sizes)


def _update_tangent(primals: Any, tangents: Any) -> tuple[Any, Any]:
    (buffer, part, *starts), given = primals, tangents[:2]
    made = with_slice(buffer, part, starts)
    if all(map(_is_zero, given)):
        return made, _zero(made)
    buffer, part = map(ad.instantiate_zeros, given)
    return made, with_slice(buffer, part, starts)


def _slice_cotangent(ct: Any, buffer: Any, *starts: Any, slice_sizes: Sequence[int]) -> list[Any]:
    found = ad.Zero(buffer.aval) if _is_zero(ct) else with_slice(zeros_of(buffer.aval), ct, starts)
    return [found, *[None] * len(starts)]


def _update_cotangents(ct: Any, buffer: Any, part: Any, *starts: Any) -> list[Any]:
    """Of those of both that are asked for: `part` may be known where the buffer is not, and the other way round."""
    found: list[Any] = [None, None]
    if ad.is_undefined_primal(buffer):
        found[0] = ad.Zero(buffer.aval) if _is_zero(ct) else with_slice(ct, zeros_of(_type_of(part)), starts)
    if ad.is_undefined_primal(part):
        found[1] = ad.Zero(part.aval) if _is_zero(ct) else slice_of(ct, starts, part.aval.shape)
    return [*found, *[None] * len(starts)]


def _zero(primal: Any) -> Any:
    return ad.Zero(jax.typeof(primal).to_tangent_aval())


def _is_zero(x: Any) -> bool:
    return isinstance(x, ad.Zero)


def _type_of(x: Any) -> Any:
    return x.aval if ad.is_undefined_primal(x) else jax.typeof(x)


for primitive, run, arrays, tangent, cotangent in (
    (slice_p, _slice, 1, _slice_tangent, _slice_cotangent),
    (update_p, _update, 2, _update_tangent, _update_cotangents),
):
    primitive.def_impl(run)
    mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=False))
    batching.fancy_primitive_batchers[primitive] = _mapped(primitive, run, arrays)
    ad.primitive_jvps[primitive] = tangent
    ad.primitive_transposes[primitive] = cotangent
slice_p.def_abstract_eval(lambda buffer, *_, slice_sizes: buffer.update(shape=slice_sizes))
update_p.def_abstract_eval(lambda buffer, *_: buffer)


# Buffers of arrays: reading, writing and adding at a place that is known when they run.


def at(buffer: Any, *place: Any) -> Any:
    """The part at a place; that at slot 0 where the place is -1, none. It has the array's type, which one by index has
    not in jax 0.12 where dimensions have size one."""
    return lax.squeeze(_part(buffer, place), range(len(place)))


def put(buffers: Leaves, values: Leaves, is_meant: Any, *place: Any) -> Leaves:
    """Buffers with values at a place, where they are meant."""
    found = []
    for buffer, value in zip(buffers, values, strict=True):
        old = _part(buffer, place)
        found.append(_updated(buffer, jnp.where(is_meant, lax.expand_dims(value, range(len(place))), old), place))
    return found


def added(sums: Leaves, values: Leaves, is_meant: Any, *place: Any) -> Leaves:
    """Sums with values added at a place of them, where they are meant."""
    found = []
    for total, value in zip(sums, values, strict=True):
        old = _part(total, place)
        new = jnp.where(is_meant, value, zeros_of(value)).astype(total.dtype)
        found.append(_updated(total, old + lax.expand_dims(new, range(len(place))), place))
    return found


def stacked(types: Sequence[Any], *counts: int) -> Leaves:
    """Zeros for as many of each type as the counts say."""
    return [zeros_of(each, *counts) for each in types]


def sum_type(dtype: Any) -> Any:
    """The type to sum many arrays of a type in: in types of 16 bits or fewer each sum would round what is added."""
    least = jnp.dtype(jnp.float32)
    return least if dtype.itemsize < least.itemsize else dtype


def sum_of(x: Any) -> Any:
    """Zeros to sum many arrays like `x` in."""
    return zeros_of(x, dtype=sum_type(x.dtype))


def _starts(buffer: Any, place: Sequence[Any]) -> Any:
    """Where a part begins, in int32: known along dimensions of size one."""
    places = zip(place, buffer.shape, strict=False)
    own = (jnp.maximum(jnp.asarray(i, np.int32), 0) if size > 1 else np.int32(0) for i, size in places)
    return (*own, *[np.int32(0)] * (buffer.ndim - len(place)))


def _is_whole(buffer: Any, place: Sequence[Any]) -> bool:
    return all(size == 1 for size in buffer.shape[: len(place)])


def _part(buffer: Any, place: Sequence[Any]) -> Any:
    if _is_whole(buffer, place):
        return buffer
    sizes = (*[1] * len(place), *buffer.shape[len(place) :])
    return slice_of(buffer, _starts(buffer, place), sizes)


def _updated(buffer: Any, part: Any, place: Sequence[Any]) -> Any:
    return part if _is_whole(buffer, place) else with_slice(buffer, part, _starts(buffer, place))
