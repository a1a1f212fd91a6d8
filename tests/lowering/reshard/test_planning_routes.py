"""Prices of reshards for all pairs of layouts at once, against the planner of single reshards."""

import itertools
import math
import random

import numpy as np
import pytest

from sdy_jax.ir.collectives import KINDS
from sdy_jax.ir.meshes import AxisRef, Mesh
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.lowering.reshard import route_prices
from sdy_jax.lowering.reshard.layout_graph import is_small
from sdy_jax.lowering.reshard.planner import plan_reshard
from sdy_jax.lowering.reshard.problem import State, atoms_of, mask_of
from sdy_jax.lowering.reshard.route_prices import RoutePrices
from sdy_jax.lowering.targets.cost_model import CostModel
from sdy_jax.lowering.targets.rates import Link, rate, wire_bytes
from sdy_jax.lowering.targets.tpu import TPU

COSTS = CostModel()
EIGHT, TWO_BY_FOUR, CUBE = Mesh.of(x=8), Mesh.of(x=2, y=4), Mesh.of(x=2, y=2, z=2)


def layout(dims: str, unreduced: str = "", kind: str = "sum") -> TensorSharding:
    """`layout("xy,,z")`: single-letter axes, a dimension between commas."""
    lists = [[AxisRef(name) for name in axes] for axes in dims.split(",")]
    return TensorSharding.closed("m", lists, [AxisRef(name) for name in unreduced], kind)


def layouts(mesh: Mesh, shape: tuple[int, ...]) -> list[TensorSharding]:
    """All layouts in equal blocks, the axes of a dimension in every order."""
    names, rank, found = [axis.name for axis in mesh.axes], len(shape), []
    for places in itertools.product(range(rank + 2), repeat=len(names)):
        lists = [[n for n, place in zip(names, places, strict=True) if place == dim] for dim in range(rank)]
        unreduced = "".join(n for n, place in zip(names, places, strict=True) if place == rank + 1)
        if not any(n % math.prod(mesh.sizes[a] for a in axes) for n, axes in zip(shape, lists, strict=True)):
            orders = itertools.product(*map(itertools.permutations, lists))
            found += [layout(",".join("".join(axes) for axes in dims), unreduced) for dims in orders]
    return found


def differences(mesh, shape, costs=COSTS, most=200, seed=0):
    """The share of pairs whose price is below the planner's, and of those whose price is above it."""
    all_of_them = layouts(mesh, shape)
    matrix = RoutePrices("m", mesh, costs).matrix(shape, 4.0, all_of_them, all_of_them)
    pairs = list(itertools.product(range(len(all_of_them)), repeat=2))
    pairs = random.Random(seed).sample(pairs, min(most, len(pairs)))
    planned = [plan_reshard(shape, 4.0, all_of_them[i], all_of_them[j], mesh, costs).cost for i, j in pairs]
    found = [matrix[pair] for pair in pairs]
    below = sum(a < b * (1 - 1e-9) for a, b in zip(found, planned, strict=True))
    above = sum(a > b * (1 + 1e-9) for a, b in zip(found, planned, strict=True))
    return below / len(pairs), above / len(pairs)


@pytest.mark.parametrize(
    ("mesh", "shape"),
    [
        (EIGHT, (64,)),
        (EIGHT, (16, 32)),
        (EIGHT, (4, 32)),
        (EIGHT, (8, 16, 64)),
        (EIGHT, (8, 8, 16, 64)),
        (CUBE, (64,)),
        (CUBE, (16, 32)),
        (CUBE, (2, 32)),
        (CUBE, (8, 2, 12)),
        (Mesh.of(x=4, y=4), (16, 32)),
        (Mesh.of(x=3, y=2), (6, 12, 18)),
    ],
    ids=str,
)
def test_prices_are_the_planners(mesh, shape):
    assert differences(mesh, shape) == (0, 0)


@pytest.mark.dear
@pytest.mark.parametrize("shape", [(8, 16, 64), (8, 8, 16, 64)], ids=str)
def test_prices_are_the_planners_on_three_axes(shape):
    assert differences(CUBE, shape, most=60) == (0, 0)


@pytest.mark.dear
@pytest.mark.parametrize("shape", [(64,), (16, 32), (2, 32), (8, 16, 64), (8, 8, 16, 64)], ids=str)
def test_prices_are_rarely_above_the_planners_where_parts_of_an_axis_would_help(shape):
    below, above = differences(TWO_BY_FOUR, shape)
    assert below == 0 and above <= 0.06


