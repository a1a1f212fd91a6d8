"""Layouts of tensors on grids, and the ways between them: buffers, plans, values."""

from __future__ import annotations

import itertools
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import shard_model as model
from shard_devices import run_stacked

import sdy_jax as sdy
from sdy_jax.ir.meshes import Mesh
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.lowering.ops.collectives.movement import permutation_pairs
from sdy_jax.mesh_dialects.semantics.grid import Grid
from sdy_jax.mesh_dialects.semantics.layout import Layout
from sdy_jax.mesh_dialects.semantics.shards import plan
from sdy_jax.runtime.meshes import RefinedMesh
from sdy_jax.shard import Sharding


def abstract(*sizes):
    return jax.sharding.AbstractMesh(sizes, tuple(f"m{axis}" for axis in range(len(sizes))))


def grid(*sizes):
    return Grid.of(RefinedMesh.of(Mesh.of(**{f"m{axis}": size for axis, size in enumerate(sizes)})))


# Buffers.

BUFFERS = [
    ((4,), np.arange(8), {"split_axes": [[0]], "halo_sizes": [2, 1]}, "0 0 0 1 2 | 0 1 2 3 4 | 2 3 4 5 6 | 4 5 6 7 0"),
    ((4,), np.arange(8), {"split_axes": [[0]], "halo_sizes": [0, 2]}, "0 1 2 3 | 2 3 4 5 | 4 5 6 7 | 6 7 0 0"),
    (
        (4,),
        np.arange(1, 15),
        {"split_axes": [[0]], "sharded_dims_offsets": [0, 2, 5, 9, 14]},
        "1 2 0 0 0 | 3 4 5 0 0 | 6 7 8 9 0 | 10 11 12 13 14",
    ),
    ((4,), np.arange(5), {"split_axes": [[0]]}, "0 1 | 2 3 | 4 0 | 0 0"),
    (
        (4,),
        np.arange(5),
        {"split_axes": [[0]], "sharded_dims_offsets": [0, 0, 3, 3, 5]},
        "0 0 0 | 0 1 2 | 0 0 0 | 3 4 0",
    ),
    ((2, 2), np.arange(4), {"split_axes": [[1, 0]]}, "0 | 2 | 1 | 3"),
    ((2,), np.array([3, 4]), {"split_axes": [[]], "partial": ("sum", [0])}, "3 4 | 0 0"),
    ((2,), np.array([3, 4]), {"split_axes": [[]], "partial": ("max", [0])}, "3 4 | 3 4"),
    ((2,), np.array([3, 4]), {"split_axes": [[]], "partial": ("product", [0])}, "3 4 | 1 1"),
    ((2,), np.array([3, 4]), {"split_axes": [[]], "partial": ("bitwise_xor", [0])}, "3 4 | 0 0"),
    ((2,), np.array([3, 4]), {"split_axes": [[]], "partial": ("average", [0])}, "3 4 | 3 4"),
    ((2, 2), np.array([3, 4]), {"split_axes": [[0]], "partial": ("sum", [1])}, "3 | 0 | 4 | 0"),
]


@pytest.mark.parametrize(("sizes", "x", "sharding", "expected"), BUFFERS)
def test_buffers_of_a_tensor(sizes, x, sharding, expected):
    rows = np.array([[int(cell) for cell in row.split()] for row in expected.split(" | ")])
    sharding = Sharding(**sharding, grid=abstract(*sizes))
    np.testing.assert_array_equal(sdy.shard.to_local(x, sharding), rows)
    np.testing.assert_array_equal(sdy.shard.to_global(rows, sharding, shape=x.shape), x)


@pytest.mark.parametrize(
    ("kind", "terms", "expected"),
    [
        ("sum", [[1, -7], [2, 4]], [3, -3]),
        ("average", [[1, -7], [2, 4]], [1, -1]),
        ("min", [[1, -7], [2, 4]], [1, -7]),
        ("bitwise_and", [[6, 5], [3, 4]], [2, 4]),
    ],
)
def test_terms_are_combined_on_the_host(kind, terms, expected):
    sharding = Sharding([[]], partial=(kind, [0]), grid=abstract(2))
    assert sdy.shard.to_global(np.array(terms), sharding).tolist() == expected


