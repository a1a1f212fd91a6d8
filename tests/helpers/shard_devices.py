"""Runs functions of local arrays on the first devices of the machine, many in one program."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

Case = tuple[Callable[..., Any], np.ndarray]


def grid_mesh(sizes: Sequence[int]) -> jax.sharding.Mesh:
    """A mesh with axes `m0`, `m1`, ..."""
    devices = np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes)
    return jax.sharding.Mesh(devices, tuple(f"m{axis}" for axis in range(len(sizes))))


def stacked(
    sizes: Sequence[int], functions: Sequence[Callable[..., Any]], mesh: Any = None, **options: Any
) -> Callable[..., list[Any]]:
    """`functions`, each of one local array, as a function of stacks of them: dimension 0 is the device."""
    mesh = mesh or grid_mesh(sizes)
    spec = P(mesh.axis_names)

    def body(*stacks: Any) -> list[Any]:
        results = [function(stack[0]) for function, stack in zip(functions, stacks, strict=True)]
        return jax.tree.map(lambda y: jax.numpy.asarray(y)[None], results)

    return jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, **options)


def run_stacked(sizes: Sequence[int], cases: Sequence[Case], **options: Any) -> list[Any]:
    """The results of all cases: stacks of what the devices hold."""
    function = jax.jit(stacked(sizes, [function for function, _ in cases], **options))
    return [jax.tree.map(np.asarray, result) for result in function(*(stack for _, stack in cases))]
