"""What a baseline holds is counted where a limit depends on it, and not where it is alone and no memory is known."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from partitioned_ops import LINE

import sdy_jax as sdy
from sdy_jax.ir.graph import Graph
from sdy_jax.ir.operations import op_names
from sdy_jax.lowering.planner.search import partitioned_program

X, W = jnp.ones((8192, 512)), jnp.ones((512, 512))


@pytest.fixture
def counted(monkeypatch):
    """How often memory is counted."""
    found, count = [], partitioned_program.peak_of
    monkeypatch.setattr(partitioned_program, "peak_of", lambda *args: found.append(args) or count(*args))
    return found


def planned(**options):
    function = sdy.partition(lambda w, x: jnp.sum(jnp.tanh(x @ w)), mesh=LINE, in_shardings=(P(), P("x")), **options)
    return function.plan(W, X)


def test_memory_is_counted_where_something_depends_on_it(counted):
    plan = planned()
    assert plan.collectives and not counted
    for options in ({"memory": "1GiB"}, {"costs": sdy.CostModel.of_machine("tpu v5e", LINE.axis_names)}):
        assert planned(**options).fingerprint() == plan.fingerprint() and counted
        counted.clear()


def test_a_program_is_read_once_for_all_that_is_asked_of_it(counted, monkeypatch):
    """By a model of time: what is held, sent, hidden and combined, before it is rewritten."""
    read, init = [], Graph.__init__

    def counted_read(graph, module):
        init(graph, module)
        read.append("sdy.all_reduce" in op_names(module))

    monkeypatch.setattr(Graph, "__init__", counted_read)
    plan = planned(costs=sdy.CostModel.of_machine("tpu v5e", LINE.axis_names))
    assert plan.collectives and len(counted) == 1
    assert read.count(True) == 1  # as its gradients are put in order, which changes nothing here


def test_what_is_stated_is_kept_to(counted):
    with pytest.raises(sdy.MemoryLimitError):
        planned(memory=64)
    assert counted
    assert jax.tree.leaves(planned().output_specs) == [P()]


def test_what_planning_counted_is_what_the_plan_holds():
    xs = [jnp.ones((16, 8))] * 4
    costs = sdy.CostModel.of_machine("tpu v5e", LINE.axis_names)
    summed = sdy.partition(
        lambda xs: [x.T @ x for x in xs], mesh=LINE, in_shardings=([P("x")] * 4,), costs=costs, combine="1MiB"
    )
    for plan in (summed.plan(xs), planned(costs=costs), planned(costs=costs, memory="1GiB")):
        assert plan.counted_peak == plan.memory.peak > 0
    assert planned().counted_peak == 0
