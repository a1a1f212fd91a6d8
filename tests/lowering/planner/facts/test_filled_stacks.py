"""Stacks of which each trip of a loop writes an entry, together all."""

import jax.numpy as jnp
import pytest
from jax import lax
from partitioned_ops import LINE

import sdy_jax as sdy
from sdy_jax.ir.graph import Graph
from sdy_jax.lowering.planner.facts.loops import filled_stacks

N, X = 4, jnp.ones((8, 16))


def carried_and_filled(function, *args):
    """The shapes of what a function's loop carries and fills, with the dimensions along which entries lie."""
    graph = Graph(sdy.partition(function, mesh=LINE).plan(*args).stages["partitioned"].operation)
    (loop,) = [op for op in graph.ops if op.name == "stablehlo.while"]
    return [(loop.results[number].shape, dim) for number, dim in filled_stacks(loop)]


def test_what_a_scan_stacks_is_filled():
    def scanned(x, ws):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), x), x, ws)

    assert carried_and_filled(scanned, X, jnp.ones((N, 16, 16))) == [((N, 8, 16), 0)]


def test_so_it_is_from_the_end():
    def scanned(x, ws):
        return lax.scan(lambda x, w: (x + w, x), x, ws, reverse=True)

    assert carried_and_filled(scanned, X, jnp.ones((N, 8, 16))) == [((N, 8, 16), 0)]


def written(at=lambda i: i, trips=N, entries=1, reads=False):
    """A loop that writes entries into a stack."""

    def trip(i, state):
        x, stack = state
        x = x + (stack[0] if reads else 1.0)
        return x, lax.dynamic_update_slice_in_dim(
            stack, jnp.stack([x] * entries), at(i), 0, allow_negative_indices=False
        )

    return lambda x: lax.fori_loop(0, trips, trip, (x, jnp.zeros((N, *x.shape))))


@pytest.mark.parametrize(
    ("options", "is_filled"),
    [
        ({}, True),
        ({"at": lambda i: N - 1 - i}, True),
        ({"trips": N - 1}, False),
        ({"at": lambda i: i + 1}, False),
        ({"at": lambda i: i // 2}, False),
        ({"entries": 2}, False),
        ({"reads": True}, False),
    ],
)
def test_all_entries_are_written_and_none_is_read(options, is_filled):
    assert carried_and_filled(written(**options), X) == [((N, 8, 16), 0)] * is_filled
