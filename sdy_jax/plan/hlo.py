"""The collectives of a compiled program, ours or `jax.jit`'s, and what runs beside them, as its compiler has
scheduled it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from sdy_jax.plan.measuring.hlo_module import (
    WIRE_BYTES,
    HloCollective,
    HloInstruction,
    HloModule,
    called_by,
    collective_of,
)

# The collectives of a compiled program: what really went into the executable, ours or `jax.jit`'s.
#
# Reads the text of optimised HLO (`compiled.as_text()`). Everything follows from the operands of a collective, so
# that synchronous and asynchronous (`-start`) forms, tuples and combined collectives are one case. Ops in a while
# loop count once per trip where XLA says the number of trips or a counter runs from constant to constant, else once,
# and those of its condition once more; of a conditional the branch counts that sends most.
#
#     ENTRY %main (p: f32[4,8]) -> f32[4,8] {
#       %p = f32[4,8]{1,0} parameter(0)
#       ROOT %r = f32[4,8]{1,0} all-reduce(%p), replica_groups=[2,4]<=[8], to_apply=%add
#     }
#
# has one all-reduce in groups of 4 over 128 bytes: 2 * 3/4 * 128 = 192 bytes on the wire per device.


@dataclass(frozen=True, slots=True)
class HloTotals:
    """Executions and wire bytes per device of a program's collectives, in all and by kind (count, bytes)."""

    count: int
    wire_bytes: float
    by_kind: dict[str, tuple[int, float]]


def collectives_in_hlo(text: str) -> list[HloCollective]:
    """The collectives of an optimised HLO module, in the order of its text.

    Raises:
      ParseError: an instruction names an operand, or groups, that cannot be read.
    """
    module = HloModule.parse(text)
    executions = module.executions()
    return [
        collective_of(instruction, module, executions[name])
        for name, instructions in module.computations.items()
        for instruction in instructions
        if instruction.opcode in WIRE_BYTES
    ]


def totals(collectives: Iterable[HloCollective]) -> HloTotals:
    """Sums of executions and wire bytes."""
    by_kind: dict[str, tuple[int, float]] = {}
    for collective in collectives:
        if not collective.count:
            continue
        count, wire = by_kind.get(collective.kind, (0, 0.0))
        by_kind[collective.kind] = count + collective.count, wire + collective.total_wire_bytes
    return HloTotals(sum(c for c, _ in by_kind.values()), sum(w for _, w in by_kind.values()), by_kind)


def estimated_cycles(text: str) -> float:
    """The cycles that a TPU's compiler expects the instructions of an optimised HLO module to take, loops by trips.

    It says none for collectives and for kernels (`kernels_in_hlo`). What other compilers make has no such numbers, and
    takes 0.
    """
    module = HloModule.parse(text)
    executions = module.executions()
    return sum(
        executions[name] * instruction.cycles
        for name, instructions in module.computations.items()
        for instruction in instructions
    )


def kernels_in_hlo(text: str) -> list[tuple[HloInstruction, int]]:
    """The calls of kernels for TPUs in an optimised HLO module, and how often each runs."""
    module = HloModule.parse(text)
    executions = module.executions()
    return [
        (instruction, executions[name])
        for name, instructions in module.computations.items()
        for instruction in instructions
        if instruction.is_kernel
    ]


# What runs beside the collectives of a compiled program, as its compiler has scheduled it.
#
# A collective that has a start and a done runs beside what stands between them. On TPUs both are fusions,
# `async-collective-start.3` and `async-collective-done.3`, and the first calls the collective.

_WORK = frozenset(("convolution", "custom-call", "dot", "fusion", "reduce", "scatter", "sort", "while"))


def overlapped(text: str) -> HloTotals:
    """Of the collectives of a scheduled HLO module those that run beside other work: that have a fusion, a product or a
    loop between start and done."""
    module = HloModule.parse(text)
    executions = module.executions()
    return totals(
        collective_of(started, module, executions[name])
        for name, instructions in module.computations.items()
        for place, instruction in enumerate(instructions)
        if (started := module.started_by(instruction)) and _has_work(instruction, instructions[place + 1 :])
    )


