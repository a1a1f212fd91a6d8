"""Updates at places that are known before: of a grid's interior, in its parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from partitioned_ops import CUBE, PLANE, check

RNG = np.random.default_rng(0)


def grid(*shape, dtype=np.float32):
    return (RNG.standard_normal(shape) * 8).astype(dtype)


def smoothed(u):
    return (u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:]) / 4


INTERIOR = {
    "set": lambda u: u.at[1:-1, 1:-1].set(smoothed(u)),
    "add": lambda u: u.at[1:-1, 1:-1].add(smoothed(u)),
    "dynamic_update_slice": lambda u: lax.dynamic_update_slice(u, smoothed(u), (1, 1)),
    "clamped": lambda u: lax.dynamic_update_slice(u, smoothed(u), (7, -7)),
    "in a loop": lambda u: lax.fori_loop(0, 3, lambda _, u: u.at[1:-1, 1:-1].set(smoothed(u)), u),
}


@pytest.mark.parametrize("name", INTERIOR)
def test_an_interior_is_written_where_it_is(name):
    """A border of the update is sent to the neighbours, as for `jnp.where` of its padded form; not all of it."""
    u = grid(64, 128)
    plan = check(INTERIOR[name], [u], [P("x", "y")], P("x", "y"), layouts="global", rtol=1e-5)
    assert not [c for c in plan.collectives if c.kind != "collective_permute"], plan
    assert plan.wire_bytes < u.nbytes / 8


@pytest.mark.dear
@pytest.mark.parametrize("layouts", ["local", "global"])
@pytest.mark.parametrize("spec", [P("x", "y"), P("y", "x"), P(("x", "y")), P(None, "y")])
@pytest.mark.parametrize("shape", [(16, 32), (15, 18)])
def test_windows_anywhere(spec, layouts, shape):
    def write(u):
        rows, columns = 2 * u[3:], -u[:, : shape[1] - 5]
        return u.at[:-3].set(rows), u.at[:, 2:-3].set(columns), u.at[1:, 1:].add(u[:-1, :-1] ** 2)

    check(write, [grid(*shape)], [spec], layouts=layouts, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bfloat16", "complex64", "bool"])
def test_elements_of_any_type(dtype):
    u = jnp.asarray(grid(16, 32)).astype(dtype)
    check(lambda u: u.at[2:-1, 1:-1].set(u[:-3, 2:]), [u], [P("x", "y")], P("x", "y"), rtol=0)


def test_what_does_not_fit_is_dropped_or_clamped():
    def write(u):
        numbers = lax.ScatterDimensionNumbers((0, 1), (), (0, 1))
        index, part = jnp.array([3, 1]), 2 * u[2:, 2:]
        return lax.scatter(u, index, part, numbers, mode="drop"), lax.dynamic_update_slice(u, part, (3, -1))

    check(write, [grid(16, 32)], [P("x", "y")], rtol=0)


def test_whole_dimensions_and_three_of_them():
    def write(u):
        return u.at[1:-1].set(u[:-2] + u[2:]), u.at[:, 1:, 2:].set(u[:, :-1, 2:])

    check(write, [grid(8, 8, 16)], [P("x", "y", "z")], mesh=CUBE, rtol=1e-6)


def test_infinite_numbers_stay_on_their_side():
    u = grid(16, 32)
    u[0, :], u[5, 5] = np.nan, np.inf
    check(lambda u: u.at[1:-1, 1:-1].set(smoothed(u)), [u], [P("x", "y")], P("x", "y"), layouts="global", rtol=1e-5)


@pytest.mark.parametrize("name", ["set", "add", "dynamic_update_slice"])
def test_derivatives_move_strips_too(name):
    def loss(u):
        return jnp.sum(jnp.sin(INTERIOR[name](INTERIOR[name](u))))

    u = grid(64, 128) / 8
    plan = check(jax.grad(loss), [u], [P("x", "y")], P("x", "y"), layouts="global", rtol=1e-4, atol=1e-5)
    assert not [c for c in plan.collectives if c.wire_bytes and c.kind != "collective_permute"], plan
    assert plan.wire_bytes < u.nbytes / 4


def test_one_window_is_looked_up_where_the_op_says():
    def read(u):
        numbers = lax.GatherDimensionNumbers((0, 1), (), (1, 0))
        places = [(1, 2), (0, 0), (7, -9), (99, 1)]
        return [lax.gather(u, jnp.array(place), numbers, (10, 28), mode="clip") for place in places]

    check(read, [grid(16, 32)], [P("x", "y")], rtol=0)


def test_small_updates_are_written_in_place():
    """An array of which a part is written is not read and written whole."""
    plan = check(lambda u: u.at[1:5].set(2 * u[3:7]), [grid(64, 32)], [P(None, "y")], P(None, "y"), rtol=0)
    assert "select" not in str(plan.stages["partitioned"]) and not plan.wire_bytes
    plan = check(lambda u: u.at[1:5].set(u[3:7]), [grid(64, 32)], [P("x")], P("x"), rtol=0)
    assert "select" not in str(plan.stages["partitioned"])


def test_an_update_that_every_device_has_is_written_without_sending():
    plan = check(lambda u, part: u.at[1:-1].set(part), [grid(16, 32), grid(14, 32)], [P("y"), P()], P("y"), rtol=0)
    assert not plan.wire_bytes and "stablehlo.scatter" in str(plan.stages["partitioned"]), PLANE


def test_scalars_and_empty_windows():
    def write(u, number):
        empty = lax.dynamic_update_slice(u, u[:0], (3, 0))
        return lax.dynamic_update_slice(number, number + 1, ()), empty, lax.dynamic_slice(u, (2, 1), (14, 30))

    check(write, [grid(16, 32), np.float32(2)], [P("x", "y"), P()], rtol=0)
