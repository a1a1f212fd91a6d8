"""From one sharding to another as the cheapest sequence of collectives.

    plan_reshard    names -> abstract problem (memo) -> direct plan -> search where the direct plan may not be the best

Plans are compared by (time, wire bytes, communicating ops, ops). The direct plan is returned on ties, and at once where
it meets the lower bound. The search runs on whole atoms first, then on their parts (mostly primes).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice, pairwise, product

from sdy_jax.errors import InternalError, ShardingError
from sdy_jax.lowering.reshard.cost import CostModel, same_cost
from sdy_jax.lowering.reshard.greedy import greedy, last_resort
from sdy_jax.lowering.reshard.major_parts import with_cuts
from sdy_jax.lowering.reshard.problem import (
    FREE,
    MERGEABLE,
    Price,
    ReshardProblem,
    ReshardStep,
    State,
    atoms_of,
    mask_of,
)
from sdy_jax.lowering.reshard.search import search
from sdy_jax.representation.mesh import AxisRef, Mesh
from sdy_jax.representation.sdy_collectives import BY_STRIPS, FLAT, SdyCollective
from sdy_jax.representation.sharding import TensorSharding

MAX_REFINEMENTS = 8
"""Orders of the parts of composite axes that are tried (a 6-way axis is 2x3 or 3x2). Guessed, a guard: each is a
search; with fewer, some reshards between odd parts of axes cost more."""

MAX_PARTS = 6
"""With more parts than that the search often gives up: it takes larger ones. Measured (2026-11, planning of
`scripts/bench_models`): of 315 reshards of an 8B model on 256 devices, cut in 7 and 8, larger parts changed 49 (0.54 to
1.22 of the price) in half the time, and no plan."""

_SLACK = 1 + 1e-9
"""Given: prices are sums of floats, whose rounding is no difference."""

_FIRST = 2
"""Cuts of the axes of which one has to lead to something better than the direct plan, or no others are tried. Measured
(2026-11, planning of `scripts/bench_models`): of 241 reshards of an 8B model on 2 x 16 x 16 none was found later, and
these tries took a third of the time."""

_FEW_PARTS = 4
"""With more parts than that no further cut is tried after one beyond the first that led to nothing. Measured (2026-11,
planning of `scripts/bench_models`): of 76 reshards of that model one was then found for 0.997 of the price, in two and
a half times as long."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One step of a plan.

    `op` is what the op says that it becomes; `result` is the closed, canonical sharding after the step; `wire_bytes` is
    per device; `reduction` is the kind of an all_reduce or reduce_scatter.
    """

    op: SdyCollective
    result: TensorSharding
    wire_bytes: float
    reduction: str = "sum"

    def __str__(self) -> str:
        """The attribute of the op as the dialect prints it; nothing for a permute."""
        return str(self.op)

    @property
    def kind(self) -> str:
        return self.op.kind


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """The steps in order, the bytes that each device sends in all of them, and their time by the cost model."""

    steps: tuple[Collective, ...]
    wire_bytes: float
    cost: float


def plan_reshard(
    shape: tuple[int, ...],
    itemsize: float,
    source: TensorSharding,
    target: TensorSharding,
    mesh: Mesh,
    costs: CostModel = CostModel(),  # noqa: B008 - immutable
    whole_axes: bool = False,
    strips: bool = True,
) -> ReshardPlan:
    """The cheapest collectives that take a tensor of global `shape` from one sharding to another on one mesh.

    Args:
        shape: the global shape. A dimension that does not divide lies in padded blocks, `ceil(n / shards)` long.
        itemsize: bytes per element.
        source, target: explicit replication, openness and priorities are ignored. Unreduced axes that the target does
            not have are reduced with the source's reduction; new ones become unreduced by the target's for free. Where
            both have unreduced axes and the reductions or meshes differ, all of the source's are reduced first.
        mesh: the mesh of both. Shardings that name different meshes are on meshes with these axes and the same devices
            in different orders: the results up to some permute are on the source's mesh, from there on the target's.
        costs: default: bytes on the wire.
        whole_axes: whether steps may use only the axes that the shardings name, none of their parts: a `shard_map` that
            somebody else has written cannot be refined.
        strips: whether a dimension whose blocks neither join to blocks nor are cut into blocks may be sent in strips,
            which are no collective of the dialect: such a step is an `sdy.reshard`.

    Raises:
        ShardingError: ranks differ.

    >>> from sdy_jax.representation.mesh import AxisRef, Mesh
    >>> x, = (AxisRef("x"),)
    >>> source, target = (TensorSharding.closed("m", axes) for axes in ([[x], []], [[], [x]]))
    >>> plan = plan_reshard((16, 8), 4, source, target, Mesh.of(x=2))
    >>> [(step.kind, str(step), step.wire_bytes) for step in plan.steps]
    [('all_to_all', '[{"x"}: 0->1]', 128.0)]
    """
    return _remembered(tuple(shape), itemsize, source, target, mesh, costs, whole_axes, strips)


@lru_cache(maxsize=1 << 14)
def _remembered(
    shape: tuple[int, ...],
    itemsize: float,
    source: TensorSharding,
    target: TensorSharding,
    mesh: Mesh,
    costs: CostModel,
    whole_axes: bool,
    strips: bool,
) -> ReshardPlan:
    _check(shape, source, target)
    if source.unreduced_axes and target.unreduced_axes and _combine_differently(source, target):
        whole = replace(target, unreduced_axes=(), reduction="sum")
        ways = ((source, whole), (whole, target))
        ways = ((source, whole), (whole, target))
        first, second = (_remembered(shape, itemsize, *ends, mesh, costs, whole_axes, strips) for ends in ways)
        return ReshardPlan(first.steps + second.steps, first.wire_bytes + second.wire_bytes, first.cost + second.cost)
    problem, atoms = _problem(shape, itemsize, source, target, mesh, costs)
    problem = replace(problem, divides=not whole_axes, strips=strips) if whole_axes or not strips else problem
    cut, steps, price = _solve(problem)
    names = _Names([part for atom, sizes in zip(atoms, cut, strict=True) for part in _parts(atom, sizes)], mesh)
    collectives = names.collectives(_refined(problem, cut), steps, source, target)
    return ReshardPlan(collectives, price.wire_bytes, price.time)


def strips_time(
    shape: tuple[int, ...],
    itemsize: float,
    source: TensorSharding,
    target: TensorSharding,
    mesh: Mesh,
    costs: CostModel,
) -> float:
    """The time of strips that lead from one sharding to another at once, on one mesh; infinite where none do."""
    problem, _ = _problem(shape, itemsize, source, target, mesh, costs)
    before, after = problem.source, problem.target
    if before.unreduced != after.unreduced or not problem.change(before, after):
        return math.inf
    return problem.price(BY_STRIPS, 0, before, after).time


def _combine_differently(source: TensorSharding, target: TensorSharding) -> bool:
    """Whether two unreduced shardings cannot share axes: their reductions or their meshes differ."""
    return source.reduction != target.reduction or source.mesh != target.mesh


def _check(shape: tuple[int, ...], source: TensorSharding, target: TensorSharding) -> None:
    for sharding in (source, target):
        if sharding.rank != len(shape):
            raise ShardingError(f"sharding <{sharding}> has rank {sharding.rank}, but the tensor has shape {shape}")


# --- names to atoms and back --------------------------------------------------------------------------------------

Piece = tuple[str, int, int]
"""Axis name, pre-size, size."""


def _pieces(axes: Sequence[AxisRef], mesh: Mesh) -> list[Piece]:
    pieces = [(a.name, a.pre_size, a.size(mesh)) for a in axes]
    return [p for p in pieces if p[2] > 1]


def _lists(sharding: TensorSharding, mesh: Mesh) -> list[list[Piece]]:
    return [_pieces(axes, mesh) for axes in (*sharding.axes, sharding.unreduced_axes)]


def _edges(lists: Iterable[list[Piece]]) -> dict[str, set[int]]:
    """The positions at which each axis is cut; atoms are the pieces between them."""
    edges: dict[str, set[int]] = {}
    for axes in lists:
        for name, pre, size in axes:
            edges.setdefault(name, set()).update((pre, pre * size))
    return edges


def _cut(piece: Piece, edges: dict[str, set[int]]) -> list[Piece]:
    name, pre, size = piece
    if len(edges[name]) == 2:
        return [piece]
    inside = sorted(e for e in edges[name] if pre <= e <= pre * size)
    return [(name, lo, hi // lo) for lo, hi in pairwise(inside)]


def _problem(
    shape: tuple[int, ...],
    itemsize: float,
    source: TensorSharding,
    target: TensorSharding,
    mesh: Mesh,
    costs: CostModel,
) -> tuple[ReshardProblem, list[Piece]]:
    """The problem without names, and the atoms that its numbers stand for, in order of first appearance."""
    ends = _lists(source, mesh), _lists(target, mesh)
    edges = with_cuts(_edges([*ends[0], *ends[1]]), costs.major_parts)
    atoms = list(dict.fromkeys([a for lists in ends for axes in lists for p in axes for a in _cut(p, edges)]))
    numbers = {atom: number for number, atom in enumerate(atoms)}

    def state(lists: list[list[Piece]]) -> State:
        *dims, unreduced = [tuple([numbers[a] for p in axes for a in _cut(p, edges)]) for axes in lists]
        return State(tuple(dims), mask_of(unreduced))

    states, sizes = (state(ends[0]), state(ends[1])), [size for *_, size in atoms]
    min_shards = min([math.prod([sizes[atom] for axes in dims for atom in axes]) for dims, _ in states])
    links = tuple([costs.link(AxisRef.canonical(*atom, mesh), mesh) for atom in atoms])
    reorders = source.mesh != target.mesh
    return ReshardProblem(shape, itemsize, links, costs.combines, *states, min_shards, reorders), atoms


def _parts(atom: Piece, sizes: tuple[int, ...]) -> list[Piece]:
    parts, (name, pre, _) = [], atom
    for size in sizes:
        parts.append((name, pre, size))
        pre *= size
    return parts


# --- solving an abstract problem ----------------------------------------------------------------------------------

AtomCut = tuple[tuple[int, ...], ...]
"""Per atom, the sizes that it is cut into."""

ReshardSolution = tuple[AtomCut, tuple[ReshardStep, ...], Price]


@lru_cache(maxsize=1 << 14)
def _solve(problem: ReshardProblem) -> ReshardSolution:
    """The best steps, and how the atoms were cut for them. Memoized without names: equal problems share it."""
    whole: AtomCut = tuple((n,) for n in problem.sizes)
    if problem.source == problem.target and not problem.reorders:
        return whole, (), FREE
    one = _single_step(problem)
    if one is not None and problem.is_of_one_speed(one.group) and not problem.cuts_tiles:
        return whole, (one,), _priced(problem, one, problem.source)
    cuts = _fine_cuts(problem)
    best = direct = before = _direct(problem, cuts[0])
    least, parts = problem.bound(problem.source), sum(map(len, cuts[0]))
    tried = dict.fromkeys([whole, *(cuts if parts <= MAX_PARTS else _coarse_cuts(problem))])
    for number, cut in enumerate(tried):
        is_idle = best is direct if parts <= _FEW_PARTS else best is before
        if best and (_is_best(problem, best[2], least) or (number >= _FIRST and is_idle)):
            break
        before, best = best, _better(best, _searched(_refined(problem, cut), cut, best))
    return best or _uncapped(problem)


def _is_best(problem: ReshardProblem, price: Price, least: float) -> bool:
    """Whether a plan sends the least bytes that there are, over the fastest atoms, in one collective."""
    quickest = same_cost(price.time, least / problem.fastest)
    return same_cost(price.wire_bytes, least) and (
        quickest or (price.communicating == 1 and problem.is_of_one_speed(problem.all_atoms) and not problem.cuts_tiles)
    )


def _single_step(problem: ReshardProblem) -> ReshardStep | None:
    """The one step that does it all, where it is certainly the best: target and source differ in one way only."""
    source, target = problem.source, problem.target
    if problem.reorders:
        return _single_permute(problem)
    if source.dims == target.dims:
        if not problem.to_unreduce:
            return ReshardStep("all_reduce", problem.to_reduce, target)
        return None if problem.to_reduce else ReshardStep("replicated_to_unreduced", problem.to_unreduce, target)
    if not problem.leads(source, target):
        return None
    pairs = list(zip(source.dims, target.dims, strict=True))
    if source.unreduced == target.unreduced:
        if all(have[: len(want)] == want for have, want in pairs):
            return ReshardStep("all_gather", problem.used(source) & ~problem.used(target), target)
        appended = problem.used(target) & ~problem.used(source)
        if _appends(problem, pairs, appended):
            return ReshardStep("all_slice", appended, target)
    # In padded blocks more may be scattered than an all_reduce sends.
    if problem.is_even and not problem.to_unreduce and _appends(problem, pairs, problem.to_reduce):
        return ReshardStep("reduce_scatter", problem.to_reduce, target)
    return None


def _single_permute(problem: ReshardProblem) -> ReshardStep | None:
    """Slicing before and gathering after a permute saves nothing; so with equal shards the permute does it all."""
    source, target = problem.source, problem.target
    whole = not source.unreduced and not target.unreduced
    return (
        ReshardStep("collective_permute", 0, target)
        if whole and problem.counts(source) == problem.counts(target)
        else None
    )


def _appends(problem: ReshardProblem, pairs: list[tuple[tuple[int, ...], tuple[int, ...]]], atoms: int) -> bool:
    """Target dimensions are the source's with exactly these atoms behind."""
    if any(want[: len(have)] != have for have, want in pairs):
        return False
    return mask_of(a for have, want in pairs for a in want[len(have) :]) == atoms


