"""The pipelines of a recorded plan."""

from __future__ import annotations

from dataclasses import dataclass

from sdy_jax.plan.record.border import RecordedPlace


@dataclass(frozen=True, slots=True)
class RecordedRow:
    """What all stages do at once: work of one kind ("forward", "backward", "weight gradient"), in a trip of the loop.

    `microbatches` and `rounds` say on what, by stage; -1 where a stage waits.
    """

    trip: int
    kind: str
    microbatches: tuple[int, ...]
    rounds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RecordedPipeline:
    """A run of a pipeline: all rows of its schedule, or those of one pass.

    Attributes:
        schedule: its name.
        axis: the mesh axis of the stages.
        stages, microbatches, rounds, layers: how many there are.
        trips: of the loop.
        bubble: the share of the time that a stage waits, by what rows compute and what they send inside of a stage.
        place: where it is called.
        forward_bytes, backward_bytes: that a device sends to the next stage, or back, for one microbatch.
        sent: what two neighbours send to each other in all trips, of those that send most.
        durations: what a row of each of `kinds` takes by the cost model, but for what it sends along the axis; in
            the unit of `PlanRecord.time`, empty where that is not known.
        stacks: the bytes of a stage's weights on a device; of a backward pass apart, with what its forward pass kept.
        carried: the bytes that a device carries from trip to trip: microbatches on their way, sums of gradients.
        held: by stage, the microbatches of a group between their forward and backward rows at most; empty of a run
            without backward rows.
        groups: by stage, its layers: `0-1, 8-9`.
        rows: the timeline.
        times: how often it runs per call.
        op: the index in `PlanRecord.ops` of the computation that is manual on the axis.
    """

    schedule: str
    axis: str
    stages: int
    microbatches: int
    rounds: int
    layers: int
    trips: int
    bubble: float
    place: RecordedPlace
    forward_bytes: float
    backward_bytes: float
    sent: float
    durations: tuple[float, ...]
    stacks: float
    carried: float
    held: tuple[int, ...]
    groups: tuple[str, ...]
    rows: tuple[RecordedRow, ...]
    times: int = 1
    op: int | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        """Those of its rows."""
        return tuple(dict.fromkeys(row.kind for row in self.rows))


@dataclass(frozen=True, slots=True)
class RecordedTried:
    """Numbers of microbatches that were tried, one for each line of a pipeline that gives several, with those lines;
    what the plan with them takes by the cost model and holds at most, and whether a device has as much. `time` is None
    where no plan fits, and then `peak` that of the least."""

    microbatches: tuple[int, ...]
    lines: tuple[str, ...]
    time: float | None
    peak: float
    fits: bool
    chosen: bool
