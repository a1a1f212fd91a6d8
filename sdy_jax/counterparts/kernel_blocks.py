"""Of which blocks a kernel makes blocks of its results: it may take multiples of some size only, or refuse."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import jax

from sdy_jax.counterparts.backward import Flat
from sdy_jax.counterparts.factors import Factor, Parts, Reasons, Types, block_types
from sdy_jax.counterparts.proof import said
from sdy_jax.lowering.blocking.spans import Span

_MOST_TRIED = 16
"""How many sizes of blocks a kernel is asked for along a factor. Chosen: powers of two up to 32768."""

Units = Mapping[Factor, int]
"""Per factor the elements that stay together: blocks are multiples of that."""


def units_of(
    functions: tuple[Flat, Flat], types: tuple[Types, Types], factors: Sequence[Factor], reasons: Reasons
) -> dict[Factor, int]:
    """The factors along which a kernel takes blocks, with the least that it takes.

    Args:
        functions: a kernel and its reference.
        types: those of its arguments and of its results.
        factors: those along which it is to be split.
        reasons: takes why it is not.
    """
    found = dict[Factor, int]()
    for factor in factors:
        problem = ""
        for unit in _units(factor.size):
            problem = _problem(functions, types, {**found, factor: unit})
            if not problem:
                found[factor] = unit
                break
        else:
            factor.refuse(problem, reasons)
    return found


def _units(size: int) -> list[int]:
    """Sizes of blocks, the smallest first."""
    return [n for n in range(1, size // 2 + 1) if not size % n][:_MOST_TRIED]


def _problem(functions: tuple[Flat, Flat], types: tuple[Types, Types], units: Units) -> str:
    """What is wrong with what both make of the smallest blocks; empty if nothing is."""
    parts = {factor: factor.size // unit for factor, unit in units.items()}
    given = block_types(types[0], parts)
    wanted = [_result_shape(index, type_.shape, parts) for index, type_ in enumerate(types[1])]
    blocks = _listed(type_.shape for type_ in given)
    for name, fun in zip(("the kernel", "its reference"), functions, strict=True):
        try:
            made = [tuple(block.shape) for block in jax.eval_shape(fun, *given)]
        except Exception as error:  # the user's function says by any error that it does not take them
            return f"{name} refuses blocks of {blocks}: {said(error)}"
        if made != wanted:
            return f"{name} makes {_listed(made)} of blocks of {blocks}, where blocks are {_listed(wanted)}"
    return ""


def _result_shape(index: int, shape: Sequence[int], parts: Parts) -> tuple[int, ...]:
    sizes = list(shape)
    for factor, count in parts.items():
        state = factor.results[index]
        if isinstance(state, Span):
            sizes[state.dim] //= count
    return tuple(sizes)


def _listed(shapes: Iterable[Sequence[int]]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes)
