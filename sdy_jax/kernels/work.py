"""The work of a `pallas_call`: counted from its body and its blocks, or as the call states it.

What a call performs is counted over the steps of its grid (`body_work`), and what it moves over the blocks of its
operands and results (`block_traffic`). Where either depends on what is known only when it runs, the call's own
`cost_estimate` counts instead, if it has one; else the count is a bound, and says why. A count that is exact comes
first: the estimate of JAX's flash attention, for one, is of all that a causal mask leaves out, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sdy_jax.ir.stated_work import StatedWork
from sdy_jax.kernels.block_traffic import Steps, block_traffic, known_grid, tables_of
from sdy_jax.kernels.body import reads_of
from sdy_jax.kernels.body_work import body_work
from sdy_jax.kernels.efficiency import efficiency_of

_ON_GPUS = frozenset(("mosaic_gpu", "triton"))


def work_of_call(
    parameters: Mapping[str, Any], compiler: str = "mosaic", known: Sequence[np.ndarray | None] = ()
) -> StatedWork:
    """The work of a call.

    Args:
        parameters: those of the `pallas_call` equation.
        compiler: as `compiler_of` says.
        known: the values of its first operands, which are the bounds of its grid and scalars, where they are constants.
    """
    mapping, reasons = parameters["grid_mapping"], dict[str, None]()
    bounds = mapping.num_dynamic_grid_bounds
    grid = known_grid(mapping, known[:bounds], reasons)
    scalars = mapping.index_map_avals[len(grid) :]
    tables = tables_of(scalars, known[bounds:])
    done = body_work(parameters["jaxpr"], *_places(parameters["jaxpr"], mapping, grid), tables)
    moved = block_traffic(mapping, Steps.of(grid), tables, compiler in _ON_GPUS)
    work_is_open = {**reasons, **done.reasons}
    moves_are_open = {**reasons, **dict.fromkeys(moved.reasons), **(done.reasons if done.copied else {})}
    flops, size, basis = done.flops, moved.blocks + (done.copied or moved.left), ["counted"]
    stated = parameters["cost_estimate"]
    if stated is None:
        basis += {**work_is_open, **moves_are_open}
    elif work_is_open or moves_are_open:
        flops = float(stated.flops + stated.transcendentals) if work_is_open else flops
        size = float(stated.bytes_accessed) if moves_are_open else size
        basis = ["as its cost_estimate states"]
    share = efficiency_of(done.has_products, done.has_transcendentals, compiler)
    return StatedWork(flops, size, share, "; ".join(basis))


def _places(body: Any, mapping: Any, grid: Sequence[int]) -> tuple[dict[int, np.ndarray], dict[int, int], float]:
    """The steps that a body tells apart, by its own numbers of the grid's dimensions, the extents of these, and how
    many steps of the grid each stands for."""
    own = [dim for dim in range(len(grid)) if dim not in set(mapping.vmapped_dims)]
    read = [axis for axis, dim in enumerate(own) if dim in reads_of(body, mapping.vmapped_dims, len(grid)).dims]
    steps = Steps.of([grid[own[axis]] for axis in read])
    others = math.prod(grid) / max(math.prod(grid[own[axis]] for axis in read), 1)
    places = dict(zip(read, steps.indices, strict=True))
    return places, {axis: grid[dim] for axis, dim in enumerate(own)}, steps.weight * others
