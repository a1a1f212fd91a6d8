"""`sdy-jax plan`, `run` and `doctor`, in process: reports, arrays in and out, exit statuses, and no traceback."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from places import HELPERS

import sdy_jax as sdy
from sdy_jax.cli import doctor, doctor_checks, plan
from sdy_jax.cli.main import main
from sdy_jax.ir.text.modules import split_modules

REFERENCE = list(split_modules((HELPERS / "sdy_reference.mlir").read_text()))

MODULE = """
sdy.mesh @mesh = <["a"=2, "b"=2]>
func.func @main(%x: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"a"}, {"b"}]>}, %w: tensor<4x6xf32>)
    -> (tensor<8x6xf32>, tensor<8x4xi1>) {
  %0 = stablehlo.dot_general %x, %w,
    contracting_dims = [1] x [0] : (tensor<8x4xf32>, tensor<4x6xf32>) -> tensor<8x6xf32>
  %1 = stablehlo.compare GT, %x, %x : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<8x4xi1>
  return %0, %1 : tensor<8x6xf32>, tensor<8x4xi1>
}
"""

MODEL = """
import jax.numpy as jnp
import sdy_jax as sdy

def mlp(x, weights, power=1):
    return jnp.tanh(x @ weights["up"]) @ weights["down"] * power

def wrong(x):
    raise KeyError("x")

class Layer:
    def __call__(self, x):
        return x + 1

layer = Layer()
partitioned = sdy.partition(mlp)
number = 3
"""


def normal(*shape):
    return np.random.default_rng(len(shape)).standard_normal(shape, dtype=np.float32)


X, W = normal(8, 4), normal(4, 6)


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """Runs a command in a directory with `m.mlir`; gives the exit status, and what is printed on both streams."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "m.mlir").write_text(MODULE)

    def run_command(*arguments):
        status = main([str(a) for a in arguments])
        return status, *capsys.readouterr()

    return run_command


# plan


def test_plan_prints_the_report(run):
    status, out, err = run("plan", "m.mlir")
    assert (status, err) == (0, "")
    assert out.startswith("plan of main on mesh a=2, b=2 (4 devices): 1 collective, 96 B on the wire per device\n")
    assert "arg0  f32[8@a,4@b]" in out
    assert "m.mlir:5  for stablehlo.dot_general" in out


@pytest.mark.parametrize(("stage", "has"), [("imported", 0), ("propagated", 0), ("partitioned", 1)])
def test_plan_prints_the_module_of_a_stage(run, stage, has):
    status, out, _ = run("plan", "m.mlir", "--stage", stage)
    assert status == 0
    assert out.count("sdy.all_reduce") == has
    Path("stage.mlir").write_text(out)
    assert run("opt", "stage.mlir")[0] == 0


def test_plan_writes_python(run):
    status, out, _ = run("plan", "m.mlir", "--python")
    assert status == 0 and "lax.psum(" in out and "def main(" in out
    assert run("plan", "m.mlir", "--python", "main.py")[1].startswith("main.py: plan of main on mesh a=2, b=2")
    assert Path("main.py").read_text() == out


def test_plan_says_why(run):
    status, out, _ = run("plan", "m.mlir", "--why", "result[0]")
    assert status == 0
    assert "<- operand 0 of stablehlo.dot_general at m.mlir:5: arg0, dim 0" in out
    assert "<- in_shardings of arg0: P('a', 'b'), given at m.mlir" in out
    status, _, err = run("plan", "m.mlir", "--why", "rseult[0]")
    assert (status, err.splitlines()[0][:62]) == (1, "m.mlir: error: no value is called 'rseult[0]'; did you mean re")


def test_options_say_how_a_program_without_shardings_is_partitioned(run):
    options = ("--drop-shardings", "--mesh", "x=4,y=2", "--in-shardings", "P('x'), P(None, ('y',))")
    out = run("plan", "m.mlir", *options)[1]
    assert "mesh x=4, y=2 (8 devices): 0 collectives" in out
    assert "f32[8@x,6@y]" in out
    out = run("plan", "m.mlir", *options, "--out-shardings", 'P(), \'[{"x"}, {"y"}]\'')[1]
    assert re.search(r"result\[0\]  f32\[8,6\] .*\n  result\[1\]  bool\[8@x,4@y\] ", out)
    out = run("plan", "m.mlir", "--drop-shardings", "--devices", 4, "--in-shardings", "P('devices')")[1]
    assert "mesh devices=4 (4 devices)" in out


