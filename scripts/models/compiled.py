"""What a compiled program takes, kept by what was compiled: the same program is compiled once, by whichever run."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax
from timing import compiler_time

from models.kernel_times import kernel_seconds
from sdy_jax.cli.devices import Topology
from sdy_jax.plan.estimates import compiled_memory
from sdy_jax.plan.measuring.profile import collectives_in_hlo, estimated_cycles, totals

GIB = 2.0**30

_COMPILERS = ("jax", "jaxlib", "libtpu", "jax-cuda13-pjrt")
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_NEEDS = re.compile(r"(?:total memory required for HLO temporaries \(|Used )([\d.]+)([GM])")


@dataclass
class Compiled:
    """What a compiler says of a program.

    Attributes:
        error: why there is none.
        compiled: seconds of compiling, on the machine that did it first.
        memory: GiB that a device holds, or would need where it has not as much.
        temporaries: of these, those that are neither arguments nor results.
        bytes: GiB that it sends.
        time: seconds of a step by the compiler's cycles and schedule, its kernels' work and the links' rates, where it
            says any.
        exposed: of these, those in which it waits for collectives.
        kernels: of these, those of kernels (`models.kernel_times`).
        flops: what the compiler counts, loops once.
    """

    error: str = ""
    compiled: float = 0.0
    memory: float = 0.0
    temporaries: float = 0.0
    bytes: float = 0.0
    time: float = 0.0
    exposed: float = 0.0
    kernels: float = 0.0
    flops: float = 0.0

    @property
    def work(self) -> float:
        """Seconds of a step but for those in which it waits for collectives: by its cycles, and its kernels'."""
        return self.time - self.exposed


def versions() -> dict[str, str]:
    """Those of what plans and compiles."""
    return dict(_versions())


def _versions() -> Iterator[tuple[str, str]]:
    for name in _COMPILERS:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue


def compiled(
    lowered: jax.stages.Lowered, topology: Topology, options: Mapping[str, str], kept: Path | None
) -> Compiled:
    """Compiles a program, or reads what was found when it was compiled before.

    Args:
        options: the compiler's, beside those of the topology.
        kept: a folder of what was found, or nothing is kept: of a compiled program its text, and what it holds. An
            entry belongs to the program's text, the topology, the options and the versions of the compilers.
    """
    given = (topology.compiler_options or {}) | dict(options)
    entry = kept / f"{_key(lowered, topology, given)}.json.gz" if kept else None
    if entry and entry.exists():
        return _read(_Output(**json.loads(gzip.decompress(entry.read_bytes()))))
    found = _compiled(lowered, given)
    if entry:
        entry.parent.mkdir(parents=True, exist_ok=True)
        entry.write_bytes(gzip.compress(json.dumps(asdict(found)).encode(), compresslevel=3))
    return _read(found)


def _key(lowered: jax.stages.Lowered, topology: Topology, options: Mapping[str, str]) -> str:
    about = [str(topology), sorted(options.items()), versions(), [os.environ.get(flag) for flag in _FLAGS]]
    return hashlib.sha256((lowered.as_text() + json.dumps(about)).encode()).hexdigest()


@dataclass
class _Output:
    """What a compiler makes of a program, as it says it: `text` is empty where it refuses, and says why in `error`."""

    error: str = ""
    compiled: float = 0.0
    memory: float = 0.0
    temporaries: float = 0.0
    flops: float = 0.0
    text: str = ""


def _compiled(lowered: jax.stages.Lowered, options: dict[str, str]) -> _Output:
    start = time.monotonic()
    try:
        executable = lowered.compile(options or None)
    except jax.errors.JaxRuntimeError as error:
        return _refused(str(error))
    seconds = time.monotonic() - start
    held = compiled_memory(executable)
    assert held is not None  # compilers for accelerators say it
    flops = (executable.cost_analysis() or {}).get("flops", 0.0)
    return _Output("", seconds, held.peak / GIB, held.temporaries / GIB, flops, executable.as_text())


def _refused(error: str) -> _Output:
    found = _NEEDS.search(error)
    needed = float(found[1]) / (1 if found[2] == "G" else 1024) if found else 0.0
    return _Output(error.splitlines()[0][:300], memory=needed)


def _read(found: _Output) -> Compiled:
    """The numbers in the text of a compiled program, beside what its compiler says of it."""
    side = Compiled(found.error, found.compiled, found.memory, found.temporaries, flops=found.flops)
    if not found.text:
        return side
    side.bytes = totals(collectives_in_hlo(found.text)).wire_bytes / GIB
    if estimated_cycles(found.text):  # compilers for GPUs state no cycles
        took = compiler_time(found.text, kernel_seconds)
        side.time, side.exposed, side.kernels = took.scheduled, took.exposed, took.kernels
    return side
