"""What the body of a kernel computes and copies in all steps of its grid."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from sdy_jax.base.jax_primitives import NDIndexer, scan_parts
from sdy_jax.ir.kernels.body import equations_in
from sdy_jax.ir.kernels.index_arithmetic import (
    CountedLoop,
    Known,
    ScalarTable,
    Value,
    counted_loop,
    evaluate,
    kept_by,
    rooms,
    unchanged,
    value_of,
)

# The floating-point operations of one equation of a kernel's body.
#
# A product of m x k and k x n elements performs 2 m n k; arithmetic and transcendental functions one per element of
# the result, reductions one per element of the operand. Integers count in products alone: what else there is of them
# is the arithmetic of indices and masks.

PRODUCT = "dot_general"


def _names(words: str) -> frozenset[str]:
    return frozenset(words.split())


TRANSCENDENTAL = _names(
    "atan2 cos cosh erf erf_inv erfc exp exp2 expm1 lgamma log log1p logistic pow sin sinh tan tanh"
)

_ARITHMETIC = _names(
    "abs add add_any ceil clamp cbrt div floor integer_pow max min mul neg reciprocal rem round rsqrt sign sqrt square "
    "sub"
)

_REDUCTIONS = _names(
    "argmax argmin cumlogsumexp cummax cummin cumprod cumsum reduce_max reduce_min reduce_prod reduce_sum"
)

UNKNOWN_PRODUCTS = _names("matmul_acc_lhs matmul_push_rhs tcgen05_mma wgmma")
"""Products of a machine's own, of which a body says no shapes that are those of the product."""


def flops_of(equation: Any) -> float:
    """The operations of an equation; 0 of those that only move data."""
    name = equation.primitive.name
    if name == PRODUCT:
        (contracted, _), _ = equation.params["dimension_numbers"]
        lhs = equation.invars[0].aval.shape
        return 2.0 * _size(equation.outvars[0]) * float(math.prod(lhs[d] for d in contracted))
    if name == "addupdate":
        return float(_size(equation.invars[1]))
    if name in _REDUCTIONS:
        return float(_size(equation.invars[0])) if _is_inexact(equation.invars[0]) else 0.0
    if name in _ARITHMETIC or name in TRANSCENDENTAL:
        return float(_size(equation.outvars[0])) if _is_inexact(equation.outvars[0]) else 0.0
    return 0.0


def _size(x: Any) -> int:
    return math.prod(x.aval.shape)


def _is_inexact(x: Any) -> bool:
    return bool(jnp.issubdtype(x.aval.dtype, jnp.inexact))


# What the body of a kernel computes and copies in all steps of its grid.
#
# The body is run once, for all steps at the same time: of integers it knows one value per step, as far as they follow
# from the step's place in the grid and from constants. So it is known how often each branch is taken, and each loop
# run:
#
#     i, j = program_id(2), program_id(3)
#     @pl.when((i + 1) * 128 > j * 128)      taken in 136 of 16 x 16 steps: what is below the diagonal
#     def _(): ...                           counts 136 times
#
# Where that is left open until the kernel runs, the larger branch counts, and loops as often as the table of scalars
# that they read allows, or once; each with its reason.

_MOST_TRIPS = 512
"""Trips of a loop that are run one by one where its branches depend on them; in longer ones the larger branch counts.
Guessed: rows of 64k tokens in blocks of 128, and a hundredth of a second."""