def test_the_shape_of_a_shard():
    shape_of = partial(sdy.shard.shard_shape, grid=abstract(4))
    assert [shape_of((10, 3), Sharding([[0]]), i) for i in range(4)] == [(3, 3), (3, 3), (3, 3), (1, 3)]
    assert [shape_of((8, 16), Sharding([[0]], halo_sizes=[2, 1]), i) for i in range(4)] == [(5, 16)] * 4
    shape_of = partial(sdy.shard.shard_shape, grid=abstract(2, 2))
    uneven = Sharding([[0], [1]], sharded_dims_offsets=[0, 24, 32, 0, 20, 32])
    shapes = [shape_of((32, 32, 32), uneven, i) for i in range(4)]
    assert shapes == [(24, 20, 32), (24, 12, 32), (8, 20, 32), (8, 12, 32)]
    assert shape_of((32, 32, 32), uneven, (1, 0)) == (8, 20, 32)
    shuffled = Sharding([[1, 0]], sharded_dims_offsets=[0, 1, 3, 6, 12])
    assert [shape_of((12,), shuffled, i) for i in range(4)] == [(1,), (3,), (2,), (6,)]


def test_the_shape_of_a_shard_of_the_device_that_asks():
    def body(_):
        device = sdy.shard.process_linear_index()
        return jnp.stack(sdy.shard.shard_shape((10, 3), Sharding([[0]]), device))

    (result,) = run_stacked((4,), [(body, np.zeros(4))])
    assert result.tolist() == [[3, 3], [3, 3], [3, 3], [1, 3]]


# Plans.

PLANS = [
    ((4,), "[[]]", "[[0]]", 0),
    ((4,), "[[0]]", "[[]]", 432),
    ((4,), "[[0]]", "[[], [0]]", 108),
    ((2, 3), "[[0, 1]]", "[[1, 0]]", 96),
    ((2, 3), "[[0, 1]]", "[[1]]", 192),
    ((2, 3), "[[], [0, 1]]", "[[], [0]]", 192),
    ((2, 2, 2), "[[0], [1, 2]]", "[[0], [2]]", 144),
    ((2, 2), "[[0], [1]]", "[[1], [0]]", 144),
    ((2, 3), "[[0], [1]]", "[[1], [0]]", 176),
    ((2, 2, 2), "[[0], [1, 2]]", "[[0, 1], [2]]", 90),
    ((2, 2, 2), "[[0, 1], [2]]", "[[0], [2, 1]]", 36),
    ((2, 2), "[[0]]", "[[1]]", 288),
    ((2, 4), "[[0]]", "[[1]]", 144),
    ((2, 4), "[[]] sum [1]", "[[1]]", 432),
    ((2, 4), "[[0]] max [1]", "[[0]]", 432),
    ((2, 4), "[[0]] max [1]", "[[0, 1]]", 216),
    ((2, 4), "[[]] max [1, 0]", "[[0, 1]]", 504),
    ((2, 4), "[[0]] max [1]", "[[0]] sum [1]", 432),
    ((2, 4), "[[]] sum [0, 1]", "[[]] sum [1]", 576),
    ((2, 4), "[[0]]", "[[]] sum [0]", 0),
    ((2, 4), "[[0]] sum [1]", "[[0]] sum [1]", 0),
    ((2, 2, 2), "[[0]] sum [1]", "[[2, 1]]", 216),
    ((2, 2, 2), "[[0, 1]]", "[[], [0, 1]]", 108),
    ((2, 2, 2), "[[2, 0, 1]]", "[[2], [0, 1]]", 54),
]


def layout(text):
    lists, _, partial_ = text.partition("]] ")
    kind, _, axes = partial_.partition(" ")
    split = eval(lists if not partial_ else f"{lists}]]")  # a literal of this file
    return Layout(tuple(map(tuple, split)), kind or None, tuple(eval(axes)) if axes else ())


@pytest.mark.parametrize(("sizes", "source", "target", "wire"), PLANS)
def test_the_bytes_of_plans(sizes, source, target, wire):
    assert sent_by(plan(layout(source), layout(target), grid(*sizes), (24, 24))) == wire


def sent_by(steps):
    """What a device sends of a tensor of bytes in the collectives of a plan."""
    return sum(step.collective.wire_bytes for step in steps)


def lists_of(rank, dims=2):
    """Every way to split `dims` dimensions by axes of a grid, in any order."""
    found = []
    for count in range(rank + 1):
        for axes in itertools.permutations(range(rank), count):
            for cuts in itertools.combinations_with_replacement(range(count + 1), dims - 1):
                ends = (0, *cuts, count)
                found.append(tuple(axes[a:b] for a, b in itertools.pairwise(ends)))
    return sorted(set(found))


