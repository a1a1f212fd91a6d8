"""Why a value does not have a layout: what stands in the way, the annotation that states it, and what that costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from jax.sharding import PartitionSpec

from sdy_jax.annotate.program import Program
from sdy_jax.base.errors import SdyError, ShardingError
from sdy_jax.ir.jax_shardings import bytes_text, from_partition_spec, listed_axes
from sdy_jax.ir.locations import short_source
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.plan.explanations.fixes import constrained, with_border
from sdy_jax.plan.explanations.naming import Named
from sdy_jax.plan.explanations.origins import spec_text
from sdy_jax.plan.explanations.why_not import Obstacle, WhyNot
from sdy_jax.plan.plan import Plan


@dataclass(frozen=True)
class WhyNotLayout(WhyNot):
    """The answer of `plan.why_not(value, P(...))`.

    Attributes:
        annotation: what states the layout, and at which line; empty where the value has it already.
        wire_bytes, memory: what each device would send and hold more then; negative where it would be less. None where
            the program has no plan then, for the reason that is `problem`.
    """

    annotation: str = ""
    wire_bytes: float | None = None
    memory: float | None = None
    problem: str = ""

    def __str__(self) -> str:
        return "\n".join([super().__str__(), *([self._annotated] if self.annotation else [])])

    @property
    def _asked(self) -> str:
        return f"as {self.axis}"

    @property
    def _annotated(self) -> str:
        if self.wire_bytes is None or self.memory is None:
            return f"  {self.annotation}: the program then has no plan: {self.problem}"
        if not self.wire_bytes and not self.memory:
            return f"  {self.annotation}: that costs nothing"
        amounts = (self.wire_bytes, "on the wire"), (self.memory, "of memory")
        costs = [f"{bytes_text(amount)} {what}" for amount, what in amounts if amount > 0]
        saves = [f"{bytes_text(-amount)} {what}" for amount, what in amounts if amount < 0]
        prices = [f"{verb} {' and '.join(of)}" for verb, of in (("costs", costs), ("saves", saves)) if of]
        return f"  {self.annotation}: that {' and '.join(prices)} per device"


def why_not_layout(plan: Plan, value: str, spec: PartitionSpec) -> WhyNotLayout:
    """See `Plan.why_not`."""
    found = plan.explanation.naming.find(value)
    asked = [_Asked(plan, named, spec) for named in found]
    entries = tuple(dict.fromkeys((one.named.label, one.type, tuple(one.obstacles())) for one in asked))
    answer = WhyNotLayout(spec_text(asked[0].wanted), entries)
    wanting = [one for one in asked if not one.has_it]
    if not wanting:
        return answer
    answer = replace(answer, annotation=f"to have it: {wanting[0].annotation}")
    try:
        after = plan.replanned(_annotated(plan.traced, wanting))
    except SdyError as error:
        return replace(answer, problem=str(error))
    wire, memory = after.wire_bytes - plan.wire_bytes, after.memory.peak - plan.memory.peak
    return replace(answer, wire_bytes=wire, memory=memory)


def _annotated(program: Program, asked: Sequence[_Asked]) -> Program:
    for one in asked:
        program = one.annotated(program)
    return program


@dataclass(frozen=True)
class _Asked:
    """A value and the layout that it is asked to have."""

    plan: Plan
    named: Named
    spec: PartitionSpec

    @cached_property
    def wanted(self) -> TensorSharding:
        program, shape = self.plan.program, self.plan.explanation.naming.shape_of(self.named.value_id)
        wanted = from_partition_spec(self.spec, len(shape), program.mesh, program.mesh_name, self.named.label)
        counts = wanted.shard_counts(program.mesh)
        for dim, (size, count) in enumerate(zip(shape, counts, strict=True)):
            if size % count and self._at_border:
                raise ShardingError(
                    f"dim {dim} of {self.named.label}, {self.type}, cannot be split over "
                    f"{listed_axes(wanted.axes[dim])}: {count} does not divide {size}"
                )
        return wanted

    @property
    def type(self) -> str:
        return self.plan.explanation.naming.type_of(self.named.value_id)

    @property
    def has_it(self) -> bool:
        now = self.named.sharding or TensorSharding.replicated(self.plan.program.mesh_name, self.wanted.rank)
        return now.axes == self.wanted.axes and not now.unreduced_axes

    def obstacles(self) -> Iterator[Obstacle]:
        """What keeps away the axes that the value lacks."""
        if self.has_it:
            yield Obstacle("PRESENT", "it has that layout: `why` tells why")
            return
        now = self.named.sharding.axes if self.named.sharding is not None else ((),) * self.wanted.rank
        for dim, (has, wants) in enumerate(zip(now, self.wanted.axes, strict=True)):
            if set(has) - set(wants):
                yield Obstacle("SPLIT", f"dim {dim} is split along {listed_axes(has)}: `why` tells why")
            for axis in wants:
                if axis not in has:
                    yield from self.plan.explanation.obstacles(self.named, axis, dim)

    @property
    def _at_border(self) -> bool:
        return not self.named.line and not self.named.name.startswith("%")

    @property
    def _leaf(self) -> tuple[str, int]:
        """Where a value at the border is stated, and the number of its leaf."""
        for where, values in (("in_shardings", self.plan.arguments), ("out_shardings", self.plan.results)):
            for leaf, value in enumerate(values):
                if value.path == self.named.name:
                    return where, leaf
        raise SdyError(f"{self.named.label} has the layout in which it was closed over; to fix: make it an argument")

    @property
    def annotation(self) -> str:
        if self._at_border:
            line = short_source(self.plan.source)
            return f"{self._leaf[0]} of `{self.named.name}`: {spec_text(self.wanted)}{f' at {line}' if line else ''}"
        return f"sdy.sharding_constraint(..., {spec_text(self.wanted)}) at {short_source(self.named.line)}"

    def annotated(self, program: Program) -> Program:
        if not self._at_border:
            return constrained(
                program, self.named.line, self.plan.explanation.naming.mlir_type(self.named.value_id), self.wanted
            )
        where, leaf = self._leaf
        border = {leaf: self.wanted}
        return with_border(program, border, {}) if where == "in_shardings" else with_border(program, {}, border)