def _fine_cuts(problem: ReshardProblem) -> list[AtomCut]:
    """The cuts of every atom into the parts that plans are made of, those of ascending primes first.

    The parts are primes, or one power of a prime where all that is divided and all that divides are powers of that: on
    a 256x256 mesh whole axes move, as on a 2x2 mesh.
    """
    sizes, whole = problem.sizes, math.prod(problem.sizes)
    if not problem.divides:
        return [tuple((n,) for n in sizes)]
    units = [_unit(p, [*sizes, *(math.gcd(n, whole) for n in problem.shape)]) for p in sorted(set(_primes(whole)))]
    ways = [list(islice(_orders(_parts_in(units, n)), MAX_REFINEMENTS)) for n in sizes]
    return list(islice(product(*ways), MAX_REFINEMENTS))


def _coarse_cuts(problem: ReshardProblem) -> list[AtomCut]:
    """Every atom whole, or in two of which one is as large as the largest thing that is smaller than the atom."""
    if not problem.divides:
        return []
    whole = math.prod(problem.sizes)
    numbers = {*problem.sizes, *(math.gcd(n, whole) for n in problem.shape)} - {1}
    ways = []
    for size in problem.sizes:
        part = max((n for n in numbers if n < size and size % n == 0), default=size)
        ways.append(list(dict.fromkeys([(size // part, part), (part, size // part)])) if part < size else [(size,)])
    return list(islice(product(*ways), MAX_REFINEMENTS))


def _orders(parts: list[int]) -> Iterator[tuple[int, ...]]:
    """The distinct permutations of a sorted list, in ascending order."""
    if not parts:
        yield ()
    for first in dict.fromkeys(parts):
        rest = parts.copy()
        rest.remove(first)
        yield from ((first, *order) for order in _orders(rest))


def _unit(prime: int, numbers: list[int]) -> int:
    """The largest power of a prime of which all numbers hold a power."""
    return prime ** math.gcd(*(_primes(n).count(prime) for n in numbers if n))


def _parts_in(units: list[int], n: int) -> list[int]:
    parts = []
    for unit in units:
        while n % unit == 0:
            parts.append(unit)
            n //= unit
    return parts


@lru_cache(maxsize=1 << 10)
def _primes(n: int) -> tuple[int, ...]:
    factors, p = [], 2
    while n > 1:
        while n % p == 0:
            factors.append(p)
            n //= p
        p += 1
    return tuple(factors)


def _refined(problem: ReshardProblem, cut: AtomCut) -> ReshardProblem:
    """The same problem on the pieces of its atoms."""
    if all(len(sizes) == 1 for sizes in cut):
        return problem
    starts = [sum(map(len, cut[:i])) for i in range(len(cut))]

    def state(coarse: State) -> State:
        dims = tuple(tuple(starts[a] + i for a in axes for i in range(len(cut[a]))) for axes in coarse.dims)
        unreduced = mask_of(starts[a] + i for a in atoms_of(coarse.unreduced) for i in range(len(cut[a])))
        return State(dims, unreduced)

    return ReshardProblem(
        problem.shape,
        problem.itemsize,
        tuple(part for link, sizes in zip(problem.links, cut, strict=True) for part in link.cut(sizes)),
        problem.combines,
        state(problem.source),
        state(problem.target),
        problem.min_shards,
        problem.reorders,
        problem.divides,
        problem.strips,
    )


def _direct(problem: ReshardProblem, cut: AtomCut) -> ReshardSolution | None:
    fine = _refined(problem, cut)
    steps = greedy(fine)
    return None if steps is None else (cut, *_merged(fine, steps))


def _searched(problem: ReshardProblem, cut: AtomCut, known: ReshardSolution | None) -> ReshardSolution | None:
    steps = search(problem, known[2] if known else None)
    return None if steps is None else (cut, *_merged(problem, steps))


def _better(first: ReshardSolution | None, second: ReshardSolution | None) -> ReshardSolution | None:
    """The cheaper one; the first on ties of time, bytes and communicating steps."""
    if first is None or second is None:
        return first or second
    a, b = first[2], second[2]
    for x, y in ((a.time, b.time), (a.wire_bytes, b.wire_bytes), (a.communicating, b.communicating)):
        if not same_cost(x, y):
            return first if x < y else second
    return first


def _uncapped(problem: ReshardProblem) -> ReshardSolution:
    """No way within the memory cap: dimensions are too small to hold what has to be sliced first."""
    cut = _fine_cuts(problem)[0]
    fine = replace(_refined(problem, cut), min_shards=1)
    best: ReshardSolution = (cut, *_merged(fine, last_resort(fine)))
    return _better(best, _searched(fine, cut, best)) or best


def _merged(problem: ReshardProblem, steps: list[ReshardStep]) -> tuple[tuple[ReshardStep, ...], Price]:
    """Neighbours of one kind become one step where that costs no more; and the price of it all."""
    kept: list[tuple[State, ReshardStep, Price]] = []
    before = problem.source
    for step in steps:
        price = _priced(problem, step, before)
        if kept and kept[-1][1].kind == step.kind and step.kind in MERGEABLE:
            start, last, paid = kept[-1]
            joined = ReshardStep(step.kind, last.group | step.group, step.state)
            at_once = _priced(problem, joined, start)
            if at_once.time <= (paid.time + price.time) * _SLACK:
                kept[-1] = (start, joined, at_once)
                before = step.state
                continue
        kept.append((before, step, price))
        before = step.state
    total = FREE
    for _, _, price in kept:
        total = total.plus(price)
    return tuple(step for _, step, _ in kept), total


def _priced(problem: ReshardProblem, step: ReshardStep, before: State) -> Price:
    if step.kind == "collective_permute":
        return problem.permute_price(before)
    return problem.price(step.kind, step.group, before, step.state)


# --- steps to collectives -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Names:
    """The mesh's names for the atoms of a solved problem."""

    pieces: list[Piece]
    mesh: Mesh

    def collectives(
        self, problem: ReshardProblem, steps: tuple[ReshardStep, ...], source: TensorSharding, target: TensorSharding
    ) -> tuple[Collective, ...]:
        kind = source.reduction if source.unreduced_axes else target.reduction
        made, before, mesh = [], problem.source, source.mesh
        for step in steps:
            mesh = target.mesh if step.kind == "collective_permute" else mesh  # one permute at least, if they differ
            result = self.sharding(step.state, mesh, kind)
            collective = self.collective_of(step, before)
            made.append(Collective(collective, result, self.wire_bytes(problem, step, before), kind))
            before = step.state
        if before != problem.target:
            raise InternalError(f"the plan from <{source}> to <{target}> ends at another sharding: {made}")
        return tuple(made)

    def wire_bytes(self, problem: ReshardProblem, step: ReshardStep, before: State) -> float:
        """What a device sends in a step."""
        if step.kind == BY_STRIPS:
            return problem.price_of_planned_strips(before, step.state).wire_bytes
        return _priced(problem, step, before).wire_bytes

    def collective_of(self, step: ReshardStep, before: State) -> SdyCollective:
        """What a step says with names."""
        pairs = list(zip(before.dims, step.state.dims, strict=True))
        if step.kind == "collective_permute":
            return SdyCollective(step.kind)
        if step.kind == "all_to_all":
            return SdyCollective(step.kind, params=self.exchanged(pairs))
        if step.kind == BY_STRIPS:
            return SdyCollective(step.kind, self.in_mesh_order(step.group))
        if step.kind in FLAT:
            return SdyCollective(step.kind, self.in_mesh_order(step.group))
        return SdyCollective(step.kind, tuple(self.axes(max(pair, key=len)[min(map(len, pair)) :]) for pair in pairs))

    def exchanged(self, pairs: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> tuple:
        """Which atoms went from where to where, sorted by source."""
        arrived = {after[len(before) :]: dim for dim, (before, after) in enumerate(pairs) if len(after) > len(before)}
        params = []
        for dim, (before, after) in enumerate(pairs):
            if len(after) < len(before):
                moved = before[len(after) :]
                params.append((self.axes(moved), dim, arrived[moved]))
        return tuple(params)

    def sharding(self, state: State, mesh_name: str | Mesh, kind: str) -> TensorSharding:
        unreduced = self.in_mesh_order(state.unreduced)
        dims = [self.axes(axes) for axes in state.dims]
        return TensorSharding.closed(mesh_name, dims, unreduced, kind if unreduced else "sum")

    def in_mesh_order(self, mask: int) -> tuple[AxisRef, ...]:
        pieces = sorted((self.pieces[a] for a in atoms_of(mask)), key=lambda p: (self.mesh.positions[p[0]], p[1]))
        return self.joined(pieces)

    def axes(self, atoms: Sequence[int]) -> tuple[AxisRef, ...]:
        return self.joined([self.pieces[a] for a in atoms])

    def joined(self, pieces: list[Piece]) -> tuple[AxisRef, ...]:
        """Neighbours of one axis that continue one another become one reference."""
        made: list[Piece] = []
        for name, pre, size in pieces:
            if made and made[-1][0] == name and made[-1][1] * made[-1][2] == pre:
                made[-1] = (name, made[-1][1], made[-1][2] * size)
            else:
                made.append((name, pre, size))
        return tuple(AxisRef.canonical(name, pre, size, self.mesh) for name, pre, size in made)