def test_an_exchange_of_unequal_axes_takes_whole_axes():
    """The planner exchanges x with half of y; here all of y moves."""
    source, target = layout("x,y"), layout("y,x")
    assert plan_reshard((16, 32), 4, source, target, TWO_BY_FOUR).cost == 384
    assert RoutePrices("m", TWO_BY_FOUR, COSTS).matrix((16, 32), 4, [source], [target])[0, 0] == 480


@pytest.mark.parametrize(
    "costs",
    [
        CostModel(bandwidth={"x": 1.0, "y": 4.0}),
        CostModel(latency=100.0),
        CostModel(bandwidth=dict.fromkeys("xyz", 100.0), copies=TPU.arrays.copies(1 / 1000, 1.0)),
    ],
    ids=str,
)
@pytest.mark.parametrize("mesh", [TWO_BY_FOUR, CUBE], ids=str)
def test_prices_are_near_the_planners_with_latency_and_unequal_axes(costs, mesh):
    below, above = differences(mesh, (8, 16), costs)
    assert below <= 0.12 and above <= 0.25


IN_TILES = CostModel(bandwidth=dict.fromkeys("xyz", 100.0), copies=TPU.arrays.copies(1 / 1000, 0.0))
"""To rearrange narrow blocks of matrices takes 0.8 of the time of sending them, those of other arrays 1.2 of it."""


@pytest.mark.dear
@pytest.mark.parametrize("shape", [(16, 64), (16, 512), (512, 1024), (8, 16, 64), (8, 16, 1024)], ids=str)
@pytest.mark.parametrize("mesh", [EIGHT, CUBE], ids=str)
def test_prices_are_the_planners_where_arrays_lie_in_tiles(mesh, shape):
    assert differences(mesh, shape, IN_TILES, most=60) == (0, 0)


def test_dimensions_that_no_layout_shards_are_on_the_way():
    given = [found for found in layouts(CUBE, (8, 16, 64)) if not any(found.axes[1:])]
    prices = RoutePrices("m", CUBE, COSTS).matrix((8, 16, 64), 4.0, given, given)
    pairs = random.Random(1).sample(list(itertools.product(range(len(given)), repeat=2)), 150)
    planned = [plan_reshard((8, 16, 64), 4.0, given[i], given[j], CUBE, COSTS).cost for i, j in pairs]
    assert [prices[pair] for pair in pairs] == planned


SINGLE = [  # source, target, kind, axes, shards of the source
    (("x,", ""), (",", ""), "all_gather", "x", 2),
    (("xy,", ""), (",", ""), "all_gather", "xy", 8),
    ((",", "x"), ("x,", ""), "reduce_scatter", "x", 1),
    ((",", "xy"), ("x,y", ""), "reduce_scatter", "xy", 1),
    (("y,", "x"), ("y,", ""), "all_reduce", "x", 4),
    ((",", "xy"), (",", ""), "all_reduce", "xy", 1),
    (("xy,", ""), (",xy", ""), "all_to_all", "xy", 8),
    (("yx,", ""), ("xy,", ""), "collective_permute", "xy", 8),
    ((",", ""), ("x,y", ""), "all_slice", "xy", 1),
    (("x,", ""), ("x,", "y"), "replicated_to_unreduced", "y", 2),
]


@pytest.mark.parametrize(("source", "target", "kind", "axes", "shards"), SINGLE)
@pytest.mark.parametrize("bandwidth", [{}, {"x": 2.0, "y": 8.0}], ids=["equal", "unequal"])
def test_single_collectives_cost_what_the_model_says(source, target, kind, axes, shards, bandwidth):
    costs, shape, ends = CostModel(bandwidth=bandwidth), (8, 16), (layout(*source), layout(*target))
    price = RoutePrices("m", TWO_BY_FOUR, costs).matrix(shape, 4.0, [ends[0]], [ends[1]])[0, 0]
    assert price == plan_reshard(shape, 4.0, *ends, TWO_BY_FOUR, costs).cost
    at_once = costs.time(kind, map(AxisRef, axes), TWO_BY_FOUR, 4.0 * 8 * 16 / shards, 0)
    by_speed = bandwidth and len(axes) > 1 and kind in ("all_gather", "reduce_scatter", "all_reduce")
    assert price < at_once if by_speed else price == at_once


