"""The benchmark of single ops: its bounds, and what its check says."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from benchmarks import loaded  # makes the scripts importable
from jax.sharding import PartitionSpec as P

# isort: split
from comparing import largest_difference, ratio
from ops import cases, least_moved

bench_ops = loaded("bench_ops")
Row, Side = bench_ops.Row, bench_ops.Side
LINE, PLANE = {"a": 8}, {"a": 2, "b": 4}
X = np.zeros((64, 2), np.float32)


@pytest.mark.parametrize(
    "function, bytes_",
    [
        (lambda x: jnp.roll(x, 3, 0), 3 * 8),
        (lambda x: jnp.pad(x[:-1], ((1, 0), (0, 0))), 8),
        (lambda x: x[::2], 0),
        (lambda x: x[32:], 64),  # the fifth device keeps nothing of its block
        (lambda x: x[::-1], 64),
        (lambda x: jnp.pad(x, ((4, 4), (0, 0)))[4:-4], 0),
    ],
)
def test_what_has_to_move_along_rows(function, bytes_):
    assert least_moved(function, [X], [P("a")], P("a"), LINE) == bytes_


def test_what_has_to_move_between_dimensions_and_to_all():
    assert least_moved(lambda x: x, [X], [P(None, "a")], P(("a", "b")), PLANE) == 4 * 8
    assert least_moved(lambda x: x, [X], [P("a")], P(), LINE) == 7 * 64
    assert least_moved(lambda x: x, [X], [P()], P("a"), LINE) == 0


def test_what_several_arguments_and_results_have_to_move():
    def both(x, y):
        return jnp.concatenate([x, y]), y

    assert least_moved(both, [X, X], [P("a"), P("a")], P("a"), LINE) == 2 * 64  # a device sends both of its blocks


@pytest.mark.parametrize(
    "ours, jit, failures",
    [
        (Side(10, 100), Side(10, 100), []),
        (Side(11, 100), Side(10, 100), ["more bytes than jit"]),
        (Side(0, 10_600), Side(0, 9_000), ["more flops than jit"]),
        (Side(0, 9_500), Side(0, 9_000), []),
        (Side(0, 0, wrong="wrong numbers, by 1.0e+00"), Side(10, 100), ["wrong numbers, by 1.0e+00"]),
        (Side(11, 100), Side(wrong="aborts"), []),
    ],
)
def test_a_row_fails_where_it_is_wrong_or_worse_than_jit(ours, jit, failures):
    assert Row("an op", ours, jit, None).failures == failures


def test_masks_of_what_only_moves_are_no_failure():
    assert Row("a slice", Side(0, 1000), Side(0, 0), None, only_moves=True).failures == []
    assert Row("a slice", Side(0, 1000), Side(0, 0), None).failures == ["more flops than jit"]


def test_the_check_fails_on_a_row_that_fails_and_on_few_that_are_near_to_their_bounds(capsys):
    near, far = (Row("an op", Side(n), Side(20), 10) for n in (11, 12))
    assert bench_ops.report([near, far]) == 0
    assert bench_ops.report([near, far, far]) == 1
    assert bench_ops.report([near, Row("a bad one", Side(2), Side(1), 2)]) == 1
    assert "a bad one: more bytes than jit\n2 rows, 1 fail; 2 of 2" in capsys.readouterr().out


def test_integers_must_be_equal_and_numbers_close():
    assert largest_difference((jnp.arange(3),), (jnp.arange(3),)) == 0
    assert largest_difference((jnp.arange(3),), (jnp.arange(3) + 1,)) == np.inf
    assert largest_difference(jnp.ones(3), jnp.array([1.0, 1.0, 2.0])) == 0.5
    assert largest_difference(jnp.array([np.nan, 1]), jnp.array([np.nan, 1])) == 0
    assert largest_difference(jnp.array([np.nan, 1]), jnp.array([0.0, 1])) == np.inf
    assert largest_difference(jnp.ones(3), (jnp.ones(3),)) == np.inf


def test_ratios_of_nothing():
    assert ratio(0, 0) == 1 and ratio(1, 0) == np.inf and ratio(1, 2) == 0.5


def test_the_cases_have_names_of_their_own_and_arguments_that_divide():
    listed = cases()
    assert len({case.name for case in listed}) == len(listed) > 60
    assert sum("65" in case.name for case in listed) > 10
