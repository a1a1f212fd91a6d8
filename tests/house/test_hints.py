"""What newcomers write first, and are told to write instead."""

from __future__ import annotations

import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from places import ROOT

import sdy_jax as sdy

X = jnp.ones((8, 8))
MESH = sdy.Mesh.of(data=2, model=4)


def layer(x, w):
    return x @ w


CALLS = {
    "shard_map's specs": (
        lambda mesh: sdy.partition(layer, mesh=mesh, in_specs=P("data"), out_specs=P()),
        "partition has no option 'in_specs' (jax.shard_map's; here a spec says how the whole array is split); to fix: "
        "write in_shardings=",
    ),
    "pjit's": (
        lambda mesh: sdy.partition(layer, mesh=mesh, out_axis_resources=P()),
        "(an old name of pjit's); to fix: write out_shardings=",
    ),
    "no use": (lambda mesh: sdy.partition(layer, mesh=mesh, check_vma=False), "jax.shard_map's; to fix: leave it out"),
    "a typo": (lambda mesh: sdy.partition(layer, mesh=mesh, in_sharding=P()), "did you mean in_shardings=?"),
    "a typo in a decorator": (lambda mesh: sdy.partition(mesh=mesh, budgets=1)(layer), "did you mean budget=?"),
    "nothing like it": (lambda mesh: sdy.partition(layer, quux=1), "has no option 'quux'; it has mesh, in_shardings"),
    "a mesh by position": (
        lambda mesh: sdy.partition(layer, mesh),
        "takes the function by position, and options by name; it got a mesh as well; to fix: write "
        "partition(fun, mesh=mesh)",
    ),
    "a mesh for the function": (lambda mesh: sdy.partition(mesh), "or @partition(mesh=mesh)"),
    "our mesh": (lambda _: sdy.partition(MESH), "got a mesh in place of the function"),
    "specs by position": (lambda _: sdy.partition(layer, (P(), P())), "it got a tuple as well; to fix: write it by"),
    "AUTO for a dimension": (
        lambda mesh: sdy.partition(layer, mesh=mesh, in_shardings=(P(sdy.AUTO), None)).plan(X, X),
        "in_shardings for `x`: P(AUTO,) has AUTO for a dimension; to fix: write P.UNCONSTRAINED for a dimension",
    ),
    "AUTO beside an axis": (
        lambda mesh: sdy.partition(layer, mesh=mesh, in_shardings=P("data", ("model", sdy.AUTO))).plan(X, X),
        "sdy.AUTO in place of the whole PartitionSpec",
    ),
    "a type as text": (
        lambda mesh: sdy.partition(layer, mesh=mesh).plan("f32[64, 128]", X),
        "`x` is a str ('f32[64, 128]'); expected an array or a number. To fix: give "
        "jax.ShapeDtypeStruct((64, 128), 'float32')",
    ),
    "a machine": (lambda _: sdy.CostModel.of_machine("tpu v5", ["x"]), "did you mean 'tpu v5"),
    "no machine": (lambda _: sdy.CostModel.of_machine("abacus", ["x"]), "no machine is called 'abacus'; known are tpu"),
    "a machine for its costs": (
        lambda mesh: sdy.partition(layer, mesh=mesh, costs="h100"),
        "costs is a str; expected a CostModel, such as CostModel.of_machine('h100', mesh)",
    ),
    "an amount for a budget": (lambda mesh: sdy.partition(layer, mesh=mesh, budget="10MiB"), "as Budget(wire_bytes="),
    "a file of Python": (lambda _: sdy.load(__file__), "this is Python; to fix: partition a function of it"),
    "JSON": (lambda _: sdy.load(b'{\n "version": 1}'), "this is JSON, as saved plans are, which load_plan reads"),
    "a factor without a size": (
        lambda mesh: sdy.partition(
            sdy.with_sharding_rule(lambda x: jnp.sin(x), "([i, k])->([i, k]) {i=8, j=8}"), mesh=mesh
        ).plan(X),
        "operand 0, dimension 1: unknown factor k; the rule gives sizes for i, j",
    ),
    "a rule of einsum": (
        lambda _: sdy.with_sharding_rule(jnp.sin, "i j -> i j"),
        "a rule is as SDY writes it: ([i, k], [k, j])->([i, j]) {i=8, j=4, k=16} reduction={k}",
    ),
}


@pytest.mark.parametrize("call, said", CALLS.values(), ids=CALLS)
def test_it_is_said_what_would_be_right(mesh, call, said):
    with pytest.raises(sdy.SdyError, match=re.escape(said)):
        call(mesh)


def test_wrong_options_are_type_errors_as_of_any_function(mesh):
    with pytest.raises(TypeError, match="in_specs"):
        sdy.partition(layer, mesh=mesh, in_specs=P())


def test_what_is_said_to_write_works(mesh):
    partitioned = sdy.partition(layer, mesh=mesh, in_shardings=(P(P.UNCONSTRAINED), sdy.AUTO))
    assert partitioned.plan(jax.ShapeDtypeStruct((64, 128), "float32"), jnp.ones((128, 8))).name == "layer"


@pytest.mark.parametrize("method", ["plan", "lower", "trace", "eval_shape"])
@pytest.mark.parametrize(
    "args, kwargs, count", [(((64, 128), (128, 8)), {}, 2), (((64, 128),), {}, 1), (([8],), {"w": X}, 1)]
)
def test_a_shape_for_an_array_is_explained_where_the_function_fails(mesh, method, args, kwargs, count):
    with pytest.raises(Exception) as caught:
        getattr(sdy.partition(layer, mesh=mesh), method)(*args, **kwargs)
    notes = [note for note in caught.value.__notes__ if note.startswith("note: argument")]
    assert len(notes) == count
    assert f"for an array of that shape give jax.ShapeDtypeStruct({tuple(args[0])}, jax.numpy.float32)" in notes[0]


def test_tuples_of_numbers_are_still_arguments(mesh):
    plan = sdy.partition(lambda sizes: sizes[0] + sizes[1], mesh=mesh).plan((2, 3))
    assert len(plan.arguments) == 2


def test_costs_of_a_machine_take_a_mesh(mesh):
    expected = sdy.CostModel.of_machine("h100", ["data", "model"])
    assert sdy.CostModel.of_machine("h100", mesh) == sdy.CostModel.of_machine("h100", MESH) == expected
    assert sdy.CostModel.of_machine("h100", "data") == sdy.CostModel.of_machine("h100", ["data"])


def test_a_misspelt_name_is_suggested_by_python(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", "import sdy_jax; sdy_jax.partitoin"], cwd=ROOT, capture_output=True, text=True
    )
    assert "Did you mean: 'partition'?" in done.stderr


@pytest.mark.parametrize("name", ["v5e", "TPU v5e", "tpu-v5e", "tpu_v5e"])
def test_machines_are_known_however_they_are_spelt(name):
    assert sdy.CostModel.of_machine(name, ["x"]) == sdy.CostModel.of_machine("tpu v5e", ["x"])