FAST_AND_SLOW = CostModel(latency={"x": 2e-6, "y": 1e-6}, bandwidth={"x": 1e9, "y": 100e9}, start=3e-6)


@pytest.mark.parametrize(
    ("source", "target", "kinds"),
    [
        ((",", "xy"), (",", ""), ["reduce_scatter", "all_reduce", "all_gather"]),
        ((",", "xy"), ("x,y", ""), ["reduce_scatter", "reduce_scatter"]),
        ((",yx", ""), (",", ""), ["all_gather", "all_gather"]),
        (("xy,", ""), (",", ""), ["all_to_all", "all_gather", "all_gather"]),
    ],
)
def test_the_fast_axis_goes_first_and_last_where_bytes_matter(source, target, kinds):
    """8 MiB over an axis at 100 GB/s and one at 1 GB/s: over the slow one goes what the fast one leaves."""
    shape, ends = (1024, 2048), (layout(*source), layout(*target))
    plan = plan_reshard(shape, 4.0, *ends, TWO_BY_FOUR, FAST_AND_SLOW)
    assert [step.kind for step in plan.steps] == kinds
    price = RoutePrices("m", TWO_BY_FOUR, FAST_AND_SLOW).matrix(shape, 4.0, [ends[0]], [ends[1]])[0, 0]
    assert price == pytest.approx(plan.cost)
    if kinds[1] == "all_reduce":
        part = 4.0 * 1024 * 2048 / 4
        assert price == pytest.approx(2 * 3 * part / 100e9 + part / 1e9 + 2 * (3e-6 + 3e-6) + 3e-6 + 2 * 2e-6)


def test_a_small_value_is_reduced_over_a_fast_and_a_slow_axis_at_once():
    """Three collectives would wait three times."""
    ends = layout(",", "xy"), layout(",")
    plan = plan_reshard((8, 4), 4.0, *ends, TWO_BY_FOUR, FAST_AND_SLOW)
    assert [step.kind for step in plan.steps] == ["all_reduce"]
    price = RoutePrices("m", TWO_BY_FOUR, FAST_AND_SLOW).matrix((8, 4), 4.0, [ends[0]], [ends[1]])[0, 0]
    assert price == pytest.approx(plan.cost)


@pytest.mark.parametrize(("target", "kinds"), [("y,x", ["reduce_scatter"]), (",x", ["reduce_scatter", "all_gather"])])
def test_no_collective_is_cut_in_two_for_latency_that_small_ones_share(target, kinds):
    """The gradient of a weight of 405B: scattered in two parts the second would be small, and its latency shared."""
    costs = CostModel({"x": 5e-6, "y": 6e-7}, bandwidth={"x": 50e9, "y": 450e9}, start=7e-6, combines=tuple(KINDS))
    plan = plan_reshard((53248, 16384), 2.0, layout("y,", "x"), layout(target), Mesh.of(x=256, y=8), costs)
    assert [step.kind for step in plan.steps] == kinds


@pytest.mark.parametrize("combines", [(), tuple(KINDS)])
@pytest.mark.parametrize("rows", [8, 100, 1000, 10_000, 100_000])
def test_with_latency_sizes_between_powers_of_four_are_priced_within_a_few_percent(rows, combines):
    costs = CostModel(latency=1e-6, bandwidth={"x": 50e9, "y": 50e9}, start=5e-6, combines=combines)
    given, shape = layouts(TWO_BY_FOUR, (8, 16)), (8 * rows, 16)
    prices = RoutePrices("m", TWO_BY_FOUR, costs).matrix(shape, 4.0, given, given)
    pairs = random.Random(0).sample(list(itertools.product(range(len(given)), repeat=2)), 60)
    for i, j in pairs:
        planned = plan_reshard(shape, 4.0, given[i], given[j], TWO_BY_FOUR, costs)
        if len(planned.steps) == 1:
            assert 0.96 * planned.cost <= prices[i, j] <= planned.cost * (1 + 1e-9)


