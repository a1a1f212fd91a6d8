"""The executor of tables: loops over parts of a table, in which stages compute and send along the mesh axis.

It runs in the body of a `shard_map` that is manual on the axis alone. All stages run the same code in lockstep. A stage
that has nothing to do in a row computes all the same, and what it makes is dropped: along other axes the work of layers
may hold collectives, and a permute in which some devices of the mesh take no part never ends on CPUs (jaxlib 0.10.2).
Where a stage is one device, it does skip.

A trip of a loop begins by sending what the last forward row has made, which travels beside the trip's backward row;
what that makes is sent at once, and travels beside the trip's forward row. Over which links rows send, and in which
loops they are, `schedules.loops` says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sdy_jax.pipelines.buffers import added, at, put, stacked, sum_of
from sdy_jax.pipelines.explicit_types import zeros_of
from sdy_jax.pipelines.group_passes import Cell, Grouping, GroupPasses
from sdy_jax.pipelines.jaxprs import types_of
from sdy_jax.pipelines.layer_passes import Inputs, LayerPasses, Leaves, inexact
from sdy_jax.pipelines.schedules.loops import Cycle, Links, Loop
from sdy_jax.pipelines.schedules.marks import scope_of
from sdy_jax.pipelines.schedules.tables import Kind, Table
from sdy_jax.pipelines.slots import Slots

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
    table: Table
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
            with jax.named_scope(scope_of(Kind.FORWARD)):
                state = sent("up", Kind.FORWARD, 1)
        for i, kind in enumerate(kinds):
            cell = Cell(rows[i, 0] != 0, *(rows[i, j] for j in range(1, rows.shape[1])))
            with jax.named_scope(scope_of(kind)):
                state = state | _ROWS[kind](self, state, cell)
                if kind is Kind.BACKWARD:
                    state = sent("down", kind, -1)
        return (state, trip + 1), None

    @property
    def _group(self) -> GroupPasses:
        return GroupPasses(self.passes, self.grouping, self.given)

    def forward(self, state: State, cell: Cell) -> State:
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

    def backward(self, state: State, cell: Cell) -> State:
        """A backward row."""
        changes, ends = self._turned(state, cell)
        y = [jnp.where(self._is_last(cell), end, down) for end, down in zip(ends, state["down"], strict=True)]
        kind = "deferred" if "deferred" in state else "inputs"
        run = partial(self._group.backward_alone if "deferred" in state else self._group.backward, cell)
        x, found = self._guarded(cell.active, run, y, state[kind], state["kept"], self.aux_cotangents)
        is_first = (cell.group == 0) & cell.active
        return changes | {kind: found, "down": x, "x": put(state["x"], x, is_first, cell.microbatch)}

    def weights(self, state: State, cell: Cell) -> State:
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

    def _is_last(self, cell: Cell) -> Any:
        return (cell.group == self.grouping.groups - 1) & cell.active

    def _turned(self, state: State, cell: Cell) -> tuple[State, Leaves]:
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

    def _with_loss(self, state: State, cell: Cell, value: Any, aux: Leaves) -> State:
        """The mean so far, and auxiliary results."""
        is_last = self._is_last(cell)
        mean = state["loss"] + jnp.where(is_last, value, 0).astype(state["loss"].dtype) / self.table.microbatches
        kept = put(state["loss_aux"], aux, is_last, cell.microbatch) if "loss_aux" in state else []
        return {"loss": mean, "loss_aux": kept} if kept else {"loss": mean}

    def _loss_inputs(self, cell: Cell) -> Inputs:
        assert self.head is not None
        given = self.head.given
        return Inputs(given.constants, [], [at(leaf, cell.microbatch) for leaf in given.extra], [])

    def _loss(self, cell: Cell, y: Leaves) -> tuple[Any, Leaves]:
        assert self.head is not None
        (value, *aux), _ = self.head.passes.forward(y, self._loss_inputs(cell))
        return value, aux

    def _loss_and_cotangents(self, cell: Cell, y: Leaves) -> tuple[Any, Leaves, Leaves, Inputs]:
        assert self.head is not None
        inputs, head = self._loss_inputs(cell), self.head
        (value, *aux), kept = head.passes.forward(y, inputs)
        turned = [head.cotangent, *(at(leaf, cell.microbatch) for leaf in head.aux_cotangents)]
        ends, found = head.passes.backward(inputs, kept, turned)
        return value, aux, ends, found

    def _no_up(self) -> Leaves:
        return [zeros_of(leaf[0]) for leaf in self.batch]

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


_ROWS: dict[Kind, Callable[[Executor, State, Cell], State]] = {
    Kind.FORWARD: Executor.forward,
    Kind.BACKWARD: Executor.backward,
    Kind.WEIGHTS: Executor.weights,
}


Columns = list[np.ndarray[Any, Any]]


def columns_of(slots: Slots, table: Table, cycles: Sequence[Cycle]) -> list[Columns]:
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
