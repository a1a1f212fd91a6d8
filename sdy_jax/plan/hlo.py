"""The collectives of a compiled program: what really went into the executable, ours or `jax.jit`'s.

Reads the text of optimised HLO (`compiled.as_text()`). Everything follows from the operands of a collective, so that
synchronous and asynchronous (`-start`) forms, tuples and combined collectives are one case. Ops in a while loop count
once per trip where XLA says the number of trips or a counter runs from constant to constant, else once, and those of
its condition once more; of a conditional the branch counts that sends most.

    ENTRY %main (p: f32[4,8]) -> f32[4,8] {
      %p = f32[4,8]{1,0} parameter(0)
      ROOT %r = f32[4,8]{1,0} all-reduce(%p), replica_groups=[2,4]<=[8], to_apply=%add
    }

has one all-reduce in groups of 4 over 128 bytes: 2 * 3/4 * 128 = 192 bytes on the wire per device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sdy_jax.plan.hlo_module import WIRE_BYTES, HloCollective, HloInstruction, HloModule, collective_of


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
