"""A training state is saved on one mesh and restored on another, and training goes on as if nothing had happened."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

pytest.importorskip("orbax.checkpoint")

import resume_elsewhere as example
import train_lm

pytestmark = pytest.mark.public
CONFIG = train_lm.Config(layers=1, d_model=32, sequence=16)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a run that is never stopped."""
    return example.run(CONFIG, train_lm.parse_mesh("data=2,model=4"), 6, tmp_path_factory.mktemp("whole"))


@pytest.mark.more("a training run that is stopped and resumed")
def test_losses_are_those_of_a_run_that_is_never_stopped(tmp_path: Path, expected: list[float]) -> None:
    meshes = ("data=2,model=4", "data=8", "data=4,model=2")
    losses = [example.run(CONFIG, train_lm.parse_mesh(m), 2 * i, tmp_path) for i, m in enumerate(meshes, 1)]
    assert [len(part) for part in losses] == [2, 2, 2]
    np.testing.assert_allclose(np.concatenate(losses), expected, rtol=1e-5)


def test_a_checkpoint_is_needed_for_that(tmp_path: Path, expected: list[float]) -> None:
    found = example.run(CONFIG, train_lm.parse_mesh("data=2,model=4"), 2, tmp_path)
    assert not np.allclose(found, expected[2:4], rtol=1e-5)


def test_restored_arrays_are_the_saved_ones_and_lie_as_the_new_mesh_says(tmp_path: Path) -> None:
    here, there = (train_lm.parse_mesh(text) for text in ("data=2,model=4", "data=8"))
    types, shardings = example.layout(CONFIG, here)
    saved = example.initial(CONFIG, here, shardings, seed=3)
    with example.ocp.CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, args=example.ocp.args.StandardSave(saved))
        checkpoints.wait_until_finished()
        elsewhere = example.layout(CONFIG, there)[1]
        restored = example.restored(checkpoints, types, elsewhere)
    jax.tree.map(np.testing.assert_array_equal, restored, saved)
    assert jax.tree.map(lambda x: x.sharding, restored) == elsewhere
    qkv: Any = saved["params"]["layers"][0]["qkv"]
    assert qkv.sharding.spec == P(None, None, "model")
    assert saved["optimizer"][0].mu["layers"][0]["qkv"].sharding == qkv.sharding


def test_the_command_says_where_it_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(steps: int) -> str:
        command = f"resume --layers 1 --d-model 32 --mesh data=8 --steps {steps} --checkpoints {tmp_path}"
        monkeypatch.setattr(sys, "argv", command.split())
        example.main()
        return capsys.readouterr().out

    assert train(1).startswith("starting on {'data': 8}\nstep    1  loss ")
    assert train(2).startswith("resuming after step 1 on {'data': 8}\nstep    2  loss ")
