"""The work of a `pallas_call`: counted from its body and its blocks, or as the call states it.

What a call performs is counted over the steps of its grid (`body_work`), and what it moves over the blocks of its
operands and results (`block_traffic`). Where either depends on what is known only when it runs, the call's own
`cost_estimate` counts instead, if it has one; else the count is a bound, and says why. A count that is exact comes
first: the estimate of JAX's flash attention, for one, is of all that a causal mask leaves out, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from sdy_jax.ir.stated_work import StatedWork
from sdy_jax.kernels.block_traffic import Steps, block_traffic, known_grid, tables_of
from sdy_jax.kernels.body import UNKNOWN_FORMS, reads_of
from sdy_jax.kernels.body_work import body_work
from sdy_jax.kernels.efficiency import efficiency_of

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