def test_a_mesh_that_is_not_the_programs_is_an_error(run):
    status, _, err = run("plan", "m.mlir", "--mesh", "x=4")
    assert status == 1
    assert err.startswith("m.mlir: error: the shardings of main are on the mesh")
    assert "--drop-shardings" in err
    status, _, err = run("plan", "m.mlir", "--devices", 2)
    assert (status, "needs 4 devices, 2 are at hand; to fix: say --devices 4, or leave it out" in err) == (1, True)
    status, _, err = run("run", "m.mlir", "--mesh", "x=16", "--drop-shardings", "--random", 0)
    assert (status, "the command needs 16 devices, 8 are at hand; to fix: use a smaller mesh" in err) == (1, True)


@pytest.mark.parametrize("mesh", ["x=16", "x=256,y=256"])
def test_a_plan_needs_no_devices(run, mesh):
    status, out, err = run("plan", "m.mlir", "--mesh", mesh, "--drop-shardings", "--in-shardings", "P('x'), None")
    assert (status, err) == (0, "") and f"on mesh {mesh.replace(',', ', ')} (" in out


# Functions.


@pytest.fixture
def model(run):
    Path("model_of_test.py").write_text(MODEL)
    yield run
    sys.modules.pop("model_of_test", None)


TYPES = "f32[8,16], {'up': f32[16,32], 'down': f32[32,16]}"
SPECS = "P('data'), {'up': P(None, 'model'), 'down': P('model')}"


@pytest.mark.parametrize("place", ["model_of_test:mlp", "model_of_test.py:mlp"])
def test_plan_of_a_function(model, place):
    options = ("--mesh", "data=2,model=4", "--args", TYPES, "--in-shardings", SPECS)
    status, out, err = model("plan", place, *options)
    assert (status, err) == (0, "")
    assert "plan of mlp on mesh data=2, model=4 (8 devices): 1 collective" in out
    assert "weights['up']    f32[16,32@model]" in out
    assert "model_of_test.py:6  for stablehlo." in out
    assert "given at the command line" in model("plan", place, *options, "--why", "x")[1]


def test_a_function_runs(model):
    weights = {"up": normal(16, 32), "down": normal(32, 16)}
    np.savez("in.npz", arg0=normal(8, 16), arg1=weights["down"], **{"weights['up']": weights["up"]})
    options = ("--mesh", "data=4", "--args", f"{TYPES}, 3", "--inputs", "in.npz", "--outputs", "out.npz")
    assert model("run", "model_of_test:mlp", *options) == (0, "", "")
    wanted = np.tanh(normal(8, 16) @ weights["up"]) @ weights["down"] * 3
    np.testing.assert_allclose(np.load("out.npz")["out0"], wanted, rtol=1e-4, atol=1e-4)


def test_of_several_meshes_the_best_is_taken(model):
    both, auto = ("--mesh", "data=8", "--mesh", "data=2,model=4"), ("--in-shardings", "AUTO", "--out-shardings", "AUTO")
    status, out, err = model("plan", "model_of_test:mlp", *both, *auto, "--args", TYPES, "--table", "meshes")
    assert (status, err) == (0, "")
    rows = [line.split() for line in out.splitlines()[2:]]
    assert [" ".join(row).partition(" costs")[0] for row in rows] == ["data=8", "data=2, model=4"]
    assert sum(row[-1] == "chosen" for row in rows) == 1
    status, out, err = model("run", "model_of_test:mlp", *both, *auto, "--args", TYPES, "--random", 0)
    assert (status, err) == (0, "") and out.startswith("plan of mlp on mesh data=")
    status, _, err = model("plan", "model_of_test:mlp", *both, "--in-shardings", SPECS, "--args", TYPES)
    assert (status, "mesh= has 2 meshes" in err) == (1, True)
    status, _, err = model("plan", "m.mlir", *both)
    assert (status, "--mesh may be given several times for functions only" in err) == (2, True)


def test_callable_objects_are_functions(model):
    assert "result  f32[8]" in model("plan", "model_of_test:layer", "--args", "f32[8]")[1]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (
            ("model_of_test:mpl",),
            1,
            "has no 'mpl'; did you mean 'mlp'? it has mlp, wrong, Layer, layer, partitioned",
        ),
        (("model_of_test:number",), 1, "model_of_test:number is an int; expected a function"),
        (("model_of_test:mlp",), 2, 'needs the types of its arguments: --args "f32[64,128], i32[]"'),
        (("model_of_test:partitioned", "--mesh", "x=2"), 2, "is partitioned already; leave out --mesh"),
        (
            ("model_of_test:partitioned", "--layouts", "global"),
            2,
            "--optimize-collectives, --layouts, --constraints, --memory and --effort",
        ),
        (
            ("model_of_test:mlp", "--layouts", "all", "--args", "f32[8]"),
            1,
            "layouts='all'; expected 'local', 'propagated' or 'global'",
        ),
        (("no_such_module:f",), 1, "error: there is no module 'no_such_module', neither installed nor in "),
        (("no_such_file.py:f",), 1, "No such file or directory"),
        (("model_of_test:wrong", "--args", "f32[8]"), 1, "model_of_test:wrong: error: KeyError: 'x' ("),
        (
            ("model_of_test:mlp", "--args", "f32[8,3], {'up': f32[4,4], 'down': f32[4,4]}"),
            1,
            "error: TypeError: dot_gen",
        ),
    ],
    ids=lambda value: "-".join(value)[:50] if isinstance(value, tuple) else "",
)
def test_a_function_that_is_wrong_is_an_error(model, arguments, status, message):
    got, out, err = model("plan", *arguments)
    assert (got, out) == (status, "")
    assert message in err
    assert "Traceback" not in err
    assert "bug" not in err


