"""Rows compiled for described devices, with what the compiler says of them, in processes of their own."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from timing import compiler_time, server_time

import sdy_jax as sdy
from models.common import Layout, Program
from models.kernels import assume_cudnn, kernel_seconds
from models.rows import ROWS, Row
from sdy_jax.cli.devices import Topology, prepare
from sdy_jax.lowering.targets.gpu import ALLOCATED
from sdy_jax.lowering.targets.target import machine_called, machine_name, machines
from sdy_jax.plan.estimates import compiled_memory
from sdy_jax.plan.profile import collectives_in_hlo, estimated_cycles, totals

# What a compiled program takes, kept by what was compiled: the same program is compiled once, by whichever run.

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
        time: seconds of a step by the compiler's schedule, the links' rates, and the work of its ops: on TPUs by the
            compiler's cycles, and its kernels'; on GPUs by the rates of products and memory (`gpu_work`).
        sent: seconds of its collectives, one after the other, by the rates of the links.
        exposed: of `time`, those in which it waits for collectives.
        kernels: of `time`, those of kernels (`models.kernels`).
        flops: what the compiler counts, loops once.
    """

    error: str = ""
    compiled: float = 0.0
    memory: float = 0.0
    temporaries: float = 0.0
    bytes: float = 0.0
    time: float = 0.0
    sent: float = 0.0
    exposed: float = 0.0
    kernels: float = 0.0
    flops: float = 0.0

    @property
    def work(self) -> float:
        """Seconds of a step but for those in which it waits for collectives."""
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
    lowered: jax.stages.Lowered,
    topology: Topology,
    options: Mapping[str, str],
    kept: Path | None,
    devices: Sequence[jax.Device] = (),
) -> Compiled:
    """Compiles a program, or reads what was found when it was compiled before.

    Args:
        options: the compiler's, beside those of the topology.
        kept: a folder of what was found, or nothing is kept: of a compiled program its text, and what it holds. An
            entry belongs to the program's text, the topology, the options and the versions of the compilers.
        devices: in the program's order; without them groups of devices are taken for rings.
    """
    given = (topology.compiler_options or {}) | dict(options)
    entry = kept / f"{_key(lowered, topology, given)}.json.gz" if kept else None
    if entry and entry.exists():
        return _read(_Output(**json.loads(gzip.decompress(entry.read_bytes()))), devices)
    found = _compiled(lowered, given)
    if entry:
        entry.parent.mkdir(parents=True, exist_ok=True)
        entry.write_bytes(gzip.compress(json.dumps(asdict(found)).encode(), compresslevel=3))
    return _read(found, devices)


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


def _read(found: _Output, devices: Sequence[jax.Device]) -> Compiled:
    """The numbers in the text of a compiled program, beside what its compiler says of it."""
    side = Compiled(found.error, found.compiled, found.memory, found.temporaries, flops=found.flops)
    if not found.text:
        return side
    collectives = collectives_in_hlo(found.text)
    side.bytes = totals(collectives).wire_bytes / GIB
    if estimated_cycles(found.text):
        took = compiler_time(found.text, kernel_seconds, devices)
        side.time, side.sent, side.exposed, side.kernels = took.scheduled, took.sent, took.exposed, took.kernels
    elif devices:
        took = server_time(found.text, machines()[machine_name(devices[0].device_kind)])
        side.time, side.sent, side.exposed = took.scheduled, took.sent, took.exposed
    return side


# One program of a row, by us or by jit, planned and compiled in a process of its own: what it takes there.

_RESERVED_MIB = 260
"""What the system takes of a TPU's memory."""

_FOOTNOTE = "\n--------------------\nFor simplicity, JAX"
"""What jax adds to an error whose own frames it has removed."""

MEMORY_APART = (0.85, 1.15)
"""How far the plan's memory may be from the compiler's: over it."""


@dataclass
class Side(Compiled):
    """What was measured of one program, planned and compiled.

    Attributes:
        planned: CPU seconds of planning.
        took: GiB of memory that planning took.
        available: GiB that a device has.
        plan_memory: GiB that it holds, by the plan.
        packed: GiB that it holds where a device has little more than the plan says, if `memory` is above that; as
            `memory` otherwise.
        plan_bytes: GiB that it sends, by the plan.
        plan_time: seconds of a step by the plan.
        links: seconds of its collectives, by the plan.
        model: seconds of the model's operations at the peak of the chips.
    """

    planned: float = 0.0
    took: float = 0.0
    available: float = 0.0
    plan_memory: float = 0.0
    packed: float = 0.0
    plan_bytes: float = 0.0
    plan_time: float = 0.0
    links: float = 0.0
    model: float = 0.0

    @property
    def bound(self) -> float:
        """Seconds below which no step is that sends as much, whatever runs beside its collectives."""
        return max(self.model, self.links)

    @property
    def share_of_peak(self) -> float:
        """Of the chips' peak, what the model takes in the compiler's time, or else in the plan's; 0 without either."""
        time = self.time or self.plan_time
        return self.model / time if time else 0.0


