"""The executor of tables: loops over parts of a table, in which stages run groups of layers and send activations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sdy_jax.annotate.pipeline_schedules import Kind, Timetable, row_scope
from sdy_jax.pipelines.jaxprs import Inputs, LayerPasses, Leaves, inexact, types_of
from sdy_jax.pipelines.loops import Cycle, Links, Loop, Slots, added, at, put, stacked, sum_of
from sdy_jax.pipelines.region import zeros_of

# What runs of a group of layers on one microbatch: a scan over the layers.

Carry = TypeVar("Carry")


@dataclass(frozen=True)
class StageRow:
    """A row's columns of one stage, as scalars."""

    active: Any
    microbatch: Any
    round: Any
    group: Any
    kept: Any
    read: Any
    result: Any


@dataclass(frozen=True)
class Grouping:
    """How layers are in groups.

    Attributes:
        layers: how many there are.
        depth: how many a group has; the last groups may have fewer.
        groups: how many groups there are.
    """

    layers: int
    depth: int
    groups: int


class GroupPasses:
    """The passes of a group.

    What is read and written of each layer is a part of a buffer that the loop over the layers carries, so that no pass
    stacks what another takes apart.

    Args:
        passes: those of a layer.
        grouping: the layers of a group.
        given: what all layers on the stage read: constants, weights of shape (rounds, depth, ...), extra inputs of
            shape (microbatches, ...), and a key or none.
    """

    def __init__(self, passes: LayerPasses, grouping: Grouping, given: Inputs):
        self._passes, self._grouping, self._given = passes, grouping, given

    def forward(self, cell: StageRow, x: Leaves, aux: Leaves, kept: Leaves) -> tuple[Leaves, Leaves, Leaves]:
        """The activations, and buffers with auxiliary results, by round, microbatch and layer, and with what is kept,
        by slot and layer. Neither is written where there are no buffers."""

        def step(carry: tuple[Leaves, Leaves, Leaves], depth: Any) -> tuple[Leaves, Leaves, Leaves]:
            x, aux, kept = carry
            outs, new = self._passes.forward(x, self._inputs(cell, depth))
            is_meant = self._is_meant(cell, depth)
            aux = put(aux, outs[len(x) :] if aux else [], is_meant, cell.round, cell.microbatch, depth)
            kept = put(kept, new if kept else [], is_meant, cell.kept, depth)
            return self._chosen(cell, depth, outs[: len(x)], x), aux, kept

        return self._through(step, (x, aux, kept), False)

    def backward(self, cell: StageRow, y: Leaves, sums: Inputs, kept: Leaves, aux: Leaves) -> tuple[Leaves, Inputs]:
        """Cotangents of the activations, and sums with those of the inputs added."""

        def step(carry: tuple[Leaves, Inputs], depth: Any) -> tuple[Leaves, Inputs]:
            (y, sums), inputs = carry, self._inputs(cell, depth)
            x, found = self._passes.backward(inputs, *self._read(cell, depth, y, kept, aux))
            return self._chosen(cell, depth, x, y), self._added(cell, depth, sums, found)

        return self._through(step, (y, sums), True)

    def backward_alone(
        self, cell: StageRow, y: Leaves, deferred: Leaves, kept: Leaves, aux: Leaves
    ) -> tuple[Leaves, Leaves]:
        """Cotangents of the activations, and buffers with what `weights` reads, by slot and layer."""

        def step(carry: tuple[Leaves, Leaves], depth: Any) -> tuple[Leaves, Leaves]:
            (y, deferred), inputs = carry, self._inputs(cell, depth)
            x, new = self._passes.backward_alone(inputs, *self._read(cell, depth, y, kept, aux))
            deferred = put(deferred, new, self._is_meant(cell, depth), cell.kept, depth)
            return self._chosen(cell, depth, x, y), deferred

        return self._through(step, (y, deferred), True)

    def weights(self, cell: StageRow, sums: Inputs, deferred: Leaves) -> Inputs:
        """Sums with the cotangents of the inputs added."""

        def step(sums: Inputs, depth: Any) -> Inputs:
            parts = [at(leaf, cell.read, depth) for leaf in deferred]
            return self._added(cell, depth, sums, self._passes.weights(self._inputs(cell, depth), parts))

        return self._through(step, sums, True)

    def _through(self, step: Callable[[Carry, Any], Carry], carry: Carry, reverse: bool) -> Carry:
        depths = jnp.arange(self._grouping.depth, dtype=jnp.int32)
        carry, _ = lax.scan(lambda carry, depth: (step(carry, depth), None), carry, depths, reverse=reverse)
        return carry

    def _read(self, cell: StageRow, depth: Any, y: Leaves, kept: Leaves, aux: Leaves) -> tuple[Leaves, Leaves]:
        """What was kept of a layer, and the cotangents of its results."""
        ends = [at(leaf, cell.round, cell.microbatch, depth) for leaf in aux]
        return [at(leaf, cell.read, depth) for leaf in kept], [*y, *ends]

    def _layer(self, cell: StageRow, depth: Any) -> Any:
        return cell.group * self._grouping.depth + depth

    def _inputs(self, cell: StageRow, depth: Any) -> Inputs:
        weights = [at(leaf, cell.round, depth) for leaf in self._given.weights]
        extra = [at(leaf, cell.microbatch) for leaf in self._given.extra]
        layer, fold = self._layer(cell, depth), jax.random.fold_in
        key = [fold(fold(key, layer), cell.microbatch) for key in self._given.key]
        return Inputs(self._given.constants, weights, extra, key)

    @property
    def _is_full(self) -> bool:
        return self._grouping.layers == self._grouping.depth * self._grouping.groups

    def _is_meant(self, cell: StageRow, depth: Any) -> Any:
        """Whether the stage does anything, and there is such a layer."""
        return cell.active if self._is_full else cell.active & (self._layer(cell, depth) < self._grouping.layers)

    def _chosen(self, cell: StageRow, depth: Any, new: Leaves, old: Leaves) -> Leaves:
        """What a layer makes, or what it was given where there is no such layer."""
        if self._is_full:
            return new
        exists = self._layer(cell, depth) < self._grouping.layers
        return [jnp.where(exists, x, y) for x, y in zip(new, old, strict=True)]

    def _added(self, cell: StageRow, depth: Any, sums: Inputs, found: Inputs) -> Inputs:
        is_meant = self._is_meant(cell, depth)
        constants = added(sums.constants, found.constants, is_meant)
        weights = added(sums.weights, found.weights, is_meant, cell.round, depth)
        return Inputs(constants, weights, added(sums.extra, found.extra, is_meant, cell.microbatch), [])


