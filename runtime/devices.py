"""The devices of a machine, meshes on them, and how fast they are."""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from sdy_jax.base.errors import SdyError, ShardingError
from sdy_jax.base.jax_calls import jit
from sdy_jax.ir.jax_shardings import AnyMesh, mesh_from_jax
from sdy_jax.ir.meshes import Mesh

# Meshes on the devices of the machine.


def mesh_on_devices(
    mesh: Mesh, devices: Sequence[jax.Device] | None = None, remedy: str | None = None
) -> jax.sharding.Mesh:
    """A mesh on the first devices, in its order.

    Args:
      mesh: with axes.
      devices: which there are; by default those of the machine.
      remedy: what to do where they are too few.

    Raises:
      ShardingError: they are too few.
    """
    devices = jax.devices() if devices is None else devices
    if mesh.size > len(devices):
        raise too_few_devices(f"the mesh {mesh}", mesh.size, len(devices), remedy)
    first = np.array(devices[: mesh.size])[list(mesh.device_ids) or slice(None)]
    return jax.sharding.Mesh(first.reshape([axis.size for axis in mesh.axes]), mesh.axis_names)


def on_devices_of(mesh: AnyMesh, base: AnyMesh) -> Mesh | None:
    """The axes of a jax mesh, and its devices as positions on another one; None if those are not its devices, or one of
    the two has none."""
    if not (isinstance(mesh, jax.sharding.Mesh) and isinstance(base, jax.sharding.Mesh)):
        return None
    position = {device: number for number, device in enumerate(base.devices.flat)}
    if {*mesh.devices.flat} != position.keys():
        return None
    ids = tuple(position[device] for device in mesh.devices.flat)
    return replace(mesh_from_jax(mesh), device_ids=() if ids == tuple(range(len(ids))) else ids)


def too_few_devices(what: str, needed: int, count: int, remedy: str | None = None) -> ShardingError:
    """The error that something needs more devices than there are; by default it tells of virtual ones."""
    remedy = remedy or f"try it on virtual ones, by {virtual_devices(needed)} before anything else"
    return ShardingError(f"{what} needs {needed} devices, {count} are at hand; to fix: {remedy}")


def virtual_devices(count: int) -> str:
    """The call that makes virtual devices on the CPU."""
    return f'jax.config.update("jax_num_cpu_devices", {count})'


def device_like(mesh: AnyMesh) -> jax.Device | None:
    """A device of a mesh; of one without devices the first at hand, unless the mesh says of which kind they are."""
    if not isinstance(mesh, jax.sharding.AbstractMesh):
        return mesh.devices.flat[0]
    return jax.devices()[0] if mesh.abstract_device is None else None


def device_kind(mesh: AnyMesh) -> str:
    """What the devices of a mesh call themselves: `TPU v5 lite`."""
    device = device_like(mesh)
    if device is None:
        assert isinstance(mesh, jax.sharding.AbstractMesh) and mesh.abstract_device is not None
        return str(mesh.abstract_device.device_kind)
    return device.device_kind


def platform_of(mesh: AnyMesh) -> str:
    """The platform of a mesh's devices, as jax names it: `cpu`, `gpu`."""
    device = device_like(mesh) or getattr(mesh, "abstract_device", None)
    # jax 0.10.0 has no platform of devices that are described.
    return str(getattr(device, "platform", None) or _platform_of_kind(device_kind(mesh).lower()))


_GPU_MAKERS = ("nvidia", "amd", "tesla", "quadro", "geforce")


def _platform_of_kind(kind: str) -> str:
    """That by which a kind of devices calls itself, as all but GPUs do."""
    first = re.split(r"[^a-z]", kind)[0]
    return "gpu" if first in _GPU_MAKERS else first


def lowering_platforms(platform: str) -> tuple[str, ...]:
    """What jax lowers for a platform's devices by."""
    return ("cuda", "rocm") if platform == "gpu" else (platform,)


_lowered_for: ContextVar[str] = ContextVar("lowered_for", default="")


@contextmanager
def lowered_for(platform: str) -> Iterator[None]:
    """Inside, programs are traced for devices of a platform, whatever those of their meshes are."""
    token = _lowered_for.set(platform)
    try:
        yield
    finally:
        _lowered_for.reset(token)


def lowering_platform(mesh: AnyMesh) -> str:
    """What jax lowers for a mesh's devices by: `cuda` or `rocm` where these say `gpu`."""
    if forced := _lowered_for.get():
        return forced
    platform, device = platform_of(mesh), device_like(mesh)
    if platform != "gpu":
        return platform
    said = device_kind(mesh).lower() if device is None else device.client.platform_version
    return "rocm" if "rocm" in said or "amd" in said else "cuda"


