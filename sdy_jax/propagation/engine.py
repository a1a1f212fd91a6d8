"""The fixed point: which ops are propagated, in which order.

Order matters wherever shardings compete, so it is that of Shardy: one sweep over the program, in which an update puts
the ops next to it on top of the stack of those still to visit. A place is a number (`places.py`), a sharding is a
number (`solver.py`); the module is read before and written after, once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sdy_jax.graph import Graph, Op, Value
from sdy_jax.propagation.basic import Direction
from sdy_jax.propagation.groups import group_members, peers
from sdy_jax.propagation.items import Item, ItemFactory
from sdy_jax.propagation.liveness import Liveness
from sdy_jax.propagation.places import NOWHERE, Places
from sdy_jax.propagation.priorities import LEVELS, level_directions
from sdy_jax.propagation.record import Recorder, Spread, Step
from sdy_jax.propagation.solver import STRATEGIES, Solution, Solver, Strategy
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.rules.dataflow import EdgeKind

_TERMINATORS = frozenset({"func.return", "stablehlo.return", "sdy.return"})
_BOTH = (Direction.BOTH, Direction.BOTH)


class Engine:
    """Propagation in one graph.

    Invariant between steps: `self._current[place]` is the number of the place's sharding.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        strategy: str = "aggressive",
        op_priorities: bool = True,
        conservative: bool = False,
        compat: str | None = None,
        recorder: Recorder | None = None,
    ):
        self._ops = graph.ops
        self._strategies = STRATEGIES[strategy]
        self._levels: tuple[int | None, ...] = tuple(range(LEVELS)) if op_priorities else (None,)
        self._recorder = recorder
        self.places = Places(graph, compat)
        self._solver = Solver(graph.meshes, explain=recorder is not None)
        factory = ItemFactory(graph, self.places, self._solver, conservative, compat)
        items = [factory.item_of(op) for op in graph.ops]
        self._items = items
        self._number = {op: i for i, op in enumerate(graph.ops)}
        self._result_items = factory.results_of_main()
        self._peers = peers([[self.places.of(v) for v in members] for members in group_members(graph)])
        self._given = [self._solver.shardings.number(s) for s in self.places.read()]
        self._current = list(self._given)
        self._slots = self._edge_slots()
        self._neighbours: dict[int, tuple[int, ...]] = {}
        self.liveness = Liveness()
        self._level: int | None = None
        self.priority = 0

    # Shardings by place.

    def sharding(self, place: int) -> TensorSharding | None:
        return self._solver.shardings[self._current[place]]

    def assign(self, place: int, sharding: TensorSharding | None) -> None:
        self._current[place] = self._solver.shardings.number(sharding)

    def write_back(self) -> None:
        """Stores what has changed in the graph and its module; dead ops keep what they had."""
        for place, (old, new) in enumerate(zip(self._given, self._current, strict=True)):
            where = self.places.places[place]
            if old != new and not (isinstance(where, Value) and where.owner in self.liveness.dead):
                self.places.write(place, self._solver.shardings[new])
        self._given = list(self._current)

    # Fixed points.

    def run(self) -> None:
        """All levels, one fixed point each."""
        for level in self._levels:
            self._level = level
            for strategy in self._strategies:
                self._propagate_results(strategy)
                self._sweep(strategy)
                self._propagate_results(strategy)

    def _propagate_results(self, strategy: Strategy) -> None:
        for item in self._result_items:
            for _ in self._propagate(item, strategy):
                pass  # no worklist is running, so there is nobody to tell

    def _sweep(self, strategy: Strategy) -> None:
        stack = list(range(len(self._ops) - 1, -1, -1))
        waiting = bytearray(b"\x01") * len(stack)
        dead, is_dead = self.liveness.dead, self.liveness.is_dead
        while stack:
            number = stack.pop()
            waiting[number] = 0
            op = self._ops[number]
            if op in dead:
                continue
            if is_dead(op):
                self._push([self._number[o] for o in self.liveness.erase(op)], -1, stack, waiting)
                continue
            item = self._items[number]
            if item is not None:
                for place in self._propagate(item, strategy):
                    self._push(self._neighbours_of(place), number, stack, waiting)

    def _push(self, numbers: Iterable[int], current: int, stack: list[int], waiting: bytearray) -> None:
        for number in numbers:
            if number != current and not waiting[number]:
                waiting[number] = 1
                stack.append(number)

    # One op.

    def _propagate(self, item: Item, strategy: Strategy) -> Iterator[int]:
        """Propagates one op. Yields each place that it changed, right after storing the new sharding there."""
        current = self._current
        tensors = tuple([current[p] for p in item.places])
        if not any(tensors):
            return
        directions = self._directions(item)
        if not any(directions):
            return
        if item.view is not None:
            seen = item.view.seen(self._solver.shardings[tensors[-1]])
            tensors = (*tensors[:-1], self._solver.shardings.number(seen))
        solution = self._solver.solve(item.kind, tensors, directions, strategy)
        if not solution.updates:
            return
        if self._recorder is not None:
            self._record(item, solution)
        for tensor, new in solution.updates:
            place = item.places[tensor]
            if place == NOWHERE:
                continue
            current[place] = self._stored(item, new) if tensor == len(tensors) - 1 else new
            yield place
            for peer in self._peers.get(place, ()):
                current[peer] = new
                yield peer

    def _stored(self, item: Item, new: int) -> int:
        if item.view is None:
            return new
        sharding = self._solver.shardings[new]
        assert sharding is not None
        return self._solver.shardings.number(item.view.stored(sharding))

    def _directions(self, item: Item) -> tuple[Direction, Direction]:
        if item.fixed is not None:
            return item.fixed, item.fixed
        if self._level is None:
            return _BOTH
        single = self._level > 0 or all(self.liveness.uses(v) == 1 for v in item.counted)
        return level_directions(self._level, item.early, item.is_broadcast, single)

    def _record(self, item: Item, solution: Solution) -> None:
        assert self._recorder is not None
        places = [self.places.places[p] for p in item.places]
        spreads = tuple(
            Spread(s.factor, s.axes, None if s.source is None else places[s.source], target)
            for s in solution.spreads
            if (target := places[s.target]) is not None
        )
        written = tuple(
            (place, sharding)
            for tensor, new in solution.updates
            if (place := places[tensor]) is not None and (sharding := self._solver.shardings[new]) is not None
        )
        self._recorder.step(Step(item.op, self._level or 0, self.priority, spreads, written))

    # Who has to look again when a place changes.

    def _edge_slots(self) -> dict[tuple[Op, int], Op]:
        """The edge op at each place where values flow into an edge; operands of computations are not among them."""
        return {
            slot: edge.op
            for edge in self.places.edges.values()
            if edge.edge.kind is EdgeKind.RESULT
            for slot in edge.edge.slots
        }

    def _neighbours_of(self, place: int) -> tuple[int, ...]:
        if place not in self._neighbours:
            where = self.places.places[place]
            found = self._touched(where) if isinstance(where, Value) else iter(())
            numbers = (self._number[op] for op in found)
            self._neighbours[place] = tuple(n for n in numbers if self._items[n] is not None)
        return self._neighbours[place]

    def _touched(self, value: Value) -> Iterator[Op]:
        """The ops to visit after a change of `value`, in the order in which they are put on the stack."""
        op = value.defining_op
        if op is None:
            yield from self._users(value)
            return
        edge = self.places.edges.get(op)
        if edge is not None:
            for target in edge.edge.targets:
                if target is not edge.edge.owner:
                    yield from self._users(target)
        yield op
        yield from self._users(value)

    def _users(self, value: Value) -> Iterator[Op]:
        for use in value.uses:
            edge_op = self._slots.get(use)
            user = use[0]
            if edge_op is not None:
                yield edge_op
            elif user.name not in _TERMINATORS:
                yield user
            elif user.parent is not None:
                yield user.parent
