"""An independent model of the dialects' ops in NumPy, on stacks: dimension 0 is the device, by linear index."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import reduce as fold
from typing import Any

import numpy as np


def groups(sizes: Sequence[int], axes: Sequence[int]) -> list[list[int]]:
    """The groups of devices over `axes`, each in the order of group indices."""
    fixed = [axis for axis in range(len(sizes)) if axis not in axes]
    found = []
    for outside in itertools.product(*(range(sizes[axis]) for axis in fixed)):
        group = []
        for inside in itertools.product(*(range(sizes[axis]) for axis in axes)):
            place = dict(zip(fixed, outside, strict=True)) | dict(zip(axes, inside, strict=True))
            group.append(int(np.ravel_multi_index([place[axis] for axis in range(len(sizes))], sizes)))
        found.append(group)
    return found


def member(sizes: Sequence[int], axes: Sequence[int], device: Sequence[int]) -> int:
    """The group index of a device."""
    return int(np.ravel_multi_index(device, [sizes[axis] for axis in axes])) if axes else 0


Inputs = list[np.ndarray]


def per_group(
    xs: np.ndarray, sizes: Sequence[int], axes: Sequence[int], function: Callable[[Inputs], Sequence[Any]]
) -> np.ndarray:
    """The results of `function`, which sees the inputs of a group in order and returns its outputs."""
    out: dict[int, Any] = {}
    for group in groups(sizes, axes):
        out |= zip(group, function([xs[device] for device in group]), strict=True)
    return np.stack([out[device] for device in range(len(xs))])


COMBINE: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "sum": np.add,
    "average": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "product": np.multiply,
    "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.bitwise_xor,
}
_OF_BOOL = {"sum": np.logical_or, "product": np.logical_and}


def combined(terms: Inputs, kind: str, dtype: Any) -> np.ndarray:
    terms = [term.astype(dtype) for term in terms]
    combine = _OF_BOOL.get(kind, COMBINE[kind]) if np.dtype(dtype) == bool else COMBINE[kind]
    total = fold(combine, terms).astype(dtype)
    if kind != "average":
        return total
    mean = np.trunc(total / len(terms)) if np.issubdtype(dtype, np.integer) else total / len(terms)
    return mean.astype(dtype)


def all_gather(xs, sizes, *, grid_axes, gather_axis):
    return per_group(xs, sizes, grid_axes, lambda g: [np.concatenate(g, gather_axis)] * len(g))


def gather(xs, sizes, *, grid_axes, gather_axis, root):
    everywhere = all_gather(xs, sizes, grid_axes=grid_axes, gather_axis=gather_axis)
    return only_on(everywhere, sizes, grid_axes, root)


def only_on(xs, sizes, axes, root):
    chosen = member(sizes, axes, root)
    return per_group(xs, sizes, axes, lambda g: [y if i == chosen else np.zeros_like(y) for i, y in enumerate(g)])


def all_slice(xs, sizes, *, grid_axes, slice_axis):
    def own(g):
        return [np.split(x, len(g), slice_axis)[i] for i, x in enumerate(g)]

    return per_group(xs, sizes, grid_axes, own)


def all_to_all(xs, sizes, *, grid_axes, split_axis, concat_axis):
    def exchange(g):
        pieces = [np.split(x, len(g), split_axis) for x in g]
        return [np.concatenate([piece[j] for piece in pieces], concat_axis) for j in range(len(g))]

    return per_group(xs, sizes, grid_axes, exchange)


def broadcast(xs, sizes, *, grid_axes, root):
    chosen = member(sizes, grid_axes, root)
    return per_group(xs, sizes, grid_axes, lambda g: [g[chosen]] * len(g))


def scatter(xs, sizes, *, grid_axes, scatter_axis, root):
    chosen = member(sizes, grid_axes, root)
    return per_group(xs, sizes, grid_axes, lambda g: np.split(g[chosen], len(g), scatter_axis))


def all_reduce(xs, sizes, *, grid_axes, reduction="sum", dtype=None):
    return per_group(xs, sizes, grid_axes, lambda g: [combined(g, reduction, dtype or xs.dtype)] * len(g))


def reduce(xs, sizes, *, grid_axes, root, reduction="sum", dtype=None):
    return only_on(all_reduce(xs, sizes, grid_axes=grid_axes, reduction=reduction, dtype=dtype), sizes, grid_axes, root)


def reduce_scatter(xs, sizes, *, grid_axes, scatter_axis, reduction="sum", dtype=None):
    everywhere = all_reduce(xs, sizes, grid_axes=grid_axes, reduction=reduction, dtype=dtype)
    return all_slice(everywhere, sizes, grid_axes=grid_axes, slice_axis=scatter_axis)


def shift(xs, sizes, *, shift_axis, offset, rotate=False, grid_axes=None):
    def moved(g):
        sources = [i - offset for i in range(len(g))]
        if rotate:
            sources = [i % len(g) for i in sources]
        return [g[i] if 0 <= i < len(g) else np.zeros_like(g[0]) for i in sources]

    return per_group(xs, sizes, [shift_axis], moved)


def send_recv(xs, sizes, *, grid_axes, source, destination):
    sender, receiver = member(sizes, grid_axes, source), member(sizes, grid_axes, destination)
    return per_group(
        xs, sizes, grid_axes, lambda g: [g[sender] if i == receiver else np.zeros_like(g[0]) for i in range(len(g))]
    )


def update_halo(xs, sizes, *, split_axes, halo_sizes):
    """Cell by cell, as the reference says it."""
    split = [d for d, axes in enumerate(split_axes) if axes]
    halos = {d: (halo_sizes[2 * k], halo_sizes[2 * k + 1]) for k, d in enumerate(split)}
    devices = list(itertools.product(*map(range, sizes)))
    out = xs.copy()
    for number, device in enumerate(devices):
        for cell in itertools.product(*map(range, xs.shape[1:])):
            owner, read = list(device), list(cell)
            for d in split:
                lo, hi = halos[d]
                core, axes = xs.shape[1 + d] - lo - hi, split_axes[d]
                step = -1 if cell[d] < lo else 1 if cell[d] >= lo + core else 0
                counts = [sizes[axis] for axis in axes]
                place = int(np.ravel_multi_index([device[axis] for axis in axes], counts)) + step
                if not 0 <= place < np.prod(counts):
                    break
                for axis, coordinate in zip(axes, np.unravel_index(place, counts), strict=True):
                    owner[axis] = int(coordinate)
                read[d] = cell[d] - step * core
            else:
                out[(number, *cell)] = xs[(devices.index(tuple(owner)), *read)]
    return out


def blocks(x: np.ndarray, sizes: Sequence[int], split: Sequence[Sequence[int]]) -> np.ndarray:
    """What each device holds of a tensor that is split evenly."""
    found = []
    for device in itertools.product(*map(range, sizes)):
        part = x
        for d, axes in enumerate(split):
            if axes:
                counts = [sizes[axis] for axis in axes]
                place = np.ravel_multi_index([device[axis] for axis in axes], counts)
                part = np.split(part, int(np.prod(counts)), d)[place]
        found.append(part)
    return np.stack(found)