def test_with_latency_sizes_between_two_powers_share_their_paths(monkeypatch):
    route_prices._routes.cache_clear()
    searches = []
    monkeypatch.setattr(
        route_prices, "shortest", lambda *args, found=route_prices.shortest: searches.append(1) or found(*args)
    )
    costs, given = CostModel(latency=5.0), layouts(TWO_BY_FOUR, (8, 16))
    book = RoutePrices("m", TWO_BY_FOUR, costs)
    book.matrix((40, 16), 4.0, given, given)
    count = len(searches)
    book.matrix((56, 16), 4.0, given, given)
    assert len(searches) == count > 0


def test_nothing_on_the_way_is_larger_than_both_ends():
    """All devices could take the whole tensor as terms along x and slice it along y, for nothing."""
    source, target = layout("x,"), layout("y,", "x")
    price = RoutePrices("m", TWO_BY_FOUR, COSTS).matrix((16, 32), 4.0, [source], [target])[0, 0]
    assert price == plan_reshard((16, 32), 4, source, target, TWO_BY_FOUR).cost == 256


def test_only_sums_become_unreduced_along_new_axes():
    whole, most, more = layout("x,"), layout("x,", "y", "max"), layout(",", "xy", "max")
    sums = layout("x,", "y")
    prices = RoutePrices("m", TWO_BY_FOUR, COSTS).matrix((16, 32), 4.0, *[[whole, most, more, sums]] * 2)
    assert np.isinf(prices).astype(int).tolist() == [[0, 1, 1, 0], [0, 0, 1, 1], [0, 0, 0, 1], [0, 1, 1, 0]]
    planned = plan_reshard((16, 32), 4.0, most, whole, TWO_BY_FOUR).cost
    assert prices[1, 0] == prices[3, 0] == planned and prices[0, 3] == 0


def test_padded_blocks_and_other_meshes_are_priced_pair_by_pair():
    asked = []

    def pair(shape, itemsize, source, target):
        asked.append((str(source), str(target)))
        return 7.0

    other = TensorSharding.closed("other", [[AxisRef("x")], []])
    given = [layout("y,"), layout("x,"), layout(","), other]
    prices = RoutePrices("m", TWO_BY_FOUR, COSTS, pair).matrix((6, 8), 4.0, given[1:], given)
    assert prices.tolist() == [[7.0, 0.0, 96.0, 7.0], [7.0, 0.0, 0.0, 7.0], [7.0, 7.0, 7.0, 7.0]]
    assert len(asked) == 8
    planned = RoutePrices("m", TWO_BY_FOUR, COSTS).matrix((6, 8), 4.0, [layout("y,")], [layout(",")])[0, 0]
    assert planned == plan_reshard((6, 8), 4.0, layout("y,"), layout(","), TWO_BY_FOUR).cost > 0


def test_sub_axes_are_atoms():
    first, second = AxisRef.sub("x", 1, 2), AxisRef.sub("x", 2, 4)
    given = [
        TensorSharding.closed("m", axes)
        for axes in ([[first], []], [[first], [second]], [[AxisRef("x")], []], [[], [second]], [[], []])
    ]
    prices = RoutePrices("m", EIGHT, COSTS).matrix((16, 32), 4.0, given, given)
    planned = [[plan_reshard((16, 32), 4.0, s, t, EIGHT).cost for t in given] for s in given]
    assert prices.tolist() == planned


def test_equal_classes_are_priced_once(monkeypatch):
    route_prices._routes.cache_clear()
    searches = []
    monkeypatch.setattr(
        route_prices, "shortest", lambda *args, found=route_prices.shortest: searches.append(1) or found(*args)
    )
    book, given = RoutePrices("m", TWO_BY_FOUR, COSTS), layouts(TWO_BY_FOUR, (8, 16))
    first = book.matrix((8, 16), 4.0, given, given)
    count = len(searches)
    assert count > 0
    assert (book.matrix((8 * 3, 16 * 5), 2.0, given, given) == first * 7.5).all()
    assert (RoutePrices("m", TWO_BY_FOUR, COSTS).matrix((8, 16), 4.0, given[:3], given[2:]) == first[:3, 2:]).all()
    assert len(searches) == count


def test_empty_tensors_and_scalars():
    book = RoutePrices("m", TWO_BY_FOUR, COSTS)
    assert book.matrix((0, 8), 4.0, [layout("x,y")], [layout(",")]).tolist() == [[0.0]]
    scalar, partial = TensorSharding.closed("m", []), TensorSharding.closed("m", [], [AxisRef("y")])
    assert book.matrix((), 4.0, [scalar, partial], [scalar, partial]).tolist() == [[0.0, 0.0], [6.0, 0.0]]
    assert book.matrix((8, 8), 4.0, [], [layout(",")]).shape == (0, 1)