def pairs_of(sizes):
    return list(itertools.product(lists_of(len(sizes)), repeat=2))


@pytest.mark.parametrize("sizes", [(2, 4), (2, 2, 2), (2, 3)])
def test_every_pair_of_shardings_has_a_plan_on_whole_axes(sizes):
    """None sends more than gathering all and slicing would, and none names parts of axes, which nobody has there."""
    place = grid(*sizes)
    for source, target in pairs_of(sizes):
        steps = plan(Layout(source), Layout(target), place, (24, 24))
        used = [step.collective.result for step in steps]
        assert not any(axis.sub_axis for end in used for axes in (*end.axes, end.unreduced_axes) for axis in axes)
        split = math.prod(place.group_size(axes) for axes in source)
        assert sent_by(steps) <= 24 * 24 * (1 - 1 / split) + 1e-6


def test_permutations_move_only_what_has_to_move():
    cases = [(sizes, *pair) for sizes in [(2, 4), (2, 2, 2)] for pair in pairs_of(sizes)]
    cases += [((4, 2, 2), ((), (0,)), ((), (2, 1))), ((4, 2, 2), ((), (2, 1)), ((), (0,)))]
    for sizes, source, target in cases:
        place = grid(*sizes)
        if all(place.group_size(a) == place.group_size(b) for a, b in zip(source, target, strict=True)):
            ends = [TensorSharding.closed("m", [place.refs(axes) for axes in lists]) for lists in (source, target)]
            pairs = permutation_pairs(*ends, place.mesh)
            before, after = (blocks_of(sizes, range(len(sizes)), lists) for lists in (source, target))
            assert sorted(receiver for _, receiver in pairs) == list(range(math.prod(sizes)))
            assert len({sender for sender, _ in pairs}) == len(pairs)
            for sender, receiver in pairs:
                assert before[sender] == after[receiver]
                assert sender == receiver or before[receiver] != after[receiver]


def blocks_of(sizes, axes, lists):
    """The block that each device of a grid over `axes` holds."""
    numbers = [[axes.index(axis) for axis in one] for one in lists]
    cells = np.arange(math.prod(sizes) ** 2).reshape(math.prod(sizes), -1)
    return [tuple(part.ravel()) for part in model.blocks(cells, sizes, numbers)]


# Values.


def resharding(source, target, **options):
    return lambda x: sdy.shard.reshard(x, source, target, **options)


@pytest.mark.parametrize("sizes", [(2, 4), (2, 2, 2), (2, 3)])
@pytest.mark.parametrize("check_vma", [True, False])
def test_random_pairs_of_shardings(sizes, check_vma):
    rng = np.random.default_rng(sizes)
    pairs = pairs_of(sizes)
    x = np.arange(24 * 24).reshape(24, 24)
    chosen = [pairs[i] for i in rng.permutation(len(pairs))[:40]]
    cases = [(resharding(Sharding(a), Sharding(b)), model.blocks(x, sizes, a)) for a, b in chosen]
    for (source, target), result in zip(chosen, run_stacked(sizes, cases, check_vma=check_vma), strict=True):
        expected = model.blocks(x, sizes, target)
        np.testing.assert_array_equal(result, expected, f"{source} -> {target}")