# The executor of tables: loops over parts of a table, in which stages compute and send along the mesh axis.
#
# It runs in the body of a `shard_map` that is manual on the axis alone. All stages run the same code in lockstep. A
# stage that has nothing to do in a row computes all the same, and what it makes is dropped: along other axes the work
# of layers may hold collectives, and a permute in which some devices of the mesh take no part never ends on CPUs
# (jaxlib 0.10.2). Where a stage is one device, it does skip.
#
# A trip of a loop begins by sending what the last forward row has made, which travels beside the trip's backward row;
# what that makes is sent at once, and travels beside the trip's forward row. Over which links rows send, and in which
# loops they are, `schedules.loops` says.

State = dict[str, Any]
"""What goes from trip to trip, by name; what a run does not ask for is not there:

* `up`, `down`: activations that are to be sent, cotangents that have arrived;
* `kept`, `deferred`: what forward rows keep for backward rows, and these for rows of weights, by slot;
* `outs`, `aux`: results by microbatch, auxiliary ones by round and microbatch;
* `results`, `loss`: results by slot, which wait for their loss; the mean of losses so far;
* `loss_aux`: auxiliary results of the loss by microbatch;
* `x`, `inputs`: cotangents of the batch and of other inputs; `loss_inputs`: of those of the loss.
"""


