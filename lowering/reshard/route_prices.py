"""Prices of reshards between all layouts of a tensor at once, from the shortest paths of its shape class.

See docs/explanation/planner.md#prices-of-all-pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import combinations, compress, pairwise

import numpy as np
from numpy.typing import NDArray

from sdy_jax.ir.meshes import Axes, AxisRef, Mesh, overlaps
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.lowering.reshard.layout_graph import (
    Ends,
    Lanes,
    Matrix,
    Rates,
    Space,
    Steps,
    is_small,
    shortened,
    shortest,
    space_of,
    used,
)
from sdy_jax.lowering.reshard.planner import plan_reshard, strips_time
from sdy_jax.lowering.reshard.problem import State, atoms_of, mask_of
from sdy_jax.lowering.targets.cost_model import CostModel
from sdy_jax.lowering.targets.rates import LastCut, Link, Rate, rate, wire_bytes

# Shape classes: what of a tensor and of the layouts at hand its prices depend on, but for the number of bytes.

_STEP = 4
"""Tensors of sizes between powers of this are priced alike, but for their bytes, where collectives have latency.
Guessed: with 2, twice as many tables of all pairs; with more, paths are those of tensors of other sizes, a few percent
off."""

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
        self._atoms_of: dict[Axes, tuple[int, ...]] = {(): ()}
        self.sizes = tuple([size for *_, size in self.atoms])
        devices = math.prod(self.sizes)
        blocks = [math.gcd(n, devices) for n in shape]
        self._dims = [dim for dim, count in enumerate(blocks) if count > 1]
        if not is_small(len(self._dims), len(self.sizes)):
            used = {dim for layout in layouts for dim, axes in enumerate(layout.axes) if axes}
            spare = [dim for dim in self._dims if dim not in used]
            self._dims = sorted({*used, *sorted(spare, key=lambda dim: -blocks[dim])[:1]})
        self._dims.sort(key=blocks.__getitem__)  # so that classes of transposed tensors are one
        self.blocks = tuple([blocks[dim] for dim in self._dims])
        self._shape = shape

    def links(self, costs: CostModel) -> tuple[Link, ...]:
        """The atoms as collectives see them."""
        return tuple([costs.link(AxisRef.canonical(*atom, self._mesh), self._mesh) for atom in self.atoms])

    def lanes(self, costs: CostModel) -> Lanes | None:
        """The last dimension, where it matters what is cut of it."""
        lanes, rank, last = costs.lanes, len(self._shape), len(self._shape) - 1
        if not lanes or last not in self._dims:
            return None
        groups = [group for size in range(len(self.sizes)) for group in combinations(self.sizes, size + 1)]
        narrow = frozenset([n for n in map(math.prod, groups) if self._shape[last] // n % lanes])
        return Lanes(self._dims.index(last), narrow, rank) if narrow or rank == 2 else None

    def state(self, layout: TensorSharding) -> State:
        """A layout by its atoms."""
        dims = tuple([self._split(layout.axes[dim]) for dim in self._dims])
        return State(dims, mask_of(self._split(layout.unreduced_axes)))

    def _split(self, axes: Axes) -> tuple[int, ...]:
        if axes not in self._atoms_of:
            self._atoms_of[axes] = self._atoms_in(axes)
        return self._atoms_of[axes]

    def _atoms_in(self, axes: Axes) -> tuple[int, ...]:
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

    Without latency, time is linear in bytes, and all tensors of a class share their paths. With it, those between two
    powers of `_STEP` share the paths of both: the time of a path is linear between them but for a few percent where
    one of its collectives just fills a bucket, and the cheapest one is not below the mean.
    """
    total = shape_class.items * itemsize
    states = [shape_class.state(source) for source in sources]
    ends = states, states if targets is sources else [shape_class.state(target) for target in targets]
    routes = _routes(shape_class.blocks, shape_class.links(costs), costs.combines, shape_class.lanes(costs))
    if routes.are_linear or total <= 1:
        return _scaled(routes.matrix(1.0, *ends), total)
    below = float(_STEP ** math.floor(math.log(total, _STEP)))
    share = (total - below) / ((_STEP - 1) * below)
    low, high = routes.matrix(below, *ends), routes.matrix(_STEP * below, *ends)
    return _scaled(low, 1 - share) + _scaled(high, share)