def drawn(rng, sizes, shape):
    """A random sharding, with halos, offsets or terms."""
    lists = list(lists_of(len(sizes)))
    split = lists[rng.integers(len(lists))]
    counts = [math.prod(sizes[axis] for axis in axes) for axes in split]
    free = [axis for axis in range(len(sizes)) if axis not in split[0] + split[1]]
    options = {}
    kind = rng.integers(4)
    if kind == 0 and all(n % count == 0 for n, count in zip(shape, counts, strict=True)):
        halos = [
            rng.integers(0, min(2, n // count) + 1, 2) for n, count in zip(shape, counts, strict=True) if count > 1
        ]
        options["halo_sizes"] = [int(n) for halo in halos for n in halo]
    if kind == 1:
        cuts = [
            [0, *sorted(int(i) for i in rng.integers(0, n + 1, count - 1)), n]
            for n, count, axes in zip(shape, counts, split, strict=True)
            if axes
        ]
        options["sharded_dims_offsets"] = [start for starts in cuts for start in starts]
    if free and rng.integers(2):
        kinds = ["sum", "max", "min", "product", "average", "bitwise_or"]
        options["partial"] = (str(rng.choice(kinds)), free[: rng.integers(1, len(free) + 1)])
    return Sharding(split, grid=abstract(*sizes), **options)


@pytest.mark.dear
@pytest.mark.parametrize("sizes", [(2, 4), (2, 2, 2), (3, 2)])
@pytest.mark.parametrize("shape", [(8, 24), (5, 7)])
def test_random_pairs_with_halos_offsets_and_terms(sizes, shape):
    """From the buffers of a tensor to those that it has under the other sharding, except where terms are a choice."""
    rng = np.random.default_rng([*sizes, *shape])
    x = rng.integers(-9, 9, shape).astype(np.int32)
    chosen = [(drawn(rng, sizes, shape), drawn(rng, sizes, shape)) for _ in range(30)]
    cases = [(resharding(a, b, shape=shape), sdy.shard.to_local(x, a)) for a, b in chosen]
    for (source, target), result in zip(chosen, run_stacked(sizes, cases), strict=True):
        case = f"{source} -> {target}"
        np.testing.assert_array_equal(sdy.shard.to_global(result, target, shape=shape), x, case)
        if not target.partial:
            np.testing.assert_array_equal(result, sdy.shard.to_local(x, target), case)


def test_real_terms_are_combined():
    terms = np.array([[1], [2], [3], [4]], np.int32)
    pair = np.array([[1, 2], [3, 4], [1, 2], [3, 4]], np.int32)
    split, whole = Sharding([[0]], partial=("sum", [1])), Sharding([[]], partial=("sum", [1]))
    cases = [
        (resharding(split, Sharding([[0]])), terms),
        (resharding(whole, Sharding([[1]])), pair),
        (resharding(whole, Sharding([[]], partial=("max", [1]))), pair),
        (resharding(split, whole), terms),
    ]
    results = run_stacked((2, 2), cases)
    assert results[0].tolist() == [[3], [3], [7], [7]]
    assert results[1].tolist() == [[4], [6], [4], [6]]
    assert results[2].tolist() == [[4, 6]] * 4
    assert results[3].tolist() == [[1, 3], [2, 4], [1, 3], [2, 4]]


def test_the_tables_of_the_specification():
    six = np.arange(6)[:, None]
    results = run_stacked(
        (2, 3),
        [
            (resharding(Sharding([[0, 1]]), Sharding([[1, 0]])), six),
            (resharding(Sharding([[0, 1]]), Sharding([[1]])), six),
        ],
    )
    assert results[0].tolist() == [[0], [2], [4], [1], [3], [5]]
    assert results[1].tolist() == [[0, 1], [2, 3], [4, 5]] * 2
    source = Sharding([[0]], sharded_dims_offsets=[0, 2, 5, 9, 14])
    target = Sharding([[0]], sharded_dims_offsets=[0, 4, 8, 12, 14])
    uneven = np.array([[1, 2, 0, 0, 0], [3, 4, 5, 0, 0], [6, 7, 8, 9, 0], [10, 11, 12, 13, 14]])
    halos = np.array([[0, 0, 0, 1, 2], [0, 1, 2, 3, 4], [2, 3, 4, 5, 6], [4, 5, 6, 7, 0]])
    two, other = (Sharding([[0]], halo_sizes=sizes) for sizes in ([2, 1], [0, 2]))
    results = run_stacked((4,), [(resharding(source, target), uneven), (resharding(two, other), halos)])
    assert results[0].tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 0, 0]]
    assert results[1].tolist() == [[0, 1, 2, 3], [2, 3, 4, 5], [4, 5, 6, 7], [6, 7, 0, 0]]


def test_stale_padding_does_not_matter():
    source, target = Sharding([[0]]), Sharding([[]])
    stale = np.array([[0, 1], [2, 3], [4, 99], [99, 99]])
    (result,) = run_stacked((4,), [(resharding(source, target, shape=(5,)), stale)])
    assert result.tolist() == [[0, 1, 2, 3, 4]] * 4


def test_a_reshard_can_be_differentiated_and_mapped():
    def body(x):
        to = Sharding([[], [0]], halo_sizes=[1, 1])
        return jax.vmap(lambda y: sdy.shard.reshard(y, Sharding([[0], []]), to))(x) * 2.0

    x = np.random.default_rng(0).normal(size=(4, 3, 2, 8)).astype(np.float32)
    (result,) = run_stacked((4,), [(body, x)])
    assert result.shape == (4, 3, 8, 4)
    from shard_devices import stacked

    gradient = jax.jit(jax.grad(lambda x: stacked((4,), [body])(x)[0].sum()))(x)
    # Each element is in one core, and in a halo if it lies at a border between devices.
    copies = np.array([1, 2, 2, 2, 2, 2, 2, 1]) * 2.0
    np.testing.assert_allclose(gradient, np.broadcast_to(copies, x.shape))