@dataclass(frozen=True)
class Head:
    """The loss at the end of the last group, as the passes of a layer, whose first result it is.

    Attributes:
        passes, given: of the layer.
        cotangent, aux_cotangents: of the loss of a microbatch, and of its auxiliary results by microbatch.
    """

    passes: LayerPasses
    given: Inputs
    cotangent: Any
    aux_cotangents: Leaves


@dataclass(frozen=True)
class Executor:
    """Runs tables on one stage.

    Attributes:
        axis: the mesh axis.
        table, slots: the schedule.
        passes, grouping: the layers.
        given: the stage's inputs beside the batch (`GroupPasses`).
        batch: the leaves of the batch, of shape (microbatches, ...).
        cotangents, aux_cotangents: of the results, and of the auxiliary ones by round and microbatch.
        head: the loss, if it is computed here.
        skips: whether stages skip what they need not do.
    """

    axis: str
    table: Timetable
    slots: Slots
    passes: LayerPasses
    grouping: Grouping
    given: Inputs
    batch: Leaves
    cotangents: Leaves = field(default_factory=list)
    aux_cotangents: Leaves = field(default_factory=list)
    head: Head | None = None
    skips: bool = False

    def start(self, *names: str) -> State:
        """The state before the first trip."""
        return {name: getattr(self, f"_no_{name}")() for name in names}

    def run(self, state: State, columns: Sequence[Any], cycles: Sequence[Cycle]) -> State:
        """The state after some cycles, whose columns are given as those of `columns_of` of one stage."""
        for each, cycle in zip(columns, cycles, strict=True):
            turn = partial(self._turn, cycle.turns[0])
            once = len(cycle.turns) == 1
            state, _ = turn(state, [x[0] for x in each]) if once else lax.scan(turn, state, each)
        return state

    def _turn(self, loops: Sequence[Loop], state: State, columns: Sequence[Any]) -> tuple[State, None]:
        for each, loop in zip(columns, loops, strict=True):
            ways = {kind: links if len(set(links)) > 1 else links[:1] for kind, links in loop.links.items()}
            (state, _), _ = lax.scan(partial(self._trip, loop.kinds, ways), (state, np.int32(0)), each)
        return state, None

    def _trip(
        self, kinds: Sequence[Kind], ways: Mapping[Kind, Sequence[Links]], carry: tuple[State, Any], rows: Any
    ) -> tuple[tuple[State, Any], None]:
        state, trip = carry

        def sent(name: str, kind: Kind, step: int) -> State:
            return state | {name: self._sent(state[name], step, ways[kind], trip)}

        if Kind.FORWARD in kinds:
            with jax.named_scope(row_scope(Kind.FORWARD)):
                state = sent("up", Kind.FORWARD, 1)
        for i, kind in enumerate(kinds):
            cell = StageRow(rows[i, 0] != 0, *(rows[i, j] for j in range(1, rows.shape[1])))
            with jax.named_scope(row_scope(kind)):
                state = state | _ROWS[kind](self, state, cell)
                if kind is Kind.BACKWARD:
                    state = sent("down", kind, -1)
        return (state, trip + 1), None

    @property
    def _group(self) -> GroupPasses:
        return GroupPasses(self.passes, self.grouping, self.given)

    def forward(self, state: State, cell: StageRow) -> State:
        """A forward row."""
        is_first = cell.group == 0
        x = [jnp.where(is_first, at(b, cell.microbatch), up) for b, up in zip(self.batch, state["up"], strict=True)]
        run = partial(self._group.forward, cell)
        y, aux, kept = self._guarded(cell.active, run, x, state.get("aux", []), state.get("kept", []))
        changes: State = {"up": y, "aux": aux, "kept": kept}
        is_last = self._is_last(cell)
        if "outs" in state:
            changes["outs"] = put(state["outs"], y, is_last, cell.microbatch)
        if "results" in state:
            changes["results"] = put(state["results"], y, is_last, cell.result)
        elif "loss" in state:
            value, loss_aux = self._loss(cell, y)
            changes |= self._with_loss(state, cell, value, loss_aux)
        return {name: changes[name] for name in changes if name in state}

    def backward(self, state: State, cell: StageRow) -> State:
        """A backward row."""
        changes, ends = self._turned(state, cell)
        y = [jnp.where(self._is_last(cell), end, down) for end, down in zip(ends, state["down"], strict=True)]
        kind = "deferred" if "deferred" in state else "inputs"
        run = partial(self._group.backward_alone if "deferred" in state else self._group.backward, cell)
        x, found = self._guarded(cell.active, run, y, state[kind], state["kept"], self.aux_cotangents)
        is_first = (cell.group == 0) & cell.active
        return changes | {kind: found, "down": x, "x": put(state["x"], x, is_first, cell.microbatch)}

    def weights(self, state: State, cell: StageRow) -> State:
        """A row of gradients of weights."""

        def run(sums: Inputs, deferred: Leaves) -> tuple[Inputs]:
            return (self._group.weights(cell, sums, deferred),)

        return {"inputs": self._guarded(cell.active, run, state["inputs"], state["deferred"])[0]}

    def _guarded(self, active: Any, run: Callable[..., Any], *given: Any) -> Any:
        """What `run` makes of the first arguments, as many as it returns; where a stage skips it, these."""
        if not self.skips:
            return run(*given)
        count = len(jax.eval_shape(run, *given))
        return lax.cond(active, lambda *given: tuple(run(*given)), lambda *given: given[:count], *given)

    def _sent(self, leaves: Leaves, step: int, ways: Sequence[Links], trip: Any) -> Leaves:
        """What the stage before (or, with -1, after) has, over the links of the trip, or of all trips.

        All devices choose alike, so that each permute has all of them.
        """

        def over(links: Links, leaves: Leaves) -> Leaves:
            pairs = [((stage - 1) % self.table.stages, stage)[::step] for stage in sorted(links)]
            return [lax.ppermute(x, self.axis, pairs) for x in leaves] if pairs else leaves

        branches = [partial(over, links) for links in ways]
        return branches[0](leaves) if len(ways) == 1 else lax.switch(trip, branches, leaves)

    def _is_last(self, cell: StageRow) -> Any:
        return (cell.group == self.grouping.groups - 1) & cell.active

    def _turned(self, state: State, cell: StageRow) -> tuple[State, Leaves]:
        """What changes, and the cotangents of the last group's results."""
        if self.head is None:
            return {}, [at(leaf, cell.microbatch) for leaf in self.cotangents]
        is_last, y = self._is_last(cell), [at(leaf, cell.result) for leaf in state["results"]]
        if self.skips:
            none = zeros(types_of(partial(self._loss_and_cotangents, cell), y))
            loss, aux, ends, found = lax.cond(is_last, partial(self._loss_and_cotangents, cell), lambda _: none, y)
        else:
            loss, aux, ends, found = self._loss_and_cotangents(cell, y)
        sums = state["loss_inputs"]
        constants = added(sums.constants, found.constants, is_last)
        extra = put(sums.extra, found.extra, is_last, cell.microbatch)
        inputs = Inputs(constants, [], extra, [])
        return {"loss_inputs": inputs, **self._with_loss(state, cell, loss, aux)}, ends

    def _with_loss(self, state: State, cell: StageRow, value: Any, aux: Leaves) -> State:
        """The mean so far, and auxiliary results."""
        is_last = self._is_last(cell)
        mean = state["loss"] + jnp.where(is_last, value, 0).astype(state["loss"].dtype) / self.table.microbatches
        kept = put(state["loss_aux"], aux, is_last, cell.microbatch) if "loss_aux" in state else []
        return {"loss": mean, "loss_aux": kept} if kept else {"loss": mean}

    def _loss_inputs(self, cell: StageRow) -> Inputs:
        assert self.head is not None
        given = self.head.given
        return Inputs(given.constants, [], [at(leaf, cell.microbatch) for leaf in given.extra], [])

    def _loss(self, cell: StageRow, y: Leaves) -> tuple[Any, Leaves]:
        assert self.head is not None
        (value, *aux), _ = self.head.passes.forward(y, self._loss_inputs(cell))
        return value, aux

    def _loss_and_cotangents(self, cell: StageRow, y: Leaves) -> tuple[Any, Leaves, Leaves, Inputs]:
        assert self.head is not None
        inputs, head = self._loss_inputs(cell), self.head
        (value, *aux), kept = head.passes.forward(y, inputs)
        turned = [head.cotangent, *(at(leaf, cell.microbatch) for leaf in head.aux_cotangents)]
        ends, found = head.passes.backward(inputs, kept, turned)
        return value, aux, ends, found

    def _no_up(self) -> Leaves:
        return [zeros_of(at(leaf, 0)) for leaf in self.batch]

    def _no_down(self) -> Leaves:
        return inexact(self._no_up())

    def _no_outs(self) -> Leaves:
        return list(map(zeros_of, self.batch))

    def _no_x(self) -> Leaves:
        return inexact(self._no_outs())

    def _no_results(self) -> Leaves:
        return stacked(self._no_up(), self.slots.results)

    def _no_loss(self) -> Any:
        assert self.head is not None
        return sum_of(self.head.passes.outs[0])

    def _no_loss_aux(self) -> Leaves:
        assert self.head is not None
        return stacked(self.head.passes.outs[1:], self.table.microbatches)

    def _no_inputs(self) -> Inputs:
        given = self.given.inexact()
        return Inputs(*(list(map(sum_of, each)) for each in (given.constants, given.weights, given.extra, [])))

    def _no_loss_inputs(self) -> Inputs:
        assert self.head is not None
        given = self.head.given.inexact()
        return Inputs(list(map(sum_of, given.constants)), [], list(map(zeros_of, given.extra)), [])

    def _no_kept(self) -> Leaves:
        return stacked(self.passes.kept, self.slots.kept[Kind.FORWARD], self.grouping.depth)

    def _no_aux(self) -> Leaves:
        types = self.passes.outs[len(self.batch) :]
        return stacked(types, self.table.rounds, self.table.microbatches, self.grouping.depth)

    def _no_deferred(self) -> Leaves:
        return stacked(self.passes.deferred, self.slots.kept[Kind.BACKWARD], self.grouping.depth)


_ROWS: dict[Kind, Callable[[Executor, State, StageRow], State]] = {
    Kind.FORWARD: Executor.forward,
    Kind.BACKWARD: Executor.backward,
    Kind.WEIGHTS: Executor.weights,
}


Columns = list[np.ndarray[Any, Any]]


def columns_of(slots: Slots, table: Timetable, cycles: Sequence[Cycle]) -> list[Columns]:
    """The columns of parts of a table: per cycle, for each loop of a turn, an array of shape (turns, trips, stages,
    rows of a trip, columns)."""
    by_row = dict(zip(map(id, table.rows), slots.columns, strict=True))

    def of_loop(loop: Loop) -> Any:
        return [[[astuple(columns) for columns in by_row[id(row)]] for row in trip] for trip in loop.trips]

    def of_loops(loops: Sequence[Loop]) -> np.ndarray[Any, Any]:
        return np.asarray(list(map(of_loop, loops)), np.int32).swapaxes(2, 3)

    return [list(map(of_loops, zip(*cycle.turns, strict=True))) for cycle in cycles]


def zeros(types: Any) -> Any:
    """Zeros of some types."""
    return jax.tree.map(zeros_of, types)
