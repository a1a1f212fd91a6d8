"""How atoms are cut into parts, so that reshards may move parts of axes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import islice, product

from sdy_jax.lowering.reshard.problem import ReshardProblem
from sdy_jax.lowering.reshard.states import State, atoms_of, mask_of

MAX_REFINEMENTS = 8
"""Orders of the parts of composite axes that are tried (a 6-candidate axis is 2x3 or 3x2). Guessed, a guard: each is a
search; with fewer, some reshards between odd parts of axes cost more."""


AtomCut = tuple[tuple[int, ...], ...]
"""Per atom, the sizes that it is cut into."""


def fine_cuts(problem: ReshardProblem) -> list[AtomCut]:
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


def coarse_cuts(problem: ReshardProblem) -> list[AtomCut]:
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


def refined(problem: ReshardProblem, cut: AtomCut) -> ReshardProblem:
    """The same problem on the pieces of its atoms."""
    if all(len(sizes) == 1 for sizes in cut):
        return problem
    starts = [sum(map(len, cut[:i])) for i in range(len(cut))]

    def state(coarse: State) -> State:
        dims = tuple(tuple(starts[a] + i for a in axes for i in range(len(cut[a]))) for axes in coarse.dims)
        unreduced = mask_of(starts[a] + i for a in atoms_of(coarse.unreduced) for i in range(len(cut[a])))
        return State(dims, unreduced)

    links = tuple(part for link, sizes in zip(problem.links, cut, strict=True) for part in link.cut(sizes))
    return replace(problem, links=links, source=state(problem.source), target=state(problem.target))
