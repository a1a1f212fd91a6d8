"""Whole arrays as the blocks that devices hold, and back, on the host: by what shardings mean, not by what runs."""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np

from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.runtime.mesh import RefinedMesh


def cut(x: np.ndarray, sharding: TensorSharding | None, mesh: RefinedMesh) -> np.ndarray:
    """The blocks of all devices, `[devices, *block]`, in the order of the mesh.

    What lies behind the end of a dimension is NaN, or the largest number: nothing may depend on it. Of partial sums
    the first device along their axes has the value, and all others what adds nothing.
    """
    if sharding is None:
        return np.broadcast_to(x, (mesh.mesh.size, *x.shape))
    local = sharding.local_shape(x.shape, mesh.mesh)
    places = _places(sharding, mesh)
    first = mesh.on(sharding.mesh).block_indices(sharding.unreduced_axes) == 0
    found = np.full((mesh.mesh.size, *local), _poison(x.dtype), x.dtype)
    for device, place in enumerate(places):
        block = x[_part(place, local)]
        inside = (slice(device, device + 1), *_start(block.shape))
        found[inside] = block[None] if first[device] else identity(sharding.reduction, x.dtype)
    return found


def joined(
    blocks: np.ndarray, shape: Sequence[int], sharding: TensorSharding | None, mesh: RefinedMesh
) -> list[np.ndarray]:
    """The arrays of `shape` that blocks, `[devices, *block]`, make up: one for each group of devices that should hold
    the same, so that what a single device has wrong shows."""
    if sharding is None:
        return list(blocks)
    view = mesh.on(sharding.mesh)
    local, places = sharding.local_shape(shape, mesh.mesh), _places(sharding, mesh)
    unreduced = view.block_indices(sharding.unreduced_axes)
    groups: dict[tuple[int, ...], list[list[int]]] = {}
    for device, place in enumerate(places):
        rows = groups.setdefault(place, [[] for _ in range(int(unreduced.max(initial=0)) + 1)])
        rows[unreduced[device]].append(device)
    copies = min(len(row) for rows in groups.values() for row in rows)
    found = [np.zeros(tuple(shape), blocks.dtype) for _ in range(copies)]
    for place, rows in groups.items():
        part = _part(place, local)
        for copy, whole in enumerate(found):
            with np.errstate(all="ignore"):  # what lies behind the end of a dimension may be anything
                value = _combined([blocks[row[copy]] for row in rows], sharding.reduction)
            whole[part] = value[_start(whole[part].shape)]
    return found


def _places(sharding: TensorSharding, mesh: RefinedMesh) -> list[tuple[int, ...]]:
    """Per device the index of its block along each dimension."""
    view = mesh.on(sharding.mesh)
    indices = [view.block_indices(axes) for axes in sharding.axes]
    return [tuple(int(index[device]) for index in indices) for device in range(mesh.mesh.size)]


def _part(place: Sequence[int], local: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(i * n, (i + 1) * n) for i, n in zip(place, local, strict=True))


def _start(shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple([slice(0, n) for n in shape])


def _combined(terms: Sequence[np.ndarray], reduction: str) -> np.ndarray:
    if len(terms) == 1:
        return terms[0]
    stacked, dtype = np.stack(terms), terms[0].dtype
    if reduction == "sum" and dtype != np.bool_:
        wide = stacked.astype(np.float64) if dtype.kind in "fV" or dtype == ml_dtypes.bfloat16 else stacked
        return np.asarray(wide.sum(0, dtype=wide.dtype)).astype(dtype)
    if dtype == np.bool_ and reduction in ("sum", "max", "or"):
        return np.asarray(stacked.any(0))
    return np.asarray(_UFUNCS[reduction].reduce(stacked, 0))


_UFUNCS = {
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "product": np.multiply,
}


def identity(reduction: str, dtype: np.dtype) -> np.ndarray:
    """What adds nothing to a reduction of this kind."""
    if reduction in ("sum", "or", "xor"):
        return np.zeros((), dtype)
    if reduction == "product":
        return np.ones((), dtype)
    if reduction == "and":
        return np.asarray(True) if dtype == np.bool_ else np.asarray(~np.zeros((), dtype))
    return _extreme(dtype, largest=reduction == "min")


def _extreme(dtype: np.dtype, largest: bool) -> np.ndarray:
    if dtype == np.bool_:
        return np.asarray(largest)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return np.asarray(limits.max if largest else limits.min, dtype)
    return np.asarray(np.inf if largest else -np.inf).astype(dtype)


def _poison(dtype: np.dtype) -> np.ndarray:
    if dtype == np.bool_:
        return np.asarray(True)
    try:
        return np.asarray(ml_dtypes.iinfo(dtype).max, dtype)
    except ValueError:
        return np.asarray(np.nan).astype(dtype)
