"""A file is the old one or the new one, whatever fails while it is written."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from places import ROOT

import sdy_jax as sdy
from sdy_jax.base.files import whole_file, write_whole
from sdy_jax.cli.run import write_outputs
from sdy_jax.lowering.targets import measurements
from sdy_jax.plan.stages import dump_of
from sdy_jax.shardy.passes.debug_info import save_module

OLD = "as it was before"
MESH = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
TABLE = np.arange(4096, dtype=np.float32)


@sdy.partition(mesh=MESH, in_shardings=P("x"))
def step(x: jax.Array) -> jax.Array:
    return jnp.sin(x) + TABLE


@pytest.fixture(scope="module")
def plan() -> sdy.Plan:
    return step.plan(jnp.ones(4096))


def saved(plan: sdy.Plan, path: Path) -> None:
    plan.save(path)


def as_page(plan: sdy.Plan, path: Path) -> None:
    plan.to_html(path)


def as_python(plan: sdy.Plan, path: Path) -> None:
    plan.to_python(path)


def as_arrays_of_python(plan: sdy.Plan, path: Path) -> None:
    plan.to_python(path.with_suffix(".py"))


def outputs(plan: sdy.Plan, path: Path) -> None:
    write_outputs(str(path), [TABLE])


def calibrated(plan: sdy.Plan, path: Path) -> None:
    measurements._write(path, SimpleNamespace(text=lambda: "1" * 4096))  # type: ignore[arg-type]


def by_a_pass(plan: sdy.Plan, path: Path) -> None:
    save_module(plan.stages["partitioned"], directory=str(path.parent), name=path.stem)


WRITERS: list[tuple[Callable[[sdy.Plan, Path], None], str]] = [
    (saved, "step.json"),
    (as_page, "step.html"),
    (as_python, "step.py"),
    (as_arrays_of_python, "step.npz"),
    (outputs, "out.npz"),
    (calibrated, "cpu.json"),
    (by_a_pass, "step.mlir"),
]


@contextmanager
def disk_with(size: int) -> Iterator[None]:
    """Files may not grow beyond a size. The system refuses as on a full disk, in the midst of a write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(("write", "name"), WRITERS)
def test_a_full_disk_leaves_the_old_file_and_is_said(
    write: Callable[[sdy.Plan, Path], None], name: str, plan: sdy.Plan, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(OLD)
    with pytest.raises(sdy.SdyError, match="File too large") as error, disk_with(100):
        write(plan, path)
    assert path.stem in str(error.value)
    assert [file.name for file in tmp_path.iterdir()] == [name] and path.read_text() == OLD
    write(plan, path)
    assert path.read_bytes() != OLD.encode()


@pytest.mark.parametrize(("write", "name"), WRITERS)
def test_what_stops_the_program_leaves_the_old_file(
    write: Callable[[sdy.Plan, Path], None], name: str, plan: sdy.Plan, tmp_path: Path, monkeypatch: Any
) -> None:
    path = tmp_path / name
    path.write_text(OLD)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(plan, path)
    assert [file.name for file in tmp_path.iterdir()] == [name] and path.read_text() == OLD


def test_a_full_disk_leaves_no_part_of_a_dump(plan: sdy.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDY_JAX_DUMP_TO", str(tmp_path))
    dump = dump_of("step")
    with disk_with(100), pytest.raises(sdy.SdyError, match=r"SDY_JAX_DUMP_TO: .*step.0 cannot be written: File too"):
        dump("partitioned", plan.stages["partitioned"])
    assert not list((tmp_path / "step.0").iterdir())


HALF = """
import sys, time
from sdy_jax.base.files import whole_file
with whole_file(sys.argv[1]) as file:
    file.write(b"new" * 10000)
    file.flush()
    print("half", flush=True)
    time.sleep(600)
"""
MANY = """
import sys
from sdy_jax.base.files import write_whole
print("ready", flush=True)
for _ in range(200):
    write_whole(sys.argv[1], sys.argv[2] * 300_000)
"""


def started(script: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline()
    return process


def test_a_process_that_is_killed_while_it_writes_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    path.write_text(OLD)
    with started(HALF, str(path)) as process:
        process.send_signal(signal.SIGKILL)
    assert path.read_text() == OLD
    (left,) = (file.name for file in tmp_path.iterdir() if file != path)
    assert left.startswith(".step.json.") and left.endswith(".new")  # hidden, and nobody takes it for a plan
    write_whole(path, "new")
    assert path.read_text() == "new"


def test_processes_that_write_one_file_leave_one_of_theirs_at_any_time(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    path.write_text("a" * 300_000)
    with started(MANY, str(path), "a") as one, started(MANY, str(path), "b") as other:
        while one.poll() is None or other.poll() is None:
            text = path.read_text()
            assert len(text) == 300_000 and len(set(text)) == 1
    assert one.returncode == other.returncode == 0 and [path] == list(tmp_path.iterdir())


def test_threads_that_write_one_file_leave_one_of_theirs(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    threads = [
        threading.Thread(target=lambda letter=letter: [write_whole(path, letter * 10_000) for _ in range(50)])
        for letter in "abcdefgh"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    text = path.read_text()
    assert len(text) == 10_000 and len(set(text)) == 1 and [path] == list(tmp_path.iterdir())


def test_a_file_keeps_its_rights_and_links_lead_where_they_led(tmp_path: Path) -> None:
    path, link = tmp_path / "folder" / "step.json", tmp_path / "latest.json"
    path.parent.mkdir()
    path.write_text(OLD)
    path.chmod(0o640)
    link.symlink_to(path)
    write_whole(link, "new")
    assert link.is_symlink() and path.read_text() == "new" and path.stat().st_mode & 0o777 == 0o640


def test_a_new_file_has_the_rights_that_others_have(tmp_path: Path) -> None:
    write_whole(tmp_path / "ours", "text")
    (tmp_path / "others").write_text("text")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "others").stat().st_mode


def test_the_longest_names_can_be_written(tmp_path: Path) -> None:
    for name in ("n" * 255, "ä" * 127, "…" * 85):
        write_whole(tmp_path / name, "text")
        assert (tmp_path / name).read_text() == "text"


def test_devices_and_pipes_are_written_to_as_they_are(tmp_path: Path) -> None:
    write_whole(os.devnull, "text")
    assert Path(os.devnull).is_char_device()
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        write_whole("/dev/full", "text")
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["cat", str(tmp_path / "pipe")], stdout=subprocess.PIPE, text=True) as reader:
        write_whole(tmp_path / "pipe", "text")
        assert reader.communicate()[0] == "text"
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize(
    ("name", "said"),
    [("", "Is a directory"), ("none/step.json", "No such file"), ("a\0b", "null"), ("n" * 256, "name too long")],
)
def test_what_cannot_be_written_is_named(name: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=said) as error, whole_file(f"{tmp_path}/{name}"):
        pass
    assert error.value.filename == f"{tmp_path}/{name}" and not list(tmp_path.iterdir())


def test_a_folder_that_is_read_only_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: sdy.Plan) -> None:
    """As root one may write everywhere, so the system's answer is made up."""
    real = open

    def read_only(file: Any, mode: str = "r", *rest: Any, **more: Any) -> Any:
        if "r" not in mode:
            raise OSError(30, "Read-only file system", file)
        return real(file, mode, *rest, **more)

    monkeypatch.setattr("builtins.open", read_only)
    with pytest.raises(sdy.SdyError, match=r"the plan cannot be written to .*step.json: Read-only file system; to fix"):
        plan.save(tmp_path / "step.json")
