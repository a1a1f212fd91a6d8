"""The benchmark of bytes: its rows, their goals, and the arguments that it draws."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from benchmarks import loaded  # makes the scripts importable

# isort: split
from comparing import Cost
from training import FAST, MODELS, ROWS, training_rows
from workloads import MESHES

from sdy_jax.plan.hlo import HloTotals

bench_bytes = loaded("bench_bytes")
LISTED = list(training_rows())


def side(wire=100.0, flops=100.0, memory=100):
    return Cost(HloTotals(1, wire, {}), flops, memory)


def row(layouts, apart=(), **ours):
    return bench_bytes.Row("a model", "8", layouts, [side(**ours), side()], [0.0, 0.0], list(apart))


@pytest.mark.parametrize(
    ("ours", "misses"),
    [
        ({}, []),
        ({"wire": 100.1}, ["bytes"]),
        ({"flops": 102.1}, ["flops"]),
        ({"memory": 111}, ["memory"]),
        ({"wire": 50.0, "flops": 102.0, "memory": 110}, []),
        ({"apart": (2e-4, 1e-6)}, ["numbers"]),
        ({"apart": (2e-4, 1e-4)}, []),
    ],
)
def test_rows_say_which_goals_they_miss(ours, misses):
    assert row("global", **ours).misses == misses
    assert str(row("global", **ours)).endswith(f"! {', '.join(misses)}" if misses else "0.00")


def test_what_is_planned_op_by_op_promises_bytes_only():
    assert row("local", wire=101.0, flops=200.0, memory=200).misses == ["bytes"]


def test_the_summary_counts_rows_that_miss_a_goal_and_takes_geometric_means():
    said = bench_bytes.summary("global", [row("global", wire=50.0), row("global", wire=200.0)])
    assert "2 rows, 1 miss a goal" in said and said.endswith("bytes 1.000, flops 1.000, memory 1.000")


def test_every_model_has_rows_with_names_of_their_own_on_meshes_of_their_layouts():
    names = [(workload.name, mesh) for workload, mesh in LISTED]
    assert len(set(names)) == len(names) >= 40 and set(names) >= FAST
    assert {make(1).name for make in MODELS} == set(ROWS)
    assert all(mesh in workload.layouts for workload, mesh in LISTED)


@pytest.mark.parametrize("number", range(len(LISTED)), ids=[f"{workload.name}, {mesh}" for workload, mesh in LISTED])
def test_the_optimizer_s_state_lies_as_its_parameters_and_all_divide(number):
    workload, name = LISTED[number]
    sizes, axes = MESHES[name]
    ins, _ = workload.shardings(name)
    adam = ins[0]["optimizer"][0]
    assert adam.mu == adam.nu == ins[0]["weights"] and adam.count == jax.sharding.PartitionSpec()
    mesh = jax.sharding.AbstractMesh(sizes, axes)
    for leaf, spec in zip(jax.tree.leaves(workload.arguments), jax.tree.leaves(ins), strict=True):
        jax.sharding.NamedSharding(mesh, spec).shard_shape(leaf.shape)


def test_drawn_second_moments_have_roots():
    state, *_ = bench_bytes.drawn(next(workload for workload, _ in LISTED if workload.name == "lstm/data"))
    adam = state["optimizer"][0]
    assert all(np.all(np.asarray(leaf) >= 0) for leaf in jax.tree.leaves(adam.nu))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(adam.mu))