def measured(
    row: Row,
    how: str,
    limit: float,
    *,
    compiles: bool = True,
    layers: int = 0,
    kept: Path | None = None,
    options: Mapping[str, str] | None = None,
) -> Side:
    """One program of a row, in a process of its own. `how`: "ours" or "jit", and "constrained", "hints" or "auto";
    `limit`: seconds; `kept`: a folder of what compilers said (`models.measure`); `options`: the compiler's."""
    said = [how, str(int(compiles)), str(layers), str(kept or ""), json.dumps(dict(options or {}))]
    command = [sys.executable, str(Path(__file__)), row.name, *said]
    passed = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}  # libtpu ends at flags of others
    environment = {**passed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, env=environment)
    except subprocess.TimeoutExpired:
        return Side(error=f"not done after {limit:.0f} s")
    for line in reversed(done.stdout.splitlines()):
        if line.startswith("{"):
            return Side(**json.loads(line))
    said = done.stderr.partition(_FOOTNOTE)[0].strip().splitlines() or [f"exit {done.returncode}"]
    return Side(error=said[-1][:300])


def run(
    row: Row, how: set[str], compiles: bool, kept: Path | None = None, options: Mapping[str, str] | None = None
) -> Side:
    """As `measured`, here. What is not compiled is planned by published rates, on no devices."""
    if not compiles:
        return _planned(row, how)
    topology = Topology.of(*row.chips)
    mesh = topology.mesh(sdy.Mesh.of(**row.axes))
    mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(jax.sharding.AxisType.Auto,) * len(mesh.axis_names))
    layout = Layout(mesh, row.rules, "constrained" in how)
    made = (row.jits or row) if "jit" in how else row
    program = made.make(made.model, layout)
    side = Side(model=program.flops / (len(topology.devices) * _peak(topology.devices[0].device_kind)))
    lower = _jit if "jit" in how else _ours
    try:
        lowered = lower(program, layout, how, side)
    except (sdy.SdyError, jax.errors.JaxRuntimeError) as error:
        return _refusal(side, error)
    found = compiled(lowered, topology, options or {}, kept, list(mesh.devices.flat))
    side = replace(side, **asdict(found), packed=found.memory)
    if "ours" in how and side.memory > side.plan_memory / MEMORY_APART[0] and not side.error:
        side.packed = min(side.memory, _packed(lowered, topology, side, kept))
    return side


def _planned(row: Row, how: set[str]) -> Side:
    program, function = row.on_shapes("constrained" in how, "auto" in how, **_options(how))
    devices = math.prod(row.axes.values())
    side = Side(model=program.flops / (devices * _peak(row.chips[0].split(":")[1])))
    try:
        _plan(function, program, side)
    except sdy.SdyError as error:
        return _refusal(side, error)
    return side


def _refusal(side: Side, error: Exception) -> Side:
    return replace(side, error=str(error).splitlines()[0][:300])


def _peak(kind: str) -> float:
    """The operations per second of a chip."""
    machine = machine_called(kind) or machine_name(kind)
    assert machine is not None  # all rows' chips are known
    return machines()[machine].chip.flops


def _ours(program: Program, layout: Layout, how: set[str], side: Side) -> Any:
    function = program.partitioned(layout, automatic="auto" in how, **_options(how))
    _plan(function, program, side)
    return function.lower(*program.arguments)


def _options(how: set[str]) -> dict[str, Any]:
    return {"constraints": "hints"} if "hints" in how else {}


def _plan(function: sdy.PartitionedFunction[..., Any], program: Program, side: Side) -> None:
    """What planning takes, and what the plan says."""
    start = time.process_time()
    plan = function.plan(*program.arguments)
    side.planned = time.process_time() - start
    side.took = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    side.available, side.plan_memory = plan.memory.available / GIB, plan.memory.peak / GIB
    side.plan_bytes, side.plan_time, side.links = plan.wire_bytes / GIB, plan.time.total, plan.time.communication


def _jit(program: Program, layout: Layout, how: set[str], side: Side) -> Any:
    return program.jitted(layout).lower(*program.arguments)


def _packed(lowered: Any, topology: Topology, side: Side, kept: Path | None) -> float:
    """GiB that a program holds where memory is short; infinite where it is refused."""
    for options in _limits(side, topology):
        found = compiled(lowered, topology, options, kept)
        if not found.error:
            return found.memory
    return math.inf


_SHORT = (MEMORY_APART[0], 0.77)
"""Shares of the memory that there is which the plan holds: what lies unused between two arrays counts against libtpu's
limit, not in what it says that a program holds, so that it may refuse the one and be within it with the other."""


def _limits(side: Side, topology: Topology) -> list[dict[str, str]]:
    """A compiler's options by which a device has little more than the plan says, one after the other where it refuses.
    With memory to spare compilers pack loosely, or run less in order: libtpu took 10.1 GiB of 15.75 for what it takes
    7.0 of 7.8 for (0.0.51). The option for TPUs refuses what takes more, and counts what the system takes; that for
    GPUs is a share of what they have, which the order of a program heeds."""
    if topology.is_gpu:
        share = math.ceil(100 * side.plan_memory * ALLOCATED / side.available)
        return [{"xla_gpu_memory_limit_slop_factor": str(share)}]
    most = [math.ceil(1024 * side.plan_memory / share) + _RESERVED_MIB for share in _SHORT]
    return [{"xla_tpu_max_hbm_size_mib": str(mib)} for mib in most]


def main(name: str, how: str, compiles: str, layers: str, kept: str, options: str) -> None:
    prepare()
    assume_cudnn()
    row = next(row for row in ROWS if row.name == name).with_layers(int(layers))
    found = run(row, set(how.split("+")), compiles == "1", Path(kept) if kept else None, json.loads(options))
    print(json.dumps(asdict(found)))


if __name__ == "__main__":
    main(*sys.argv[1:])
