"""What `import sdy_jax as sdy` shows: `dir`, `help`, the version, `show`, and what type checkers say."""

from __future__ import annotations

import inspect
import pydoc
import re
import subprocess
import sys
import types
from pathlib import Path

import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from places import ROOT

import sdy_jax as sdy

SHOWN = [name for name in dir(sdy) if not name.startswith("_")]
NAMES = re.compile(r"^    (?=[A-Za-z])([\w]+(?:, \w+)*)(?:  | *$)", re.MULTILINE)


def test_dir_shows_what_users_need():
    assert set(SHOWN) <= set(sdy.__all__) and len(SHOWN) < 40
    assert {"partition", "AUTO", "show", "load", "SdyError", "errors", "dialect"} <= set(SHOWN)


def test_names_that_dir_leaves_out_are_there_and_elsewhere():
    hidden = set(sdy.__all__) - set(SHOWN)
    returned = {"PackedLayers", "PlanRecord", "Program", "Verification"}
    assert hidden == sdy._ELSEWHERE and returned <= hidden
    for name in hidden - returned:
        module = sdy.errors if hasattr(sdy.errors, name) else sdy.dialect
        assert getattr(module, name) is getattr(sdy, name) and name in module.__all__


@pytest.mark.parametrize("module", [sdy.errors, sdy.dialect])
def test_names_of_faces_are_public(module):
    assert set(module.__all__) <= set(sdy.__all__)


def test_help_begins_with_a_page_of_all_names_in_groups():
    page = pydoc.plain(pydoc.render_doc(sdy)).split("PACKAGE CONTENTS")[0]
    listed = [name for line in NAMES.findall(sdy.__doc__) for name in line.split(", ")]
    assert sorted(set(listed) - {"import"}) == sorted(SHOWN)
    assert all(name in page for name in SHOWN) and page.count("\n") < 80


def test_the_version_is_that_of_the_build():
    done = subprocess.run(
        [sys.executable, "-c", "import sdy_jax, sys; print(sdy_jax.__version__, 'jax' in sys.modules)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [sdy.__version__, "False"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", sdy.__version__)


# Showing plans --------------------------------------------------------------------------------------------------------


@pytest.fixture
def plan(mesh):
    layer = sdy.partition(lambda x, w: x @ w, mesh=mesh, in_shardings=(P(None, "model"), P("model")))
    return layer.plan(jnp.ones((8, 8)), jnp.ones((8, 8)))


@pytest.fixture
def notebook(monkeypatch):
    """What a notebook is given to display."""
    given = []
    display = types.ModuleType("IPython.display")
    display.display = lambda what, **how: given.append((what, how))
    ipython = types.ModuleType("IPython")
    ipython.get_ipython, ipython.display = lambda: types.SimpleNamespace(kernel=object()), display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return given


def test_a_plan_is_shown_as_text_in_a_terminal(plan, capsys, tmp_path):
    sdy.show(plan)
    assert capsys.readouterr().out == f"{plan}\n"
    plan.save(tmp_path / "plan.json")
    sdy.show(sdy.load_plan(tmp_path / "plan.json"))
    sdy.show(plan.table("values"))
    assert str(plan.table("values")) in capsys.readouterr().out


def test_a_terminal_of_ipython_is_a_terminal(plan, capsys, monkeypatch):
    ipython = types.ModuleType("IPython")
    ipython.get_ipython = lambda: types.SimpleNamespace()
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    sdy.show(plan)
    assert capsys.readouterr().out == f"{plan}\n"


def test_a_plan_is_shown_as_a_page_in_a_notebook(plan, notebook):
    sdy.show(plan, height=300)
    sdy.show(plan.record())
    sdy.show(plan.table("values"))
    (shown, how), (again, _), (table, _) = notebook
    assert how == {"raw": True} and shown["text/plain"] == str(plan)
    assert re.match(r'<iframe srcdoc="&lt;!doctype html', shown["text/html"], re.IGNORECASE)
    assert "height:300px" in shown["text/html"] and shown["text/html"].count("<") == 2
    assert again["text/html"].startswith("<iframe") and table is not None


@pytest.mark.parametrize("given, said", [(3, "an int; expected a plan"), ("step.json", "a str; expected a plan")])
def test_what_is_no_plan_is_refused(given, said):
    with pytest.raises(sdy.SdyError, match=said):
        sdy.show(given)


def test_a_function_is_told_to_be_planned(mesh):
    def step(x):
        return x

    with pytest.raises(sdy.SdyError, match=re.escape("to fix: sdy.show(step.plan(...))")):
        sdy.show(sdy.partition(step, mesh=mesh))


# Types ----------------------------------------------------------------------------------------------------------------

TYPED = """
import jax
import sdy_jax as sdy
from typing import reveal_type

@sdy.partition(in_shardings=None)
def step(state: dict[str, jax.Array], batch: jax.Array, *, scale: float = 1.0) -> tuple[jax.Array, int]:
    return batch, 1

class Model:
    @sdy.partition()
    def apply(self, x: jax.Array) -> jax.Array:
        return x

plain = sdy.partition(lambda x: x)
reveal_type(step.__call__)
reveal_type(step({}, jax.numpy.ones(3)))
reveal_type(step.plan({}, jax.numpy.ones(3)))
reveal_type(Model().apply)
reveal_type(sdy.load_plan("p"))
reveal_type(sdy.errors.SdyError)
step(3, scale="x")
sdy.partition(step, in_specs=None)
"""


@pytest.mark.more("runs mypy, some twenty seconds")
def test_type_checkers_know_the_signature_of_a_partitioned_function(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "user.py").write_text(TYPED)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--config-file",
            str(ROOT / "pyproject.toml"),
            "--hide-error-context",
            "user.py",
        ],
        cwd=tmp_path,
        env={"MYPYPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
    )
    array = "jax._src.basearray.Array"
    assert re.findall(r'Revealed type is "(.*)"', done.stdout) == [
        f"def (state: dict[str, {array}], batch: {array}, *, scale: float =) -> tuple[{array}, int]",
        f"tuple[{array}, int]",
        "sdy_jax.plan.plan.Plan",
        f"def (x: {array}) -> {array}",
        "sdy_jax.plan.record.record.PlanRecord",
        "def (*args: object) -> sdy_jax.base.errors.SdyError",
    ]
    wrong = [line for line in done.stdout.splitlines() if "error:" in line]
    assert [line.split(":")[1] for line in wrong] == ["22", "22", "22", "23", "23"]
    assert 'Unexpected keyword argument "in_specs"' in wrong[3]


def test_the_signature_of_a_partitioned_function_is_the_functions(mesh):
    def step(state: dict, batch: int = 3) -> int:
        """One step."""

    partitioned = sdy.partition(step, mesh=mesh)
    assert inspect.signature(partitioned) == inspect.signature(step)
    assert (partitioned.__name__, partitioned.__doc__) == ("step", "One step.")