def allocator_memory(mesh: AnyMesh) -> float:
    """The bytes of a device that its allocator has; 0 where that is not known.

    With several processes it is not asked for: each would see its own devices only, and plans must be equal everywhere.
    """
    device = device_like(mesh)
    if device is None or jax.process_count() > 1:
        return 0.0
    try:
        stats = device.memory_stats()
    except (jax.errors.JaxRuntimeError, NotImplementedError):  # a topology without devices, to compile for
        stats = None
    return float((stats or {}).get("bytes_limit", 0))


def network_axes(mesh: AnyMesh, joins_hosts: bool = False) -> dict[str, int]:
    """The axes along which neighbours reach each other over the data-centre network: those over several slices, or over
    several processes where devices do not know their slice. With each the size of its major part that does so, where
    blocks of devices along it are of one slice; else 0. `joins_hosts`: devices of all processes that do not know their
    slice are of the same."""
    if isinstance(mesh, jax.sharding.AbstractMesh):
        return {}
    return axes_between(
        np.vectorize(partial(_place, joins_hosts=joins_hosts), otypes=[int])(mesh.devices), mesh.axis_names
    )


def axes_between(place: np.ndarray, axes: Sequence[str]) -> dict[str, int]:
    """The axes along which devices lie in several places, by the number of the place of each: as `network_axes`.

    >>> axes_between(np.arange(16).reshape(8, 2) // 4, ["data", "model"])
    {'data': 4}
    """
    counts = zip(axes, place.shape, map(partial(_blocks, place), range(place.ndim)), strict=True)
    return {name: 0 if count == size else count for name, size, count in counts if count > 1}


def _blocks(place: np.ndarray, dim: int) -> int:
    """How many blocks of one size a dimension has, each in one place: as few as there are."""
    others = tuple(other for other in range(place.ndim) if other != dim)
    steps = np.flatnonzero((np.diff(place, axis=dim) != 0).any(axis=others))
    size = place.shape[dim]
    return size // math.gcd(size, *(int(step) + 1 for step in steps))


_DESCRIBED: dict[int, tuple[jax.Device, int]] = {}
"""By id the devices that need not be there, and their slices: jax says that all are in the first (0.10.2)."""


def describe_slices(devices: Sequence[jax.Device], count: int) -> None:
    """Notes that devices to compile for are in so many slices, one behind the other."""
    for number, device in enumerate(devices):
        _DESCRIBED[id(device)] = device, number * count // len(devices)


def _place(device: jax.Device, joins_hosts: bool) -> int:
    """The number of what a device's own links reach: its slice, which of GPUs is a host, or what its NVLinks join."""
    if id(device) in _DESCRIBED:
        return _DESCRIBED[id(device)][1]
    number = getattr(device, "slice_index", None)
    if number is None:
        return 0 if joins_hosts else device.process_index
    return int(number)


LineParts = tuple[tuple[int, int, int], ...]
"""The parts of a mesh axis, major to minor, that each lie along one dimension of a torus: size, dimension, and how many
neighbours on the next device is. None where the axis goes around."""


def torus_lines(mesh: AnyMesh) -> tuple[tuple[str, LineParts], ...]:
    """How each axis of a mesh lies on a torus. Axes of devices that do not know their place are left out."""
    if isinstance(mesh, jax.sharding.AbstractMesh) or not hasattr(mesh.devices.flat[0], "coords"):
        return ()
    places = np.array([device.coords for device in mesh.devices.flat]).reshape(*mesh.devices.shape, -1)
    along = {name: np.moveaxis(places, dim, 0) for dim, name in enumerate(mesh.axis_names)}
    return tuple((name, _lines(found)) for name, found in along.items() if (found != found[:1]).any())


def _lines(places: np.ndarray) -> LineParts:
    """The parts of the first dimension of an array of coordinates; none where they are no lines."""
    count = len(places)
    if count == 1:
        return ()
    for size in range(count, 1, -1):
        moving = np.flatnonzero(_changes(places, size)).tolist() if count % size == 0 else []
        if len(moving) == 1:
            rest = places[::size]
            others = _lines(rest)
            along = np.unique(places[:size].reshape(size, -1, places.shape[-1])[:, 0, moving[0]])
            far = int(np.diff(along).min())
            return (*others, (size, moving[0], far)) if others or len(rest) == 1 else ()
    return ()


def _changes(places: np.ndarray, size: int) -> np.ndarray:
    """Which coordinates change inside of blocks of so many places."""
    blocks = places.reshape(len(places) // size, size, *places.shape[1:])
    return (blocks != blocks[:, :1]).any(axis=tuple(range(blocks.ndim - 1)))


# How long collectives, products and element-wise ops take on the devices of a mesh.

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
