"""The bytes of a kernel's blocks: what its pipeline reads from main memory and writes to it.

Steps of a grid run in order, the last dimension fastest. A block is read when its index is another one than a step
before, and written when it is another one than a step later: so an array whose index map leaves out the innermost
dimensions moves once for all of their steps, and one that it leaves out another dimension again for each.

    grid (heads, q blocks, k blocks):  q (h, i, 0)   heads x q blocks
                                       k (h, j, 0)   heads x q blocks x k blocks
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.extend.core import Literal

from sdy_jax.kernels.body_work import IN_MEMORY, run_index_map
from sdy_jax.kernels.counted_loops import Table

_MOST_STEPS = 1 << 18
"""Steps of a grid for which index maps are evaluated. Guessed: of larger grids some indices of the outermost dimensions
say how often blocks move, as most are followed by these, and all else changes slowly; in a tenth of a second."""

BY_TABLE = "where blocks lie is told by tables when it runs: they count as moving with each index of these"


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps of a grid in order, as an index per dimension; each stands for so many of the whole grid."""

    indices: tuple[np.ndarray, ...]
    weight: float

    @staticmethod
    def of(grid: Sequence[int], most: int = _MOST_STEPS) -> Steps:
        """All steps of a grid; of too many, those with some indices of its outermost dimensions, evenly spread."""
        kept = list(grid)
        for dim, extent in enumerate(grid):
            others = math.prod(kept) // max(extent, 1)
            kept[dim] = max(1, min(extent, most // max(others, 1)))
        whole, some = math.prod(grid), math.prod(kept)
        indices = np.indices(kept).reshape(len(kept), math.prod(kept))
        for dim, (extent, count) in enumerate(zip(grid, kept, strict=True)):
            if count < extent:
                indices[dim] = (2 * indices[dim] + 1) * extent // (2 * count)
        return Steps(tuple(indices), whole / some if some else 0.0)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of blocks, and of arrays that stay in main memory, of which the body copies what it needs."""

    blocks: float
    left: float
    reasons: tuple[str, ...]


def block_traffic(mapping: Any, steps: Steps, tables: Sequence[Table], shares_cache: bool) -> Traffic:
    """The bytes of a call's blocks.

    Args:
        mapping: its grid mapping.
        steps: those of its grid.
        tables: the scalars that index maps read.
        shares_cache: whether cores share a cache of all that is read again, as those of GPUs do; then an array moves
            once.
    """
    blocks, left, reasons = 0.0, 0.0, dict[str, None]()
    for each in mapping.block_mappings:
        array = math.prod(each.array_aval.shape) * float(np.dtype(each.array_aval.dtype).itemsize)
        if str(getattr(each.transformed_block_aval, "memory_space", "")) in IN_MEMORY:
            left += array
            continue
        moves = _moves(each, steps, tables, reasons) * _block_bytes(each)
        blocks += min(array, moves) if shares_cache else moves
    return Traffic(blocks, left, tuple(reasons))


def _block_bytes(each: Any) -> float:
    shape = each.array_aval.shape
    sizes = (min(int(getattr(entry, "block_size", 1)), n) for entry, n in zip(each.block_shape, shape, strict=True))
    return float(math.prod(sizes) * np.dtype(each.array_aval.dtype).itemsize)


def _moves(each: Any, steps: Steps, tables: Sequence[Table], reasons: dict[str, None]) -> float:
    """How often a block moves."""
    jaxpr, count = each.index_map_jaxpr, len(steps.indices[0]) if steps.indices else 1
    changed = np.zeros(max(count - 1, 0), bool)
    entries = run_index_map(jaxpr, steps.indices, tables)
    for out, value in zip(jaxpr.jaxpr.outvars, entries, strict=True):
        if value is None:
            reasons[BY_TABLE] = None
            parts = [steps.indices[dim] for dim in _dims_of(jaxpr.jaxpr, out, len(steps.indices))]
        else:
            parts = [np.broadcast_to(value, (count,))]
        for part in parts:
            changed |= part[1:] != part[:-1]
    return float(1 + changed.sum()) * steps.weight if count else 0.0


def _dims_of(jaxpr: Any, out: Any, rank: int) -> list[int]:
    """The grid dimensions that an entry of an index map depends on."""
    needed = {out}
    for equation in reversed(jaxpr.eqns):
        if needed.intersection(equation.outvars):
            needed.update(x for x in equation.invars if not isinstance(x, Literal))
    return [dim for dim, x in enumerate(jaxpr.invars[:rank]) if x in needed]


def known_grid(mapping: Any, bounds: Sequence[np.ndarray | None], reasons: dict[str, None]) -> tuple[int, ...]:
    """The extents of a grid; of a bound that is told when it runs what is known of it, else the most that a block which
    follows it allows, else one.

    Args:
        mapping: the grid mapping.
        bounds: the values of dynamic bounds, in order.
        reasons: takes what is not exact.
    """
    found, given = [], list(bounds)
    for dim, extent in enumerate(mapping.grid):
        if isinstance(extent, int):
            found.append(extent)
            continue
        value = given.pop(0) if given else None
        if value is not None:
            found.append(int(value))
            continue
        most = _blocks_along(mapping, dim)
        reasons[f"the grid's dimension {dim} ends where it is told when it runs: {most or 1} steps count"] = None
        found.append(most or 1)
    return tuple(found)


def _blocks_along(mapping: Any, dim: int) -> int:
    """The most blocks that an array has along a dimension which follows one of the grid."""
    most = 0
    for each in mapping.block_mappings:
        jaxpr = each.index_map_jaxpr.jaxpr
        for out, entry, n in zip(jaxpr.outvars, each.block_shape, each.array_aval.shape, strict=True):
            if out is jaxpr.invars[dim]:
                most = max(most, -(-n // int(getattr(entry, "block_size", 1))))
    return most


def tables_of(avals: Sequence[Any], known: Sequence[np.ndarray | None]) -> list[Table]:
    """The scalars of a call, as they are known."""
    values: Mapping[int, np.ndarray | None] = dict(enumerate(known))
    return [Table(tuple(aval.shape), values.get(i)) for i, aval in enumerate(avals)]
