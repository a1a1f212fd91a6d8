"""Nothing that a file holds is executed when it is loaded, as SECURITY.md says."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from places import ROOT

import sdy_jax as sdy
from sdy_jax.cli.main import main

LOADED = """
import sys, io, contextlib
import sdy_jax as sdy
from sdy_jax.cli.main import main

def load_all():
    sdy.partition(sdy.load("m.mlir")).plan
    sdy.load("m.bytecode"), sdy.load("m.exported")
    sdy.loads(open("m.mlir").read())
    record = sdy.load_plan("plan.json")
    str(record), record.to_html("page.html")
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["plan", "plan.json"]) == main(["plan", "m.mlir"]) == main(["opt", "m.mlir"]) == 0

load_all()  # imports what it needs
watched = ("exec", "compile", "import", "pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "os.fork",
           "subprocess.Popen", "socket.connect", "ctypes.dlopen", "marshal.loads", "code.__new__")
seen = []
watching = True
sys.addaudithook(lambda event, args: watching and event in watched and seen.append((event, str(args)[:200])))
load_all()
watching = False
print(seen)
"""


class Harmful:
    """What a pickle of it does."""

    def __reduce__(self):
        return os.system, ("touch harmed",)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    mesh = sdy.Mesh.of(x=4)
    partitioned = sdy.partition(lambda x: jnp.sin(x) @ x, mesh=mesh, in_shardings=None)
    partitioned.plan(jnp.ones((8, 8))).save("plan.json", steps=True)
    program = export.export(jax.jit(lambda x: jnp.sin(x) @ x))(jax.ShapeDtypeStruct((8, 8), "float32"))
    Path("m.mlir").write_text(program.mlir_module())
    Path("m.bytecode").write_bytes(program.mlir_module_serialized)
    Path("m.exported").write_bytes(bytes(program.serialize()))
    Path("train.py").write_text("import os\nos.system('touch harmed')\ndef step(x): return x\n")
    Path("harmful").write_bytes(pickle.dumps(Harmful()))
    np.savez("harmful.npz", arg0=np.array([Harmful()], dtype=object))
    return tmp_path


@pytest.mark.more("a process of its own")
def test_loading_executes_nothing(files: Path) -> None:
    pytest.importorskip("flatbuffers")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "SDY_JAX_CACHE_DIR": "0"}
    done = subprocess.run([sys.executable, "-c", LOADED], cwd=files, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]" and not (files / "harmed").exists()


@pytest.mark.parametrize(
    "load",
    [
        lambda: sdy.load("harmful"),
        lambda: sdy.load_plan("harmful"),
        lambda: sdy.load(Path("harmful").read_bytes()),
        lambda: sdy.partition(jnp.sin, plan="harmful").plan(jnp.ones(3)),
        lambda: sdy.load("harmful.npz"),
    ],
)
def test_a_pickle_is_refused(files: Path, load) -> None:
    with pytest.raises(sdy.SdyError):
        load()
    assert not (files / "harmed").exists()


def test_arrays_of_objects_are_refused(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "m.mlir", "--inputs", "harmful.npz"]) == 1
    assert "harmful.npz" in capsys.readouterr().err and not (files / "harmed").exists()


def test_python_without_the_name_of_a_function_is_only_read(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "train.py"]) == 1
    assert "train.py:step" in capsys.readouterr().err and not (files / "harmed").exists()


def test_the_page_says_what_the_test_does() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    for name in ("sdy.load", "sdy.loads", "sdy.load_plan", "sdy-jax opt", "sdy-jax plan", Path(__file__).name):
        assert name in text
