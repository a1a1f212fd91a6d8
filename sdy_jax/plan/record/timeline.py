"""One step of a plan over time, and what of the machine's peak it uses: see `record.py`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

# When ops compute and collectives are sent, by estimate.


@dataclass(frozen=True, slots=True)
class RecordedLane:
    """What does one thing at a time: the compute units of a device, its links along some mesh axes, or the link to the
    memory of its host.

    Attributes:
        name: "compute", "host", or the axes, `data`, `data, model`.
        axes: the mesh axes of links; none of compute and of the host.
    """

    name: str
    axes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RecordedSlice:
    """What a lane does for some time.

    Attributes:
        lane: its number in `RecordedTimeline.lanes`.
        start, duration: in the unit of `PlanRecord.time`; the duration is that of all executions. A loop is drawn as
            one trip that is as wide as all of its trips.
        times: the executions, with a guess for loops of which the trips are not known.
        op: the index in `PlanRecord.ops` of what computes, or sends; None where that is not there.
        collective: the index in `PlanRecord.collectives` of what is sent; None where an op computes.
        hidden: it is sent while something is computed; else everything waits for it.
        phase: "forward", "backward" or "update"; empty where the program has no backward pass.
        host: the index in `PlanRecord.host` of what moves from or to the host. The estimate of a step waits for none of
            that; it takes no time where the rate of the host's link is not known.
    """

    lane: int
    start: float
    duration: float
    times: int = 1
    op: int | None = None
    collective: int | None = None
    hidden: bool = False
    phase: str = ""
    host: int | None = None

    @property
    def end(self) -> float:
        """When it ends."""
        return self.start + self.duration


@dataclass(frozen=True, slots=True)
class RecordedLoop:
    """A loop, or a conditional, that the timeline shows: the index of its op, when it runs, and how often its body does
    each time."""

    op: int
    start: float
    duration: float
    trips: int


@dataclass(frozen=True)
class RecordedTimeline:
    """One step on a device, by the cost model: as it is estimated, no measurement.

    The slices of compute and those that are not hidden follow each other without a gap: they are the critical path, as
    long as `PlanRecord.time` says. A conditional's branches stand one after the other, as the estimate counts them.

    Attributes:
        lanes: compute first, then links, at last the host's where something moves from or to it.
        slices: in the order in which they start.
        loops: outer ones before those in them.
        starts: when each of `PlanRecord.ops` begins.

    Example:
        waits = [each for each in record.timeline.slices if each.collective is not None and not each.hidden]
        longest = max(waits, key=lambda each: each.duration)
    """

    lanes: tuple[RecordedLane, ...] = ()
    slices: tuple[RecordedSlice, ...] = ()
    loops: tuple[RecordedLoop, ...] = ()
    starts: tuple[float, ...] = ()

    @property
    def compute(self) -> float:
        """The time of all work."""
        return math.fsum(each.duration for each in self.slices if not each.lane)

    @property
    def communication(self) -> float:
        """The time of all that is sent."""
        return math.fsum(each.duration for each in self.slices if each.collective is not None)

    @property
    def hidden(self) -> float:
        """Of that, what is sent while something is computed."""
        return math.fsum(each.duration for each in self.slices if each.hidden and each.host is None)

    @property
    def host(self) -> float:
        """The time of all that moves from and to the host, in both directions."""
        return math.fsum(each.duration for each in self.slices if each.host is not None)

    @property
    def total(self) -> float:
        """When the step ends."""
        return max((each.end for each in self.critical), default=0.0)

    @cached_property
    def critical(self) -> tuple[RecordedSlice, ...]:
        """The slices that the step is as long as together: all work, and what is waited for."""
        return tuple(each for each in self.slices if not each.hidden)

    def phases(self) -> dict[str, float]:
        """How long the phases take, in the order in which they begin: work and waiting."""
        found: dict[str, list[float]] = {}
        for each in self.critical:
            found.setdefault(each.phase, []).append(each.duration)
        return {phase: math.fsum(times) for phase, times in found.items()}


NO_TIMELINE = RecordedTimeline()
"""Of plans that were saved before there were any."""

# What a step took when it ran.


@dataclass(frozen=True, slots=True)
class RecordedExecution:
    """What a lane did when the step ran.

    Attributes:
        lane: its number in `RecordedRun.lanes`.
        start, duration: in seconds, from the beginning of the call.
        instruction: of the compiled program, as profilers call it.
        scope: the name scopes of the op that it is of; may be empty.
        backward: it is of a derivative's backward pass.
        collective: the index in `PlanRecord.collectives` of what is sent; None of what computes.
    """

    lane: int
    start: float
    duration: float
    instruction: str
    scope: str = ""
    backward: bool = False
    collective: int | None = None

    @property
    def end(self) -> float:
        """When it ends."""
        return self.start + self.duration


@dataclass(frozen=True)
class RecordedRun:
    """One call on one device, as jax's profiler saw it: what `Plan.analyze` ran.

    Attributes:
        device: its kind.
        seconds: of a call without the profiler, the median of some.
        lanes: compute first, then links, as of `RecordedTimeline`.
        slices: in the order in which they start. Those of a lane may overlap.
    """

    device: str
    seconds: float
    lanes: tuple[RecordedLane, ...] = ()
    slices: tuple[RecordedExecution, ...] = ()


# How much of what the machine can do is used.


@dataclass(frozen=True, slots=True)
class RecordedResource:
    """What a step uses of a part of a device, and how fast that is.

    Attributes:
        name: "compute", "memory", or the mesh axes of links.
        amount: operations, or bytes, in a step.
        peak: as many in a second, at most.
    """

    name: str
    amount: float
    peak: float

    @property
    def seconds(self) -> float:
        """What the step takes at least because of it."""
        return self.amount / self.peak


@dataclass(frozen=True, slots=True)
class RecordedRoofline:
    """What a step uses of a device beside what that can do.

    Attributes:
        resources: compute, memory where the cost model knows its rate, and the links of each set of axes.
        seconds: what the step takes by the cost model.
        model_flops: the operations that a device performs, but for those that other devices perform as well.
    """

    resources: tuple[RecordedResource, ...]
    seconds: float
    model_flops: float

    def of(self, name: str) -> RecordedResource | None:
        """A resource by its name."""
        return next((each for each in self.resources if each.name == name), None)

    def share(self, resource: RecordedResource) -> float:
        """The share of its peak that the step uses of a resource."""
        return resource.seconds / self.seconds if self.seconds else 0.0

    @property
    def mfu(self) -> float:
        """The share of the peak of operations that goes into the model (model FLOP utilization), by estimate; what is
        computed again for the sake of memory, as under `jax.checkpoint`, counts as well."""
        compute = self.of("compute")
        return self.model_flops / compute.peak / self.seconds if compute is not None and self.seconds else 0.0

    @property
    def bound(self) -> RecordedResource | None:
        """The resource that alone would take longest."""
        return max(self.resources, key=lambda each: each.seconds, default=None)
