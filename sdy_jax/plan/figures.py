"""The figures of a plan: bytes on the wire, times, memory, padding, work that devices repeat."""

from __future__ import annotations

from functools import cached_property

from sdy_jax.ir.graph import Op
from sdy_jax.plan.estimates.compared_meshes import ComparedMesh
from sdy_jax.plan.estimates.estimated_time import EstimatedTime
from sdy_jax.plan.estimates.memory import MemoryUse, memory_of
from sdy_jax.plan.estimates.padding import PaddedValue, padded_values
from sdy_jax.plan.estimates.totals import PlanTotals
from sdy_jax.plan.estimates.work import Work, flops, work_of
from sdy_jax.plan.facts import PlanFacts
from sdy_jax.representation.type_text import bytes_text


class Figures(PlanFacts):
    """What `Plan` says in numbers, by estimate."""

    @property
    def headline(self) -> str:
        """The first line of the plan's text: name, mesh, that it does not fit, number of collectives, bytes, and the
        estimated time."""
        axes = ", ".join(f"{axis.name}={axis.size}" for axis in self.program.mesh.axes)
        count, least = len(self.collectives), "" if self.totals.known else "at least "
        return (
            f"plan of {self.name} on mesh {axes} ({self.program.mesh.size} devices): {self._too_large}{count} "
            f"collective{'' if count == 1 else 's'}, {least}{bytes_text(self.wire_bytes)} on the wire per device"
            + (f", estimated {least}{self.time}" if self.costs.unit == "seconds" else "")
        )

    @property
    def _too_large(self) -> str:
        """That a device has less memory than the program takes."""
        if self.planned_with is None or self.memory.fits:
            return ""
        return f"does not fit: {bytes_text(self.memory.peak)} of {bytes_text(self.memory.available)}; "

    @property
    def compared(self) -> ComparedMesh:
        """What it takes, to be compared with plans on other meshes."""
        return ComparedMesh(self.program.mesh, self.time, self.wire_bytes, self.memory.peak, self.memory.fits)

    def summary(self) -> str:
        """One line per kind of collective: how many executions, how many bytes."""
        lines = [self.headline]
        for kind, (count, wire) in self.totals.by_kind().items():
            lines.append(f"  {count:4d} x {kind:<22} {bytes_text(wire):>10} per device")
        if self.notes:
            lines.append(f"  {len(self.notes):4d} notes: print the plan to read them")
        return "\n".join(lines)

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends per call: loops count once per trip, conditionals as their largest branch.

        Where the trip count of a loop is unknown (`totals.known` is False), it counts as one trip: this is the least.
        """
        return self.totals.wire_bytes

    @cached_property
    def totals(self) -> PlanTotals:
        """The sums over `collectives`."""
        return PlanTotals.of(self.collectives)

    @cached_property
    def time(self) -> EstimatedTime:
        """How long the program takes by the cost model, for collectives and for each device's own work one after the
        other, but for what is hidden, by rings, by gathers one trip ahead, and by what the compiler starts early: in
        seconds where the model is one of time (`unit`), else in bytes. Of a program on local arrays only the
        collectives count.

        Example:
            assert plan.time.communication < 0.1 * plan.time.compute
        """
        costs, mesh = self.costs, self.program.mesh
        sent = sum(record.estimated_times * record.sending_time(costs, mesh) for record in self.collectives)
        hidden = self.hidden_by_work + sum(record.estimated_times * record.hidden for record in self.collectives)
        return EstimatedTime(self.work_cost, sent, costs.unit, hidden)

    @cached_property
    def padding(self) -> tuple[PaddedValue, ...]:
        """The values that lie in blocks which do not divide them, with the bytes of padding that a device holds."""
        return padded_values(self.graph) if "partitioned" in self.stages else ()

    @property
    def padded_bytes(self) -> float:
        """Bytes of padding per device, over all values of the program (which need not exist at the same time)."""
        return sum(value.bytes for value in self.padding)

    @cached_property
    def memory(self) -> MemoryUse:
        """What a device holds while the program runs, by estimate: arguments, results, and what is in between at most.

        A compiler that fuses more, or orders ops better, needs less; one that copies needs more.

        Example:
            assert plan.memory.peak < 16 * 2**30
        """
        if self.planned_with is None:
            return memory_of(self.graph)
        return memory_of(self.graph, self.target, self.planned_with.available)

    @cached_property
    def work(self) -> tuple[Work, ...]:
        """What the program's ops compute, as far as that is known; nothing of a program on local arrays."""
        return tuple(self.work_by_op.values()) if "partitioned" in self.stages else ()

    @cached_property
    def work_by_op(self) -> dict[Op, Work]:
        """The same by the ops of `graph`."""
        return work_of(self.graph, self.program.mesh_name)

    @property
    def repeated_flops(self) -> float:
        """Operations per device and call that exceed the device's part of an op: several devices perform the same.

        Loops count once per trip (a loop with an unknown count as one trip), conditionals as their largest branch.
        """
        return flops(self.work, repeated=True)
