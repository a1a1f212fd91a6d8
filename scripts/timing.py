"""What compiled programs take: by their compilers' schedules and estimates, or measured on the devices at hand."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from gpu_work import GpuWork

import sdy_jax as sdy
from sdy_jax.lowering.targets.family import Links, Machine
from sdy_jax.lowering.targets.rates import Link, rate
from sdy_jax.lowering.targets.torus import Line, Lines, Torus
from sdy_jax.lowering.targets.tpu import TPU
from sdy_jax.plan.hlo_module import HloCollective, HloInstruction, HloModule
from sdy_jax.plan.profile import kernels_in_hlo, waiting

CLOCK = 1.5e9
"""Cycles per second of a TPU v5e: 197 TFLOP/s are what its four units of 128 x 128 multiply-adds do in so many."""

ICI = TPU.machines["tpu v5e"].links
LINK = Link(2, bandwidth=ICI.bandwidth, hop=ICI.latency, start=ICI.latency)
"""Along a ring of a slice: what the ops around a collective take is among the cycles of these."""

BETWEEN_SLICES = Link(2, ICI.network.bandwidth, ICI.network.latency, is_network=True)

TORUS = ICI.torus or Torus(2)


@dataclass(frozen=True, slots=True)
class CompilerTime:
    """Seconds of a compiled program: of its ops, and of its collectives.

    `kernels`: on TPUs, those among the work of ops that the compiler states nothing of.
    `exposed`: those of the collectives in which no other op runs, as the program is scheduled.
    """

    work: float
    sent: float
    exposed: float
    kernels: float = 0.0

    @property
    def total(self) -> float:
        """One after the other."""
        return self.work + self.sent

    @property
    def scheduled(self) -> float:
        """As they are scheduled."""
        return self.work + self.exposed


def no_kernel(call: HloInstruction) -> float:
    """The seconds of a kernel's call by its compiler, which states none."""
    return 0.0


def compiler_time(
    hlo: str, kernel: Callable[[HloInstruction], float] = no_kernel, devices: Sequence[jax.Device] = ()
) -> CompilerTime:
    """The time of a compiled program for v5e.

    Args:
        hlo: its text.
        kernel: the seconds of a kernel's call.
        devices: those for which it was compiled, in its order; without them each group of devices is a ring.
    """

    def work(instruction: HloInstruction) -> float:
        return kernel(instruction) if instruction.is_kernel else instruction.cycles / CLOCK

    waits = waiting(HloModule.parse(hlo), Seconds([device.coords for device in devices]), work)
    kernels = sum(count * kernel(call) for call, count in kernels_in_hlo(hlo))
    return CompilerTime(waits.work, waits.sent, waits.exposed, kernels)


def server_time(hlo: str, machine: Machine) -> CompilerTime:
    """The time of a program compiled for GPUs, whose compiler says what runs beside what, and no time: of its ops by
    the published rates of products and memory (`gpu_work`), of its collectives by those of the links."""
    module = HloModule.parse(hlo)
    waits = waiting(module, ServerSeconds(machine.links), GpuWork(module, machine.chip))
    return CompilerTime(waits.work, waits.sent, waits.exposed)


def fullest_bucket(plan: sdy.Plan) -> float:
    """What the largest collective of a plan sends, or several that run as one, over the size up to which small ones are
    worth combining by the plan's model; 0 where nothing is sent, or nothing gained by combining."""
    mesh = plan.program.mesh
    sent = [record for record in plan.collectives if record.wire_bytes and record.axes]
    sizes = [plan.costs.bucket_bytes(record.kind, record.axes, mesh) for record in sent]
    return max([record.wire_bytes / size for record, size in zip(sent, sizes, strict=True) if size], default=0.0)


class Seconds:
    """How long a collective takes among chips at some places on their torus."""

    def __init__(self, places: Sequence[Sequence[int]]):
        self._places = np.array(places)
        self._sizes = tuple(np.ptp(self._places, axis=0) + 1) if len(places) else ()
        self._lines: dict[tuple[int, ...], Lines] = {}

    def __call__(self, found: HloCollective) -> float:
        if found.kind == "slice-send":  # over the network between slices, whatever the collective
            return rate("collective_permute", [BETWEEN_SLICES]).time(found.wire_bytes)
        if found.group not in self._lines:
            self._lines[found.group] = self._lines_of(found.group)
        link = LINK._replace(size=max(found.group_size, 2), lines=self._lines[found.group])
        return rate(found.kind.replace("-", "_"), [link]).time(found.wire_bytes)

    def _lines_of(self, group: tuple[int, ...]) -> Lines:
        """The lines that a group fills; a ring where it fills none, or is on a small slice."""
        size, lines = len(group), list[Line]()
        if group and len(self._places) > TORUS.as_rings:
            rings = TORUS.rings(self._sizes)
            for dim, along in enumerate(self._places[list(group)].T):
                on = np.unique(along)
                if len(on) > 1:
                    around = int(self._sizes[dim]) if rings[dim] else 0
                    lines.append(Line(dim, len(on), int(np.diff(on).min()), around))
        size = max(size, 2)
        return tuple(lines) if math.prod([line.size for line in lines]) == size else (Line(0, size, 1, size),)


class ServerSeconds:
    """How long a collective takes among GPUs that some links join, and a network the rest, by their published rates."""

    def __init__(self, links: Links):
        self._links = links
        self._inside = Link(2, bandwidth=links.bandwidth, hop=links.latency, start=links.start)
        network = links.network
        self._outside = Link(2, network.bandwidth, network.latency, links.start, is_network=True)

    def __call__(self, found: HloCollective) -> float:
        inside, outside = self._inside, self._outside
        if found.pairs:
            leaves = any(self._server(source) != self._server(target) for source, target in found.pairs)
            over = [outside if leaves else inside]
        else:
            servers = len(set(map(self._server, found.group)))
            over = [outside._replace(size=servers), inside._replace(size=found.group_size // servers)]
        return rate(found.kind.replace("-", "_"), over).time(found.wire_bytes)

    def _server(self, device: int) -> int:
        return device // self._links.joins


def paired_ratio(programs: Sequence[Any], arguments: tuple[Any, ...], donates: bool, pairs: int) -> float:
    """The median of the ratios of the times of two programs, run in turns.

    Args:
        programs: both take the same arguments in their own layouts.
        arguments: on the host.
        donates: the first argument is given away, and the first result takes its place.
        pairs: runs of each, after two that warm up.
    """
    placed = [list(jax.device_put(arguments, program.input_shardings[0])) for program in programs]
    ratios = []
    for number in range(pairs + 2):
        seconds = [0.0, 0.0]
        for side in (0, 1) if number % 2 else (1, 0):
            start = time.perf_counter()
            results = jax.block_until_ready(programs[side](*placed[side]))
            seconds[side] = time.perf_counter() - start
            if donates:
                placed[side][0] = results[0]
        ratios.append(seconds[0] / seconds[1])
    return float(np.median(ratios[2:]))
