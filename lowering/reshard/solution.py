"""The best steps for an abstract problem: the direct plan, or what the search finds where that may not be the best.

Plans are compared by (time, wire bytes, communicating ops, ops). The direct plan is returned on ties, and at once where
it meets the lower bound. The search runs on whole atoms first, then on their parts (mostly primes).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from sdy_jax.lowering.reshard.atom_cuts import AtomCut, coarse_cuts, fine_cuts, refined
from sdy_jax.lowering.reshard.greedy import greedy, last_resort
from sdy_jax.lowering.reshard.problem import ReshardProblem
from sdy_jax.lowering.reshard.search import search
from sdy_jax.lowering.reshard.states import FREE, MERGEABLE, Price, ReshardStep, State, mask_of, same_cost

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

ReshardSolution = tuple[AtomCut, tuple[ReshardStep, ...], Price]


@lru_cache(maxsize=1 << 14)
def solved(problem: ReshardProblem) -> ReshardSolution:
    """The best steps, and how the atoms were cut for them. Memoized without names: equal problems share it."""
    whole: AtomCut = tuple((n,) for n in problem.sizes)
    if problem.source == problem.target and not problem.reorders:
        return whole, (), FREE
    one = _single_step(problem)
    if one is not None and problem.is_of_one_speed(one.group) and not problem.cuts_tiles:
        return whole, (one,), priced(problem, one, problem.source)
    cuts = fine_cuts(problem)
    best = direct = before = _direct(problem, cuts[0])
    least, parts = problem.bound(problem.source), sum(map(len, cuts[0]))
    tried = dict.fromkeys([whole, *(cuts if parts <= MAX_PARTS else coarse_cuts(problem))])
    for number, cut in enumerate(tried):
        is_idle = best is direct if parts <= _FEW_PARTS else best is before
        if best and (_is_best(problem, best[2], least) or (number >= _FIRST and is_idle)):
            break
        before, best = best, _better(best, _searched(refined(problem, cut), cut, best))
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


def _direct(problem: ReshardProblem, cut: AtomCut) -> ReshardSolution | None:
    fine = refined(problem, cut)
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
    cut = fine_cuts(problem)[0]
    fine = replace(refined(problem, cut), min_shards=1)
    best: ReshardSolution = (cut, *_merged(fine, last_resort(fine)))
    return _better(best, _searched(fine, cut, best)) or best


def _merged(problem: ReshardProblem, steps: list[ReshardStep]) -> tuple[tuple[ReshardStep, ...], Price]:
    """Neighbours of one kind become one step where that costs no more; and the price of it all."""
    kept: list[tuple[State, ReshardStep, Price]] = []
    before = problem.source
    for step in steps:
        price = priced(problem, step, before)
        if kept and kept[-1][1].kind == step.kind and step.kind in MERGEABLE:
            start, last, paid = kept[-1]
            joined = ReshardStep(step.kind, last.group | step.group, step.state)
            at_once = priced(problem, joined, start)
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


def priced(problem: ReshardProblem, step: ReshardStep, before: State) -> Price:
    if step.kind == "collective_permute":
        return problem.permute_price(before)
    return problem.price(step.kind, step.group, before, step.state)
