"""Eight virtual CPU devices for every test, and meshes over them. Runs before any test module imports jax."""

import os
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

_TESTS = Path(__file__).resolve().parent
# What tests share, with each other and with the processes that they start.
_PATHS = [str((_TESTS / name).resolve()) for name in (".", "helpers", "../scripts", "../examples")]
sys.path[1:1] = _PATHS
os.environ["PYTHONPATH"] = os.pathsep.join([*_PATHS, *filter(None, [os.environ.get("PYTHONPATH")])])

_DEVICE_COUNT = "--xla_force_host_platform_device_count"
if _DEVICE_COUNT not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICE_COUNT}=8".strip()
# Compiling takes most of the time, and its result runs once; threads for parts of small modules cost more than they do.
os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
os.environ["XLA_FLAGS"] += " --xla_cpu_parallel_codegen_split_count=1"
# Newer ones, and the compiler for TPUs, end the process at flags that they do not know.
if version("jaxlib").startswith("0.10.") and find_spec("libtpu") is None:
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["SDY_JAX_CACHE_DIR"] = "0"  # tests see what is planned, whatever jax keeps of other runs

import gc

gc.set_threshold(10_000, 10, 10)
"""New objects between two looks for garbage. At Python's 700 these took half of the time of importing tests whose
assertions are written anew, and 9 percent of running them; at 10,000 six, at 50,000 seven (measured, 2026-11)."""

import ctypes
import resource
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from padding import poisoned
from plan_pages import BEFORE, SPECS, planned, write_pages
from shared_contexts import forget_context, share_contexts

import sdy_jax as sdy
from sdy_jax.plan.digests import FOLDER

_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)


_CASES = 2
"""The cases of a parametrized test that `scripts/test` runs: the first and the last, of a dear one the first."""

_DEAR_CASES = 3
"""Those of a dear one that `scripts/test --all` runs, where its mark does not say."""


def pytest_collection_finish() -> None:
    """What importing and collecting made stays to the end: nobody needs to look for garbage in it after each module."""
    gc.collect()
    gc.freeze()
    share_contexts()


_LONG = (
    "test_random_pipelines.py", "test_totals.py", "test_library_kernels.py", "test_callbacks.py", "test_linalg.py",
    "test_pipeline.py", "test_whole_program.py", "test_random_programs.py", "test_recomputation.py", "test_blocking.py",
    "test_within_memory.py", "test_planted_faults.py", "test_every_process.py", "test_processes.py", "test_gallery.py",
    "test_readme.py", "test_pages.py", "test_automatic_layouts.py", "test_pinned_plans.py", "test_plans.py",
    "test_offered_microbatches.py", "test_whole_models.py", "test_bench_models.py", "test_several_meshes.py",
)  # fmt: skip
"""Files that take long, some of them with few tests. Measured (2026-11): 20 to 100 s of CPU each."""


def _longest_first(items: list[pytest.Item]) -> None:
    """A process takes file by file: one that takes long is not left for the end, where others have none to take."""
    counts = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path.name not in _LONG, -counts[item.path]))  # the sort keeps files in one piece


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what `scripts/test --all` alone runs, of tests with many cases all but a few, and what it leaves out."""
    _longest_first(items)
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for found in cases.values():
        dear = found[0].get_closest_marker("dear")
        first = _spread(found, 1 if dear else _CASES)
        kept = _spread(found, dear.kwargs.get("cases", _DEAR_CASES) if dear else len(found))
        for item in found:
            if item not in first:
                item.add_marker(pytest.mark.more("further cases of the same test"))
            if item not in kept:
                item.add_marker(pytest.mark.slow)


def _spread(items: list[pytest.Item], count: int) -> list[pytest.Item]:
    """So many of the items, as far apart as may be: the first one, and of several the last."""
    return [items[round(i * (len(items) - 1) / max(count - 1, 1))] for i in range(min(count, len(items)))]


@pytest.fixture(scope="module", autouse=True)
def _caches_cleared() -> Iterator[None]:
    """What a module has compiled is of no use to the next one, and takes gigabytes by the end.

    glibc keeps what was freed in small pieces unless it is told to give it back.
    """
    yield
    jax.clear_caches()
    forget_context()
    gc.collect()
    if _TRIM is not None:
        _TRIM(0)


@pytest.fixture
def poisoned_padding() -> Iterator[None]:
    """Padding that spoils whatever depends on it."""
    with poisoned():
        yield


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which plans are kept, which is not there yet."""
    monkeypatch.setenv(FOLDER, str(tmp_path / "kept"))
    return tmp_path / "kept"


@pytest.fixture(scope="session")
def mesh() -> jax.sharding.Mesh:
    """Eight devices as 2 x 4, axes `data` and `model`."""
    return jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"))


@pytest.fixture(scope="session")
def mesh_xyz() -> jax.sharding.Mesh:
    """Eight devices as 2 x 2 x 2, axes `x`, `y` and `z`."""
    return jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("x", "y", "z"))


@pytest.fixture(scope="session")
def paged() -> sdy.Plan:
    """A plan of which there are pages."""
    return planned(SPECS)


@pytest.fixture(scope="session")
def paged_before() -> sdy.Plan:
    """The plan before a change."""
    return planned(BEFORE)


@pytest.fixture(scope="session")
def pages(paged: sdy.Plan, paged_before: sdy.Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pages of both."""
    folder = tmp_path_factory.mktemp("pages")
    write_pages(paged, paged_before, folder)
    return folder


_PEAKS: dict[str, float] = {}


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Says how much memory this process had at most, in GiB: to xdist in its workers, else to the summary."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    getattr(session.config, "workeroutput", _PEAKS)["pytest"] = peak


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    _PEAKS[node.gateway.id] = getattr(node, "workeroutput", {}).get("pytest", float("nan"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    peaks = ", ".join(f"{name} {peak:.1f}" for name, peak in sorted(_PEAKS.items()))
    terminalreporter.write_line(f"GiB of memory at most: {peaks}")