def _scaled(times: Matrix, factor: float) -> Matrix:
    """The times multiplied by a factor; what is infinite stays so."""
    return np.multiply(times, factor, out=np.full_like(times, np.inf), where=np.isfinite(times))


class _Routes:
    """The times to states from all others, by the bytes of a tensor, computed when a state is first asked for."""

    def __init__(self, space: Space, links: tuple[Link, ...], combines: tuple[str, ...], lanes: Lanes | None):
        self._space, self._links, self._combines, self._lanes = space, links, combines, lanes
        self._rates = space.rates(links, combines, lanes)
        self._are_alike = self.are_linear and len({link.bandwidth for link in links}) < 2
        # Else all axes at once may be faster than one by one.
        self._are_alike &= not any(link.peers or link.lines for link in links)
        self._known: dict[tuple[float, State], NDArray[np.float64]] = {}
        self._steps: dict[State, dict[State, tuple[float, Rate] | None]] = {}
        self._outside: dict[tuple[float, State], dict[State, float]] = {}
        self._into: dict[State, Steps] = {}
        self._out_of: dict[State, Steps] = {}

    @property
    def are_linear(self) -> bool:
        """Whether times are proportional to bytes."""
        return self._rates.are_linear

    def matrix(self, total: float, sources: Sequence[State], targets: Sequence[State]) -> Matrix:
        """The times from some states (rows) to others, for a tensor of `total` bytes."""
        self._learn(total, [t for t in dict.fromkeys(targets) if (total, t) not in self._known])
        made = np.full((len(sources), len(targets)), np.inf)
        is_inside = [source in self._space.index for source in sources]
        rows = [self._space.index[source] for source in compress(sources, is_inside)]
        made[is_inside] = np.array([self._known[total, t][rows] for t in targets]).T
        for i, source in enumerate(sources):
            if not is_inside[i]:
                made[i] = self._from_outside(total, source, targets)
        if not self._are_alike or not all(is_inside):
            self._join_steps(total, made, sources, targets)
        return made

    def _learn(self, total: float, targets: Sequence[State]) -> None:
        alike: dict[tuple[int, int], list[State]] = {}  # by what says which arcs lead there
        for target in targets:
            alike.setdefault((used(target), target.unreduced), []).append(target)
        times = self._rates.times(total)
        for states in alike.values():
            ends = Ends(
                np.array([math.prod(self._space.counts(state)) for state in states]),
                np.array([self._last_steps(total, state) for state in states]),
            )
            found = shortest(self._space, times, ends, self._space.arcs_to(states[0]))
            self._known.update({(total, state): row for state, row in zip(states, found, strict=True)})

    def _last_steps(self, total: float, target: State) -> NDArray[np.float64]:
        """The times from each state of the space to a target by its last step; by none, where it is one of them."""
        times = np.full(len(self._space.index), np.inf)
        if target in self._space.index:
            times[self._space.index[target]] = 0.0
            return times
        if target not in self._into:
            self._into[target] = Steps.into(self._space, target, self._rated)
        steps = self._into[target]
        np.minimum.at(times, steps.states, steps.rates.times(total))
        return times

    def _from_outside(self, total: float, source: State, targets: Sequence[State]) -> list[float]:
        """The times from a state that is not in the space."""
        known = self._outside.setdefault((total, source), {source: 0.0})
        new = [target for target in targets if target not in known]
        if new:
            if source not in self._out_of:
                self._out_of[source] = Steps.out_of(self._space, source, self._rated)
            times = self._out_of[source].rates.times(total)
            known.update({target: self._first_steps(total, source, times, target) for target in new})
        return [known[target] for target in targets]

    def _first_steps(self, total: float, source: State, times: NDArray[np.float64], target: State) -> float:
        """The time from a state that is not in the space: by one collective, or by one that leads into it, `times`."""
        steps = self._out_of[source]
        onward = times[steps.inside] + self._known[total, target][steps.states]
        onward[~steps.changes.are_towards(target)[steps.inside]] = np.inf
        least = min(math.prod(self._space.counts(end)) for end in (source, target))  # nothing is larger than both ends
        within = onward[self._space.shards[steps.states] >= least]
        found = min([*within, *(times[n] for n in steps.places.get(target, ()))], default=math.inf)
        return found if math.isfinite(found) else onward.min(initial=math.inf)

    def _rated(self, steps: Sequence[tuple[str, int, State, State]]) -> Rates:
        return self._space.rates_of(steps, self._links, self._combines, self._lanes)

    def _join_steps(self, total: float, made: Matrix, sources: Sequence[State], targets: Sequence[State]) -> None:
        """Where one collective does it all, over all axes at once, it may take less than one after another."""
        columns = dict[State, list[int]]()
        for j, target in enumerate(targets):
            columns.setdefault(target, []).append(j)
        for i, source in enumerate(sources):
            known = self._steps.setdefault(source, {})
            is_any = source.unreduced or source not in self._space.index
            for target in columns if is_any else filter(columns.__contains__, shortened(source)):
                if target not in known:
                    known[target] = self._step(source, target)
                if (step := known[target]) is not None:
                    sent, each = step
                    made[i, columns[target]] = np.minimum(made[i, columns[target]], each.time(sent * total))

    def _step(self, source: State, target: State) -> tuple[float, Rate] | None:
        """What one collective from one state to another sends of a tensor, and its rate."""
        found = self._single_step(source, target) if source != target else None
        return found and self._rate_of(*found, source, self._space.cut(self._lanes, source, target))

    def _single_step(self, source: State, target: State) -> tuple[str, int] | None:
        counts = self._space.counts
        if source.unreduced == target.unreduced and counts(source) == counts(target):
            return "collective_permute", used(source) | used(target)
        return _single_step(source, target)

    def _rate_of(self, kind: str, group: int, source: State, cut: LastCut | None) -> tuple[float, Rate]:
        links = [self._links[a] for a in atoms_of(group)]
        block = 1 / math.prod(self._space.counts(source))
        sent = wire_bytes(kind, math.prod([link.size for link in links]), block, 0.0)
        return sent, rate(kind, links, self._combines, cut)