def test_many_axes_keep_mesh_order_and_the_orders_at_hand():
    mesh = Mesh.of(a=2, b=2, c=2, d=2)
    assert is_small(4, 3) and not is_small(4, 4)
    given = [layout(dims, left) for dims, left in (("ab,c,,", "d"), ("ba,,,dc", ""), (",,,", "ab"), ("d,c,b,a", ""))]
    book = RoutePrices("m", mesh, COSTS)
    prices = book.matrix((16, 16, 16, 16), 4.0, given, given)
    planned = [[plan_reshard((16, 16, 16, 16), 4.0, s, t, mesh).cost for t in given] for s in given[:2]]
    assert (prices[:2] >= planned).all() and (prices[:2] <= np.multiply(planned, 1.3)).all()
    assert np.isfinite(prices).all()
    rows = [layout("abc,,,"), layout("cab,,,"), layout(",,,", "bc")]
    planned = [[plan_reshard((16, 16, 16, 16), 4.0, s, t, mesh).cost for t in rows] for s in rows]
    assert book.matrix((16, 16, 16, 16), 4.0, rows, rows).tolist() == planned


@pytest.mark.more("random sets of layouts")
def test_a_price_does_not_depend_on_what_else_is_at_hand():
    """Orders of four axes other than the mesh's are in no space: only the two ends of a price are reached by them."""
    mesh = Mesh.of(a=2, b=2, c=2, d=2)
    dims = ("ab,c,,d", "ba,,,dc", "cba,,d,", ",dcba,,", "ca,db,,", ",,,")
    given = [layout(found) for found in dims] + [layout("ca,,,", "d"), layout("db,,a,")]
    all_dims = layout("a,b,c,d")
    assert not is_small(4, 4)
    book = RoutePrices("m", mesh, COSTS)
    prices = book.matrix((16, 16, 16, 16), 4.0, given, given)
    for (i, source), (j, target) in itertools.product(enumerate(given), repeat=2):
        assert book.matrix((16, 16, 16, 16), 4.0, [source], [target, all_dims])[0, 0] == prices[i, j]
        planned = plan_reshard((16, 16, 16, 16), 4.0, source, target, mesh, COSTS).cost
        assert planned <= prices[i, j] <= 4 * planned  # two steps out of order may be one too many


def test_a_transposed_tensor_is_of_the_class_of_the_other():
    """Its routes are found once, and what they cost is the same."""
    given = layouts(CUBE, (8, 16))
    turned = [TensorSharding.closed("m", s.axes[::-1], s.unreduced_axes) for s in given]
    both = [route_prices.ShapeClass(shape, CUBE, each).blocks for shape, each in (((8, 16), given), ((16, 8), turned))]
    assert both[0] == both[1]
    book = RoutePrices("m", CUBE, COSTS)
    found = book.matrix((8, 16), 4.0, given, given)
    np.testing.assert_array_equal(found, book.matrix((16, 8), 4.0, turned, turned))


# A plain search, state by state, for what the arrays find.


def moves(state: State, atoms: int):
    """Single collectives over one atom, all_to_alls of one pair, and all_reduces, with the states that they lead to."""
    dims, unreduced = state
    idle = set(range(atoms)) - {a for axes in dims for a in axes} - set(atoms_of(unreduced))
    for dim, axes in enumerate(dims):
        for atom in idle:
            yield "all_slice", 1 << atom, state.with_dim(dim, (*axes, atom))
        for atom in atoms_of(unreduced):
            yield "reduce_scatter", 1 << atom, state.with_dim(dim, (*axes, atom), unreduced & ~(1 << atom))
        if axes:
            last, shorter = 1 << axes[-1], state.with_dim(dim, axes[:-1])
            yield "all_gather", last, shorter
            yield "sharded_to_unreduced", last, State(shorter.dims, unreduced | last)
        for start, other in itertools.product(range(len(axes)), range(len(dims))):
            if other != dim:
                moved = state.with_dim(dim, axes[:start]).with_dim(other, (*dims[other], *axes[start:]))
                yield "all_to_all", mask_of(axes[start:]), moved
    for atom in idle:
        yield "replicated_to_unreduced", 1 << atom, State(dims, unreduced | 1 << atom)
    for group in range(1, 1 << atoms):
        if group & unreduced == group:
            yield "all_reduce", group, State(dims, unreduced & ~group)


