"""Shape classes: what of a tensor and of the layouts at hand its prices depend on, but for the number of bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from sdy_jax.lowering.planning.routes.paths import Matrix, shortest
from sdy_jax.lowering.planning.routes.space import Space, is_small, space_of
from sdy_jax.lowering.reshard.cost import CostModel
from sdy_jax.lowering.reshard.problem import State, atoms_of, mask_of
from sdy_jax.representation.mesh import Axes, Mesh
from sdy_jax.representation.sharding import TensorSharding

Atom = tuple[str, int, int]
"""A piece of a mesh axis that no layout at hand cuts further: axis name, pre-size, size."""


class ShapeClass:
    """The atoms of some layouts, and the dimensions in which atoms may be: all, or where that makes too many states,
    those that a layout shards and a spare one.

    `blocks`: per such dimension, a number that all shard counts of equal blocks divide.
    """

    def __init__(self, shape: Sequence[int], mesh: Mesh, layouts: Sequence[TensorSharding]):
        self.items = float(math.prod(shape))
        self._mesh = mesh
        self._cuts = _cuts(mesh, layouts)
        self.atoms = [(name, low, high // low) for name, cuts in self._cuts.items() for low, high in pairwise(cuts)]
        self._numbers = {atom: number for number, atom in enumerate(self.atoms)}
        self.sizes = tuple([size for *_, size in self.atoms])
        devices = math.prod(self.sizes)
        blocks = [math.gcd(n, devices) for n in shape]
        self._dims = [dim for dim, count in enumerate(blocks) if count > 1]
        if not is_small(len(self._dims), len(self.sizes)):
            used = {dim for layout in layouts for dim, axes in enumerate(layout.axes) if axes}
            spare = [dim for dim in self._dims if dim not in used]
            self._dims = sorted({*used, *sorted(spare, key=lambda dim: -blocks[dim])[:1]})
        self.blocks = tuple([blocks[dim] for dim in self._dims])

    def state(self, layout: TensorSharding) -> State:
        """A layout by its atoms."""
        dims = tuple([self._split(layout.axes[dim]) for dim in self._dims])
        return State(dims, mask_of(self._split(layout.unreduced_axes)))

    def _split(self, axes: Axes) -> tuple[int, ...]:
        ends = [(a.name, a.pre_size, a.pre_size * a.size(self._mesh)) for a in axes]
        return tuple(
            [
                self._numbers[name, low, high // low]
                for name, start, stop in ends
                for low, high in pairwise([cut for cut in self._cuts.get(name, ()) if start <= cut <= stop])
            ]
        )


def _cuts(mesh: Mesh, layouts: Sequence[TensorSharding]) -> dict[str, list[int]]:
    """Where each axis is cut, its ends included; axes of size one are left out."""
    cuts = {axis.name: {1, axis.size} for axis in mesh.axes if axis.size > 1}
    for axis in {a for layout in layouts for axes in (*layout.axes, layout.unreduced_axes) for a in axes}:
        if axis.name in cuts:
            cuts[axis.name] |= {axis.pre_size, axis.pre_size * axis.size(mesh)}
    return {name: sorted(found) for name, found in cuts.items()}


def times_between(
    shape_class: ShapeClass,
    costs: CostModel,
    itemsize: float,
    sources: Sequence[TensorSharding],
    targets: Sequence[TensorSharding],
) -> Matrix:
    """The times from some layouts of a class to others.

    Without latency, time is linear in bytes, and all tensors of a class share their paths.
    """
    total = shape_class.items * itemsize
    ends = [shape_class.state(s) for s in sources], [shape_class.state(t) for t in targets]
    others = () if is_small(len(shape_class.blocks), len(shape_class.sizes)) else _unordered([*ends[0], *ends[1]])
    bandwidths = tuple([costs.bandwidth_of(name) for name, *_ in shape_class.atoms])
    unit, scale = (total, 1.0) if costs.latency else (1.0, total)
    found = _routes(shape_class.blocks, shape_class.sizes, others, bandwidths, costs.latency, unit).matrix(*ends)
    return np.multiply(found, scale, out=found, where=np.isfinite(found))


def _unordered(states: Sequence[State]) -> tuple[State, ...]:
    return tuple(dict.fromkeys(s for s in states if any(tuple(sorted(axes)) != axes for axes in s.dims)))


class _Routes:
    """The times to states from all others, computed when a state is first asked for."""

    def __init__(self, space: Space, bandwidths: tuple[float, ...], latency: float, total: float):
        self._space, self._bandwidths, self._total = space, bandwidths, total
        self._costs = CostModel(latency)
        self._is_uniform = not latency and len(set(bandwidths)) < 2
        self._times = space.times(total, latency, bandwidths)
        self._known: dict[State, NDArray[np.float64]] = {}

    def matrix(self, sources: Sequence[State], targets: Sequence[State]) -> Matrix:
        rows = [self._space.index[s] for s in sources]
        self._learn([t for t in dict.fromkeys(targets) if t not in self._known])
        made = np.array([self._known[t][rows] for t in targets]).T
        if not self._is_uniform:
            self._join_steps(made, sources, targets)
        return made

    def _learn(self, targets: Sequence[State]) -> None:
        alike: dict[bytes, list[State]] = {}
        for target in targets:
            alike.setdefault(self._space.arcs_to(target).tobytes(), []).append(target)
        for states in alike.values():
            numbers = np.array([self._space.index[state] for state in states])
            found = shortest(self._space, self._times, numbers, self._space.arcs_to(states[0]))
            self._known.update(zip(states, found, strict=True))

    def _join_steps(self, made: Matrix, sources: Sequence[State], targets: Sequence[State]) -> None:
        """Where one collective does it all, the planner takes that one, over all axes at once."""
        for i, source in enumerate(sources):
            for j, target in enumerate(targets):
                found = _single_step(source, target)
                if found and source != target:
                    made[i, j] = self._time_of(*found, source, target)

    def _time_of(self, kind: str, group: int, source: State, target: State) -> float:
        atoms, shards, index = atoms_of(group), self._space.shards, self._space.index
        before, after = (self._total / int(shards[index[state]]) for state in (source, target))
        size = math.prod(self._space.sizes[a] for a in atoms)
        return self._costs.group_time(kind, size, min(self._bandwidths[a] for a in atoms), before, after)


@lru_cache(maxsize=1 << 9)
def _routes(
    blocks: tuple[int, ...],
    sizes: tuple[int, ...],
    others: tuple[State, ...],
    bandwidths: tuple[float, ...],
    latency: float,
    total: float,
) -> _Routes:
    return _Routes(space_of(blocks, sizes, others), bandwidths, latency, total)


def _single_step(source: State, target: State) -> tuple[str, int] | None:
    """The gather, reduce_scatter or all_reduce that leads from one state to another, with its group."""
    gone = source.unreduced & ~target.unreduced
    if target.unreduced & ~source.unreduced:
        return None
    pairs = list(zip(source.dims, target.dims, strict=True))
    if source.dims == target.dims:
        return "all_reduce", gone
    if not gone and all(have[: len(want)] == want for have, want in pairs):
        return "all_gather", mask_of(a for have, want in pairs for a in have[len(want) :])
    if all(want[: len(have)] == have for have, want in pairs):
        added = mask_of(a for have, want in pairs for a in want[len(have) :])
        return ("reduce_scatter", gone) if added == gone else None
    return None
