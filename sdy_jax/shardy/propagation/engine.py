"""The entry to propagation, by the user's priorities; its fixed point, the order of ops, the record of its steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.ir.meshes import AxisRef, Mesh, sort_axes
from sdy_jax.ir.shardings import CLOSED, OpShardingRule, TensorSharding
from sdy_jax.ir.stored_shardings import mesh_of
from sdy_jax.shardy.propagation.factors import Spread
from sdy_jax.shardy.propagation.solver import (
    FACTOR_STRATEGIES,
    LEVELS,
    NEITHER_WAY,
    NO_SHARDING,
    WITHOUT_LEVELS,
    Directions,
    FactorStrategy,
    Solver,
    Updates,
)
from sdy_jax.shardy.propagation.worklist import (
    NO_VALUE,
    EntryFactory,
    Liveness,
    Neighbours,
    ValueIds,
    WorklistEntry,
    peers,
)
from sdy_jax.shardy.rules import RuleBook

# The record of a propagation, from which `why` and the debug-info pass explain the sharding of a value.
#
# The engine records one `Event` for each successful propagation of an op; `explanations.py` derives steps from them
# later.

Event = tuple["WorklistEntry", tuple[int, ...], Any, Any, int, int]
"""One successful propagation of one op: the entry, the numbers of its tensors' shardings before, directions, strategy,
level and user priority."""


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One successful propagation of one op.

    `number` counts from 0; `level` is the op priority (0 to 4), `priority` the user priority. `tensors` are the value
    ids of operands and results (0: a value that cannot have a sharding), `before` their shardings as the op saw them,
    `written` the tensors that changed with the shardings that were stored.
    """

    number: int
    entry: WorklistEntry
    level: int
    priority: int
    rule: OpShardingRule
    before: tuple[TensorSharding | None, ...]
    spreads: tuple[Spread, ...]
    written: tuple[tuple[int, TensorSharding], ...]

    @property
    def op(self) -> Op:
        return self.entry.op

    @property
    def tensors(self) -> tuple[int, ...]:
        return self.entry.value_ids

    @property
    def num_operands(self) -> int:
        return len(self.rule.operand_mappings)


# The fixed point of propagation, and the order in which it visits ops.
#
# The order decides between competing shardings, so it is that of Shardy: one sweep over the program, in which an
# update puts the neighbouring ops on top of the worklist, a stack. Values and shardings are numbers here
# (`worklist.py`, `solver.py`); the module is read once before, and written once after. See
# docs/explanation/propagation.md#the-fixed-point.