_CALLS = frozenset(
    ["closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "jit", "pjit", "remat", "checkpoint"]
)

IN_MEMORY = frozenset(("any", "gmem", "hbm"))
"""The spaces of refs to a device's main memory, of which a body copies parts by itself."""

_OPEN_BRANCH = "a branch is chosen when it runs: its larger side counts"
_OPEN_LOOP = "a loop ends where it is told when it runs: one trip counts"
_LOOP_BY_TABLE = "a loop ends where it is told when it runs: it counts for all of the table that it reads"
_OPEN_PRODUCT = "products of the machine's own instructions do not count"


@dataclass(slots=True)
class BodyWork:
    """What is counted.

    Attributes:
        flops: floating-point operations, of each step.
        started, starts: the bytes and the number of copies between main memory and a core that are started.
        awaited: the bytes of those that are waited for.
        near, near_awaited: the bytes of copies that name no main memory, which are started, and waited for. Where none
            is started, to wait for one is to wait for others of as many bytes.
        places: from how many places a copy begins that are known to be different ones.
        has_products, has_transcendentals: what it computes.
        reasons: what keeps it from being exact.
    """

    flops: np.ndarray = field(default_factory=lambda: np.zeros(1))
    started: float = 0.0
    starts: float = 0.0
    awaited: float = 0.0
    near: float = 0.0
    near_awaited: float = 0.0
    places: int = 1
    has_products: bool = False
    has_transcendentals: bool = False
    reasons: dict[str, None] = field(default_factory=dict)

    @property
    def copied(self) -> float:
        """The bytes of copies: each is waited for once, whoever started it."""
        return self.awaited + (0.0 if self.near else self.near_awaited) or self.started

    @property
    def copies(self) -> float:
        """How many are waited for, of the size of those that are started."""
        return self.copied * self.starts / self.started if self.started else 0.0

    def add(self, other: BodyWork) -> None:
        self.flops = self.flops + other.flops
        self.started += other.started
        self.starts += other.starts
        self.awaited += other.awaited
        self.near += other.near
        self.near_awaited += other.near_awaited
        self.places = max(self.places, other.places)
        self.has_products |= other.has_products
        self.has_transcendentals |= other.has_transcendentals
        self.reasons |= other.reasons

    @property
    def _order(self) -> tuple[float, float, float]:
        return float(self.flops.sum()), self.copied, self.started


def body_work(
    body: Any,
    places: Mapping[int, np.ndarray],
    extents: Mapping[int, int],
    weight: float,
    tables: Sequence[ScalarTable],
) -> BodyWork:
    """What a kernel's body does.

    Args:
        body: its jaxpr.
        places: the grid's indices along the dimensions that it reads, as it counts them; of all steps in one order.
        extents: those of all dimensions that are known.
        weight: how many steps of the whole grid one of these stands for.
        tables: its first arguments, which are scalars.
    """
    counter = _Counter(places, extents)
    steps = max([len(x) for x in places.values()], default=1)
    inner = getattr(body, "jaxpr", body)
    values: list[Value] = [*tables, *[None] * (len(inner.invars) - len(tables))]
    counter.run(body, values, np.full(steps, weight))
    return counter.found


@dataclass(slots=True)
class _Scope:
    """The variables of one jaxpr: numbers that are known, and tables."""

    known: Known
    tables: dict[Any, ScalarTable]

    def value(self, x: Any) -> Value:
        if not isinstance(x, Literal) and x in self.tables:
            return self.tables[x]
        found = value_of(x, self.known)
        return found if found is None or not getattr(x.aval, "shape", ()) else None

    def values(self, xs: Sequence[Any]) -> list[Value]:
        return [self.value(x) for x in xs]

    def set(self, xs: Sequence[Any], values: Sequence[Value]) -> None:
        for x, value in zip(xs, values, strict=True):
            if isinstance(value, ScalarTable):
                self.tables[x] = value
            elif value is not None:
                self.known[x] = value


Read = tuple[ScalarTable, tuple[np.ndarray | None, ...]]
"""A table, and the place that is read."""


@dataclass(slots=True)
class _Counter:
    places: Mapping[int, np.ndarray]
    extents: Mapping[int, int]
    found: BodyWork = field(default_factory=BodyWork)
    reads: list[Read] = field(default_factory=list)

    def run(self, jaxpr: Any, values: Sequence[Value], weights: np.ndarray) -> list[Value]:
        """Runs a jaxpr as often as `weights` say for each step; returns its results."""
        inner, scope = getattr(jaxpr, "jaxpr", jaxpr), _Scope({}, {})
        scope.set(inner.invars, values)
        constants = (np.asarray(c) if np.ndim(c) == 0 else None for c in getattr(jaxpr, "consts", ()))
        scope.set(inner.constvars, list(constants) or [None] * len(inner.constvars))
        for equation in inner.eqns:
            self._equation(equation, scope, weights)
        return scope.values(inner.outvars)

    def _equation(self, equation: Any, scope: _Scope, weights: np.ndarray) -> None:
        name = equation.primitive.name
        handler = _HANDLERS.get(name)
        if handler is not None:
            scope.set(equation.outvars, handler(self, equation, scope, weights))
            return
        if name in _CALLS:
            inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
            scope.set(equation.outvars, self.run(inner, scope.values(equation.invars), weights))
            return
        if count := flops_of(equation):
            self.found.flops = self.found.flops + count * weights
        self.found.has_products |= name == PRODUCT or name in UNKNOWN_PRODUCTS
        self.found.has_transcendentals |= name in TRANSCENDENTAL
        if name in UNKNOWN_PRODUCTS:
            self.found.reasons[_OPEN_PRODUCT] = None
        evaluate(equation, scope.known)

    # What is known.

    def _program_id(self, equation: Any, scope: _Scope, weights: np.ndarray) -> list[Value]:
        return [self.places.get(equation.params["axis"])]

    def _num_programs(self, equation: Any, scope: _Scope, weights: np.ndarray) -> list[Value]:
        extent = self.extents.get(equation.params["axis"])
        return [None if extent is None else np.asarray(extent)]

    def _same(self, equation: Any, scope: _Scope, weights: np.ndarray) -> list[Value]:
        return [scope.value(equation.invars[0])]

    def _get(self, equation: Any, scope: _Scope, weights: np.ndarray) -> list[Value]:
        """A scalar of a table, where the place that is read is known."""
        table = scope.value(equation.invars[0])
        if not isinstance(table, ScalarTable) or equation.outvars[0].aval.shape:
            return [None]
        transforms = equation.params["tree"].unflatten(equation.invars[1:])
        if len(transforms) != 1 or not isinstance(transforms[0], NDIndexer):
            return [None]
        indices = [np.asarray(i) if isinstance(i, int) else scope.value(i) for i in transforms[0].indices]
        place = tuple([i if isinstance(i, np.ndarray) else None for i in indices])
        self.reads.append((table, place))
        if table.values is None or any(i is None for i in place):
            return [None]
        inside = [np.clip(i, 0, n - 1) for i, n in zip(place, table.shape, strict=True) if i is not None]
        return [table.values[tuple(inside)]]

    # Branches and loops.

    def _cond(self, equation: Any, scope: _Scope, weights: np.ndarray) -> list[Value]:
        branches, values = equation.params["branches"], scope.values(equation.invars[1:])
        which = scope.value(equation.invars[0])
        if not isinstance(which, np.ndarray):
            return self._larger(branches, values, weights)
        which = np.clip(which.astype(np.int64), 0, len(branches) - 1)
        taken = [(which == number) for number in range(len(branches))]
        results = [self.run(b, values, weights * t) if t.any() else None for b, t in zip(branches, taken, strict=True)]
        return _chosen(taken, [r for r in results if r is not None], [t for t in taken if t.any()])

    def _larger(self, branches: Sequence[Any], values: Sequence[Value], weights: np.ndarray) -> list[Value]:
        trials = []
        for branch in branches:
            found, results = self._apart(partial(self.run, branch, values, weights))
            trials.append(found)
        most = max(trials, key=lambda trial: trial._order)
        self.found.add(most)
        if any(trial._order != most._order for trial in trials):
            self.found.reasons[_OPEN_BRANCH] = None
        return [None] * len(results)

    def _apart(self, run: Callable[[], list[Value]]) -> tuple[BodyWork, list[Value]]:
        """What is counted and returned while something runs, which does not count yet."""
        before, self.found = self.found, BodyWork()
        try:
            results = run()
            return self.found, results
        finally:
            self.found = before

    def _scan(self, equation: Any, scope: _Scope, weights: np.ndarray) -> list[Value]:
        parts, values = scan_parts(equation), scope.values(equation.invars)
        body, length = equation.params["jaxpr"], np.asarray(equation.params["length"])
        first, last = parts.constants, parts.constants + parts.carried
        slices: list[Value] = [None] * (len(values) - last)
        if parts.carried != parts.returned:  # some are used in one trip only, and nobody says which
            self.run(body, [*values[:first], *[None] * (len(values) - first)], weights * length)
            return [None] * len(equation.outvars)

        def trip(carry: Sequence[Value], weights: np.ndarray) -> list[Value]:
            return self.run(body, [*values[:first], *carry, *slices], weights)[: parts.carried]

        carry = self._trips(trip, body, values[first:last], kept_by(body, first, parts.carried), length, weights)
        return [*carry, *[None] * (len(equation.outvars) - len(carry))]

    def _while(self, equation: Any, scope: _Scope, weights: np.ndarray) -> list[Value]:
        p, values = equation.params, scope.values(equation.invars)
        first = p["cond_nconsts"]
        last = first + p["body_nconsts"]
        constants, carry = values[first:last], values[last:]

        def trip(carry: Sequence[Value], weights: np.ndarray) -> list[Value]:
            return self.run(p["body_jaxpr"], [*constants, *carry], weights)

        loop = counted_loop(p["cond_jaxpr"], p["body_jaxpr"], values[:first], carry, p["body_nconsts"])
        kept = kept_by(p["body_jaxpr"], p["body_nconsts"], len(carry))
        if loop is not None and loop.trips is not None:
            return self._trips(trip, p["body_jaxpr"], carry, kept, loop.trips, weights)
        inside = unchanged(carry, kept)
        count = self._by_table(trip, inside, loop, weights) or self._by_lookups(trip, inside, weights)
        self.found.reasons[_OPEN_LOOP if count is None else _LOOP_BY_TABLE] = None
        trip(inside, weights * (1 if count is None else count))
        return inside

    def _trips(
        self,
        trip: _Trip,
        body: Any,
        carry: Sequence[Value],
        kept: Sequence[bool],
        trips: np.ndarray,
        weights: np.ndarray,
    ) -> list[Value]:
        """The trips of a loop, one by one where that may matter; `kept`: what a trip returns as it was."""
        most = int(trips.max(initial=0))
        if most <= 1 or (most <= _MOST_TRIPS and any(isinstance(x, np.ndarray) for x in carry) and _has_branches(body)):
            for number in range(most):
                carry = trip(carry, weights * (trips > number))
        else:
            trip(unchanged(carry, kept), weights * trips)
        return unchanged(carry, kept)

    def _by_table(
        self, trip: _Trip, inside: list[Value], loop: CountedLoop | None, weights: np.ndarray
    ) -> float | None:
        """How many trips a loop makes at most that reads a table from a place of each step's own on: up to the place of
        the next step. None where it reads none so."""
        if loop is None or loop.start is None:
            return None
        places = []
        for number in (0, 1):
            carry = list(inside)
            carry[loop.counter] = loop.start + number * loop.step
            places.append(self._tried(trip, carry, weights)[1])
        found = [n for (one, a), (other, b) in zip(*places, strict=False) if one is other for n in rooms(one, a, b)]
        return min(found, default=None)

    def _by_lookups(self, trip: _Trip, inside: list[Value], weights: np.ndarray) -> float | None:
        """How many trips a loop makes that looks up places in tables, if all steps together look up each of the largest
        one once, for each part of main memory that they copy from. None where it looks up none."""
        found, reads = self._tried(trip, inside, np.ones(len(weights)))
        looked_up = [table for table, place in reads if table.values is None and any(i is None for i in place)]
        if _LOOP_BY_TABLE in found.reasons or not looked_up:
            return None
        table = max(looked_up, key=lambda each: math.prod(each.shape))
        count, copies = sum(each is table for each in looked_up), found.copies / len(weights)
        return math.prod(table.shape) * found.places / (min(count, copies) or count) / len(weights)

    def _tried(self, trip: _Trip, carry: list[Value], weights: np.ndarray) -> tuple[BodyWork, list[Read]]:
        """What a trip does, and the places in tables that it reads."""
        before, self.reads = self.reads, []
        found, _ = self._apart(partial(trip, carry, weights))
        reads, self.reads = self.reads, before
        return found, reads

    # Copies.

    def _started(self, equation: Any, scope: _Scope, weights: np.ndarray) -> list[Value]:
        size, is_near = _copied_bytes(equation)
        if is_near:
            self.found.near += size * float(weights.sum())
        else:
            self.found.started += size * float(weights.sum())
            self.found.starts += float(weights.sum())
            self.found.places = max(self.found.places, self._places(equation, scope))
        return [None] * len(equation.outvars)

    def _awaited(self, equation: Any, scope: _Scope, weights: np.ndarray) -> list[Value]:
        size, is_near = _copied_bytes(equation)
        if is_near:
            self.found.near_awaited += size * float(weights.sum())
        else:
            self.found.awaited += size * float(weights.sum())
        return [None] * len(equation.outvars)

    def _places(self, equation: Any, scope: _Scope) -> int:
        """From how many places a copy begins, as far as these are known."""
        source, *_ = equation.params["tree"].unflatten(equation.invars)
        indices = [i for t in getattr(source, "transforms", ()) if isinstance(t, NDIndexer) for i in t.indices]
        starts = [getattr(i, "start", i) for i in indices]
        known = [scope.value(i) for i in starts if not isinstance(i, (int, np.integer))]
        varying = [x for x in known if isinstance(x, np.ndarray) and x.ndim]
        return len({*zip(*(x.tolist() for x in varying), strict=True)}) if varying else 1

    def _scoped(self, equation: Any, scope: _Scope, weights: np.ndarray) -> list[Value]:
        """A body with scratch of its own; what is around it are its constants."""
        inner = equation.params["jaxpr"]
        around = _Scope({}, {})
        around.set(inner.constvars, scope.values(equation.invars))
        for each in inner.eqns:
            self._equation(each, around, weights)
        return around.values(inner.outvars)


_Trip = Callable[[Sequence[Value], np.ndarray], list[Value]]
_Handler = Callable[[_Counter, Any, _Scope, np.ndarray], list[Value]]

_HANDLERS: Mapping[str, _Handler] = {
    "program_id": _Counter._program_id,
    "num_programs": _Counter._num_programs,
    "multiple_of": _Counter._same,
    "get": _Counter._get,
    "cond": _Counter._cond,
    "scan": _Counter._scan,
    "while": _Counter._while,
    "dma_start": _Counter._started,
    "dma_wait": _Counter._awaited,
    "run_scoped": _Counter._scoped,
}


def _chosen(taken: Sequence[np.ndarray], results: Sequence[list[Value]], by: Sequence[np.ndarray]) -> list[Value]:
    """The results of branches of which each step takes one, as far as all that are taken know them."""
    found: list[Value] = []
    for values in zip(*results, strict=True):
        known = [value for value in values if isinstance(value, np.ndarray)]
        is_same = all(value is values[0] for value in values)
        found.append(values[0] if is_same else np.select(by, known) if len(known) == len(values) else None)
    return found


def _has_branches(jaxpr: Any) -> bool:
    return any(e.primitive.name in ("cond", "while") for e in equations_in(jaxpr))


def _copied_bytes(equation: Any) -> tuple[float, bool]:
    """The bytes of a copy, and whether neither of its ends is in main memory."""
    source, target, *_ = equation.params["tree"].unflatten([x.aval for x in equation.invars])
    spaces = {str(getattr(getattr(x, "ref", x), "memory_space", "")) for x in (source, target)}
    return float(math.prod(target.shape) * np.dtype(target.dtype).itemsize), spaces.isdisjoint(IN_MEMORY)


def run_index_map(jaxpr: Any, indices: Sequence[np.ndarray], tables: Sequence[ScalarTable]) -> list[np.ndarray | None]:
    """The entries of an index map for these steps; None where tables that are not known say them."""
    results = _Counter({}, {}).run(jaxpr, [*indices, *tables], np.zeros(1))
    return [value if isinstance(value, np.ndarray) else None for value in results]