@pytest.mark.parametrize(
    ("option", "text", "message"),
    [
        ("--mesh", "a", "got 'a'; expected different names with sizes, data=2,model=4"),
        ("--mesh", "a=2,a=2", "got 'a=2'"),
        ("--mesh", "a=0", "got 'a=0'"),
        ("--in-shardings", "P('a'", "'(' was never closed; expected P('data', None), "),
        ("--in-shardings", "open('x')", "got open('x')"),
        ("--in-shardings", "P(3)", "no mesh axis: 3"),
        ("--out-shardings", "{**x}", "got {**x}"),
        ("--args", "f33[2]", "no element type: f33"),
        ("--args", "f32[x]", "got x"),
        ("--args", "f32[-1]", "no sizes in f32[-1]"),
        ("--args", "f32", "got f32"),
    ],
)
def test_options_that_make_no_sense_are_errors_of_use(run, option, text, message):
    status, out, err = run("plan", "m.mlir", "--drop-shardings", f"{option}={text}")
    assert (status, out) == (2, "")
    assert err.startswith(f"error: {option} {text}: ")
    assert message in err


@pytest.mark.parametrize("arguments", [("paln", "m.mlir"), ("plan",), ("plan", "m.mlir", "--devices", "0")])
def test_wrong_use_exits_with_2(run, arguments):
    with pytest.raises(SystemExit) as caught:
        run(*arguments)
    assert caught.value.code == 2


# run


def test_run_reads_and_writes_arrays(run):
    np.savez("in.npz", arg1=W, arg0=X)
    assert run("run", "m.mlir", "--inputs", "in.npz", "--outputs", "out.npz") == (0, "", "")
    found = np.load("out.npz")
    assert sorted(found) == ["out0", "out1"]
    np.testing.assert_allclose(found["out0"], X @ W, rtol=1e-5)
    assert found["out1"].dtype == bool
    assert not found["out1"].any()


def test_run_without_outputs_prints_a_summary(run):
    np.savez("in.npz", arg0=X, arg1=W)
    status, out, _ = run("run", "m.mlir", "--inputs", "in.npz")
    assert status == 0
    product = X @ W
    first, *_, line0, line1 = out.splitlines()
    assert first == "plan of main on mesh a=2, b=2 (4 devices): 1 collective, 96 B on the wire per device"
    assert line0 == f"  out0  f32[8,6]   min {product.min():.6g}  max {product.max():.6g}  mean {product.mean():.6g}"
    assert line1 == "  out1  bool[8,4]  0 of 32 true"


def test_random_inputs_are_the_same_for_a_seed(run):
    outputs = [run("run", "m.mlir", "--random", seed)[1] for seed in (0, 0, 1)]
    assert outputs[0] == outputs[1] != outputs[2]


def test_run_reads_the_program_from_standard_input(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(MODULE.encode())))
    assert run("run", "-", "--random", 0)[0] == 0
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"func.func")))
    assert run("run", "-", "--random", 0)[2].startswith("<stdin>:1:10: error: ")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"arg0": X}, "in.npz: error: has no arg1: f32[4,6]; it has arg0"),
        ({}, "in.npz: error: has no arg0: f32[8,4], no arg1: f32[4,6]; it has nothing"),
        ({"arg0": X, "arg1": W, "arg2": W}, "in.npz: error: has arg2, but the program takes only arg0, arg1"),
        ({"arg0": X, "arg1": W[:3]}, "in.npz: error: arg1 is f32[3,6], the program takes f32[4,6]"),
        ({"arg0": X, "arg1": W.ravel()}, "in.npz: error: arg1 is f32[24], the program takes f32[4,6]"),
        ({"arg0": X.astype(np.float64), "arg1": W}, "in.npz: error: arg0 is f64[8,4], the program takes f32"),
        ({"arg0": X.astype(object), "arg1": W}, "in.npz: error: is no .npz file of numbers: "),
    ],
)
def test_inputs_that_do_not_fit_are_errors(run, arrays, message):
    np.savez("in.npz", **arrays)
    status, out, err = run("run", "m.mlir", "--inputs", "in.npz")
    assert (status, out) == (1, "")
    assert err.startswith(message)


