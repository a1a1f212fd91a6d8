"""The work of a `pallas_call`: operations, bytes of its blocks, and the share of a chip's peak that kernels reach."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.extend.core import Literal

from sdy_jax.ir.custom_ops import StatedWork
from sdy_jax.ir.kernels.body import UNKNOWN_FORMS, reads_of
from sdy_jax.ir.kernels.body_work import IN_MEMORY, body_work, run_index_map
from sdy_jax.ir.kernels.index_arithmetic import ScalarTable

# The share of a chip's peak that kernels reach, by what they do.
#
# It is of arithmetic alone: a kernel that waits for its memory takes as long as that (`StatedWork`). The peak is that
# of `lowering/targets`, at which products of the compiler's own are priced.

ATTENTION = 0.6
"""Products with exponentials between them. Given (the specification of kernels): where no figure of the very kernel is
published or measured; FlashAttention-3 is published at 0.75 on an H100."""

ATTENTION_BY_TRITON = 0.35
"""Likewise by Triton. Published (Shah et al. 2024, FlashAttention-3): what FlashAttention-2, of the same form, reaches
on an H100."""

PRODUCTS = 0.986
"""Products alone, as grouped ones. Published (Gale et al. 2022, MegaBlocks): of the throughput of the vendor's own
products, with blocks of 128 x 128."""

NO_PRODUCTS = 1.0
"""Anything else. Given: it waits for memory."""


def efficiency_of(has_products: bool, has_transcendentals: bool, compiler: str) -> float:
    """The share of peak of a kernel that does such things; `compiler`: as `compiler_of` says."""
    if not has_products:
        return NO_PRODUCTS
    if not has_transcendentals:
        return PRODUCTS
    return ATTENTION_BY_TRITON if compiler == "triton" else ATTENTION


# The bytes of a kernel's blocks: what its pipeline reads from main memory and writes to it.
#
# Steps of a grid run in order, the last dimension fastest. A block is read when its index is another one than a step
# before, and written when it is another one than a step later: so an array whose index map leaves out the innermost
# dimensions moves once for all of their steps, and one that it leaves out another dimension again for each.
#
#     grid (heads, q blocks, k blocks):  q (h, i, 0)   heads x q blocks
#                                        k (h, j, 0)   heads x q blocks x k blocks

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


def block_traffic(mapping: Any, steps: Steps, tables: Sequence[ScalarTable], shares_cache: bool) -> Traffic:
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


def _moves(each: Any, steps: Steps, tables: Sequence[ScalarTable], reasons: dict[str, None]) -> float:
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


def tables_of(avals: Sequence[Any], known: Sequence[np.ndarray | None]) -> list[ScalarTable]:
    """The scalars of a call, as they are known."""
    values: Mapping[int, np.ndarray | None] = dict(enumerate(known))
    return [ScalarTable(tuple(aval.shape), values.get(i)) for i, aval in enumerate(avals)]


# The work of a `pallas_call`: counted from its body and its blocks, or as the call states it.
#
# What a call performs is counted over the steps of its grid (`body_work`), and what it moves over the blocks of its
# operands and results (`block_traffic`). Where either depends on what is known only when it runs, the call's own
# `cost_estimate` counts instead, if it has one; else the count is a bound, and says why. A count that is exact comes
# first: the estimate of JAX's flash attention, for one, is of all that a causal mask leaves out, too.

_ALIKE = 1e-6
"""Given: shares are sums of floats, whose rounding is no difference."""

_ON_GPUS = frozenset(("mosaic_gpu", "triton"))


def work_of_call(
    parameters: Mapping[str, Any],
    compiler: str = "mosaic",
    factors: Sequence[tuple[int, int]] = (),
    known: Sequence[np.ndarray | None] = (),
) -> StatedWork:
    """The work of a call.

    Args:
        parameters: those of the `pallas_call` equation.
        compiler: as `compiler_of` says.
        factors: of its sharding rule those that go over its grid: the dimension and the size of each.
        known: the values of its first operands, which are the bounds of its grid and scalars, where they are constants.
    """
    try:
        return _counted(parameters, compiler, factors, known)
    except UNKNOWN_FORMS as error:
        return _not_counted(parameters, f"its body is not counted ({type(error).__name__}: {error})")


def _not_counted(parameters: Mapping[str, Any], why: str) -> StatedWork:
    """What a call states; else no work, and each array once."""
    stated = parameters["cost_estimate"]
    if stated is not None:
        return StatedWork(float(stated.flops + stated.transcendentals), float(stated.bytes_accessed), basis=why)
    arrays = [each.array_aval for each in parameters["grid_mapping"].block_mappings]
    return StatedWork(0.0, float(sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in arrays)), basis=why)


def _counted(
    parameters: Mapping[str, Any],
    compiler: str,
    factors: Sequence[tuple[int, int]],
    known: Sequence[np.ndarray | None],
) -> StatedWork:
    mapping, reasons = parameters["grid_mapping"], dict[str, None]()
    bounds = mapping.num_dynamic_grid_bounds
    grid = known_grid(mapping, known[:bounds], reasons)
    scalars = mapping.index_map_avals[len(grid) :]
    tables = tables_of(scalars, known[bounds:])
    places, extents, weight = _places(parameters["jaxpr"], mapping, grid)
    done = body_work(parameters["jaxpr"], places, extents, weight, tables)
    moved = block_traffic(mapping, Steps.of(grid), tables, compiler in _ON_GPUS)
    work_is_open = {**reasons, **done.reasons}
    moves_are_open = {**reasons, **dict.fromkeys(moved.reasons), **(done.reasons if done.copied else {})}
    flops, size, basis = float(np.sum(done.flops)), moved.blocks + (done.copied or moved.left), ["counted"]
    stated = parameters["cost_estimate"]
    if stated is None:
        basis += {**work_is_open, **moves_are_open}
    elif work_is_open or moves_are_open:
        flops = float(stated.flops + stated.transcendentals) if work_is_open else flops
        size = float(stated.bytes_accessed) if moves_are_open else size
        basis = ["as its cost_estimate states"]
    share = efficiency_of(done.has_products, done.has_transcendentals, compiler)
    uneven = () if work_is_open else tuple(_uneven(done.flops, places, factors, mapping, grid))
    return StatedWork(flops, size, share, "; ".join(basis), uneven)


def _uneven(
    flops: np.ndarray,
    places: Mapping[int, np.ndarray],
    factors: Sequence[tuple[int, int]],
    mapping: Any,
    grid: Sequence[int],
) -> Iterator[tuple[int, tuple[tuple[int, float], ...]]]:
    """The factors along which parts of the grid perform unequal shares (`StatedWork.uneven`)."""
    axes = {dim: axis for axis, dim in enumerate(_own_dims(mapping, grid))}
    for factor, (dim, size) in enumerate(factors):
        steps = places.get(axes.get(dim, -1))
        if steps is None or size < 2 or not flops.any():
            continue
        of_index = np.bincount(steps * size // grid[dim], np.broadcast_to(flops, steps.shape), size) / flops.sum()
        shares = [(n, float(of_index.reshape(n, -1).sum(1).max())) for n in range(2, size + 1) if not size % n]
        if any(share > (1 + _ALIKE) / n for n, share in shares):
            yield factor, tuple(shares)


def _own_dims(mapping: Any, grid: Sequence[int]) -> list[int]:
    """The dimensions of a grid that its body counts: without those of `vmap`."""
    return [dim for dim in range(len(grid)) if dim not in set(mapping.vmapped_dims)]


def _places(body: Any, mapping: Any, grid: Sequence[int]) -> tuple[dict[int, np.ndarray], dict[int, int], float]:
    """The steps that a body tells apart, by its own numbers of the grid's dimensions, the extents of these, and how
    many steps of the grid each stands for."""
    own = _own_dims(mapping, grid)
    read = [axis for axis, dim in enumerate(own) if dim in reads_of(body, mapping.vmapped_dims, len(grid)).dims]
    steps = Steps.of([grid[own[axis]] for axis in read])
    others = math.prod(grid) / max(math.prod(grid[own[axis]] for axis in read), 1)
    places = dict(zip(read, steps.indices, strict=True))
    return places, {axis: grid[dim] for axis, dim in enumerate(own)}, steps.weight * others
