"""`sdy-jax verify` compares programs with themselves on one device."""

import json
import textwrap

import numpy as np
import pytest

from sdy_jax.cli.main import main

TEXT = """
sdy.mesh @mesh = <["x"=2, "y"=2]>
func.func @main(%a: tensor<8x6xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {"y"}]>},
                %b: tensor<6x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"y"}, {}]>}) -> tensor<8x4xf32> {
  %0 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0]
      : (tensor<8x6xf32>, tensor<6x4xf32>) -> tensor<8x4xf32>
  return %0 : tensor<8x4xf32>
}
"""
FAULT = """
def plant():
    from jax import lax
    right = lax.psum
    lax.psum = lambda x, *args, **kwargs: right(x, *args, **kwargs) * 1.01
"""


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "product.mlir"
    path.write_text(TEXT)
    return str(path)


@pytest.mark.more("programs from files")
def test_a_file_is_the_same_on_its_mesh_and_on_others(text, capsys):
    assert main(["verify", text, "--also", "x=3,y=1", "--target", "cpu", "--no-uneven"]) == 0
    said = capsys.readouterr().out
    assert "verify of main: 2 cases, all the same" in said and "x=3, y=1" in said and "no derivatives" in said


@pytest.mark.more("a process of its own")
def test_a_function_is_compared_with_its_derivatives_and_given_arguments(tmp_path, capsys):
    (tmp_path / "model.py").write_text("def square(x):\n    return (x @ x).sum()\n")
    np.savez(tmp_path / "in.npz", arg0=np.eye(8, dtype=np.float32))
    program = [f"{tmp_path}/model.py:square", "--args", "f32[8,8]", "--mesh", "x=4", "--in-shardings", "P('x')"]
    assert main(["verify", *program, "--inputs", f"{tmp_path}/in.npz", "--target", "tpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and [case["is_derivative"] for case in found["cases"]] == [False, True, False, True]


@pytest.mark.more("a process of its own")
def test_what_is_wrong_is_named_written_down_and_the_status(text, tmp_path, capsys, monkeypatch):
    (tmp_path / "fault.py").write_text(textwrap.dedent(FAULT))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("SDY_JAX_VERIFY_HOOK", "fault:plant")
    program = tmp_path / "wrong.py"
    assert main(["verify", text, "--target", "gpu", "--no-uneven", "--reproducer", str(program)]) == 1
    said = capsys.readouterr().out
    assert "1 case, 1 wrong" in said and "first wrong value: sdy.all_reduce at" in said and "product.mlir:5" in said
    assert 'for a result of the program: all_reduce {"y"}' in said
    assert "difference_alone" in program.read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--target", "abacus"], "--target abacus: expected one of cpu, gpu, tpu"),
        (["--also", "x"], "got 'x'; expected different names with sizes"),
    ],
)
def test_wrong_options_have_the_status_two(text, options, message, capsys):
    assert main(["verify", text, *options]) == 2
    assert message in capsys.readouterr().err


def test_axes_that_the_mesh_does_not_have_are_named(text, capsys):
    assert main(["verify", text, "--also", "z=2"]) == 1
    assert "there is no axis 'z'; the function's mesh has x, y" in capsys.readouterr().err