def test_inputs_that_are_no_arrays_are_errors(run):
    np.save("in.npy", X)
    Path("in.txt").write_text("text")
    Path("short.npz").write_bytes(b"PK\x03\x04")
    with zipfile.ZipFile("other.npz", "w") as archive:
        archive.writestr("arg0.npy", b"no array")
    for file in ("in.npy", "in.txt", "short.npz", "other.npz", "none.npz", "."):
        status, out, err = run("run", "m.mlir", "--inputs", file)
        assert (status, out) == (1, "")
        assert err.startswith(f"{file}: error: ")
        assert "bug" not in err


def test_missing_inputs_are_said(run):
    status, _, err = run("run", "m.mlir")
    assert status == 1
    assert err.startswith("m.mlir: error: the program takes arg0: f32[8,4], arg1: f32[4,6]; to fix: give --inputs FILE")
    Path("constant.mlir").write_text(REFERENCE[6])
    assert run("run", "constant.mlir")[1].endswith("out0  f32[2,2]  min 0  max 3  mean 1.5\n")


def test_outputs_that_cannot_be_written_are_an_error(run):
    status, _, err = run("run", "m.mlir", "--random", 0, "--outputs", "none/out.npz")
    assert (status, err) == (1, "none/out.npz: error: No such file or directory; there is no folder none\n")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x93NUMPY...", "is one array (.npy); expected an .npz file: numpy.savez(FILE, arg0=..., arg1=...)"),
        (b"hello", "is no archive of arrays; expected an .npz file: numpy.savez(FILE, arg0=..., arg1=...)"),
        (b"PK\x03\x04", "is no .npz file of numbers: "),
    ],
)
def test_inputs_that_are_no_archive(run, content, message):
    Path("in.npz").write_bytes(content)
    status, _, err = run("run", "m.mlir", "--inputs", "in.npz")
    assert status == 1 and err.startswith(f"in.npz: error: {message}")


@pytest.mark.parametrize("seed", ["-1", "x", "1.5"])
def test_what_is_no_seed(run, capsys, seed):
    with pytest.raises(SystemExit, match="2"):
        run("run", "m.mlir", f"--random={seed}")
    assert f"{seed!r} is no seed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("function", "error"),
    [
        ("wrong.py:f", "{here}/wrong.py:2:7: error: SyntaxError: invalid syntax\n"),
        ("none.py:f", "none.py:f: error: No such file or directory in {here}\n"),
    ],
)
def test_functions_that_cannot_be_imported(run, function, error):
    Path("wrong.py").write_text("import jax\ndef f(:\n")
    status, _, err = run("plan", function, "--mesh", "x=8", "--args", "f32[8]")
    assert (status, err) == (1, error.format(here=os.getcwd()))


def test_a_file_without_a_function_is_named(run):
    Path("empty.mlir").write_text("")
    assert run("plan", "empty.mlir")[2].startswith("empty.mlir: error: this is empty")


def elementwise(op, type_):
    array = f"tensor<8x{type_}>"
    return f"func.func @main(%x: {array}) -> {array} {{ %0 = {op} %x : {array} return %0 : {array} }}"


@pytest.mark.parametrize(
    ("type_", "dtype"),
    [
        ("bf16", ml_dtypes.bfloat16),
        ("f8E4M3FN", ml_dtypes.float8_e4m3fn),
        ("i4", ml_dtypes.int4),
        ("f16", np.float16),
        ("f64", np.float64),
        ("i64", np.int64),
        ("ui8", np.uint8),
        ("complex<f64>", np.complex128),
    ],
)
@pytest.mark.parametrize("shape", [(), ("--mesh", "x=4", "--in-shardings", "P('x')")])
def test_arrays_of_every_type_go_in_and_come_out(run, type_, dtype, shape):
    Path("e.mlir").write_text(elementwise("stablehlo.negate", type_))
    x = np.arange(8).astype(dtype)
    np.savez("in.npz", arg0=x)
    assert run("run", "e.mlir", *shape, "--inputs", "in.npz", "--outputs", "out.npz") == (0, "", "")
    found = np.load("out.npz")["out0"]
    assert found.dtype.itemsize == x.dtype.itemsize
    assert (found.view(dtype) == -x).all()
    assert run("run", "e.mlir", "--random", 0)[0] == 0


def test_other_byte_orders_are_read(run):
    np.savez("in.npz", arg0=X.astype(">f4"), arg1=W)
    run("run", "m.mlir", "--inputs", "in.npz", "--outputs", "out.npz")
    np.testing.assert_allclose(np.load("out.npz")["out0"], X @ W, rtol=1e-5)


