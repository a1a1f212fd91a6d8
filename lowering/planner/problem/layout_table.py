"""Layouts and lists of axes by number, and what it costs to go from one layout to another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, count, permutations
from typing import NamedTuple

import numpy as np

from sdy_jax.ir.meshes import Axes, AxisRef, Mesh, axes_size, overlaps, set_difference, sort_and_merge
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.lowering.planner.facts.factors import canonical
from sdy_jax.lowering.planner.setting import Memo
from sdy_jax.lowering.reshard.bounds import steps_between
from sdy_jax.lowering.reshard.route_prices import RoutePrices
from sdy_jax.lowering.targets.cost_model import CostModel
from sdy_jax.lowering.targets.family import Arrays

# Layouts by number, and what it costs to go from one to another: what the planner of a whole program computes with.


class ValueClass(NamedTuple):
    """A tensor's global shape and its bytes per element: values of one class cost the same in equal layouts. What has
    no bytes is only taken in the layout in which it is made: it ties nodes to each other.

    `is_alone`: its collectives have hardly any others to run with (`fusion.sent_alone`).
    `is_rounded`: it is rounded before it is moved.
    """

    shape: tuple[int, ...]
    itemsize: float
    is_alone: bool = False
    is_rounded: bool = False


_MOST_REMEMBERED = 256
"""Layouts of a class up to which their prices are remembered for other forms and borders of a program: half a megabyte.
Guessed, a guard of memory: classes are some hundred, and each is asked for with a few lists of layouts."""

ModelPairPrice = Callable[[CostModel, tuple[int, ...], float, TensorSharding, TensorSharding], float]
"""The price of one reshard by a cost model."""


class LayoutTable:
    """The numbers of layouts. Shardings that place data alike have one number.

    Args:
        mesh_name, mesh: the mesh that layouts are on.
        inverted: the pairs of atoms of which the first one may also be major to the second one, which comes before it
            in mesh order.
    """

    def __init__(self, mesh_name: str, mesh: Mesh, inverted: frozenset[tuple[AxisRef, AxisRef]] = frozenset()):
        self.mesh = mesh
        self.mesh_name = mesh_name
        self.inverted = inverted
        self._orders: dict[Axes, tuple[Axes, ...]] = {}
        self._numbers: dict[object, int] = {}
        self._by_axes: dict[object, int] = {}
        self._without: dict[tuple[int, Axes], int] = {}
        self.shardings: list[TensorSharding] = []
        """The layout of each number, as a closed sharding."""

    def number(self, sharding: TensorSharding) -> int:
        """The number of a sharding's layout."""
        found = self._numbers.get(sharding.layout)
        if found is None:
            found = self._numbers[sharding.layout] = len(self.shardings)
            closed = sharding if sharding.is_fully_closed and not sharding.replicated_axes else sharding.closed_like()
            self.shardings.append(closed)
        return found

    def number_of_axes(self, axes: tuple[Axes, ...], unreduced: Axes = (), reduction: str = "sum") -> int:
        """The number of a layout on the program's mesh."""
        key = axes, unreduced, reduction
        found = self._by_axes.get(key)
        if found is None:
            sharding = TensorSharding.closed(self.mesh_name, axes, unreduced, reduction if unreduced else "sum")
            found = self._by_axes[key] = self.number(sharding)
        return found

    def orders(self, atoms: Axes) -> tuple[Axes, ...]:
        """The lists in which a dimension may have these atoms, which are in mesh order: that is the first.

        >>> x, y = AxisRef("x"), AxisRef("y")
        >>> table = LayoutTable("mesh", Mesh.of(x=2, y=2), frozenset([(y, x)]))
        >>> [[str(axis) for axis in order] for order in table.orders((x, y))]
        [['"x"', '"y"'], ['"y"', '"x"']]
        """
        if atoms not in self._orders:
            place = {atom: number for number, atom in enumerate(atoms)}
            allowed = [
                canonical(order, self.mesh)
                for order in permutations(atoms)
                if all(place[a] < place[b] or (a, b) in self.inverted for a, b in combinations(order, 2))
            ]
            self._orders[atoms] = tuple(dict.fromkeys(allowed))
        return self._orders[atoms]

    def without(self, number: int, axes: Axes) -> int:
        """The layout that is left if some axes are taken out of it."""
        key = number, axes
        if key not in self._without:
            sharding = self.shardings[number]
            lists = (*sharding.axes, sharding.unreduced_axes)
            *dims, unreduced = [_without(found, axes, self.mesh) for found in lists]
            self._without[key] = self.number_of_axes(tuple(dims), unreduced, sharding.reduction)
        return self._without[key]