def _has_work(start: HloInstruction, later: Iterable[HloInstruction]) -> bool:
    """Whether work lies between a start and its done."""
    for instruction in later:
        if instruction.ends(start):
            return False
        if instruction.opcode in _WORK:
            return True
    return False


@dataclass(frozen=True, slots=True)
class Waiting:
    """Seconds of a program's collectives per device: all, and those in which nothing else runs."""

    sent: float
    exposed: float


def no_kernel(call: HloInstruction) -> float:
    """The seconds of a kernel's call by its compiler, which states none."""
    return 0.0


def waiting(
    text: str,
    seconds: Callable[[HloCollective], float],
    clock: float,
    kernel: Callable[[HloInstruction], float] = no_kernel,
) -> Waiting:
    """What a scheduled HLO module for TPUs waits for its collectives, as it orders starts, work and dones.

    Those that run at once share the links: the first to start goes first, and one that has no start goes before them.

    Args:
        seconds: how long a collective takes.
        clock: cycles per second; of cycles the compiler states those of all but collectives and kernels.
        kernel: how long the call of a kernel takes.
    """
    module = HloModule.parse(text)
    executions = module.executions()
    return _Schedule(module, seconds, clock, kernel).waiting(executions)


class _Schedule:
    """The seconds of computations as they are scheduled: callees before those that call them."""

    def __init__(
        self,
        module: HloModule,
        seconds: Callable[[HloCollective], float],
        clock: float,
        kernel: Callable[[HloInstruction], float],
    ):
        self._module, self._seconds, self._clock, self._kernel = module, seconds, clock, kernel
        self._took: dict[str, float] = {}

    def waiting(self, executions: Mapping[str, int]) -> Waiting:
        started = [i for body in self._module.computations.values() for i in body if self._module.started_by(i)]
        inside = {name for start in started if start.opcode not in WIRE_BYTES for name in called_by(start)}
        sent = exposed = 0.0
        for name, count in executions.items():
            if name not in inside:
                own, waits = self._run(name)
                sent, exposed = sent + count * own, exposed + count * waits
        return Waiting(sent, exposed)

    def _run(self, name: str) -> tuple[float, float]:
        """The seconds that a computation's own collectives take, and those in which it waits for them."""
        sent = exposed = work = 0.0
        running: list[tuple[HloInstruction, float]] = []
        for instruction in self._module.computations[name]:
            if started := self._module.started_by(instruction):
                took = self._seconds(collective_of(started, self._module, 1))
                sent += took
                running.append((instruction, took))
            elif place := next((n + 1 for n, (start, _) in enumerate(running) if instruction.ends(start)), 0):
                exposed += sum(left for _, left in running[:place])
                running = running[place:]
            elif instruction.opcode in WIRE_BYTES:
                took = self._seconds(collective_of(instruction, self._module, 1))
                sent, exposed = sent + took, exposed + took
            else:
                took = self._work(instruction)
                work += took
                running = _after(running, took)
        self._took[name] = work + exposed
        return sent, exposed

    def _work(self, instruction: HloInstruction) -> float:
        """The seconds of what is no collective, with those of the computations that it calls."""
        trips = self._module.trips(instruction) if instruction.opcode == "while" else 1
        called = [self._took.get(name, 0.0) for name in called_by(instruction)]
        own = self._kernel(instruction) if instruction.is_kernel else instruction.cycles / self._clock
        return own + trips * sum(called)


def _after(running: Sequence[tuple[HloInstruction, float]], seconds: float) -> list[tuple[HloInstruction, float]]:
    """What is left of collectives that run, the first one first, after some time."""
    left = []
    for start, took in running:
        left.append((start, max(took - seconds, 0.0)))
        seconds = max(seconds - took, 0.0)
    return left
