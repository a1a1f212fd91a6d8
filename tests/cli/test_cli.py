"""The command line, in process: its output, its exit status, and no traceback for bad input."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

import sdy_jax
from sdy_jax.cli import opt
from sdy_jax.cli.main import main

MODULE = """
sdy.mesh @mesh = <["a"=2]>
func.func @main(%x: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"a"}]>}) -> tensor<8xf32> {
  %0 = stablehlo.tanh %x : tensor<8xf32>
  return %0 : tensor<8xf32>
}
"""
UNKNOWN_AXIS = MODULE.replace('[{"a"}]', '[{"x"}]')


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """Runs `opt` on a text in a file; gives the exit status, and what is printed on both streams."""
    monkeypatch.chdir(tmp_path)

    def run_on(text, *options):
        (tmp_path / "m.mlir").write_bytes(text if isinstance(text, bytes) else text.encode())
        status = main(["opt", *options, "m.mlir"])
        return status, *capsys.readouterr()

    return run_on


@pytest.mark.parametrize(
    "pipeline",
    [
        "basic-propagate,sdy-close-shardings",
        "sdy-aggressive-propagate{propagation-strategy=basic},close-shardings",
        "builtin.module(sdy-basic-propagate, func.func(canonicalize), sdy-close-shardings)",
    ],
)
def test_opt_runs_passes_and_prints_the_module(run, pipeline):
    status, out, err = run(MODULE, "--pipeline", pipeline)
    assert (status, err) == (0, "")
    assert 'stablehlo.tanh %arg0 {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{"a"}]>]>}' in out
    assert run(out) == (0, out, "")


def test_opt_without_passes_prints_what_it_parsed(run):
    status, out, _ = run(MODULE)
    assert status == 0
    assert "stablehlo.tanh" in out
    assert run(out) == (0, out, "")


def test_opt_reads_standard_input(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(MODULE.encode())))
    assert main(["opt", "-"]) == 0
    assert "stablehlo.tanh" in capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(UNKNOWN_AXIS.encode())))
    assert main(["opt", "-"]) == 1
    assert capsys.readouterr().err.startswith("<stdin>:3:1: error: [A1] ")


def test_an_empty_file_is_an_empty_module(run):
    assert run("") == (0, "module {\n}\n", "")
    status, _, err = run("", "--pipeline", "sdy-propagation-pipeline")
    assert (status, "no function" in err) == (1, True)


# What is wrong with a module, where, and that the exit status is 1.


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("func.func @main(", "m.mlir:1:16: error: expected non-function type\n  func.func @main(\n  " + " " * 15 + "^"),
        ("x", "m.mlir:1:1: error: custom op 'x' is unknown"),
        (UNKNOWN_AXIS, 'm.mlir:3:1: error: [A1] func.func, argument 0: unknown axis name: "x"; axes are axes of the'),
        (MODULE.replace('"a"=2]', '"a"=0]'), "m.mlir:2:20: error: [M1] sdy.mesh: axis size must be at least 1, got: 0"),
        (MODULE.replace("tanh", "tanhh"), "m.mlir:4:8: error: "),
        (MODULE.replace("tanh %x", "tanh %y"), "m.mlir:4:23: error: use of undeclared SSA value name"),
        (MODULE.replace("return %0 : tensor<8xf32>", "return"), "m.mlir:5:3: error: 'func.return' op has 0 operands"),
        (MODULE + "\x00", "m.mlir:7:1: error: a NUL character"),
        (b"\xff\xfe", "m.mlir: error: this is no UTF-8 text: byte 0xff at offset 0"),
        (b"ML\xefR", "m.mlir: error: this is no UTF-8 text"),
    ],
)
@pytest.mark.parametrize("pipeline", ["", "sdy-propagation-pipeline"])
def test_a_bad_module_is_an_error_with_its_place(run, text, message, pipeline):
    status, out, err = run(text, "--pipeline", pipeline)
    assert (status, out) == (1, "")
    assert err.startswith(message)


def test_notes_have_their_place_and_the_ops_text_is_left_out(run):
    _, _, err = run(
        MODULE.replace("tensor<8xf32>\n  return", "tensor<8xf32>\n  %0 = stablehlo.negate %x : tensor<8xf32>\n  return")
    )
    first, line, mark, note = err.splitlines()
    assert first == "m.mlir:5:3: error: redefinition of SSA value '%0'"
    assert (line, mark) == ("    %0 = stablehlo.negate %x : tensor<8xf32>", "    ^")
    assert note == "m.mlir:4:3: note: previously defined here"
    assert "see current operation" not in run(UNKNOWN_AXIS)[2]


@pytest.mark.parametrize(
    "location",
    [
        'loc("model.py":3:4)',
        'loc("f"("model.py":3:4))',
        'loc(callsite("a)" at "model.py":3:4))',
        'loc(fused["model.py":3:4, "x"])',
        "loc(#here)",
    ],
)
def test_an_op_with_a_location_of_its_own_is_found_in_the_file(run, location):
    text = UNKNOWN_AXIS.rstrip().removesuffix("}") + f'}} {location}\n#here = loc("model.py":3:4) // loc(\n'
    _, _, err = run(text)
    assert err.startswith("m.mlir:3:1: error: [A1] ")
    assert "m.mlir: note: the operation comes from" in err
    assert '"model.py":3:4' in err


def test_an_error_that_a_pass_finds_has_its_message(run):
    text = """func.func @main(%x: tensor<8xf32>, %y: tensor<4xf32>) {
  sdy.sharding_group %x group_id=0 : tensor<8xf32>
  sdy.sharding_group %y group_id=0 : tensor<4xf32>
  return
}"""
    status, out, err = run(text, "--pipeline", "sdy-sharding-group-import")
    assert (status, out) == (1, "")
    assert err.startswith("m.mlir:")
    assert "group" in err
    assert "bug" not in err


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        ("no-such-pass", "no pass is called 'no-such-pass'"),
        ("basic-propagate{no-such-option=1}", "no option 'no-such-option'"),
        ("sdy-aggressive-propagate{propagation-strategy=bold}", "propagation-strategy"),
        ("basic-propagate,,", "error: "),
        ("func.func(basic-propagate", "error: "),
    ],
)
@pytest.mark.parametrize("split", [False, True])
def test_a_bad_pipeline_is_an_error(run, pipeline, message, split):
    status, out, err = run(MODULE, "--pipeline", pipeline, *(["--split-input-file"] if split else []))
    assert (status, out) == (1, "")
    assert err.startswith("error: pipeline, column ")
    assert message in err


@pytest.mark.parametrize(("path", "message"), [("none.mlir", "No such file"), (".", "Is a directory")])
def test_a_file_that_cannot_be_read_is_an_error(tmp_path, monkeypatch, capsys, path, message):
    monkeypatch.chdir(tmp_path)
    assert main(["opt", path]) == 1
    assert capsys.readouterr().err.startswith(f"{path}: error: {message}")


def test_a_bug_is_reported_as_one(run, monkeypatch, tmp_path):
    def broken(module, pipeline):
        raise KeyError("x")

    monkeypatch.setattr(opt, "run_pipeline", broken)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    status, _, err = run(MODULE)
    assert status == 1
    assert err.startswith("m.mlir: error: this is a bug in sdy_jax: KeyError: 'x'; the traceback is in ")
    (dump,) = tmp_path.glob("sdy_jax-bug-*")
    assert "in broken" in dump.read_text()
    assert str(dump) in err


def test_a_bug_is_reported_where_its_traceback_cannot_be_kept(run, monkeypatch, tmp_path):
    def broken(module, pipeline):
        raise KeyError("x")

    monkeypatch.setattr(opt, "run_pipeline", broken)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    status, _, err = run(MODULE)
    assert status == 1 and "KeyError: 'x'; the traceback cannot be kept: No such file" in err


def test_a_pass_that_leaves_a_broken_module_is_reported_as_a_bug(run, monkeypatch, tmp_path):
    def broken(module, pipeline):
        operations = module.regions[0].blocks[0].operations
        next(op for op in operations if op.operation.name == "sdy.mesh").operation.erase()

    monkeypatch.setattr(opt, "run_pipeline", broken)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    status, out, err = run(MODULE)
    assert (status, out) == (1, "")
    assert "a module that is wrong: [S2] func.func, argument 0: unknown mesh: @mesh" in err
    assert "bug in sdy_jax" in err


# Several modules in a file.


def test_modules_in_one_file_are_separate(run):
    good = run(MODULE)[1]
    status, out, err = run(f"{MODULE}// -----\n{UNKNOWN_AXIS}  // -----  \n{MODULE}", "--split-input-file")
    first, second, third = out.split("// -----\n")
    assert status == 1
    assert first == third == good
    assert second.startswith('// error: [A1] func.func, argument 0: unknown axis name: "x"; ')
    assert second.count("\n") == 1
    assert err.startswith("m.mlir:10:1: error: [A1] ")


def test_without_the_option_a_separator_is_a_comment(run):
    assert run(f"{MODULE}// -----\n")[0] == 0
    assert run(f"{MODULE}// -----\n{MODULE}")[2].startswith("m.mlir:9:1: error: redefinition of symbol")


@pytest.mark.parametrize(
    "text", [f"{MODULE}// -----\n{MODULE}", f"// -----\n{MODULE}", MODULE, MODULE.replace("\n", "\r\n")]
)
def test_what_is_printed_splits_and_prints_again(run, text):
    status, out, err = run(text, "--split-input-file", "--pipeline", "canonicalize")
    assert (status, err) == (0, "")
    assert run(out, "--split-input-file") == (0, out, "")


def test_errors_from_passes_stand_in_place_too(run):
    functions = "func.func @a() {\n  return\n}\nfunc.func @b() {\n  return\n}\n"
    status, out, _ = run(f"{functions}// -----\n{MODULE}", "--split-input-file", "--pipeline", "basic-propagate")
    assert status == 1
    assert out.startswith("// error: the module has functions @a, @b")
    assert "stablehlo.tanh" in out


# Its manners.


def test_help_needs_no_jax():
    lines = ("import sys", "from sdy_jax.cli.main import main", "try: main(['opt', '--help'])")
    code = "\n".join((*lines, "finally: assert 'jax' not in sys.modules"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--split-input-file" in done.stdout


def test_public_names_are_where_the_package_says():
    assert set(sdy_jax.__all__) == {*sdy_jax._HOMES, *sdy_jax._FACES}
    assert all(getattr(sdy_jax, name) is not None for name in sdy_jax.__all__)
    with pytest.raises(AttributeError, match="no attribute 'partitoin'"):
        _ = sdy_jax.partitoin


@pytest.mark.more("a process of its own")
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device that is always full")
def test_output_that_cannot_be_written_is_an_error(tmp_path):
    path = tmp_path / "m.mlir"
    path.write_text(MODULE)
    command = f"{sys.executable} -m sdy_jax opt {path} > /dev/full"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "<stdout>: error: No space left on device\n")


@pytest.mark.more("processes without streams")
@pytest.mark.parametrize(
    ("ending", "status", "error"),
    [("m.mlir >&-", 0, ""), ("- <&-", 1, "<stdin>: error: standard input is closed\n")],
    ids=["output", "input"],
)
def test_closed_streams(tmp_path, ending, status, error):
    (tmp_path / "m.mlir").write_text(MODULE)
    command = f"{sys.executable} -m sdy_jax opt {ending}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (status, error)


@pytest.mark.more("a reader that stops")
def test_a_reader_that_stops_is_no_error(tmp_path):
    path = tmp_path / "m.mlir"
    path.write_text(MODULE)
    command = f"{sys.executable} -m sdy_jax opt {path} | true"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


def test_strict_checks_are_asked_for(run):
    text = 'sdy.mesh @m = <["a"=2], device_ids=[0, 1]>'
    assert run(text)[0] == 0
    status, _, err = run(text, "--strict")
    assert status == 1
    assert err.startswith("m.mlir:1:37: error: [M7] sdy.mesh: its device ids are 0..1 in order; device ids that are 0")


GROUP = """
sdy.mesh @mesh = <["a"=2, "b"=2]>
func.func @main(%x: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"a"}, {}]>},
    %y: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"b"}, {}]>}) {
  sdy.sharding_group %x group_id=0 : tensor<8x8xf32>
  sdy.sharding_group %y group_id=0 : tensor<8x8xf32>
  return
}
"""


def test_warnings_are_printed_without_lines_of_ours(tmp_path, capsys):
    path = tmp_path / "m.mlir"
    path.write_text(GROUP)
    assert main(["opt", str(path), "--pipeline", "propagation-pipeline"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: the members of sharding group 0 have different shardings")