def test_what_is_not_finite_is_counted(run):
    Path("e.mlir").write_text(elementwise("stablehlo.log", "f32"))
    np.savez("in.npz", arg0=np.arange(8, dtype=np.float32))
    assert run("run", "e.mlir", "--inputs", "in.npz")[1].endswith("(1 not finite)\n")


def test_a_module_that_cannot_be_partitioned_is_an_error_with_its_line(run):
    Path("m.mlir").write_text(MODULE.replace("stablehlo.compare GT", "stablehlo.compare GTT"))
    status, out, err = run("run", "m.mlir", "--random", 0)
    assert (status, out) == (1, "")
    assert err.startswith("m.mlir:7:")
    Path("m.mlir").write_text("func.func @main(%x: tensor<*xf32>) { return }")
    assert run("run", "m.mlir", "--random", 0)[2].startswith("m.mlir: error: `arg0` of main is no array: ")


def test_what_is_our_mistake_is_called_so(run, monkeypatch, tmp_path):
    def broken(*_):
        raise KeyError("x")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("sdy_jax.calls.planned_function.build_plan", broken)
    monkeypatch.setattr(plan, "job_of", broken)
    status, _, err = run("plan", "m.mlir")
    assert status == 1
    assert err.startswith("error: this is a bug in sdy_jax: KeyError: 'x'; the traceback is in ")


# Artifacts of another program.

EXPORT = """
import sys, numpy as np, jax, jax.numpy as jnp
from jax import export

def mlp(x, weights):
    return jnp.tanh(x @ weights["up"]) @ weights["down"]

def step(params, velocity, batch):
    x, y = batch
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((mlp(x, p) - y) ** 2))(params)
    velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, grads)
    return jax.tree.map(lambda p, v: p - 0.1 * v, params, velocity), velocity, loss

def save(name, fun, *args):
    artifact = export.export(jax.jit(fun))(*args)
    open(f"{name}.bin", "wb").write(artifact.serialize())
    open(f"{name}.mlirbc", "wb").write(artifact.mlir_module_serialized)
    np.savez(f"{name}_in.npz", **{f"arg{i}": x for i, x in enumerate(jax.tree.leaves(args))})
    np.savez(f"{name}_out.npz", **{f"out{i}": x for i, x in enumerate(jax.tree.leaves(jax.jit(fun)(*args)))})

rng = np.random.default_rng(0)
draw = lambda *shape: rng.standard_normal(shape, dtype=np.float32)
params = {"up": draw(16, 32) / 4, "down": draw(32, 16) / 6}
save("mlp", mlp, draw(8, 16), params)
save("step", step, params, jax.tree.map(np.zeros_like, params), (draw(8, 16), draw(8, 16)))
(size,) = export.symbolic_shape("n")
artifact = export.export(jax.jit(lambda x: x * 2))(jax.ShapeDtypeStruct((size, 4), jnp.float32))
open("sized.bin", "wb").write(artifact.serialize())
"""


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    """A directory with artifacts that another process has written, and their inputs and outputs."""
    pytest.importorskip("flatbuffers")
    directory = tmp_path_factory.mktemp("artifacts")
    subprocess.run([sys.executable, "-c", EXPORT], check=True, timeout=120, cwd=directory)
    return directory


PARAMS = "{'up': P('fsdp', 'model'), 'down': P('model', 'fsdp')}"


@pytest.mark.parametrize(
    ("name", "specs"),
    [
        ("mlp.bin", SPECS.replace("data", "fsdp")),
        ("step.bin", f"{PARAMS}, {PARAMS}, (P('fsdp'), P('fsdp'))"),
        ("mlp.mlirbc", "P('fsdp'), P('model'), P(None, 'model')"),
        ("step.mlirbc", "P('fsdp')"),
    ],
)
def test_artifacts_of_another_process_run(run, artifacts, name, specs):
    options = (
        "--mesh",
        "fsdp=2,model=4",
        "--in-shardings",
        specs,
        "--inputs",
        artifacts / f"{name.split('.')[0]}_in.npz",
    )
    assert run("run", artifacts / name, *options, "--outputs", "out.npz") == (0, "", "")
    found, wanted = np.load("out.npz"), np.load(artifacts / f"{name.split('.')[0]}_out.npz")
    assert sorted(found) == sorted(wanted)
    for key in wanted:
        np.testing.assert_allclose(found[key], wanted[key], rtol=1e-4, atol=1e-5)