@lru_cache(maxsize=1 << 9)
def _routes(
    blocks: tuple[int, ...],
    links: tuple[Link, ...],
    combines: tuple[str, ...],
    lanes: Lanes | None,
) -> _Routes:
    return _Routes(space_of(blocks, tuple([link.size for link in links])), links, combines, lanes)


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


# Prices of reshards between given layouts, from the shortest paths of their shape class.

PairPrice = Callable[[tuple[int, ...], float, TensorSharding, TensorSharding], float]


class RoutePrices:
    """What reshards cost on a mesh, as `plan_reshard` plans them, but for all pairs of layouts at once.

    Args:
        mesh_name: the mesh that layouts are on, as their shardings name it.
        mesh: its axes.
        costs: the cost model.
        pair: the price of one pair, asked for where blocks are padded and for shardings of other meshes; default: the
            cost of `plan_reshard`.

    >>> mesh = Mesh.of(x=2)
    >>> row, col = (TensorSharding.closed("m", axes) for axes in ([[AxisRef("x")], []], [[], [AxisRef("x")]]))
    >>> RoutePrices("m", mesh, CostModel()).matrix((16, 8), 4.0, [row, col], [row, col]).tolist()
    [[0.0, 128.0], [128.0, 0.0]]
    """

    def __init__(self, mesh_name: str, mesh: Mesh, costs: CostModel, pair: PairPrice | None = None):
        self._mesh_name, self._mesh, self._costs = mesh_name, mesh, costs
        self._pair = pair or self._planned
        self._of_byte: dict[object, float] = {}

    def matrix(
        self,
        shape: tuple[int, ...],
        itemsize: float,
        sources: Sequence[TensorSharding],
        targets: Sequence[TensorSharding],
    ) -> Matrix:
        """The time from each of some layouts (rows) to each of others; infinite where no reshard leads there.

        Args:
            shape, itemsize: the global shape of the tensor, and its bytes per element.
            sources, targets: closed shardings. The sub-axes of any of them are atoms for all.
        """
        rows = [self._is_known(shape, s) for s in sources]
        cols = rows if targets is sources else [self._is_known(shape, t) for t in targets]
        known = list(compress(sources, rows))
        ends = known, known if targets is sources else list(compress(targets, cols))
        found = np.full((len(sources), len(targets)), np.inf)
        if all(ends):
            shape_class = ShapeClass(shape, self._mesh, known if targets is sources else [*ends[0], *ends[1]])
            found[np.ix_(rows, cols)] = times_between(shape_class, self._costs, itemsize, *ends)
        for i, j in np.argwhere(~np.logical_and.outer(rows, cols)):
            found[i, j] = self._pair(shape, itemsize, sources[i], targets[j])
        others = [i for i, source in enumerate(sources) if not _adds(source)]
        for j, target in enumerate(targets):
            if target.unreduced_axes:
                asked = others if target.reduction == "sum" else range(len(sources))
                found[[i for i in asked if not may_become_unreduced(sources[i], target)], j] = np.inf
        return found

    def of_pair(self, shape: tuple[int, ...], itemsize: float, source: TensorSharding, target: TensorSharding) -> float:
        """The price of one step between blocks that neither join to blocks nor are cut into blocks; infinite where none
        leads there. Between meshes, that of all steps."""
        if not may_become_unreduced(source, target):
            return math.inf
        if source.mesh == target.mesh:
            return strips_time(shape, itemsize, source, target, self._mesh, self._costs)
        if not self._costs.is_default:
            return self._pair(shape, itemsize, source, target)
        key = shape, source.layout, target.layout
        if key not in self._of_byte:  # prices are bytes: tensors of all element types share them
            self._of_byte[key] = self._pair(shape, 1.0, source, target)
        return itemsize * self._of_byte[key]

    def _is_known(self, shape: Sequence[int], sharding: TensorSharding) -> bool:
        """Whether a layout is on the mesh, in blocks of one size."""
        _, axes, unreduced, _ = sharding.layout
        on_mesh = sharding.mesh == self._mesh_name or not (unreduced or any(axes))
        counts = sharding.shard_counts(self._mesh)
        return on_mesh and not any(n % count for n, count in zip(shape, counts, strict=True))

    def _planned(
        self, shape: tuple[int, ...], itemsize: float, source: TensorSharding, target: TensorSharding
    ) -> float:
        return plan_reshard(shape, itemsize, source, target, self._mesh, self._costs).cost


def _adds(sharding: TensorSharding) -> bool:
    """Whether further axes may become unreduced: there is nothing to combine yet, or it is a sum."""
    return not sharding.unreduced_axes or sharding.reduction == "sum"


def may_become_unreduced(source: TensorSharding, target: TensorSharding) -> bool:
    """Whether the axes along which the target is unreduced and the source is not may be so: terms of a sum may be zero,
    of another reduction none is."""
    if not target.unreduced_axes:
        return True
    if target.reduction == "sum":
        return _adds(source)
    have: tuple[AxisRef, ...] = source.unreduced_axes if source.reduction == target.reduction else ()
    return all(any(overlaps(a, b) for b in have) for a in target.unreduced_axes)
