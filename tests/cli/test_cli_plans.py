"""Plans kept, compared and held to budgets on the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax.cli.main import main

MODULE = """
sdy.mesh @mesh = <["a"=2]>
func.func @main(%x: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"a"}]>})
    -> (tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}]>}) {
  %0 = stablehlo.tanh %x : tensor<8xf32>
  return %0 : tensor<8xf32>
}
"""
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs `plan` on the module, or on another one; gives the exit status, and what is printed on both streams."""
    monkeypatch.chdir(tmp_path)

    def run_on(*options: str, text: str = MODULE) -> tuple[int, str, str]:
        Path("m.mlir").write_text(text)
        status = main(["plan", *options, "m.mlir"])
        out, err = capsys.readouterr()
        return status, out, err

    return run_on


def test_a_plan_is_saved_beside_being_printed(run: Run) -> None:
    status, out, err = run("--save", "step.json")
    assert (status, err) == (0, "") and out.startswith("plan of main")
    assert sdy.load_plan("step.json").headline == out.splitlines()[0]


def test_differences_to_a_saved_plan_are_printed(run: Run) -> None:
    run("--save", "old.json")
    assert run("--diff", "old.json") == (0, "plan of main: no differences\n", "")
    status, out, _ = run("--diff", "old.json", text=MODULE.replace("[{}]", '[{"a"}]'))
    assert status == 0 and "out_shardings of result: P() -> P('a')" in out and "- all_gather" in out


def test_a_saved_plan_is_printed_and_compared_without_the_program(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    printed = run("--save", "old.json")
    assert (main(["plan", "old.json"]), *capsys.readouterr()) == printed
    assert main(["plan", "old.json", "--table", "memory"]) == 0
    assert capsys.readouterr().out.startswith("what a device holds when it holds most of main")
    run("--save", "new.json", text=MODULE.replace("[{}]", '[{"a"}]'))
    assert main(["plan", "new.json", "--diff", "old.json"]) == 0 and "- all_gather" in capsys.readouterr().out
    assert main(["plan", "new.json", "--why", "result"]) == 2
    assert "--why needs the program, new.json is a saved plan of it" in capsys.readouterr().err


def test_a_plan_within_its_budget_passes(run: Run) -> None:
    status, out, err = run("--budget", "wire_bytes=16, memory=1KiB, forbid=all_reduce+all_to_all, a=all_gather")
    assert (status, err) == (0, "") and out.startswith("plan of main")


def test_a_plan_that_breaks_its_budget_fails_after_it_is_printed(run: Run) -> None:
    status, out, err = run("--budget", "wire_bytes=15")
    assert status == 1 and out.startswith("plan of main")
    assert "m.mlir: error: main on mesh a=2:" in err and "16 B on the wire per device, 15 B are allowed" in err


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (["--budget", "lots"], 2, "'lots' is not NAME=VALUE, once per name; expected wire_bytes=10MiB"),
        (["--budget", "wire_bytes=lots"], 2, "wire_bytes='lots'; expected a number of bytes"),
        (["--budget", "forbid=all_gathr"], 2, "did you mean all_gather?"),
        (["--budget", "b=all_gather"], 1, "axes has 'b', the mesh of main has 'a'"),
        (["--diff", "none.json"], 1, "none.json cannot be read"),
        (["--diff", "m.mlir"], 1, "m.mlir is no plan of sdy_jax"),
        (["--save", "nowhere/step.json"], 1, "the plan cannot be written to nowhere/step.json"),
    ],
)
def test_what_cannot_be_is_a_clear_error(run: Run, options: list[str], status: int, message: str) -> None:
    found, _, err = run(*options)
    assert found == status and message in err, err


# Machines by name: none of them is there, and no compiler is asked.

GRADIENT = """
sdy.mesh @mesh = <["data"=2, "model"=8]>
func.func @main(%x: tensor<4096x512xbf16> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>},
    %y: tensor<4096x512xbf16> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>})
    -> (tensor<512x512xbf16> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}]>}) {
  %0 = stablehlo.dot_general %x, %y, contracting_dims = [0] x [0]
      : (tensor<4096x512xbf16>, tensor<4096x512xbf16>) -> tensor<512x512xbf16>
  return %0 : tensor<512x512xbf16>
}
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("h100", "costs in seconds: 2 x h100 x8, by its published rates"),  # what NVLink joins is eight
        ("2 x h100-sxm x8", "costs in seconds: 2 x h100 x8, by its published rates"),
        ("gb200 x72", "costs in seconds: gb200 x72, by its published rates"),
        ("v5e", "costs in seconds: tpu v5e, by its published rates"),
    ],
)
def test_a_plan_is_for_machines_that_are_named(run: Run, name: str, said: str) -> None:
    status, out, err = run("--machine", name, text=GRADIENT)
    assert (status, err) == (0, "") and said in out and "estimated" in out.splitlines()[0]


def test_a_plan_for_named_machines_is_that_of_their_costs(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    Path("step.py").write_text("import jax.numpy as jnp\n\ndef step(x, y):\n    return jnp.tanh(x.T @ y)\n")
    layout = ["--in-shardings", "P('data'), P('data', 'model')", "--out-shardings", "P(None, 'model')"]
    types = ["--args", "f32[4096,512], f32[4096,512]", "--mesh", "data=2,model=8"]
    assert main(["plan", "step.py:step", *types, *layout, "--machine", "h100", "--save", "named.json"]) == 0
    capsys.readouterr()
    named, x = sdy.load_plan("named.json"), jax.ShapeDtypeStruct((4096, 512), np.float32)
    mesh = jax.sharding.AbstractMesh((2, 8), ("data", "model"))
    costs = sdy.CostModel.of_machine("h100", mesh, {"data": 50e9})
    specs = {"in_shardings": (P("data"), P("data", "model")), "out_shardings": P(None, "model")}
    plan = sdy.partition(lambda x, y: jnp.tanh(x.T @ y), mesh=mesh, costs=costs, **specs).plan(x, x)
    assert named.time.communication == plan.time.communication > 0 and named.time.compute == plan.time.compute
    assert named.memory.peak == plan.memory.peak and named.memory.available == 60 * 2**30


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--machine", "h9000"), "--machine h9000: no machine is called 'h9000'; did you mean"),
        (("--machine", "h100 x4"), "--machine h100 x4: 'h100 x4' are 4 devices, and the mesh data=2, model=8 has 16"),
        (("--machine", "h100", "--mesh", "data=12"), "12 do not fill such hosts"),
        (("--machine", "h100", "--topology", "tpu:v5e:4x4"), "leave one out"),
    ],
)
def test_machines_that_do_not_fit_are_errors_of_the_options(run: Run, options: tuple[str, ...], message: str) -> None:
    status, out, err = run(*options, text=GRADIENT)
    assert (status, out) == (2, "") and message in err
