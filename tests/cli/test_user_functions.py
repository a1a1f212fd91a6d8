"""Functions on the command line: named, found, and given arguments by functions beside them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from places import ROOT

from sdy_jax.cli.main import main

TRAIN = """
import jax, jax.numpy as jnp

calls = []

def loss(params, batch):
    return jnp.mean((batch["x"] @ params["w"]) ** 2)

def step(params, batch, scale=1.0):
    value, gradient = jax.value_and_grad(loss)(params, batch)
    return jax.tree.map(lambda p, g: p - scale * g, params, gradient), value

def types():
    return {"w": jax.ShapeDtypeStruct((16, 8), jnp.bfloat16)}, {"x": jax.ShapeDtypeStruct((8, 16), jnp.bfloat16)}, 0.5

def arrays():
    jax.debug.callback(lambda: print("computed"))
    return {"w": jnp.ones((16, 8))}, {"x": jnp.ones((8, 16))}

def looks():
    w = jnp.ones((16, 8))
    assert float(w.sum()) > 0
    return {"w": w}, {"x": jax.ShapeDtypeStruct((8, 16), jnp.float32)}

def one():
    return jnp.ones((8, 8))

def counted():
    calls.append("counted")
    return jnp.ones((8, 8))

def fails():
    raise KeyError("no data")

def square(x):
    assert not calls
    return x @ x

def _hidden():
    pass
"""
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRAIN)

    def run_on(*options: str) -> tuple[int, str, str]:
        status = main(options)
        return status, *capsys.readouterr()

    return run_on


@pytest.mark.parametrize("program", ["train.py", "train.py:", "train"])
@pytest.mark.parametrize("command", ["plan", "run", "verify"])
def test_a_file_of_python_is_told_to_name_a_function(run: Run, command: str, program: str) -> None:
    status, _, err = run(command, program)
    assert status == 1 and err.startswith(f"{program}: error: train.py is Python; to fix: name a function in it")
    assert "train.py:loss, or train.py:step, or train.py:types" in err and "_hidden" not in err


def test_passes_are_not_for_python(run: Run) -> None:
    status, _, err = run("opt", "train.py")
    assert status == 1 and err.startswith("train.py: error: this is Python; to fix: partition a function of it")


def test_a_file_of_python_without_functions_says_so(run: Run) -> None:
    Path("empty.py").write_text("x = 1\n")
    assert "empty.py:NAME, which is not among what it defines by `def`" in run("plan", "empty.py")[2]


STEP = ("plan", "train.py:step", "--mesh", "data=8", "--in-shardings", "None, P('data'), None")


@pytest.mark.parametrize("where", ["train.py:types", "types", "train:types"])
def test_arguments_come_from_a_function(run: Run, where: str) -> None:
    status, out, err = run(*STEP, "--args-from", where)
    assert (status, err) == (0, "") and "batch['x']   bf16[8@data,16]" in out and "params['w']  bf16[16,8]" in out


@pytest.mark.parametrize("where", ["arrays", "looks"])
def test_arrays_give_their_types_and_are_computed_where_looked_at_only(run: Run, where: str) -> None:
    status, out, _ = run(*STEP[:-2], "--args-from", where)
    assert status == 0 and "batch['x']   f32[8,16]" in out and "computed" not in out


def test_what_run_is_given_is_computed(run: Run) -> None:
    status, out, _ = run("run", "train.py:square", "--mesh", "data=8", "--args-from", "one")
    assert status == 0 and "min 8  max 8" in out
    status, out, _ = run("run", "train.py:square", "--mesh", "data=8", "--args-from", "one", "--random", "0")
    assert status == 0 and "min 8  max 8" not in out
    assert "give --inputs" in run("run", "train.py:step", "--mesh", "data=8", "--args-from", "types")[2]


def test_a_module_is_imported_once(run: Run) -> None:
    status, _, err = run("plan", "train.py:square", "--mesh", "data=8", "--args-from", "./train.py:counted")
    assert status == 1 and "AssertionError" in err  # `calls` is the same list


@pytest.mark.parametrize(
    "where, status, said",
    [
        ("nothing", 1, "train.py:nothing: error: train.py has no 'nothing'; it has loss, step"),
        ("a.b", 2, "--args-from a.b: expected module:function or file.py:function"),
        ("fails", 1, "train.py:fails: error: KeyError: 'no data'"),
        ("train.py:calls", 1, "is a list; expected a function"),
    ],
)
def test_wrong_sources_of_arguments_are_named(run: Run, where: str, status: int, said: str) -> None:
    found, _, err = run(*STEP, "--args-from", where)
    assert found == status and said in err


def test_a_function_without_types_is_told_both_ways(run: Run) -> None:
    status, _, err = run("plan", "train.py:step", "--mesh", "data=8")
    assert status == 2 and '--args "f32[64,128], i32[]", or --args-from train.py:NAME' in err


def test_the_remedy_of_a_budget_speaks_of_the_command_line(run: Run) -> None:
    status, _, err = run(*STEP, "--args-from", "types", "--budget", "wire_bytes=1B")
    assert status == 1 and "print(" not in err and "error.plan" not in err
    assert re.search(r"to fix:( sdy-jax plan without --budget shows the plan|\n)", err)


def test_without_a_command_the_page_is_printed(run: Run) -> None:
    status, out, err = run()
    assert (status, err) == (0, "") and out.startswith("usage: sdy-jax") and "sdy-jax plan model.mlir" in out


def test_the_module_is_run_without_arguments() -> None:
    done = subprocess.run([sys.executable, "-m", "sdy_jax"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: sdy-jax")
