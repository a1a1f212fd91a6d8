"""The ops of the mesh and shard dialects on eight devices: the value tables, and queries."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from shard_devices import run_stacked
from shard_vectors import VECTORS

import sdy_jax as sdy

GRIDS = sorted({vector.sizes for vector in VECTORS})


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("sizes", GRIDS, ids=lambda sizes: "x".join(map(str, sizes)))
def test_the_value_tables(sizes, check_vma):
    vectors = [vector for vector in VECTORS if vector.sizes == sizes]
    cases = [(partial(getattr(sdy.shard, v.op), **v.kwargs), v.given) for v in vectors]
    results = run_stacked(sizes, cases, check_vma=check_vma)
    for vector, result in zip(vectors, results, strict=True):
        np.testing.assert_array_equal(result, vector.expected, vector.name)
        assert result.dtype == vector.expected.dtype, vector.name


def ring(x):
    (me,) = sdy.shard.process_multi_index("m0")
    following, preceding = [(me + 1) % 4], [(me + 3) % 4]
    return sdy.shard.send_recv(x, grid_axes="m0", source=preceding, destination=following)


def test_send_and_recv_between_devices_that_depend_on_the_device():
    (result,) = run_stacked((4,), [(ring, np.array([[5], [6], [7], [8]], np.int32))])
    np.testing.assert_array_equal(result, [[8], [5], [6], [7]])


def test_what_is_sent_to_nobody_or_to_somebody_else_is_not_received():
    def to(source, destination):
        def send(x):
            (me,) = sdy.shard.process_multi_index("m0")
            return sdy.shard.send_recv(x, grid_axes="m0", source=source(me), destination=destination(me))

        return send

    x = np.array([[5], [6], [7], [8]], np.int32)
    cases = {
        to(lambda i: i + 1, lambda i: i - 1): [6, 7, 8, 0],
        to(lambda i: i - 1, lambda i: i + 1): [0, 5, 6, 7],
        to(lambda i: i * 0 + 2, lambda i: i * 0 + 1): [0, 7, 0, 0],
        to(lambda i: 2, lambda i: i * 0 + 1): [0, 7, 0, 0],
        to(lambda i: i, lambda i: (i + 1) % 4): [0, 0, 0, 0],
        to(lambda i: i, lambda i: jnp.where(i == 3, i, 0)): [5, 0, 0, 8],
        to(lambda i: i + 100, lambda i: i - 100): [0, 0, 0, 0],
    }
    results = run_stacked((4,), [(function, x) for function in cases])
    for expected, result in zip(cases.values(), results, strict=True):
        assert result[:, 0].tolist() == expected


def test_a_traced_root_that_is_no_device_gives_zeros():
    x = np.arange(1, 9, dtype=np.float32).reshape(4, 2)
    bad = {(0, 0): True, (1, 1): True, (2, 0): False, (0, 2): False, (-1, 1): False, (1, -1): False, (0, 5): False}

    def rooted(root):
        def body(x):
            root_ = [jnp.int32(c) + 0 * sdy.shard.process_linear_index() for c in root]
            options = {"grid_axes": (1, 0), "root": root_}
            return (
                sdy.shard.broadcast(x, **options),
                sdy.shard.gather(x, gather_axis=0, **options),
                sdy.shard.reduce(x, **options),
                sdy.shard.scatter(jnp.tile(x, 2), scatter_axis=0, **options),
            )

        return body

    for results, (root, exists) in zip(run_stacked((2, 2), [(rooted(r), x) for r in bad]), bad.items(), strict=True):
        assert [bool(np.any(result)) for result in results] == [exists] * 4, root
        if exists:
            device = root[1] * 2 + root[0]
            np.testing.assert_array_equal(results[0], np.stack([x[device]] * 4))
            assert [bool(np.any(y)) for y in results[1]] == [i == device for i in range(4)]


def test_where_a_device_is():
    def body(_):
        every, some = sdy.shard.process_multi_index(), sdy.shard.process_multi_index(axes=[1, 0])
        return sdy.shard.process_linear_index(), jnp.stack(some), jnp.stack(every)

    ((linear, some, every),) = run_stacked((2, 3), [(body, np.zeros(6))])
    assert linear.tolist() == [0, 1, 2, 3, 4, 5]
    assert some.tolist() == [[0, 0], [1, 0], [2, 0], [0, 1], [1, 1], [2, 1]]
    assert every.tolist() == [pair[::-1] for pair in some.tolist()]


def test_the_neighbours_of_a_device():
    def neighbours(split_axes):
        return lambda _: jnp.stack(sdy.shard.neighbors_linear_indices(split_axes=split_axes))

    (one, carried) = run_stacked((2, 4), [(neighbours([1]), np.zeros(8)), (neighbours([1, 0]), np.zeros(8))])
    assert one.tolist() == [[-1, 1], [0, 2], [1, 3], [2, -1], [-1, 5], [4, 6], [5, 7], [6, -1]]
    assert carried.tolist() == [[-1, 4], [4, 5], [5, 6], [6, 7], [0, 1], [1, 2], [2, 3], [3, -1]]


def test_neighbours_of_devices_that_need_not_be_there():
    grid = jax.sharding.AbstractMesh((10, 20, 30), ("x", "y", "z"))
    near = {(1, 2, 3): (633, 693), (1, 0, 3): (-1, 633), (1, 19, 3): (1143, -1)}
    for device, expected in near.items():
        assert sdy.shard.neighbors_linear_indices(device, split_axes=[1], grid=grid) == expected
    with sdy.shard.with_grid(grid):
        assert sdy.shard.neighbors_linear_indices((1, 2, 3), split_axes="y") == (633, 693)


def test_the_shape_of_a_grid():
    grid = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
    assert sdy.shard.grid_shape(grid=grid) == (2, 4)
    assert sdy.shard.grid_shape([1, 0], grid=grid) == (4, 2)
    assert sdy.shard.grid_shape("model", mesh=grid) == (4,)
