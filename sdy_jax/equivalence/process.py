"""Jobs in a process of their own, `python -m sdy_jax.equivalence.process`, with as many virtual devices as needed."""

from __future__ import annotations

import importlib
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from sdy_jax.equivalence.trial import outcomes
from sdy_jax.equivalence.verification import Job, Outcome

# A job in a process of its own, which has as many virtual CPU devices as the job needs.

_COUNT = re.compile(r"--xla_force_host_platform_device_count=\S*")
_FAST = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""Flags of XLA's. Measured (2026-11): small programs spend most of their time in LLVM's passes."""

_FASTER = " --xla_cpu_use_fusion_emitters=false"
"""A flag of jaxlib 0.10; later ones end the process at it. Measured (2026-11, a training step of three layers): 0.7 s
instead of 3.1 s to compile and run."""

_LAST_WORDS = 300
"""Characters that are kept of what a process says as it dies. Chosen: for a table."""


def run_in_child(job: Job, timeout: float) -> list[Outcome]:
    """The outcomes of a job's trials. A trial at which the process dies has failed, and the others run in another.

    Args:
        timeout: seconds that each trial may take on average; what is not done then has failed.
    """
    with tempfile.TemporaryDirectory(prefix="sdy_jax-verify-") as name:
        folder = Path(name)
        (folder / "job").write_bytes(pickle.dumps(job))
        found: list[Outcome] = []
        while len(found) < len(job.trials):
            first = len(found)
            problem = _run(folder, first, job.devices, timeout * (len(job.trials) - first))
            found += _read(folder / f"outcomes{first}")
            if len(found) < len(job.trials):
                found.append(Outcome("failed", problem or "the process ended early"))
        return found


def _run(folder: Path, first: int, devices: int, timeout: float) -> str:
    """What ended the process before it was done; empty if nothing did."""
    command = [sys.executable, "-m", "sdy_jax.equivalence.process", str(folder), str(first)]
    try:
        done = subprocess.run(command, env=_environment(devices), capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return f"the process was not done after {timeout:.0f} seconds"
    said = " ".join(done.stderr.split())[-_LAST_WORDS:]
    return f"the process ended with status {done.returncode}: {said}" if done.returncode else ""


def _environment(devices: int) -> dict[str, str]:
    given = _COUNT.sub("", os.environ.get("XLA_FLAGS", ""))
    faster = _FASTER if version("jaxlib").startswith("0.10.") else ""
    package = str(Path(__file__).resolve().parents[2])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{_FAST}{faster} {given} --xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": os.pathsep.join(paths),
    }


def _read(path: Path) -> Iterator[Outcome]:
    if not path.exists():  # it died before
        return
    with open(path, "rb") as file:
        while True:
            try:
                yield pickle.load(file)
            except (EOFError, pickle.UnpicklingError):  # the end, or what was being written as the process died
                return


# The process that verifies: `python -m sdy_jax.equivalence.process FOLDER FIRST`.
#
# It reads `job` in the folder, and adds each outcome to a file there as soon as it is known: what is written stays,
# if the process dies.

HOOK = "SDY_JAX_VERIFY_HOOK"
"""An environment variable, for tests: `module:function`, which is called before anything runs."""


def main(folder: Path, first: int) -> None:
    """Runs the trials from one on."""
    if hook := os.environ.get(HOOK):
        module, _, name = hook.partition(":")
        getattr(importlib.import_module(module), name)()
    job = pickle.loads((folder / "job").read_bytes())
    with open(folder / f"outcomes{first}", "wb") as file:
        for outcome in outcomes(job, first):
            pickle.dump(outcome, file)
            file.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