def _without(axes: Axes, removed: Axes, mesh: Mesh) -> Axes:
    if not any(overlaps(a, b) for a in axes for b in removed):
        return axes
    return set_difference(axes, removed, mesh)


class Prices:
    """The prices of reshards between layouts, for all pairs of a class that were ever asked for.

    Each collective of what sends anything costs `least` beside its price: what saves next to nothing is not worth one.
    `arrays`: how arrays lie on a device, which holds as many bytes of them as their tiles take. `memo`: has the prices
    between layouts that were asked for together with others, whatever numbers these have.
    """

    def __init__(
        self,
        table: LayoutTable,
        costs: CostModel,
        pair: ModelPairPrice,
        arrays: Arrays = Arrays(),  # noqa: B008 - immutable
        memo: Memo | None = None,
    ):
        self._table, self.arrays, self._memo = table, arrays, memo or Memo()
        alone = replace(costs, combines=())
        models = {
            (apart, rounds): of.of_rounded if rounds else of
            for apart, of in ((False, costs), (True, alone))
            for rounds in (False, True)
        }
        self._routes = {
            key: RoutePrices(table.mesh_name, table.mesh, of, partial(pair, of)) for key, of in models.items()
        }
        self._least, self._all_alone = 0.0, False
        self._known: dict[ValueClass, _OfClass] = {}
        self._bytes: dict[tuple[ValueClass, int, bool], float] = {}

    def add_to_each(self, least: float) -> None:
        """Sets what is added for each collective to the price of all that sends anything."""
        self._least = least
        self._known.clear()

    @contextmanager
    def all_alone(self) -> Iterator[None]:
        """Meanwhile the collectives of all values have hardly any others to run with."""
        shared, self._known, self._all_alone = self._known, {}, True
        yield
        self._known, self._all_alone = shared, False

    def learn(self, of: ValueClass, layouts: Iterable[int]) -> None:
        """Prices all pairs of some layouts, and of these with those that are known."""
        known = self._known.setdefault(of, _OfClass({}, np.zeros((0, 0)), []))
        new = [layout for layout in dict.fromkeys(layouts) if layout not in known.index]
        if not new:
            return
        for layout in new:
            known.index[layout] = len(known.index)
        shardings = [self._table.shardings[layout] for layout in known.index]
        prices = self._remembered(of._replace(is_alone=of.is_alone or self._all_alone), shardings)
        charged = self._least * steps_between(shardings, self._table.mesh) if self._least else 0.0
        known.matrix = np.where(prices > 0, prices + charged, 0.0)
        np.fill_diagonal(known.matrix, 0.0)
        known.rows = known.matrix.tolist()

    def _remembered(self, of: ValueClass, layouts: list[TensorSharding]) -> np.ndarray:
        """The prices between all layouts. In padded blocks they may depend on the order, else on the layouts alone."""
        placed = [layout.layout for layout in layouts]
        if len(layouts) > _MOST_REMEMBERED:
            return self._priced(of, layouts)
        if not self._are_even(of, layouts):
            return self._memo.once(("prices", of, tuple(placed)), lambda: self._priced(of, layouts))
        key = "prices", of, frozenset(placed)
        index, prices = self._memo.once(
            key, lambda: (dict(zip(placed, count(), strict=False)), self._priced(of, layouts))
        )
        order = [index[each] for each in placed]
        return prices[np.ix_(order, order)]

    def _are_even(self, of: ValueClass, layouts: list[TensorSharding]) -> bool:
        counts = np.array([layout.shard_counts(self._table.mesh) for layout in layouts], int)
        return not (np.array(of.shape, int) % counts.reshape(len(layouts), -1)).any()

    def _priced(self, of: ValueClass, layouts: list[TensorSharding]) -> np.ndarray:
        """The prices between all layouts. Between two of which one lies in padded blocks, what is sent is padded like
        the smaller blocks. Where blocks neither join to the other ones nor are cut into them, strips are sent, or other
        layouts lie in between."""
        shape, itemsize, is_alone, is_rounded = of
        routes = self._routes[is_alone, is_rounded]
        if not itemsize:
            return np.where(np.eye(len(layouts)), 0.0, np.inf)
        nested, wholes, numbers = self._joined_blocks(shape, layouts)
        prices = np.full(nested.shape, np.inf)
        for number, whole in enumerate(wholes):
            alike = nested & (numbers == number)
            rows, columns = np.flatnonzero(alike.any(1)), np.flatnonzero(alike.any(0))
            sources = [layouts[i] for i in rows]
            targets = sources if np.array_equal(rows, columns) else [layouts[j] for j in columns]
            found = np.full(nested.shape, np.inf)
            found[np.ix_(rows, columns)] = routes.matrix(whole, itemsize, sources, targets)
            prices[alike] = found[alike]
        if nested.all():
            return prices
        for i, j in np.argwhere(~nested & _differ_once(layouts)):
            prices[i, j] = routes.of_pair(shape, itemsize, layouts[i], layouts[j])
        for i, j in np.argwhere(np.isinf(prices) & ~nested):
            prices[i, j] = np.min(prices[i] + prices[:, j])
        return prices

    def _joined_blocks(
        self, shape: tuple[int, ...], layouts: list[TensorSharding]
    ) -> tuple[np.ndarray, list[tuple[int, ...]], np.ndarray]:
        """For each pair of layouts whether one's blocks join to the other's, the shapes to which tensors are padded
        there, and for each pair the index of its shape."""
        of_counts = dict[tuple[int, ...], int]()  # layouts are many, counts of blocks are few
        places = [of_counts.setdefault(layout.shard_counts(self._table.mesh), len(of_counts)) for layout in layouts]
        counts = np.array(list(of_counts), int).reshape(len(of_counts), -1)
        few, many = np.minimum(counts[:, None], counts), np.maximum(counts[:, None], counts)
        lengths = np.broadcast_to(np.array(shape, int), many.shape)
        blocks = -(-lengths // many)
        nested = ((few == 1) | ((many % few == 0) & (blocks * (many // few) == -(-lengths // few)))).all(-1)
        padded = np.where(nested[..., None], blocks * many, 0)
        mixed = padded @ np.cumprod([1, *padded.max((0, 1)) + 1])[:-1]  # one number per shape: rows take long
        _, first, numbers = np.unique(mixed[nested], return_index=True, return_inverse=True)
        of_pairs = np.zeros(nested.shape, int)
        of_pairs[nested] = numbers
        each = np.ix_(places, places)
        return nested[each], list(map(tuple, padded[nested][first].tolist())), of_pairs[each]

    def cost(self, of: ValueClass, source: int, target: int) -> float:
        """The price of one reshard; infinite where there is none."""
        if source == target:
            return 0.0
        known = self._known.get(of)
        if known is None or source not in known.index or target not in known.index:
            self.learn(of, (source, target))
            known = self._known[of]
        return known.rows[known.index[source]][known.index[target]]

    def is_whole(self, layout: int) -> bool:
        """Whether a layout has no partial sums."""
        return not self._table.shardings[layout].unreduced_axes

    def local_bytes(self, of: ValueClass, layout: int, is_rounded: bool = False) -> float:
        """What one device holds of a tensor. `is_rounded`: it holds it as products alone take it."""
        key = of, layout, is_rounded
        if key not in self._bytes:
            shape, itemsize, *_ = of
            local = self._table.shardings[layout].local_shape(shape, self._table.mesh)
            self._bytes[key] = self.arrays.bytes(local, itemsize, is_rounded)
        return self._bytes[key]

    def matrix(self, of: ValueClass, sources: Sequence[int], targets: Sequence[int]) -> np.ndarray:
        """The prices from each of some layouts (rows) to each of others (columns)."""
        self.learn(of, (*sources, *targets))
        known = self._known[of]
        return known.matrix[np.ix_([known.index[a] for a in sources], [known.index[b] for b in targets])]


def _differ_once(layouts: Sequence[TensorSharding]) -> np.ndarray:
    """For each pair of layouts, whether the axes of one dimension are all in which they differ."""
    numbers: dict[object, int] = {}
    places = [
        [numbers.setdefault(axes, len(numbers)) for axes in (*s.axes, (s.layout[2:], s.layout[0]))] for s in layouts
    ]
    each = np.array(places)
    return (each[:, None] != each).sum(-1) == 1


@dataclass(slots=True)
class _OfClass:
    """The layouts that are known of a class, and the prices of all pairs, as an array and as lists."""

    index: dict[int, int]
    matrix: np.ndarray
    rows: list[list[float]]


# Lists of axes by number, and the layouts that they make: candidates are very many, and such lists are few.

Numbers = tuple[int, ...]
"""Numbers of lists of axes, as one per factor of a rule."""


class AxesLists:
    """The lists of axes that atoms of a mesh form, alone and joined; number 0 is the empty list.

    Attributes:
        table: has the layouts.
        axes: the list of each number.
        sizes: into how many parts each splits a dimension.
    """

    def __init__(self, atoms: Sequence[AxisRef], table: LayoutTable):
        self.table, self._atoms = table, tuple(atoms)
        self.axes: list[Axes] = [()]
        self.sizes = [1]
        self._numbers: dict[Axes, int] = {(): 0}
        self._orders: dict[int, Numbers] = {0: (0,)}
        self._joined: dict[Numbers, int] = {}
        self._merged: dict[Numbers, int] = {}
        self._layouts: dict[tuple[Numbers, int, str], int] = {}

    def orders(self, atoms: int) -> Numbers:
        """The lists in which a dimension may have a set of atoms, which has a bit for each."""
        if atoms not in self._orders:
            found = tuple([atom for bit, atom in enumerate(self._atoms) if atoms >> bit & 1])
            self._orders[atoms] = tuple(map(self._number, self.table.orders(found)))
        return self._orders[atoms]

    def joined(self, numbers: Numbers) -> int:
        """The list of a dimension that is made of several factors, major to minor."""
        if numbers not in self._joined:
            self._joined[numbers] = self._number(canonical(self._all_of(numbers), self.table.mesh))
        return self._joined[numbers]

    def merged(self, numbers: Numbers) -> int:
        """The list of the axes of all these, in mesh order."""
        if numbers not in self._merged:
            self._merged[numbers] = self._number(sort_and_merge(self._all_of(numbers), self.table.mesh))
        return self._merged[numbers]

    def layout(self, dimensions: Numbers, unreduced: int, reduction: str) -> int:
        """The number of the layout with these lists in its dimensions, and unreduced along another one."""
        key = dimensions, unreduced, reduction
        if key not in self._layouts:
            axes = tuple([self.axes[number] for number in dimensions])
            self._layouts[key] = self.table.number_of_axes(axes, self.axes[unreduced], reduction)
        return self._layouts[key]

    def _all_of(self, numbers: Numbers) -> list[AxisRef]:
        return [axis for number in numbers for axis in self.axes[number]]

    def _number(self, axes: Axes) -> int:
        if axes not in self._numbers:
            self._numbers[axes] = len(self.axes)
            self.axes.append(axes)
            self.sizes.append(axes_size(axes, self.table.mesh))
        return self._numbers[axes]
