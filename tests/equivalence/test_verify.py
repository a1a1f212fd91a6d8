"""`verify` runs programs in a process of its own, forward and backward, and says what is the same and what is not."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from norm_kernel import norm

import sdy_jax as sdy
from sdy_jax.equivalence.trial import run_in_child
from sdy_jax.equivalence.verification import Job, Subject, Trial
from sdy_jax.ir.meshes import Mesh

ABSTRACT = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
X = np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((16, 12)).astype(np.float32)
ONCE = {"targets": ["cpu"], "uneven": False, "derivatives": False}


def layer(x, w):
    return jnp.tanh(x @ w), (x @ w).sum(0)


SPECS = {"mesh": ABSTRACT, "in_shardings": (P("data"), P(None, "model"))}


def test_a_function_on_a_mesh_without_devices_is_verified_forward_and_backward_on_two_meshes_by_three_costs():
    found = sdy.verify(sdy.partition(layer, **SPECS), X, W)
    assert found and len(found.cases) == 12, found
    assert {case.mesh for case in found.cases} == {"data=2, model=4", "data=2, model=3"}
    assert {case.target for case in found.cases} == {"cpu", "gpu", "tpu"}
    assert sum(case.is_derivative for case in found.cases) == sum(case.is_uneven for case in found.cases) == 6
    assert found.raise_for_difference() is found and "12 cases, all the same" in str(found)
    assert json.loads(found.to_json())["ok"]


def test_a_plain_function_is_taken_with_its_mesh_and_types_for_which_values_are_made_up():
    types = jax.ShapeDtypeStruct((8, 16), "float32"), jax.ShapeDtypeStruct((16, 12), "bfloat16")
    found = sdy.verify(layer, *types, **SPECS, **ONCE, meshes=[{"model": 2}])
    assert found and [case.mesh for case in found.cases] == ["data=2, model=4", "data=2, model=2"]


@pytest.mark.more("kinds of arguments")
def test_integers_index_keys_are_keys_and_trees_are_trees():
    def lookup(params, index, key):
        noise = jax.random.normal(key, (4, 8))
        return {"row": params["table"][index] + noise, "next": index + 1, "hot": jax.nn.one_hot(index, 6)}

    params = {"table": jax.ShapeDtypeStruct((5, 8), "float32")}
    index = jax.ShapeDtypeStruct((4,), "int32")
    options = {"mesh": ABSTRACT, "in_shardings": ({"table": P("data")}, None, None), "targets": ["cpu"]}
    assert sdy.verify(lookup, params, index, jax.random.key(0), **options, uneven=False)


@pytest.mark.more("smaller meshes")
def test_a_large_mesh_is_scaled_down_and_said_so():
    mesh = jax.sharding.AbstractMesh((16, 16), ("data", "model"))
    found = sdy.verify(layer, X, W, mesh=mesh, in_shardings=P("data"), **ONCE)
    assert found and found.cases[0].mesh == "data=2, model=2"
    assert "the mesh data=16, model=16 is run as data=2, model=2" in found.notes


@pytest.mark.more("smaller arguments")
def test_arguments_of_a_large_mesh_are_made_smaller_where_the_function_takes_them():
    def model(params, x, row):
        return jnp.tanh(x @ params["up"]).reshape(x.shape[0], 16, 128)[row]

    mesh = jax.sharding.AbstractMesh((16, 16), ("data", "model"))
    params = {"up": jax.ShapeDtypeStruct((512, 2048), "float32")}
    types = params, jax.ShapeDtypeStruct((4096, 512), "float32"), jax.ShapeDtypeStruct((), "int32")
    found = sdy.verify(model, *types, mesh=mesh, in_shardings=({"up": P(None, "model")}, P("data"), None), **ONCE)
    assert found and "sizes: 4096 as 256, 512 as 32" in str(found), found  # 2048 is 16 x 128, as the function says


@pytest.mark.more("complex and double numbers")
def test_complex_and_double_numbers_are_compared_where_they_cancel(mesh):
    def cancelled(x, y):
        wave = jnp.exp(1j * x.astype(jnp.complex64))
        return (wave * 2j + (2.0 + 1j)).sum(0) - wave.sum(0) * 2j, (y - y.mean()).sum()

    with jax.enable_x64(True):
        args = X, X.astype(np.float64)
        found = sdy.verify(cancelled, *args, mesh=mesh, in_shardings=P("data", "model"), **ONCE)
    assert found, found


@pytest.mark.more("programs from text")
def test_a_program_from_text_has_no_derivatives_and_says_so():
    program = sdy.loads("func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> { return %x : tensor<8xf32> }")
    found = sdy.verify(program, X[:, 0], mesh=ABSTRACT, in_shardings=P("data"), targets=["cpu"], uneven=False)
    assert found and any("no derivatives" in note for note in found.notes)


@pytest.mark.more("chosen layouts")
def test_layouts_that_the_planner_chooses_are_chosen_there(mesh):
    found = sdy.verify(layer, X, W, mesh=mesh, in_shardings=(sdy.AUTO, P(None, "model")), **ONCE)
    assert found, found


@pytest.mark.more("functions with shard_map")
def test_what_a_shard_map_computes_is_compared_with_jit(mesh):
    def body(x):
        return jax.lax.psum(x * 2, "data")

    def mapped(x):
        return jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=P())(x) + 1

    found = sdy.verify(mapped, X, mesh=mesh, targets=["cpu"], derivatives=False)
    assert found and [case.outcome.status for case in found.cases] == ["same", "refused"], found
    assert "of no other mesh" in found.cases[1].outcome.problem


@pytest.mark.more("a process of its own")
def test_lapack_is_there_in_a_process_that_traces_nothing(mesh):
    def decomposed(x):
        return jnp.linalg.cholesky(x @ x.T + 8 * jnp.eye(8, dtype=x.dtype))

    assert sdy.verify(decomposed, X, mesh=mesh, in_shardings=P("data"), targets=["cpu"], uneven=False)


@pytest.mark.more("Explicit axes")
def test_types_on_explicit_axes_and_constraints_inside_are_those_of_the_function(mesh):
    explicit = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)

    def product(x, w):
        return jnp.einsum("ij,jk->ik", x, w, out_sharding=P("data", "model"))

    def constrained(x, w):
        return jax.lax.with_sharding_constraint(x @ w, jax.sharding.NamedSharding(mesh, P("model"))).sum()

    x = jax.device_put(X, jax.sharding.NamedSharding(explicit, P("data")))
    w = jax.device_put(W, jax.sharding.NamedSharding(explicit, P()))
    for fun, args, on in ((product, (x, w), explicit), (constrained, (X, W), mesh)):
        found = sdy.verify(fun, *args, mesh=on, targets=["cpu"])
        assert found and [case.outcome.status for case in found.cases] == ["same"] * 4, found


@pytest.mark.more("side inputs of a trace")
def test_what_the_traced_program_does_not_say_is_found(mesh, monkeypatch):
    """jax lowers the function once more without us, so that our trace is compared, too."""
    from sdy_jax.equivalence import subject

    lowered = subject.plain_text
    monkeypatch.setattr(subject, "plain_text", lambda *call: lowered(*call).replace("stablehlo.tanh", "stablehlo.sine"))
    found = sdy.verify(layer, X, W, mesh=mesh, in_shardings=P("data"), **ONCE)
    assert not found and found.faults[0].op == "`result[0]`"
    assert "something else than the function under jax.jit" in found.faults[0].evidence


@pytest.mark.more("programs by platform")
def test_what_depends_on_the_platform_is_that_of_cpus():
    def shifted(x):
        return jax.lax.platform_dependent(x, cpu=lambda x: x + 1, default=lambda x: x + 2)

    device = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", 1, "gpu")
    mesh = jax.sharding.AbstractMesh((2,), ("data",), abstract_device=device)
    function = sdy.partition(shifted, mesh=mesh, in_shardings=P("data"))
    assert sdy.verify(function, X, **ONCE)
    assert "dense<2.0" in function.plan(X).mlir("traced")  # on GPUs it is still what it was


def test_callbacks_run_in_this_process(mesh):
    def called(x):
        return jax.pure_callback(lambda a: np.asarray(a) * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x) + 1

    for x in (X, jax.ShapeDtypeStruct((8, 16), "float32")):
        found = sdy.verify(called, x, mesh=mesh, in_shardings=P("data"), targets=["cpu"], uneven=False)
        assert found and "calls functions of this process" in str(found), found
    with pytest.raises(sdy.UnsupportedError, match="its mesh needs 16 devices"):
        large = jax.sharding.AbstractMesh((16,), ("data",))
        sdy.verify(called, jnp.ones((16,)), mesh=large, in_shardings=P("data"), targets=["cpu"])


def test_kernels_run_in_this_process_with_their_derivatives(mesh):
    def split(x, w):
        return norm(jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("model"))), w)

    for function in (norm, split):
        given = {"mesh": mesh, "in_shardings": (P("data"), P()), **ONCE, "derivatives": True}
        found = sdy.verify(function, X, jnp.ones(16), **given)
        assert found and [case.is_derivative for case in found.cases] == [False, True], found


def test_wrong_arguments_of_verify_are_named(mesh):
    with pytest.raises(sdy.SdyError, match=r"targets has 'abacus'; expected some of cpu, gpu, tpu"):
        sdy.verify(layer, X, W, mesh=mesh, targets=["abacus"])
    with pytest.raises(sdy.ShardingError, match="no axis 'rows'; the function's mesh has data, model"):
        sdy.verify(layer, X, W, mesh=mesh, meshes=[{"rows": 2}])
    with pytest.raises(sdy.SdyError, match="leave out mesh="):
        sdy.verify(sdy.partition(layer, mesh=mesh), X, W, mesh=mesh)


@pytest.mark.more("a process that dies")
def test_a_process_that_dies_fails_one_case_and_the_others_run():
    text = "func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> { return %x : tensor<8xf32> }"
    subject = Subject("main", "here:1", text, "", "mesh", (X[:, 0].copy(),), ("result",))
    trials = (Trial(0, Mesh.of(x=2), "cpu"), Trial(0, Mesh.of(x=99), "cpu"), Trial(0, Mesh.of(x=2), "cpu"))
    job = Job((subject,), trials[:1])
    assert [outcome.status for outcome in run_in_child(job, 60)] == ["same"]
    assert [outcome.status for outcome in run_in_child(job, 0.01)] == ["failed"]
