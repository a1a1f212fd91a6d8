"""Several processes on one machine: they train as one does, and what goes wrong in one of them all of them say."""

import json
import re
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from cluster_step import CLUSTER, ClusterStep
from process_programs import HEARTBEAT, batch, ended, initial, loss, mesh_of, reports, resume, start, trained

TWO_OR_FOUR = pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])


@pytest.fixture(scope="module")
def one_process() -> list[float]:
    return trained(mesh_of(jax.devices()), initial())


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two processes that train keep their programs."""
    return tmp_path_factory.mktemp("kept")


@pytest.fixture(scope="module")
def keeping(kept: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What these two say."""
    return reports("train_apart", 2, tmp_path_factory.mktemp("first"), KEPT=str(kept))


def train_as_one(found: list[dict[str, Any]], one_process: list[float]) -> None:
    value, slopes = jax.value_and_grad(loss)(initial(), batch(0))
    for report in found:
        np.testing.assert_allclose(report["losses"], one_process, rtol=1e-5)
        np.testing.assert_allclose(report["slopes"], slopes["up"], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose([report["doubled"] / 2, report["compiled"]], value, rtol=1e-5)
    np.testing.assert_allclose(found[-1]["alone"], value, rtol=1e-5)
    for same in ("fingerprint", "lowered"):
        assert len({report[same] for report in found}) == 1, same


def test_processes_train_as_one(keeping: list[dict[str, Any]], one_process: list[float]) -> None:
    train_as_one(keeping, one_process)


@pytest.mark.slow
def test_four_processes_train_as_one(tmp_path: Path, one_process: list[float]) -> None:
    train_as_one(reports("train_apart", 4, tmp_path, KEPT="0"), one_process)


@TWO_OR_FOUR
@pytest.mark.more("processes that differ")
def test_every_process_says_which_one_runs_something_else(count: int, tmp_path: Path) -> None:
    found = reports("differ", count, tmp_path, SDY_JAX_PROCESS_TIMEOUT="6")
    odd = f"process {count - 1}"
    for report in found:
        message, seconds = report["collectives"]
        others = "process 0" if count == 2 else "processes 0, 1 and 2"
        assert message.startswith(
            f"{odd} is about to run another program than {others}, `program`: collective 2 differs"
        )
        assert re.search(
            rf"process 0 has all_reduce sum .* of \S*process_programs\.py:\d+; {odd} has all_reduce max", message
        )
        assert seconds < 20
        for name in ("ops", "compiled"):
            assert "the collectives are equal, the op differs: process 0 has `%" in report[name][0], name
        assert "collective 2 differs" in report["jitted"][0]
        np.testing.assert_allclose(report["then"], batch(0).sum(), rtol=1e-4)
    for report in found[:-1]:
        message, seconds = report["missing"]
        assert message.startswith(f"{odd} did not come to `program` within 6 s")
        assert "SDY_JAX_PROCESS_TIMEOUT" in message and seconds < 20


@pytest.mark.more("processes that end")
@TWO_OR_FOUR
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_process_that_an_error_ends_is_named_at_once(count: int, victim: int, tmp_path: Path) -> None:
    ended(start("fail", count, tmp_path, VICTIM=str(victim)))
    for index in {*range(count)} - {victim}:
        message, seconds = json.loads((tmp_path / f"fail.{index}").read_text())
        assert message.startswith(
            f"process {victim} ended before it came to `<lambda>`, by KeyError: 'the batch has no"
        )
        assert seconds < 30


@TWO_OR_FOUR
@pytest.mark.more("a process that dies")
def test_survivors_say_who_died_and_a_restart_goes_on(count: int, tmp_path: Path, one_process: list[float]) -> None:
    started = time.monotonic()
    *survivors, killed = ended(start("die", count, tmp_path, VICTIM=str(count - 1)))
    assert killed[0] == -9 and time.monotonic() - started < 60 + HEARTBEAT
    for status, output in survivors:
        assert status != 0
        gone = rf"stopped sending heartbeats\):\n{count - 1}\b|Task {count - 1} heartbeat timeout"
        assert re.search(gone, output), output
    here = count == 2  # the other restart is in as many processes as before
    for report in [resume(tmp_path)] if here else reports("resume", count, tmp_path):
        assert 0 < report["first"] <= 3
        np.testing.assert_allclose(report["losses"], one_process[report["first"] :], rtol=1e-5)


@pytest.mark.slow
def test_without_its_coordinator_nobody_waits(tmp_path: Path) -> None:
    """Process 0 serves the others, which end as soon as it is gone."""
    killed, *survivors = ended(start("die", 2, tmp_path, VICTIM="0"))
    assert killed[0] == -9
    assert all(status != 0 and "the leader task was preempted/died" in output for status, output in survivors)


@pytest.mark.more("programs that are found")
def test_processes_of_which_some_find_their_programs_train_as_one(
    kept: Path, keeping: list[dict[str, Any]], tmp_path: Path, one_process: list[float]
) -> None:
    """Neither one that finds none nor one that keeps none runs anything else than one that finds all."""
    empty = tmp_path / "empty"
    runs = [keeping, *(reports("train_apart", 2, tmp_path, KEPT=f"{kept}:{other}") for other in (empty, 0))]
    for folder in (kept, empty):
        assert {path.suffix for path in folder.iterdir()} == {".plan", ".module"}
    finding, others = zip(*runs[1:], strict=True)
    assert all(report["emitted"] < runs[0][0]["emitted"] for report in finding)
    assert all(report["emitted"] > finding[0]["emitted"] for report in others)
    for found in runs:
        for report in found:
            np.testing.assert_allclose(report["losses"], one_process, rtol=1e-5)
            for same in ("fingerprint", "lowered"):
                assert report[same] == runs[0][0][same], same


@pytest.mark.slow
def test_a_cluster_of_four_processes_of_sixteen_devices_trains_a_model_on_four_axes(tmp_path: Path) -> None:
    found = reports("cluster", 4, tmp_path, devices=16, timeout=500)
    assert len({report["fingerprint"] for report in found}) == 1
    expected = ClusterStep.on({**CLUSTER, "data": 1, "fsdp": 2, "tensor": 2}).losses()
    for report in found:
        np.testing.assert_allclose(report["losses"], expected, rtol=1e-2)  # in bfloat16
    assert expected[-1] < expected[0]


@pytest.mark.slow
def test_sixteen_processes_make_one_plan(tmp_path: Path) -> None:
    found = reports("agree", 16, tmp_path, timeout=500)
    assert len({report["fingerprint"] for report in found}) == 1