# What is wrong with a sharding.


@pytest.mark.parametrize(
    ("sizes", "sharding", "message"),
    [
        ((2, 4), {"split_axes": [[0], [0]]}, "grid axis 'm0' is used twice"),
        ((2, 4), {"split_axes": [[0]], "partial": ("sum", [0])}, "grid axis 'm0' is used twice"),
        ((2, 4), {"split_axes": [[0]], "partial": ("generic", [1])}, "partial = generic is not allowed"),
        ((2, 4), {"split_axes": [[0]], "partial": ("sum", [])}, "partial needs a kind and at least one axis"),
        ((2, 4), {"split_axes": [[0]], "partial": ("median", [1])}, "attribute reduction must be one of sum, max"),
        ((2, 4), {"split_axes": []}, "split_axes needs at least one"),
        ((2, 4), {"split_axes": [[2]]}, "split_axes contains 2, but the grid has axes 0..1"),
        ((2, 4), {"split_axes": [["x"]]}, "split_axes contains 'x', but the axes of the grid are m0, m1"),
        ((2, 4), {"split_axes": [[0]], "halo_sizes": [1, 1], "sharded_dims_offsets": [0, 2, 4]}, "exclude each other"),
        ((2, 4), {"split_axes": [[0]], "halo_sizes": [1]}, "1 halo sizes for 1 split dimensions, expected 2"),
        ((2, 4), {"split_axes": [[0]], "halo_sizes": [1, -1]}, "halo size -1 is negative"),
        ((2, 4), {"split_axes": [[0], [1]], "sharded_dims_offsets": [0, 2, 4, 0, 2, 4, 6]}, "7 offsets, expected 8"),
        ((2, 4), {"split_axes": [[0, 1]], "sharded_dims_offsets": list(range(7))}, "7 offsets, expected 9"),
        ((2, 4), {"split_axes": [[1]], "sharded_dims_offsets": [0, 2, 3, 2, 8]}, "decrease at position 3"),
        ((2, 4), {"split_axes": [[0]], "sharded_dims_offsets": [1, 2, 4]}, "start at 1, expected 0"),
    ],
)
def test_a_sharding_that_is_none(sizes, sharding, message):
    with pytest.raises(sdy.SdyError, match=r"^shard\.sharding: ") as error:
        Sharding(**sharding, grid=abstract(*sizes))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("shape", "sharding", "message"),
    [
        ((4, 8), {"split_axes": [[0]], "sharded_dims_offsets": [0, 2, 5]}, "end at 5, the dimension has size 4"),
        ((4,), {"split_axes": [[], [0]]}, "split_axes has 2 lists, the tensor 1 dimensions"),
        ((8,), {"split_axes": [[1]], "halo_sizes": [3, 0]}, "halo size 3 exceeds the shard size 2 of dimension 0"),
        ((6,), {"split_axes": [[1]], "halo_sizes": [1, 0]}, "dimension 0 of size 6 does not split evenly; halos need"),
        ((), {"split_axes": [[0]]}, "split_axes has 1 lists, the tensor 0 dimensions"),
    ],
)
def test_a_sharding_that_does_not_fit(shape, sharding, message):
    with pytest.raises(sdy.SdyError) as error:
        sdy.shard.shard_shape(shape, Sharding(**sharding, grid=abstract(2, 4)), 0)
    assert str(error.value).startswith("shard.shard_shape: ")
    assert message in str(error.value)


@pytest.mark.parametrize("device", [8, -1, (0, 4), (2, 0), (0, 0, 0)])
def test_a_device_that_there_is_not(device):
    with pytest.raises(sdy.SdyError, match="device"):
        sdy.shard.shard_shape((8,), Sharding([[0]]), device, grid=abstract(2, 4))


def test_a_buffer_of_another_shape():
    with pytest.raises(sdy.SdyError, match=r"shard\.reshard: got a buffer of shape \(3,\), but split_axes = \[\[0\]\]"):
        run_stacked((4,), [(resharding(Sharding([[0]]), Sharding([[]]), shape=(16,)), np.zeros((4, 3)))])
