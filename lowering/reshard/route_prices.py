"""Prices of reshards between all layouts of a tensor at once, from the shortest paths of its shape class.

See docs/explanation/planner.md#prices-of-all-pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import combinations, compress, count, pairwise
from typing import NamedTuple

import numpy as np

from sdy_jax.ir.meshes import Axes, AxisRef, Mesh, overlaps
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.lowering.reshard.layout_graph import ArcKind, Arcs, Bools, Ints, Space, States, is_small, space_of
from sdy_jax.lowering.reshard.planner import plan_reshard, strips_time
from sdy_jax.lowering.reshard.problem import State, mask_of
from sdy_jax.lowering.reshard.shortest_paths import Ends, Lanes, Matrix, Rates, RouteNetwork, shortest
from sdy_jax.lowering.targets.cost_model import CostModel
from sdy_jax.lowering.targets.rates import Link

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
    """The times between states by the bytes of a tensor, found when they are first asked for."""

    def __init__(self, space: Space, network: RouteNetwork):
        self._met = _Met(space, network)
        self._rates = network.rates(space.arcs, space.counts[space.arcs.sources], space.counts[space.arcs.targets])
        self._of_sizes: dict[float, _OfSize] = {}

    @property
    def are_linear(self) -> bool:
        """Whether times are proportional to bytes."""
        return self._rates.are_linear

    def matrix(self, total: float, sources: Sequence[State], targets: Sequence[State]) -> Matrix:
        """The times from some states (rows) to others, for a tensor of `total` bytes."""
        rows, columns = self._met.numbers(sources), self._met.numbers(targets)
        if total not in self._of_sizes:
            self._of_sizes[total] = _OfSize(self._met, total, self._rates.times(total))
        return self._of_sizes[total].matrix(rows, columns)


class _Steps(NamedTuple):
    """Collectives, and their rates."""

    arcs: Arcs
    rates: Rates

    def also(self, other: _Steps) -> _Steps:
        """These and others."""
        rates = Rates(*[np.concatenate(both) for both in zip(self.rates, other.rates, strict=True)])
        return _Steps(Arcs.of([self.arcs, other.arcs]), rates)


class _Met:
    """The states of a class that were met, by number, and the single collectives between them.

    A space may leave out states, having too many: atoms of a dimension in another order than that of the mesh. Layouts
    at hand may be such states. One is left and reached by a single collective from and to a state of the space, or
    another layout at hand; so a price depends on its two ends, and not on what else is at hand.

    Attributes:
        space: the space of the class.
        places: per state, its number in the space, or -1.
        layouts, counts, shards, wanted: as the space has them.
        into, out_of: collectives from the space to states that are not in it, and from these to the space.
        ways: other collectives between states that were met, from those that are not in the space.
        direct: where one collective does it all, over all axes at once, it may take less than one after another.
    """

    def __init__(self, space: Space, network: RouteNetwork):
        self.space, self._network = space, network
        self._known: dict[State, int] = {}
        self._take(space.layouts([]))
        none = Arcs.of([])
        self.into = self.out_of = self.ways = self.direct = self._rated(none, self.counts, self.counts)

    def numbers(self, states: Sequence[State]) -> Ints:
        """Their numbers, new ones for those that were not met."""
        new = [state for state in dict.fromkeys(states) if state not in self._known]
        if new:
            self._known.update(zip(new, count(len(self._known))))
            self._meet(self.space.layouts(new))
        return np.array([self._known[state] for state in states], np.int64)

    def _take(self, layouts: States) -> None:
        space = self.space
        self.layouts, self.places, self.wanted = layouts, space.numbers(layouts), space.wanted(layouts)
        self.counts = space.counts_of(layouts)
        self.shards = self.counts.prod(1)

    def _meet(self, layouts: States) -> None:
        first = len(self.places)
        self._take(self.layouts.also(layouts))
        for number in (np.flatnonzero(self.places[first:] < 0) + first).tolist():
            self._leave_and_reach(number)
        numbers = np.arange(len(self.places))
        new, old = numbers[first:], numbers[:first]
        for sources, targets in ((new, numbers), (old, new)):
            found = self.space.steps(self.layouts.at(sources), self.layouts.at(targets))
            arcs = found._replace(sources=sources[found.sources], targets=targets[found.targets])
            at_once = arcs.are(
                ArcKind.all_gather, ArcKind.reduce_scatter, ArcKind.all_reduce, ArcKind.collective_permute
            )
            ways = (self.places[arcs.sources] < 0) & ~arcs.are(ArcKind.collective_permute) & _leaves(arcs)
            self.direct = self.direct.also(self._rated(arcs.where(at_once), self.counts, self.counts))
            self.ways = self.ways.also(self._rated(arcs.where(ways), self.counts, self.counts))

    def _leave_and_reach(self, number: int) -> None:
        """Adds what leads between a state that is not in the space and those that are."""
        space, one = self.space, self.layouts.at(np.array([number]))
        into, out_of = space.steps(space.states, one), space.steps(one, space.states)
        into = into.where(~into.are(ArcKind.all_gather, ArcKind.sharded_to_unreduced) | into.are_single())
        out_of = out_of.where(_leaves(out_of))
        into, out_of = into._replace(targets=into.targets + number), out_of._replace(sources=out_of.sources + number)
        self.into = self.into.also(self._rated(into, space.counts, self.counts))
        self.out_of = self.out_of.also(self._rated(out_of, self.counts, space.counts))

    def _rated(self, arcs: Arcs, sources: Ints, targets: Ints) -> _Steps:
        return _Steps(arcs, self._network.rates(arcs, sources[arcs.sources], targets[arcs.targets]))


def _leaves(arcs: Arcs) -> Bools:
    """Which collectives leave a state that is not in the space: several atoms are gathered, reduced, or made unreduced
    at once, and one is sliced or scattered."""
    alone = arcs.are(ArcKind.all_slice, ArcKind.reduce_scatter, ArcKind.replicated_to_unreduced)
    return ~alone | arcs.are_single()


class _OfSize:
    """The times between the states that were met, for a tensor of some bytes."""

    def __init__(self, met: _Met, total: float, times: Matrix):
        self._met, self._total, self._times = met, total, times
        self._columns: dict[int, int] = {}
        self._found = np.zeros((len(met.space.states.unreduced), 0))
        self._outside: dict[int, Matrix] = {}

    def matrix(self, rows: Ints, columns: Ints) -> Matrix:
        """The times from some states to others, by their numbers among those that were met."""
        self._learn([n for n in dict.fromkeys(columns.tolist()) if n not in self._columns])
        asked = np.array([self._columns[n] for n in columns.tolist()], np.int64)
        places = self._met.places[rows]
        made = self._found[np.ix_(places, asked)]
        outside, ways = np.flatnonzero(places < 0), self._among_met(self._met.ways)
        for i in outside.tolist():
            made[i] = self._from_outside(int(rows[i]), ways)[asked]
        return np.minimum(made, self._among_met(self._met.direct)[np.ix_(rows, columns)])

    def _learn(self, targets: list[int]) -> None:
        """Finds the times to states from all states of the space."""
        if not targets:
            return
        met, ends = self._met, np.array(targets, np.int64)
        last = np.full((len(self._found), len(met.places)), np.inf)
        np.minimum.at(last, (met.into.arcs.sources, met.into.arcs.targets), met.into.rates.times(self._total))
        inside = np.flatnonzero(met.places >= 0)
        last[met.places[inside], inside] = 0.0
        of = Ends(met.shards[ends], met.wanted[ends], met.layouts.unreduced[ends], last[:, ends])
        self._columns.update(zip(targets, count(len(self._columns))))
        self._found = np.column_stack([self._found, shortest(met.space, self._times, of)])

    def _from_outside(self, source: int, ways: Matrix) -> Matrix:
        """The times from a state that is not in the space to those to which times are known."""
        known = self._outside.get(source, np.zeros(0))
        if len(known) < len(self._columns):
            targets = np.array(list(self._columns)[len(known) :], np.int64)
            times = self._first_steps(source, targets, self._found[:, len(known) :], ways[source, targets])
            self._outside[source] = np.append(known, np.where(targets == source, 0.0, times))
        return self._outside[source]

    def _first_steps(self, source: int, targets: Ints, found: Matrix, ways: Matrix) -> Matrix:
        """The times by one collective, `ways`, or by one that leads into the space, from where they are `found`."""
        met = self._met
        arcs = met.out_of.arcs
        some = slice(*np.searchsorted(arcs.sources, [source, source + 1]))
        arcs, times = arcs.where(some), met.out_of.rates.times(self._total)[some]
        onward = times[:, None] + found[arcs.targets]
        onward[~arcs.changes().are_towards(met.wanted[targets], met.layouts.unreduced[targets])] = np.inf
        least = np.minimum(met.shards[source], met.shards[targets])  # nothing is larger than both ends
        within = np.where(met.space.shards[arcs.targets, None] >= least, onward, np.inf).min(0, initial=np.inf)
        within = np.minimum(within, ways)
        return np.where(np.isfinite(within), within, onward.min(0, initial=np.inf))

    def _among_met(self, steps: _Steps) -> Matrix:
        """The times from all states that were met to all, by single collectives."""
        times = np.full((len(self._met.places),) * 2, np.inf)
        np.minimum.at(times, (steps.arcs.sources, steps.arcs.targets), steps.rates.times(self._total))
        return times


@lru_cache(maxsize=1 << 9)
def _routes(
    blocks: tuple[int, ...],
    links: tuple[Link, ...],
    combines: tuple[str, ...],
    lanes: Lanes | None,
) -> _Routes:
    return _Routes(space_of(blocks, tuple([link.size for link in links])), RouteNetwork(links, combines, lanes))


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