class Engine:
    """Propagation in one graph.

    Sharding groups must have been imported (`sdy-sharding-group-import`), their members synchronised.

    Args:
      graph: of a module with data-flow edges; calls do not propagate.
      strategy: `"aggressive"`, `"basic"` or `"basic-then-aggressive"`.
      op_priorities: five fixed points in which more and more ops take part, instead of one.
      conservative: leave out factors along which a result's shard is not one operand's shard, and sub-axes.
      recorder: receives an event for each step.
      rules: a memo of the ops' rules, to share with other stages or with rules of Shardy's only; as conservative.

    Entries are numbered: those of ops by their position in the program, those of function results after them.
    Invariants between steps: `self._current[value_id]` is the number of the value's sharding; an entry `i` has a
    sharding only if `self._reached[i]`; to propagate it would change nothing in the directions `self._settled[i]`, nor,
    in this fixed point, unless `self._open[i]`. So only open entries are visited, in the order in which all of them
    would be.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        strategy: str = "aggressive",
        op_priorities: bool = True,
        conservative: bool = False,
        recorder: list[Event] | None = None,
        rules: RuleBook | None = None,
    ):
        self.graph, self._ops = graph, graph.ops
        self.strategies = FACTOR_STRATEGIES[strategy]
        self._levels = range(LEVELS) if op_priorities else (WITHOUT_LEVELS,)
        self._recorder = recorder
        self.value_ids = ValueIds(graph)
        self.solver = Solver(graph.meshes)
        rules = rules or RuleBook(conservative)
        factory = EntryFactory(graph, self.value_ids, self.solver, rules, conservative)
        self.entries = [factory.entry_of(op) for op in graph.ops]
        self.result_entries = factory.results_of_main()
        self._all: list[WorklistEntry | None] = [*self.entries, *self.result_entries]
        self._number = {op: i for i, op in enumerate(graph.ops)}
        self.peers = peers(graph, self.value_ids)
        self._given = [self.solver.shardings.number(s) for s in self.value_ids.read()]
        self._current = list(self._given)
        self._open = bytearray(len(self._all))
        self._reached = bytearray(len(self._all))
        self._settled: list[Directions | None] = [None] * len(self._all)
        self._readers = self._readers_by_id()
        for value_id, number in enumerate(self._current):
            if number != NO_SHARDING:
                self._store(value_id, number)
        self._siblings = self._unshared_results() if len(graph.meshes) > 1 else {}
        has_entry = {op: i for op, i in self._number.items() if self.entries[i] is not None}
        self._neighbours = Neighbours(graph, self.value_ids, has_entry)
        self.liveness = Liveness()
        self._unused = {number for number, op in enumerate(graph.ops) if self.liveness.is_dead(op)}
        self._level = WITHOUT_LEVELS
        self._strategy = self.strategies[0]
        self.priority = 0

    # Shardings.

    def sharding(self, value_id: int) -> TensorSharding | None:
        return self.solver.shardings[self._current[value_id]]

    def given(self, value_id: int) -> TensorSharding | None:
        """The sharding with which propagation began."""
        return self.solver.shardings[self._given[value_id]]

    def assign(self, value_id: int, sharding: TensorSharding | None) -> None:
        self._store(value_id, self.solver.shardings.number(sharding))

    def keep_free(self, value_id: int, axes: Sequence[AxisRef]) -> None:
        """Reserves axes at a border of a manual computation: dimensions of its edge get them at a later priority."""
        for reader in self._readers[value_id]:
            entry = self._all[reader]
            if entry is not None and entry.view is not None and entry.value_ids[-1] == value_id:
                self._all[reader] = entry._replace(view=entry.view.keeping(axes))

    def _store(self, value_id: int, number: int) -> None:
        self._current[value_id] = number
        for reader in self._readers[value_id]:
            self._open[reader] = self._reached[reader] = 1
            self._settled[reader] = None

    def write_back(self) -> None:
        """Stores what has changed in the graph and its module; dead ops keep what they had."""
        changed = (value_id for value_id, number in enumerate(self._current) if number != self._given[value_id])
        self.value_ids.write((value_id, self.sharding(value_id)) for value_id in changed if not self.is_dead(value_id))

    def is_dead(self, value_id: int) -> bool:
        """Whether the value belongs to a dead op."""
        where = self.value_ids.values[value_id]
        return isinstance(where, Value) and where.owner in self.liveness.dead

    # Fixed points.

    def run(self) -> None:
        """All levels, one fixed point each."""
        for level in self._levels:
            for strategy in self.strategies:
                self._fixed_point(level, strategy)

    def _fixed_point(self, level: int, strategy: FactorStrategy) -> None:
        if strategy is not self._strategy:
            self._settled = [None] * len(self._all)
        self._level, self._strategy = level, strategy
        self._open = bytearray(
            [
                reached and entry is not None and NEITHER_WAY != entry.directions[level] != settled
                for entry, reached, settled in zip(self._all, self._reached, self._settled, strict=True)
            ]
        )
        self._propagate_results()
        self._sweep()
        self._propagate_results()

    def _propagate_results(self) -> None:
        """No worklist is running, so that nobody is told of changes."""
        number = self._open.find(1, len(self._ops))
        while number >= 0:
            self._visit(number)
            number = self._open.find(1, number + 1)

    def _sweep(self) -> None:
        """Visits the ops in program order, and after each of them those that it put on the stack.

        Ops from `ahead` on still have their turn in program order, so they are not put on the stack.
        """
        count, ahead = len(self._ops), 0
        stack: list[int] = []
        waiting = bytearray(count)
        for unused in self._unused:
            self._open[unused] = 1
        while True:
            if stack:
                number = stack.pop()
                waiting[number] = 0
            else:
                number = self._open.find(1, ahead, count)
                if number < 0:
                    return
                ahead = number + 1
            if not self._open[number]:
                continue
            for neighbour in self._visit(number):
                if neighbour < ahead and neighbour != number and not waiting[neighbour]:
                    waiting[neighbour] = 1
                    stack.append(neighbour)

    # One op.

    def _visit(self, number: int) -> Iterable[int]:
        """Erases or propagates one op. Returns the ops to visit because of it, in the order in which they are put on
        the stack."""
        self._open[number] = 0
        if number in self._unused:
            return self._erase(number)
        entry = self._all[number]
        changed = () if entry is None else self._propagate(number, entry)
        return [neighbour for value_id in changed for neighbour in self._neighbours.of(value_id)] if changed else ()

    def _erase(self, number: int) -> list[int]:
        """Erases an unused op. Returns the producers of its operands that few or no other ops use."""
        self._unused.remove(number)
        op = self._ops[number]
        if op in self.liveness.dead:
            return []
        again = [self._number[o] for o in self.liveness.erase(op)]
        for inner in op.walk():
            self._all[self._number[inner]] = None
        for other in again:
            self._open[other] = 1
            if self.liveness.is_dead(self._ops[other]):
                self._unused.add(other)
        return again

    def _propagate(self, number: int, entry: WorklistEntry) -> Sequence[int]:
        """Propagates one op. Returns the value ids that it changed, in the order in which they were changed."""
        directions = entry.directions[self._level]
        if self._level == 0 and entry.counts_uses and not self._has_single_uses(entry.op):
            return ()
        current = self._current
        tensors = tuple([current[p] for p in entry.value_ids])
        if entry.view is not None:
            seen = entry.view.seen(self.solver.shardings[tensors[-1]])
            tensors = (*tensors[:-1], self.solver.shardings.number(seen))
        updates = self.solver.solve(entry.kind, tensors, directions, self._strategy)
        if not updates:
            self._settled[number] = directions
            return ()
        if self._recorder is not None:
            level = 0 if self._level == WITHOUT_LEVELS else self._level
            self._recorder.append((entry, tensors, directions, self._strategy, level, self.priority))
        return self._update(entry, updates)

    def _update(self, entry: WorklistEntry, updates: Updates) -> list[int]:
        changed = []
        for tensor, new in updates:
            value_id = entry.value_ids[tensor]
            if value_id == NO_VALUE:
                continue
            if tensor == len(entry.value_ids) - 1:
                new = self.stored(entry, new)
                if entry.view is not None and not self._has_as_much(value_id, new):
                    continue
            self._store(value_id, new)
            changed.append(value_id)
            for peer in self.peers.get(value_id, ()):
                self._store(peer, new)
                changed.append(peer)
        if self._siblings:
            for value_id in changed:
                self._fill_siblings(value_id)
        return changed

    def _fill_siblings(self, value_id: int) -> None:
        """An op has shardings for all of its results or for none: the others are on the same mesh, and open."""
        sharding = self.sharding(value_id)
        for sibling, rank in self._siblings.get(value_id, ()):
            if self._current[sibling] == NO_SHARDING and sharding is not None:
                self._store(sibling, self.solver.shardings.number(TensorSharding.fully_open(sharding.mesh, rank)))

    def _has_as_much(self, value_id: int, new: int) -> bool:
        """Whether a sharding splits as its value is split now, or further. At the border of a manual computation one
        with a manual axis behind a free one loses both: taken, it would be lost and found without end, as in jaxlib."""
        before, after = self.sharding(value_id), self.solver.shardings[new]
        if before is None or after is None:
            return True
        pairs = zip(before.dimensions, after.dimensions, strict=False)  # on one device there are none
        return all([b.name for b in old.axes] == [a.name for a in it.axes[: len(old.axes)]] for old, it in pairs)

    def stored(self, entry: WorklistEntry, new: int) -> int:
        if entry.view is None:
            return new
        sharding = self.solver.shardings[new]
        assert sharding is not None
        return self.solver.shardings.number(entry.view.stored(sharding))

    def _has_single_uses(self, op: Op) -> bool:
        """Whether each operand, scalars aside, has exactly one use."""
        return all(value.shape == () or self.liveness.uses(value) == 1 for value in op.operands)

    # Read once.

    def _readers_by_id(self) -> list[list[int]]:
        """Per value id, the entries that read it."""
        readers: list[list[int]] = [[] for _ in self.value_ids.values]
        for number, entry in enumerate(self._all):
            for value_id in entry.value_ids if entry is not None else ():
                readers[value_id].append(number)
        readers[NO_VALUE] = []
        return readers

    def _unshared_results(self) -> dict[int, list[tuple[int, int]]]:
        """Per result of an op with several, the other ones that have a value id of their own, with their ranks."""
        found: dict[int, list[tuple[int, int]]] = {}
        for op in self._ops:
            own = [
                (value_id, v.rank) for v in op.results if self.value_ids.values[value_id := self.value_ids.of(v)] is v
            ]
            for value_id, _ in own:
                found[value_id] = [other for other in own if other[0] != value_id]
        return found


# User priorities: dimensions of a lower priority wait until those of higher ones have spread.
#
# Before its turn, a dimension of priority p > 0 is empty and closed, and its axes are kept free on its tensor by
# being listed as replicated. Its turn gives the dimension back as the user wrote it. See
# docs/explanation/propagation.md#priorities-of-users.


def run_by_user_priority(engine: Engine) -> None:
    """Runs the engine once for priority 0, then once per further priority, in increasing order."""
    graph = engine.graph
    waiting: dict[int, list[tuple[int, TensorSharding]]] = {}
    anywhere = any(_has_priorities(sharding) for sharding in engine.solver.shardings)
    for value_id in _ids_in_order(graph, engine.value_ids) if anywhere else ():
        original = engine.sharding(value_id)
        if original is None or not _has_priorities(original):
            continue
        for priority in sorted({d.priority for d in original.dimensions if d.priority}):
            waiting.setdefault(priority, []).append((value_id, original))
        engine.assign(value_id, first_turn(original, mesh_of(graph.meshes, original)))
        engine.keep_free(value_id, _axes_after(original, 0))
    engine.run()
    for priority in sorted(waiting):
        engine.priority = priority
        for value_id, original in waiting[priority]:
            present = engine.sharding(value_id)
            if present is not None and not engine.is_dead(value_id):
                engine.assign(value_id, take_turn(present, original, priority))
                engine.keep_free(value_id, _axes_after(original, priority))
        engine.run()


def _has_priorities(sharding: TensorSharding) -> bool:
    return any(d.priority is not None for d in sharding.dimensions)


def _axes_after(sharding: TensorSharding, priority: int) -> list[AxisRef]:
    """The axes of the dimensions with a later priority."""
    return [axis for d in sharding.dimensions if (d.priority or 0) > priority for axis in d.axes]


def _ids_in_order(graph: Graph, value_ids: ValueIds) -> list[int]:
    """Per function its arguments, its results, then its ops; each value id once."""
    found: list[int] = []
    for name, function in graph.functions.items():
        found += [value_ids.of(a) for a in function.blocks[0].arguments]
        found += value_ids.results[name]
        found += [value_ids.of(v) for op in function.walk() for v in op.results]
    return [value_id for value_id in dict.fromkeys(found) if value_id != NO_VALUE]


def first_turn(sharding: TensorSharding, mesh: Mesh) -> TensorSharding:
    """The sharding as priority 0 sees it."""
    return replace(
        sharding,
        dimensions=tuple(CLOSED if d.priority else replace(d, priority=None) for d in sharding.dimensions),
        replicated_axes=sort_axes((*sharding.replicated_axes, *_axes_after(sharding, 0)), mesh),
    )


def take_turn(present: TensorSharding, original: TensorSharding, priority: int) -> TensorSharding:
    """`present` with the dimensions of this priority as they were given."""
    freed = {axis for d in original.dimensions if d.priority == priority for axis in d.axes}
    return replace(
        present,
        dimensions=tuple(
            replace(o, priority=None) if o.priority == priority else p
            for p, o in zip(present.dimensions, original.dimensions, strict=True)
        ),
        replicated_axes=tuple(axis for axis in present.replicated_axes if axis not in freed),
    )


# The entry to propagation.


def propagate(engine: Engine, *, user_priorities: bool = True) -> Engine:
    """Spreads the shardings of an engine's graph over all its values, and stores the new ones in it and its module.

    Args:
      engine: a new one.
      user_priorities: respect the priorities written in shardings; afterwards there are none.

    Returns:
      The engine in its final state; `engine.liveness.dead` are the ops that nothing uses.
    """
    if user_priorities:
        run_by_user_priority(engine)
    else:
        engine.run()
    engine.write_back()
    return engine
