"""What `jax.vmap` maps.

* `batch_jaxpr`: which results of a function are mapped; those of `jax.vmap` itself have to be told.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax._src.interpreters.batching import batch_jaxpr


def mapped_results(region: Any, axis_data: Any, dims: Sequence[int | None]) -> list[bool]:
    """Per result of a closed jaxpr whether `jax.vmap` over some of its arguments maps it; all where jax cannot tell."""
    apart = dataclasses.replace(axis_data, spmd_name=None)
    try:
        _, found = batch_jaxpr(region, apart, [dim is not None for dim in dims], False)
    except NotImplementedError:  # of a `custom_partitioning` function, which only partitioned programs map
        return [True] * len(region.out_avals)
    return list(found)
