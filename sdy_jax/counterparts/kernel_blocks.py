"""Of which blocks a kernel makes blocks of its results: it may take multiples of some size only, or refuse."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import jax

from sdy_jax.annotate.equations import all_equations
from sdy_jax.counterparts.backward import Flat
from sdy_jax.counterparts.factors import Factor, Parts, Reasons, Types, block_types
from sdy_jax.counterparts.proof import said
from sdy_jax.jax_internals.pallas import pallas_call_p
from sdy_jax.lowering.blocking.spans import Span

_MOST_TRIED = 16
"""How many sizes of blocks a kernel is asked for along a factor. Chosen: powers of two up to 32768."""

Units = Mapping[Factor, int]
"""Per factor the elements that stay together: blocks are multiples of that."""


@dataclass(frozen=True)
class KernelBlocks:
    """Which blocks a kernel and its reference take.

    Attributes:
        kernel, reference: functions of the same arrays.
        arguments, results: their types.
    """

    kernel: Flat
    reference: Flat
    arguments: Types
    results: Types

    def units(self, factors: Sequence[Factor], reasons: Reasons) -> dict[Factor, int]:
        """The factors along which they take blocks, with the least that they take; reasons for all others are added."""
        found = dict[Factor, int]()
        for factor in factors:
            problem = ""
            for unit in _units(factor.size):
                problem = self._problem({**found, factor: unit})
                if not problem:
                    found[factor] = unit
                    break
            else:
                factor.refuse(problem, reasons)
        return found

    @cached_property
    def _steps(self) -> list[int]:
        return _made(self.kernel, self.arguments)[1]

    def _problem(self, units: Units) -> str:
        """What is wrong with what both make of the smallest blocks; empty if nothing is."""
        parts = {factor: factor.size // unit for factor, unit in units.items()}
        given = block_types(self.arguments, parts)
        wanted = [_result_shape(index, type_.shape, parts) for index, type_ in enumerate(self.results)]
        blocks, steps = _listed(type_.shape for type_ in given), list[list[int]]()
        for name, fun in (("the kernel", self.kernel), ("its reference", self.reference)):
            try:
                made, grids = _made(fun, given)
            except Exception as error:  # the user's function says by any error that it does not take them
                return f"{name} refuses blocks of {blocks}: {said(error)}"
            if made != wanted:
                return f"{name} makes {_listed(made)} of blocks of {blocks}, where blocks are {_listed(wanted)}"
            steps.append(grids)
        if not _covers(steps[0], self._steps, prod(parts.values())):
            return f"the kernel's grids leave out some of blocks of {blocks}"
        return ""


def _units(size: int) -> list[int]:
    """Sizes of blocks, the smallest first."""
    return [n for n in range(1, size // 2 + 1) if not size % n][:_MOST_TRIED]


def _made(fun: Flat, types: Types) -> tuple[list[tuple[int, ...]], list[int]]:
    """The shapes of a function's results, and the steps of the grids of the Pallas kernels that it calls."""
    jaxpr, made = jax.make_jaxpr(fun, return_shape=True)(*types)
    calls = [eqn for eqn in all_equations(jaxpr) if eqn.primitive is pallas_call_p]
    grids = [eqn.params["grid_mapping"].grid for eqn in calls]
    return [tuple(type_.shape) for type_ in made], [prod([n for n in grid if isinstance(n, int)]) for grid in grids]


def _covers(on_block: Sequence[int], on_whole: Sequence[int], blocks: int) -> bool:
    """Whether grids of as many blocks have no fewer steps than those of the whole: `n // 16` has none for 8 rows."""
    if len(on_block) != len(on_whole):
        return sum(on_block) * blocks >= sum(on_whole)
    return all(one * blocks >= all_ for one, all_ in zip(on_block, on_whole, strict=True))


def _result_shape(index: int, shape: Sequence[int], parts: Parts) -> tuple[int, ...]:
    sizes = list(shape)
    for factor, count in parts.items():
        state = factor.results[index]
        if isinstance(state, Span):
            sizes[state.dim] //= count
    return tuple(sizes)


def _listed(shapes: Iterable[Sequence[int]]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes)
