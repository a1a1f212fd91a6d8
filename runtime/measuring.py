"""How long collectives, products and element-wise ops take on the devices of a mesh."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from sdy_jax.base.jax_calls import jit
from sdy_jax.errors import SdyError

_REPEATS = 5
"""Runs of which the median counts, after one that compiles and one that warms up. Guessed: more take longer, fewer let
one interrupted run count."""

_FEW, _MANY = 8, 256
"""How many more steps a program has than one beside it, and how many where few take little: what calling takes is in
both. Guessed: with fewer, the difference drowns in noise."""

_ENOUGH = 2e-3
"""Seconds of which a clock shows differences. Guessed: a hundred times what calls differ by."""

_FLOAT = np.dtype(np.float32)

Step = Callable[[jax.Array], jax.Array]


class CollectiveTime(NamedTuple):
    """The seconds of one collective over an axis, with the bytes of the block that each device has before it."""

    kind: str
    axis: str
    bytes: int
    seconds: float


def check_runs(mesh: jax.sharding.Mesh) -> None:
    """
    Raises:
        SdyError: the devices of the mesh are only described, to compile for.
    """
    if not set(mesh.devices.flat) <= set(jax.devices(mesh.devices.flat[0].platform)):
        kind = mesh.devices.flat[0].device_kind
        raise SdyError(f"the mesh is of {kind!r} devices that are not there; to fix: measure where they are")


def collective_times(mesh: jax.sharding.Mesh, sizes: Sequence[int]) -> Iterator[CollectiveTime]:
    """The times of collectives of some sizes (bytes of a device's block) along each axis of more than one device."""
    for axis, count in mesh.shape.items():
        for size in sizes if count > 1 else ():
            yield CollectiveTime("all_gather", axis, size, _per_step(mesh, _gathered(axis, count), size // 4))
            yield CollectiveTime("all_reduce", axis, size, _per_step(mesh, _reduced(axis, count), size // 4))


def _gathered(axis: str, count: int) -> Step:
    def step(x: jax.Array) -> jax.Array:
        whole = jax.lax.all_gather(x, axis, tiled=True)
        return jax.lax.dynamic_slice_in_dim(whole, (jax.lax.axis_index(axis) + 1) % count * len(x), len(x))

    return step


def _reduced(axis: str, count: int) -> Step:
    return lambda x: jax.lax.psum(x, axis) / count


def product_time(mesh: jax.sharding.Mesh, size: int, dtype: jnp.dtype) -> float:
    """The seconds of a product of two square matrices on every device at once."""

    def step(x: jax.Array) -> jax.Array:
        square = x.reshape(size, size)
        return (square @ square / size).reshape(-1)

    return _per_step(mesh, step, size * size, dtype)


def elementwise_time(mesh: jax.sharding.Mesh, size: int) -> float:
    """The seconds in which every device reads and writes an array of so many bytes."""
    return _per_step(mesh, lambda x: x * 0.5 + 1.0, size // 4)


def _per_step(mesh: jax.sharding.Mesh, step: Step, items: int, dtype: jnp.dtype = _FLOAT) -> float:
    """The seconds of one step among steps that wait for each other, from an array of so many items per device."""
    short = _seconds(mesh, step, max(items, 1), dtype, 1)
    for more in (_FEW, _MANY):
        long = _seconds(mesh, step, max(items, 1), dtype, 1 + more)
        if long > _ENOUGH:
            break
    return max(long - short, 0.0) / more


def _seconds(mesh: jax.sharding.Mesh, step: Step, items: int, dtype: jnp.dtype, count: int) -> float:
    spec, is_cpu = P(mesh.axis_names), mesh.devices.flat[0].platform == "cpu"

    def steps(x: jax.Array) -> jax.Array:
        if is_cpu:  # whose compiler makes one op of several in spite of barriers, and whose loops cost little
            return jax.lax.fori_loop(0, count, lambda _, y: step(y), x)
        for _ in range(count):  # a trip of a loop takes 27 us on an H200, as long as 64 MiB (2026-11)
            x = jax.lax.optimization_barrier(step(x))
        return x

    stepped = jax.shard_map(steps, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    sharding = jax.sharding.NamedSharding(mesh, spec)
    run = jit(stepped, in_shardings=sharding)
    x = jit(lambda: jnp.ones(items * mesh.size, dtype), out_shardings=sharding)()
    for _ in range(2):
        run(x).block_until_ready()
    return statistics.median([_timed(run, x) for _ in range(_REPEATS)])


def _timed(run: Step, x: jax.Array) -> float:
    start = time.perf_counter()
    run(x).block_until_ready()
    return time.perf_counter() - start
