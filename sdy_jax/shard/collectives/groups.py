"""The devices among which a collective runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from sdy_jax.representation.named import AnyMesh
from sdy_jax.shard.grids import AxisNames, on_devices


def in_groups(
    op: Callable[..., jax.Array], x: Any, grid: AnyMesh | None, grid_axes: AxisNames, *parameters: Any
) -> jax.Array:
    """An op of the semantics among the devices that a call means."""
    here, axes = on_devices(op.__name__, grid, grid_axes)
    return op(here, jnp.asarray(x), axes, *parameters)