def plain_times(target: State, found: dict[State, list], shards: dict[State, int]) -> dict[State, float]:
    """The least time from every state; nothing on the way has fewer shards than both ends."""
    wanted = mask_of(a for axes in target.dims for a in axes)
    useless = {
        "all_slice": lambda group: group & ~wanted,
        "reduce_scatter": lambda group: group & target.unreduced,
        "all_reduce": lambda group: group & target.unreduced,
        "replicated_to_unreduced": lambda group: group & ~target.unreduced,
        "sharded_to_unreduced": lambda group: group & ~target.unreduced,
    }
    times: dict[State, float] = {}
    for level in {min(shards[state], shards[target]) for state in found}:
        left, waiting = {target: 0.0}, [target]
        while waiting:
            reached = waiting.pop()
            for kind, group, state, time in found[reached]:
                is_used = shards[state] >= level and not useless.get(kind, lambda _: 0)(group)
                if is_used and left[reached] + time < left.get(state, math.inf):
                    left[state] = left[reached] + time
                    waiting.append(state)
        times |= {state: time for state, time in left.items() if min(shards[state], shards[target]) == level}
    return times


@pytest.mark.parametrize("seed", range(6))
def test_times_are_those_of_a_plain_search(seed):
    rng = random.Random(seed)
    sizes, rank = rng.choice([(2, 2, 2), (2, 3), (4, 2), (2, 2)]), 2
    links = tuple([Link(n, rng.choice([1e9, 5e9]), rng.choice([0, 1e-6]), rng.choice([0, 3e-6])) for n in sizes])
    total, combines = 4.0 ** rng.randrange(4, 14), rng.choice([(), ("all_reduce", "all_gather")])
    given = []
    for places in itertools.product(range(rank + 2), repeat=len(sizes)):
        lists = [[a for a, place in enumerate(places) if place == dim] for dim in range(rank)]
        unreduced = mask_of(a for a, place in enumerate(places) if place == rank + 1)
        given += [State(dims, unreduced) for dims in itertools.product(*map(itertools.permutations, lists))]
    counts = {state: [math.prod(sizes[a] for a in axes) for axes in state.dims] for state in given}
    shards = {state: math.prod(found) for state, found in counts.items()}

    def time(kind, group, state):
        over = [links[a] for a in atoms_of(group)]
        sent = wire_bytes(kind, math.prod(link.size for link in over), total / shards[state], 0.0)
        return rate(kind, over, combines).time(sent) if sent else 0.0

    back = {state: [] for state in given}  # what leads to each state
    for state in given:
        for kind, group, reached in moves(state, len(sizes)):
            back[reached].append((kind, group, state, time(kind, group, state)))
        for other in given:
            if other != state and counts[other] == counts[state] and other.unreduced == state.unreduced:
                group = mask_of(a for axes in (*state.dims, *other.dims) for a in axes) | state.unreduced
                back[other].append(("collective_permute", group, state, time("collective_permute", group, state)))
    asked = rng.sample(given, 12)
    routes = route_prices._routes((math.prod(sizes),) * rank, links, combines, None)
    matrix = routes.matrix(total, given, asked)
    for j, target in enumerate(asked):
        times = plain_times(target, back, shards)
        for i, source in enumerate(given):
            whole = [prefix[: len(axes)] == axes for prefix, axes in zip(source.dims, target.dims, strict=True)]
            at_once = math.inf  # over several atoms
            if all(whole) and source.unreduced == target.unreduced and source != target:
                gone = mask_of(set(itertools.chain(*source.dims)) - set(itertools.chain(*target.dims)))
                at_once = time("all_gather", gone, source)
            longer = [axes[: len(prefix)] == prefix for prefix, axes in zip(source.dims, target.dims, strict=True)]
            more = mask_of(set(itertools.chain(*target.dims)) - set(itertools.chain(*source.dims)))
            if all(longer) and more and source.unreduced == target.unreduced | more and not target.unreduced & more:
                at_once = min(at_once, time("reduce_scatter", more, source))
            assert matrix[i, j] == pytest.approx(min(times.get(source, math.inf), at_once), rel=1e-12, abs=0)
