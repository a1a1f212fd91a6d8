"""`assert_same` passes where it should, and its failures say what differs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax.equivalence.comparison import compared

X = np.arange(128, dtype=np.float32).reshape(8, 16)


def test_same_numbers_give_the_plan_that_was_run(mesh):
    options = {"mesh": mesh, "in_shardings": P("data")}
    plan = sdy.testing.assert_same(lambda x: {"sum": x.sum(0)}, X, **options, layouts="local")
    assert [c.kind for c in plan.collectives] == ["all_reduce"]
    assert sdy.testing.assert_same(lambda x: {"sum": x.sum(0)}, X, **options).layouts.baseline_cost


def test_without_a_mesh_all_devices_stand_in_a_row():
    plan = sdy.testing.assert_same(lambda x: x * 2, X, in_shardings=P("devices"))
    assert plan.program.mesh.sizes == {"devices": 8}


def test_the_mesh_of_the_context_is_used(mesh):
    with jax.set_mesh(mesh):
        plan = sdy.testing.assert_same(lambda x: x * 2, X, in_shardings=P("model"))
    assert plan.program.mesh.sizes == {"data": 2, "model": 4}


def test_a_wrong_number_is_reported_with_its_path_and_the_plan(mesh, monkeypatch):
    monkeypatch.setattr("jax.lax.psum", lambda x, *_, **__: x)
    named = r"(?s)result\['sum'\] differs by .*plan of .*first wrong value: sdy.all_reduce at .*test_testing.py"
    with pytest.raises(AssertionError, match=named):
        sdy.testing.assert_same(lambda x: {"sum": x.sum(0)}, X, mesh=mesh, in_shardings=P("data"))


def test_a_partitioned_function_is_not_compared_with_itself(mesh):
    double = sdy.partition(lambda x: x * 2, mesh=mesh, in_shardings=P("data"))
    with pytest.raises(TypeError, match="would compare it with itself; to fix: give the plain function"):
        sdy.testing.assert_same(double, X)


@pytest.mark.parametrize(
    ("found", "wanted", "message"),
    [
        (np.float32([1, 2]), np.float32([1, 2]), ""),
        (np.float32([1, 2]), np.float32([1, 3]), "differs by 1"),
        (np.float32([1, np.nan]), np.float32([1, np.nan]), ""),
        (np.float32([1, np.nan]), np.float32([1, 2]), "differs by nan"),
        (np.float32([1, 2]), np.float32([1, np.inf]), "NaN or infinity at other places"),
        (np.int32([1, 2]), np.int32([1, 3]), "differs in 1 of 2 elements"),
        (np.float32([1, 2]), np.float16([1, 2]), "is float32[2], expected float16[2]"),
        (np.float32([1, 2]), np.float32([[1, 2]]), "is float32[2], expected float32[1, 2]"),
        (np.asarray(jnp.bfloat16([1.0, 2.0])), np.asarray(jnp.bfloat16([1.0, 2.01])), ""),
    ],
)
def test_differences(found, wanted, message):
    difference = compared(found, wanted)
    assert message in difference.problem and bool(message) != difference.ok
