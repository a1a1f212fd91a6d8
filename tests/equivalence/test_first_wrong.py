"""The first wrong value is named, inside of loops and branches too; and a program shows it by itself."""

import contextlib
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax.equivalence import comparison, extraction
from sdy_jax.equivalence.bisection import WrongStage, first_wrong
from sdy_jax.equivalence.comparison import compared
from sdy_jax.equivalence.faults import difference_alone, fault_of, reproducer_of_op
from sdy_jax.lowering.ops.registry import EMITTERS

X = np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((16, 32)).astype(np.float32)


def looped(x, w):
    def trip(carry, row):
        shrunk = lax.cond(row[0] > 0, lambda: carry * 0.5, lambda: carry * 0.25)
        return shrunk + row, carry

    h = jnp.tanh(x @ w)
    last, _ = lax.scan(trip, h[0], h)
    return jnp.roll(h, 1, 0) + 1.0, last, h[:, 3:9].sum(0), jax.nn.softmax(h)


def planned(mesh, fun=looped, specs=(P("data"), P(None, "model")), args=(X, W), **options):
    wanted = [np.asarray(y) for y in jax.tree.leaves(jax.jit(fun)(*args))]
    plan = sdy.partition(fun, mesh=mesh, in_shardings=specs, **options).plan(*args)
    return plan, lambda found, number: compared(found, wanted[number])


def test_every_value_of_a_right_program_is_right(mesh):
    plan, differs = planned(mesh)
    assert first_wrong(plan, mesh, [X, W], differs) is None


def test_values_in_rings_are_right_too(mesh):
    def layer(x, around, up, down):
        return jnp.tanh(jnp.tanh(x @ around) @ up) @ down @ around

    costs = sdy.CostModel(latency=1e-7, flop=1e-11, bandwidth={"data": 1e9, "model": 1e9}, memory=1e-13)
    rng = np.random.default_rng(0)
    args = [rng.standard_normal(n).astype(np.float32) for n in ((128, 64), (64, 64), (64, 1024), (1024, 64))]
    specs = P("model"), P(), P(None, "model"), P("model")
    plan, differs = planned(mesh, layer, specs, args, costs=costs, out_shardings=P("model"))
    assert "sdy_jax.ring" in plan.mlir()
    assert first_wrong(plan, mesh, args, differs) is None


def test_values_in_buckets_are_right_too(mesh):
    def each(x, y):
        return jnp.tanh(x), jnp.tanh(y)

    plan, differs = planned(mesh, each, P("data"), (X, X * 2), combine="1MiB", out_shardings=P())
    assert "sdy_jax.bucket" in plan.mlir()
    assert first_wrong(plan, mesh, [X, X * 2], differs) is None


def test_a_wrong_collective_is_named_with_what_it_is_for_and_shown_alone(mesh, monkeypatch):
    monkeypatch.setattr("sdy_jax.lowering.planner.search.layout_search._TOLERATED", 0.01)
    right = lax.psum
    plan, differs = planned(mesh)
    monkeypatch.setattr(lax, "psum", lambda x, *args, **kwargs: right(x, *args, **kwargs) * 1.01)
    wrong = first_wrong(plan, mesh, [X, W], differs)
    fault = fault_of(wrong, plan)
    assert fault.op == "sdy.all_reduce" and "test_first_wrong.py" in fault.source and fault.culprit == "sdy_jax"
    assert 'all_reduce {"data"}' in str(fault) and "{U:data}" in fault.strategy
    program = reproducer_of_op(wrong, "It is wrong.")
    assert "tensor<1xf32>" in program  # which was of 6
    assert "differs by" in printed_by(program)
    monkeypatch.undo()
    assert printed_by(program) == "no difference\n"


def printed_by(program):
    """What a reproducer prints here, where the fault is; its devices are there already."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        exec(program, {})
    return text.getvalue()


def test_a_wrong_op_in_a_branch_in_a_loop_is_named_with_both(mesh, monkeypatch):
    right = EMITTERS["stablehlo.dynamic_slice"]
    plan, differs = planned(mesh)
    monkeypatch.setitem(
        EMITTERS, "stablehlo.dynamic_slice", lambda local, x, *at: right(local, x, *[a + 1 for a in at])
    )
    fault = fault_of(first_wrong(plan, mesh, [X, W], differs), plan)
    assert fault.op == "stablehlo.dynamic_slice" and "trip 0 of stablehlo.while" in fault.within[0]
    assert "right by jit with the same shardings" in fault.evidence


def test_an_op_that_xla_has_wrong_on_one_device_is_xlas_mistake(mesh, monkeypatch):
    plan, differs = planned(mesh, jnp.tanh, P("data"), (X,))
    right = extraction.run_plain

    def wrong(*args, **kwargs):
        return [x + 1 if x.dtype == np.float32 else x for x in right(*args, **kwargs)]

    monkeypatch.setattr(extraction, "run_plain", wrong)
    monkeypatch.setattr(comparison, "run_plain", wrong)
    fault = fault_of(first_wrong(plan, mesh, [X], differs), plan)
    assert (fault.op, fault.culprit) == ("stablehlo.tanh", "XLA")
    assert "differs between one device and several by jit alone" in fault.evidence


def test_a_pass_that_changes_the_program_is_named_by_its_stage(mesh, monkeypatch):
    plan, differs = planned(mesh)
    wrong = first_wrong(plan, mesh, [X, W], lambda found, number: differs(found + (number == 0), number))
    assert isinstance(wrong, WrongStage) and wrong.stage == "traced"


@pytest.mark.more("rounding")
def test_rounding_is_no_fault(mesh):
    def cancelled(x):
        return (x * 1e4).sum(0) - (x * 1e4).sum(0)[::-1] * 0 - x.sum(0) * 1e4

    args = [np.random.default_rng(0).standard_normal((1024, 8)).astype(np.float32)]
    found = sdy.verify(cancelled, *args, mesh=mesh, in_shardings=P(("data", "model")), targets=["cpu"], uneven=False)
    assert found, found


@pytest.mark.parametrize("size", [8, 7])
def test_ops_alone_are_compared_with_what_they_mean(size):
    text = f"""
    sdy.mesh @mesh = <["x"=4]>
    func.func @main(%x: tensor<{size}xf32> {{sdy.sharding = #sdy.sharding<@mesh, [{{"x"}}]>}}) -> tensor<{size}xf32> {{
      %y = sdy.all_gather [{{"x"}}] %x out_sharding=<@mesh, [{{}}]> : tensor<{size}xf32>
      return %y : tensor<{size}xf32>
    }}"""
    assert difference_alone(text, [X[0, :size]]).ok
