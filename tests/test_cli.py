"""The command line, in process: its output, its exit status, and no traceback for bad input."""

import pytest

from sdy_jax.cli import main

MODULE = """
sdy.mesh @mesh = <["a"=2]>
func.func @main(%x: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"a"}]>}) -> tensor<8xf32> {
  %0 = stablehlo.tanh %x : tensor<8xf32>
  return %0 : tensor<8xf32>
}
"""


@pytest.fixture
def module(tmp_path):
    path = tmp_path / "module.mlir"
    path.write_text(MODULE)
    return str(path)


def test_opt_runs_passes_and_prints_the_module(module, capsys):
    assert main(["opt", "--pipeline", "basic-propagate,sdy-close-shardings", module]) == 0
    assert (
        'stablehlo.tanh %arg0 {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{"a"}]>]>}' in capsys.readouterr().out
    )


def test_opt_without_passes_prints_what_it_parsed(module, capsys):
    assert main(["opt", module]) == 0
    assert "stablehlo.tanh" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "pipeline", "message"),
    [
        (MODULE, "no-such-pass", "no pass is called 'no-such-pass'"),
        ("func.func @main(", "", "error"),
        (None, "", "No such"),
    ],
)
def test_bad_input_is_an_error_message_and_exit_status_1(tmp_path, capsys, text, pipeline, message):
    path = tmp_path / "bad.mlir"
    if text is not None:
        path.write_text(text)
    assert main(["opt", "--pipeline", pipeline, str(path)]) == 1
    assert message in capsys.readouterr().err