def test_the_plan_of_an_artifact_has_its_names(run, artifacts):
    status, out, _ = run("plan", artifacts / "step.bin", "--mesh", "data=8", "--in-shardings", "P(), P(), P('data')")
    assert status == 0
    assert "plan of step on mesh data=8" in out
    assert "velocity['down']" in out
    assert "batch[0]          f32[8@data,16]" in out
    assert "all_gather" in out and "layouts: chosen for the whole program" in out


def test_symbolic_sizes_come_from_the_arguments(run, artifacts):
    path = artifacts / "sized.bin"
    status, _, err = run("plan", path)
    assert (status, "the program takes f32[n,4]; to fix: give the types with sizes as --args" in err) == (1, True)
    assert (
        "f32[12@devices,4]"
        in run("plan", path, "--args", "f32[12,4]", "--devices", 2, "--in-shardings", "P('devices')")[1]
    )
    np.savez("in.npz", arg0=X)
    assert run("run", path, "--inputs", "in.npz", "--outputs", "out.npz")[0] == 0
    assert (np.load("out.npz")["out0"] == 2 * X).all()
    assert "--args" in run("run", path, "--random", 0)[2]


# The mesh and shard dialects.

ANNOTATED = """
mesh.mesh @grid(shape = 2x?)
func.func @main(%x: tensor<4x8xf32>) -> tensor<4x8xf32> {
  %s = mesh.sharding @grid split_axes = [[0], [1]] : !mesh.sharding
  %0 = mesh.shard %x to %s : tensor<4x8xf32>
  %1 = stablehlo.tanh %0 : tensor<4x8xf32>
  return %1 : tensor<4x8xf32>
}
"""
LOCAL = """
mesh.mesh @grid(shape = 2x?)
func.func @main(%x: tensor<2x?xbf16>, %y: tensor<i64>) -> (tensor<2x?xbf16>, tensor<i64>) {
  %0 = mesh.all_gather %x on @grid mesh_axes = [1] gather_axis = 1 : tensor<2x?xbf16> -> tensor<2x?xbf16>
  %1 = mesh.all_reduce %y on @grid mesh_axes = [0] : tensor<i64> -> tensor<i64>
  return %0, %1 : tensor<2x?xbf16>, tensor<i64>
}
"""


def test_annotations_of_the_mesh_dialect_partition_a_program(run):
    Path("m.mlir").write_text(ANNOTATED)
    status, out, _ = run("plan", "m.mlir", "--devices", 8)
    assert status == 0
    assert "mesh axis0=2, axis1=4 (8 devices)" in out
    assert "arg0  f32[4@axis0,8@axis1]" in out
    assert "f32[4@x,8@y]" in run("plan", "m.mlir", "--mesh", "x=2,y=2")[1]
    np.savez("in.npz", arg0=normal(4, 8))
    assert run("run", "m.mlir", "--devices", 4, "--inputs", "in.npz", "--outputs", "out.npz") == (0, "", "")
    np.testing.assert_allclose(np.load("out.npz")["out0"], np.tanh(normal(4, 8)), rtol=1e-5)
    np.testing.assert_allclose(sdy.partition(sdy.load("m.mlir"))(normal(4, 8)), np.tanh(normal(4, 8)), rtol=1e-5)


@pytest.mark.parametrize("command", [["plan"], ["run", "--random", 0]], ids=["plan", "run"])
def test_a_rule_that_is_broken_on_the_devices_is_said_at_its_place(run, command):
    Path("m.mlir").write_text("""
mesh.mesh @m(shape = 2x4)
func.func @main(%x: tensor<8x16xf32>) -> tensor<8x16xf32> {
  %s = mesh.sharding @m split_axes = [[0]] : !mesh.sharding
  %a = mesh.shard %x to %s : tensor<8x16xf32>
  return %a : tensor<8x16xf32>
}""")
    status, _, err = run(command[0], "m.mlir", "--mesh", "x=8", *command[1:])
    assert (status, err) == (1, "m.mlir:2:1: error: mesh.mesh: @m is 2x4, the devices form 8\n")


