"""Which collectives wait for each other, in the time of a program."""

import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from partitioned_ops import LINE
from planned_steps import Program, shapes, step

import sdy_jax as sdy

LATENCY = 1e6
"""Of one collective, beside which bytes are few; so all of them fit into one bucket."""


def waits(program):
    """How often the walk's program waits, in latencies of one collective."""
    records = [r for r in program.placed.report.collectives if r.wire_bytes]
    return len(records), (program.baseline.sending - sum(r.wire_bytes for r in records)) / LATENCY


def programs(function, args, in_shardings):
    """As walked where all-reduces are combined, and where nothing is."""
    models = (sdy.CostModel(start=LATENCY, combines=kinds) for kinds in (("all_reduce",), ()))
    return [Program(function, args, LINE, in_shardings, costs=costs) for costs in models]


def test_gradients_wait_for_each_other():
    args = [shapes((64, 256), (256, 64))] * 2, *shapes((32, 64), (32, 64))
    combined, apart = map(waits, programs(step, args, (P(), P("x"), P("x"))))
    assert combined[0] == apart[0] > 3
    assert (combined[1], apart[1]) == (pytest.approx(1), pytest.approx(apart[0]))


def test_what_products_wait_for_waits_alone():
    """The sums of the last layer are not waited for by products, but there is only one."""

    def layers(x, w):
        for up, down in w:
            x = jnp.tanh(x @ up) @ down
        return x

    args = *shapes((32, 64)), [tuple(shapes((64, 256), (256, 64)))] * 3
    combined, apart = map(waits, programs(layers, args, (P(), [(P(None, "x"), P("x"))] * 3)))
    assert combined == apart == (3, pytest.approx(3))
