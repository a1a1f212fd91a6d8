"""Plans that were reviewed: equal ones pass whatever else changed; others fail with the differences."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from places import ROOT
from plan_edits import MLP, planned

import sdy_jax as sdy
from sdy_jax.equivalence.pytest_plugin import UPDATE_PLANS
from sdy_jax.testing import assert_plan

CONSTRAINED = MLP.replace("    return x\n", "    return sdy.sharding_constraint(x, P())\n")


@pytest.fixture(scope="module")
def reviewed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reviewed plan of a program."""
    folder = tmp_path_factory.mktemp("reviewed")
    path = folder / "plans" / "step.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(UPDATE_PLANS, "1")
        assert_plan(planned(CONSTRAINED, folder), path)
    return path


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: text,
        lambda text: f"# The model.\n\n\n{text}",
        lambda text: text.replace("hidden", "inner"),
        lambda text: text.replace("params", "weights"),
    ],
    ids=["none", "a comment above", "a variable renamed", "an argument renamed"],
)
def test_edits_that_change_no_plan_pass(edit: Callable[[str], str], reviewed: Path, tmp_path: Path) -> None:
    assert_plan(planned(edit(CONSTRAINED), tmp_path), reviewed)


def test_another_version_of_jax_passes(reviewed: Path, tmp_path: Path) -> None:
    text = reviewed.read_text()
    older = tmp_path / "older.json"
    older.write_text(text.replace('"jax 0.', '"jax 99.'))
    assert older.read_text() != text
    assert_plan(planned(CONSTRAINED, tmp_path), older)


def test_a_changed_plan_fails_with_the_differences(reviewed: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as error:
        assert_plan(planned(MLP, tmp_path), reviewed)
    text = str(error.value)
    assert f"the plan is not the one reviewed in {reviewed}" in text
    caused = text.partition("caused by\n")[2].splitlines()[0]
    assert "sharding_constraint P() removed: return sdy.sharding_constraint(x, P())" in caused
    assert "- all_gather" in text and "pytest --sdy-update-plans" in text


def test_a_missing_file_fails_and_says_how_to_write_it(tmp_path: Path) -> None:
    with pytest.raises(
        AssertionError, match=r"there is no reviewed plan .*none\.json\nplan of step .*\nto accept it: pytest"
    ):
        assert_plan(planned(MLP, tmp_path), tmp_path / "none.json")


def test_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "step.json").write_text("{")
    with pytest.raises(sdy.SdyError, match="is no plan of sdy_jax"):
        assert_plan(planned(MLP, tmp_path), tmp_path / "step.json")


def test_the_file_has_a_page_to_read_and_no_ops(reviewed: Path) -> None:
    whole = json.loads(reviewed.read_text())
    plan = whole["plan"]
    assert whole["page"][0].startswith("plan of step on mesh data=2, model=4") and "collectives" in str(whole["page"])
    assert "ops" not in plan or not plan["ops"]
    assert [each["kind"] for each in plan["collectives"]] and plan["arguments"]


def test_a_file_that_has_the_plan_already_is_left_alone(reviewed: Path, tmp_path: Path) -> None:
    written = reviewed.read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(UPDATE_PLANS, "1")
        assert_plan(planned(f"# The model.\n{CONSTRAINED}", tmp_path), reviewed)
        assert reviewed.read_bytes() == written
        (tmp_path / "other.json").write_bytes(written)
        assert_plan(planned(MLP, tmp_path), tmp_path / "other.json")
    assert_plan(planned(MLP, tmp_path), tmp_path / "other.json")


TEST = """
import pathlib, sdy_jax as sdy
from sdy_jax.testing import assert_plan

def test_plan():
    folder = pathlib.Path(__file__).parent
    assert_plan(sdy.load_plan(folder / "now.json"), folder / "reviewed.json")
"""


@pytest.mark.more("pytest in a process of its own")
def test_one_flag_of_pytest_accepts_a_plan(tmp_path: Path) -> None:
    planned(MLP, tmp_path).save(tmp_path / "now.json")
    (tmp_path / "test_it.py").write_text(TEST)
    is_installed = any(point.name == "sdy_jax" for point in entry_points(group="pytest11"))
    plugin = [] if is_installed else ["-p", "sdy_jax.equivalence.pytest_plugin"]
    folders = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": folders}
    command = [sys.executable, "-m", "pytest", "-q", *plugin, "--sdy-update-plans", str(tmp_path)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    assert_plan(planned(MLP, tmp_path), tmp_path / "reviewed.json")
