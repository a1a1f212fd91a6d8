"""Rotations by a shift that is known at run time: no more than the blocks that have to change places."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from partitioned_ops import CUBE, LINE, PLANE, check

import sdy_jax as sdy
from sdy_jax.plan.profile import collectives_in_hlo, totals

SHIFTS = (0, 1, 7, 8, 13, 63, 64, 65, -1, -9, -64, 1000)
LINE_OF_64 = np.arange(64, dtype=np.int32)
ROWS = np.arange(64 * 8, dtype=np.float32).reshape(64, 8)


def along(dim, x, shift):
    return jnp.roll(x, shift, dim)


def sent(function, *args):
    return totals(collectives_in_hlo(function.lower(*args).compile().as_text())).wire_bytes


@pytest.mark.parametrize("dtype", [np.int32, np.float32, np.bool_, np.int8, np.complex64])
def test_a_line_goes_round_by_steps(dtype):
    x = (LINE_OF_64 % 5).astype(dtype)
    function = sdy.partition(partial(along, 0), mesh=LINE, in_shardings=(P("x"), P()), out_shardings=P("x"))
    for shift in SHIFTS:
        np.testing.assert_array_equal(function(x, shift), np.roll(x, shift))


def test_steps_send_a_block_per_bit_of_the_distance_and_one_more():
    x = LINE_OF_64
    function = sdy.partition(partial(along, 0), mesh=LINE, in_shardings=(P("x"), P()), out_shardings=P("x"))
    plan = function.plan(x, 3)
    assert plan.wire_bytes == sent(function, x, 3) == 4 * 8 * 4  # an all_gather: 7 blocks


@pytest.mark.dear
@pytest.mark.parametrize(
    "mesh, spec", [(PLANE, P(("y", "x"))), (PLANE, P("y")), (CUBE, P(("z", "x"))), (PLANE, P(("x", "y")))]
)
def test_axes_in_any_order(mesh, spec):
    for shift in (3, 32, -17):
        check(partial(along, 0), [LINE_OF_64, np.int32(shift)], (spec, P()), spec, mesh=mesh)


@pytest.mark.parametrize("shift", [5, -20])
def test_rows_go_by_way_of_another_dimension(shift):
    """Two all_to_alls of 7/8 of a block each, between which the dimension is whole."""
    block = 64 * 8 * 4 // 8
    args = [ROWS, np.int32(shift)]
    check(partial(along, 0), args, (P("x"), P()), P("x"), mesh=LINE, kinds="all_to_all " * 2, wire_bytes=1.75 * block)


def test_two_dimensions_at_once():
    def both(x, shifts):
        return jnp.roll(x, shifts, (0, 1))

    for shifts in ((3, 5), (-30, 2), (32, -7)):
        check(both, [ROWS, np.array(shifts, np.int32)], (P("x", "y"), P()), P("x", "y"))


def test_gradients_turn_back():
    def loss(x, shift):
        return jnp.sum(jnp.roll(x, shift, 0) ** 2 * jnp.arange(64.0))

    x = LINE_OF_64.astype(np.float32)
    for shift in (0, 1, 13, 64, -5):
        plan = check(jax.grad(loss), [x, np.int32(shift)], (P("x"), P()), P("x"), mesh=LINE)
        assert plan.wire_bytes <= 2 * 4 * 8 * 4, plan  # four blocks there, four back


def test_sizes_that_do_not_divide():
    def uneven(x, shift):
        y = jax.lax.with_sharding_constraint(x[:61], NamedSharding(LINE, P("x")))
        return jnp.roll(y, shift, 0).sum() + jnp.roll(y, shift, 0)[:56]

    def plain(x, shift):
        return jnp.roll(x[:61], shift, 0).sum() + jnp.roll(x[:61], shift, 0)[:56]

    function = sdy.partition(uneven, mesh=LINE, in_shardings=(P("x"), P()), out_shardings=P("x"))
    for shift in (0, 3, 60, -7):
        np.testing.assert_array_equal(function(LINE_OF_64, shift), plain(LINE_OF_64, shift))


def test_starts_are_clamped():
    def from_start(x, start):
        return jax.lax.dynamic_slice(jnp.concatenate([x, x]), (start,), (64,))

    function = sdy.partition(from_start, mesh=LINE, in_shardings=(P("x"), P()), out_shardings=P("x"))
    for start in (5, 64, 65, 200):
        np.testing.assert_array_equal(function(LINE_OF_64, start), from_start(LINE_OF_64, start))


@pytest.mark.parametrize("low, high", [(slice(0, 64), slice(0, 64)), (slice(0, 128, 2), slice(64, 128))])
def test_sums_of_other_parts_are_no_rolls(low, high):
    def put(x, start):
        wide = jax.lax.dynamic_update_slice(jnp.zeros(128, x.dtype), x, (start,))
        return wide[low] + wide[high]

    for start in (0, 17):
        check(put, [LINE_OF_64, np.int32(start)], (P("x"), P()), P("x"), mesh=LINE)


def test_a_roll_is_split_like_its_operand():
    def function(x, shift):
        return jnp.roll(x, shift, 0) * 2

    plan = sdy.partition(function, mesh=LINE, in_shardings=(P("x"), P())).plan(ROWS, 3)
    assert "result  f32[64@x,8]" in str(plan)


def test_rolled_programs_are_read_back():
    function = sdy.partition(partial(along, 0), mesh=LINE, in_shardings=(P("x"), P()))
    plan = function.plan(LINE_OF_64, np.int32(3))
    assert "sdy_jax.roll" in str(plan.stages["partitioned"])
    again = sdy.partition(sdy.loads(plan.mlir("partitioned")), mesh=LINE)
    np.testing.assert_array_equal(again(LINE_OF_64, np.int32(3)), np.roll(LINE_OF_64, 3))
    assert again.plan(LINE_OF_64, np.int32(3)).wire_bytes == plan.wire_bytes


def test_rolls_in_loops():
    def function(x, shift):
        return jax.lax.fori_loop(0, 3, lambda i, y: jnp.roll(y, shift + i, 0) + x, x)

    for shift in (1, -30):
        check(function, [LINE_OF_64, np.int32(shift)], (P("x"), P()), P("x"), mesh=LINE)