def test_local_programs_take_an_entry_for_every_device(run):
    Path("m.mlir").write_text(LOCAL)
    x = np.arange(24).reshape(6, 2, 2).astype(ml_dtypes.bfloat16)
    np.savez("in.npz", arg0=x, arg1=np.arange(6) << 40)
    assert run("run", "m.mlir", "--devices", 6, "--inputs", "in.npz", "--outputs", "out.npz") == (0, "", "")
    found = np.load("out.npz")
    gathered = np.concatenate([x.reshape(2, 3, 2, 2)[:, i] for i in range(3)], axis=-1)
    assert (found["out0"].view(ml_dtypes.bfloat16) == np.repeat(gathered, 3, axis=0)).all()
    assert found["out1"].tolist() == [n << 40 for n in (3, 5, 7, 3, 5, 7)]
    status, out, _ = run("run", "m.mlir", "--mesh", "x=2,y=3", "--inputs", "in.npz")
    assert (status, out.splitlines()[0].partition(":")[0]) == (
        0,
        "plan of main on local arrays, on mesh x=2, y=3 (6 devices)",
    )
    assert run("plan", "m.mlir", "--devices", 6, "--args", "bf16[6,2,2], i64[6]")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("run",), 2, "error: the mesh @grid = 2x? has a size that is not known; say how large by --devices N"),
        (("run", "--devices", 7), 1, "m.mlir: error: 7 devices do not fill"),
        (("run", "--devices", 4), 1, "m.mlir: error: the program takes arg0: bf16[4,2,?], arg1: i64[4]; to fix: "),
        (
            ("run", "--devices", 4, "--inputs", "in.npz"),
            1,
            "in.npz: error: arg0 is f32[4,3,1], the program takes bf16[",
        ),
        (
            ("run", "--devices", 4, "--in-shardings", "P()"),
            2,
            "error: --in-shardings is not for programs on local arrays",
        ),
        (("plan", "--devices", 4), 1, "m.mlir: error: the program takes bf16[4,2,?], i64[4]; to fix: give the types"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_local_programs_that_cannot_run_are_errors(run, arguments, status, message):
    Path("m.mlir").write_text(LOCAL)
    np.savez("in.npz", arg0=normal(4, 3, 1), arg1=np.arange(4))
    command, *options = arguments
    got, out, err = run(command, "m.mlir", *options)
    assert (got, out) == (status, "")
    assert err.startswith(message)


# The examples of the SDY reference.

_EXPECTED = (
    ("stablehlo.while", lambda x, n: [x]),
    ("dense<[[", lambda: [np.float32([[0, 1], [2, 3]])]),
    ("dense<0>", lambda x: [np.zeros((8, 2), np.int64)]),
    ("custom>", lambda a, b, c, d: [a + b, c @ d]),
    ("dot_general", lambda a, b: [a @ b]),
    ("propagation_edges", lambda x: [x + x]),
    ("stablehlo.tanh", lambda x: [np.tanh(x)]),
    ("", lambda x: [x]),
)
"""What an example computes, by what its text has."""

RUN_ALL = """
import sys
from sdy_jax.cli.main import main
for number in sys.argv[1:]:
    assert main(["run", f"{number}.mlir", "--inputs", f"{number}.npz", "--outputs", f"{number}_out.npz"]) == 0, number
"""


def arguments_of(text):
    rng = np.random.default_rng(0)
    infos = sdy.load(text.encode()).in_info
    return [
        np.asarray(rng.integers(0, 9, i.shape) if i.dtype.kind == "i" else rng.standard_normal(i.shape), i.dtype)
        for i in infos
    ]


@pytest.mark.more("all examples of the reference")
def test_the_examples_of_the_reference_run_as_if_on_one_device(tmp_path):
    # One of them is on a mesh of 128 devices, which only another process can have.
    whole = {str(n): text for n, text in enumerate(REFERENCE) if "@maximal" not in text}
    assert len(whole) == len(REFERENCE) - 1
    arguments = {number: arguments_of(text) for number, text in whole.items()}
    for number, text in whole.items():
        (tmp_path / f"{number}.mlir").write_text(text)
        np.savez(tmp_path / f"{number}.npz", **{f"arg{i}": x for i, x in enumerate(arguments[number])})
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=128", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", RUN_ALL, *whole]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, **flags}, capture_output=True, text=True)
    told = [line for line in done.stderr.splitlines() if "the mesh has 6 axes" not in line]
    assert (done.returncode, told) == (0, [])
    for number, text in whole.items():
        wanted = next(f for has, f in _EXPECTED if has in text)(*arguments[number])
        found = np.load(tmp_path / f"{number}_out.npz")
        for i, array in enumerate(wanted):
            np.testing.assert_allclose(found[f"out{i}"], array, rtol=1e-5, atol=1e-6, err_msg=text)


def test_the_example_whose_input_is_stated_to_be_terms_takes_their_sum(run):
    Path("m.mlir").write_text(next(text for text in REFERENCE if "@maximal" in text))
    status, _, err = run("run", "m.mlir", "--random", 0)
    assert (status, err) == (0, "")
    assert "arg0  f32[8@a]" in run("plan", "m.mlir")[1]


def test_a_result_that_is_stated_to_be_terms_is_refused_with_the_reason(run):
    Path("m.mlir").write_text(
        MODULE.replace("(tensor<8x6xf32>,", "(tensor<8x6xf32> TERMS,").replace(
            "TERMS", '{sdy.sharding = #sdy.sharding<@mesh, [{"a"}, {}], unreduced={"b"}>}'
        )
    )
    status, _, err = run("run", "m.mlir", "--random", 0)
    assert status == 1
    assert "`result[0]` is to be <" in err
    assert "not terms of a sum" in err


