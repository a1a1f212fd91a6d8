"""`SDY_JAX_DUMP_TO`: every stage of every plan as a file."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from sharding_dump import parse

import sdy_jax as sdy
from sdy_jax.errors import SdyError
from sdy_jax.shardy.passes.pipelines import PLAN_EXPORT, plan_import
from sdy_jax.shardy.passes.registry import Pass

MESH = jax.make_mesh((4,), ("x",))
X = np.ones((8, 4), np.float32)


@pytest.fixture
def step():
    @sdy.partition(mesh=MESH, in_shardings=P("x"))
    def step(x):
        return jnp.sin(x).sum()

    return step


def test_every_stage_of_every_plan_is_a_file_that_is_read_back(step, tmp_path, monkeypatch):
    monkeypatch.setenv("SDY_JAX_DUMP_TO", str(tmp_path / "new"))
    plan = step.plan(X)
    files = sorted((tmp_path / "new" / "step.0").iterdir())
    passes = [*plan_import(), "imported", Pass("user-priority-propagate"), *PLAN_EXPORT]
    names = ["traced", *(getattr(each, "name", each) for each in passes), "partitioned"]
    assert [file.name for file in files] == [f"{i:02}.{name}.mlir" for i, name in enumerate(names)]
    for file in files:
        parse(file.read_text())
    texts = {file.name[3:-5]: file.read_text() for file in files}
    for stage in ("traced", "imported", "partitioned"):
        assert texts[stage] == plan.mlir(stage)
    assert texts["sdy-close-shardings"] == plan.mlir("propagated")
    step.plan(X[:, :2])
    assert {folder.name for folder in (tmp_path / "new").iterdir()} == {"step.0", "step.1"}


def test_a_plan_that_fails_leaves_the_stages_before_its_failure(step, tmp_path, monkeypatch):
    monkeypatch.setenv("SDY_JAX_DUMP_TO", str(tmp_path))

    def fail(*_):
        raise RuntimeError("partition")

    monkeypatch.setattr("sdy_jax.plan.build.partition", fail)
    with pytest.raises(RuntimeError):
        step.plan(X)
    assert max(file.name for file in (tmp_path / "step.0").iterdir()).endswith("sdy-close-shardings.mlir")


def test_names_of_functions_are_made_names_of_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("SDY_JAX_DUMP_TO", str(tmp_path))
    sdy.partition(lambda x: x + 1, mesh=MESH, in_shardings=P("x")).plan(X)
    assert [folder.name for folder in tmp_path.iterdir()] == ["_lambda_.0"]


def test_a_directory_that_cannot_be_written_is_an_error_by_the_name_of_the_variable(step, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SDY_JAX_DUMP_TO", str(tmp_path / "file"))
    with pytest.raises(SdyError, match=r"SDY_JAX_DUMP_TO: .*file cannot be written: .*; to fix: name a directory"):
        step.plan(X)


def test_nothing_is_written_unless_it_is_asked_for(step, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SDY_JAX_DUMP_TO", raising=False)
    assert float(step(X)) == pytest.approx(float(jnp.sin(X).sum()))
    assert not list(tmp_path.iterdir())