# doctor


def test_doctor_finds_everything_in_order(run):
    status, out, err = run("doctor")
    assert (status, err) == (0, "")
    assert f"jax              ok       {jax.__version__}\n" in out
    assert "devices          ok       8 x cpu (cpu)\n" in out
    assert "end to end       ok       a network on (2, 4) devices, collectives: 1; off by " in out
    assert "broken" not in out


def test_doctor_speaks_json(run):
    status, out, _ = run("doctor", "--json", "--devices", 2)
    found = {entry["name"]: entry for entry in json.loads(out)}
    assert status == 0
    assert found["devices"]["detail"] == "2 x cpu (cpu)"
    assert found["end to end"]["status"] == "ok"


def test_doctor_says_what_is_broken(run, monkeypatch):
    def wrong(*_):
        raise RuntimeError("no such luck\nand more")

    monkeypatch.setitem(doctor_checks.CHECKS, "passes", wrong)
    status, out, _ = run("doctor")
    assert status == 1
    assert "passes           broken   RuntimeError: no such luck\n" in out


def lacking(monkeypatch, package):
    """Nothing is tried out, and a package is not installed."""
    version = doctor.metadata.version

    def version_of(name):
        if name == package:
            raise doctor.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(doctor.metadata, "version", version_of)
    monkeypatch.setattr(doctor_checks, "CHECKS", {})


def test_doctor_cannot_do_without_jax(run, monkeypatch):
    lacking(monkeypatch, "jaxlib")
    status, out, _ = run("doctor")
    assert status == 1
    assert "jaxlib       broken   is not installed\n" in out
    monkeypatch.setitem(sys.modules, "sdy_jax.cli.doctor_checks", None)
    status, out, _ = run("doctor")
    assert status == 1
    assert "import       broken   ModuleNotFoundError: " in out


@pytest.mark.parametrize("package", ["flatbuffers", "libtpu"])
def test_doctor_can_do_without_optional_packages(run, monkeypatch, package):
    lacking(monkeypatch, package)
    status, out, _ = run("doctor")
    assert status == 0
    assert f"{package:<11}  missing  optional: " in out


# Manners.


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_colours_are_for_terminals_that_want_them(run, monkeypatch):
    def shown(**environment):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", Terminal())
            patch.delenv("NO_COLOR", raising=False)
            patch.setenv("TERM", "xterm")
            for name, value in environment.items():
                patch.setenv(name, value)
            run("plan", "none.mlir")
            return sys.stderr.getvalue()

    said = f"No such file or directory in {os.getcwd()}\n"
    plain = f"none.mlir: error: {said}"
    assert shown() == f"\x1b[1mnone.mlir: \x1b[0m\x1b[1;31merror:\x1b[0m {said}"
    assert shown(NO_COLOR="1") == shown(TERM="dumb") == plain
    assert run("plan", "none.mlir")[2] == plain


@pytest.mark.parametrize("command", [(), ("opt",), ("plan",), ("run",), ("doctor",)])
def test_help_has_examples_and_the_version_is_known(run, command, capsys):
    with pytest.raises(SystemExit) as caught:
        run(*command, "--help")
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert "sdy-jax" in out
    assert all(len(line) <= 120 for line in out.splitlines())
    with pytest.raises(SystemExit):
        run("--version")
    assert capsys.readouterr().out.startswith("sdy_jax 0.")


def test_the_parser_of_arguments_needs_no_jax():
    lines = ("import sys", "from sdy_jax.cli.main import main", "try: main(['run', '--help'])")
    code = "\n".join((*lines, "finally: assert 'jax' not in sys.modules"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--inputs" in done.stdout


def test_specs_are_those_of_python(mesh):
    from sdy_jax.cli.arguments import parse_shardings, parse_types

    text = "(P('data', None), [P(('data', 'model')), None], {'a': P(P.UNCONSTRAINED), 1: '[{}]'})"
    wanted = (P("data", None), [P(("data", "model")), None], {"a": P(P.UNCONSTRAINED), 1: "[{}]"})
    assert parse_shardings(text, "--in-shardings") == wanted
    first, second = parse_types("[bf16[2,3], s8[4], pred[2], c64[], float8_e4m3fn[5]], 2.5", "--args")
    assert [str(jax.core.ShapedArray(t.shape, t.dtype)) for t in first] == [
        "bfloat16[2,3]",
        "int8[4]",
        "bool[2]",
        "complex64[]",
        "float8_e4m3fn[5]",
    ]
    assert second == 2.5
