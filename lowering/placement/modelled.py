"""From a program and the walk over it to the planner's model, and back from its choices to a plan for the next walk.

Every op with a rule is a node with all ways to run its kind; ops that leave no choice, constraints and the border are
nodes with one way. Each data-flow edge is a node that takes its sources and makes its targets in one layout, so what a
loop carries is chosen with the trip count on its inner side. Values that every device can compute have no price.
Source: spec of the planner, sections 2 to 7 and 13.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from sdy_jax.ir.graph import Block, Graph, Op, Value
from sdy_jax.ir.operations import COMPUTATIONS, manual_axes
from sdy_jax.ir.statements import group_of
from sdy_jax.lowering.placement.copies import HeldCopy, PlannedUse, UseOfCopy
from sdy_jax.lowering.placement.decisions import Decision
from sdy_jax.lowering.placement.live_bytes import can_fuse
from sdy_jax.lowering.placement.policy import Policy
from sdy_jax.lowering.placement.rematerialize import depends_on_no_input
from sdy_jax.lowering.placement.stated import StatedWays
from sdy_jax.lowering.placement.trips import trips
from sdy_jax.lowering.placement.walked import LayoutPlan, Walked
from sdy_jax.lowering.placement.ways import Ways
from sdy_jax.lowering.placement.written import is_written_collective
from sdy_jax.lowering.planning.choice import PlannedOp
from sdy_jax.lowering.planning.enumerated import Way
from sdy_jax.lowering.planning.layout_table import LayoutTable, Prices, ValueClass
from sdy_jax.lowering.planning.program_model import Chosen, CopyInLayout, ModelValue, Port, ProgramModel
from sdy_jax.lowering.planning.routes.prices import PairPrice
from sdy_jax.lowering.reshard.cost import CostModel
from sdy_jax.lowering.strategies.registry import REMATERIALIZABLE, is_forwarding
from sdy_jax.representation.mesh import AxisRef, Mesh
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.rules.dataflow import EdgeKind, edges_of, is_data_flow
from sdy_jax.rules.predicates import is_elementwise

_FREE = -1
"""In place of a value's number: it costs nothing in any layout."""

_MOST_USERS, _WIDENING = 16, 4
"""What is made anew for each user has at most so many, and is that many times as large as what it is made of."""


class Ends(NamedTuple):
    """What a node takes, as operands of ops, and the values that it makes."""

    slots: tuple[tuple[Op, int], ...]
    makes: tuple[Value, ...]

    @property
    def op(self) -> Op | None:
        """The op that the node is, or to which it belongs; None for an argument of the program."""
        return self.slots[0][0] if self.slots else self.makes[0].defining_op if self.makes else None


class ModelledProgram:
    """A program as the planner sees it. `start` are the walk's own choices."""

    def __init__(
        self,
        graph: Graph,
        walked: Walked,
        mesh_name: str,
        mesh: Mesh,
        costs: CostModel,
        price: PairPrice,
        policy: Policy,
    ):
        self._graph, self._walked, self._products_fuse = graph, walked, policy.products_fuse
        self._number = {op: n for n, op in enumerate(graph.ops)}
        self.table = LayoutTable(mesh_name, mesh)
        self.atoms = atoms_of(walked, mesh)
        self.model = ProgramModel(Prices(self.table, costs, price))
        self._values: dict[Value, int] = {}
        self._made_anew: dict[tuple[Op, int], int] = {}
        """Per use of what is made for each user alone, the number of its value."""
        self._free_uses: dict[Value, list[Port]] = {}
        """Where values are taken that every device can compute."""
        self._costs, self._pads = costs, policy.uneven == "pad"
        self._ways: dict[tuple[AxisRef, ...], Ways] = {}
        self._free = self.atoms
        """The atoms that are not manual here."""
        self._stated, self._ties = StatedWays(self.table, self._pads), dict[int, int]()
        self._decided: dict[int, int] = {}
        self._edges: dict[tuple[int, int], int] = {}
        self._constraints: dict[int, int] = {}
        self._made_outside = set[int]()
        """The edges whose last layout is that outside of a computation; of the others the first one is."""
        self._here, self._last = graph.main.blocks[0], 0
        self._block_of: list[Block] = []
        """Per node, the block that it is in."""
        self._ops_of: list[list[Op]] = []
        """Per node and operand, the op for which it is taken."""
        self._until: list[int] = []
        """Per node, the number of its op, or of the last op before it."""
        self._extents: dict[Op, tuple[int, int]] = {}
        """Of data-flow ops, their first and last node."""
        self.ends: list[Ends] = []
        """Per node, what it takes and makes."""
        self._read()
        self._place_uses()
        self.start: Chosen = [0] * len(self.model.nodes)

    # The program.

    def _read(self) -> None:
        main = self._graph.main.blocks[0]
        for argument, sharding in zip(main.arguments, self._walked.arguments, strict=True):
            if argument.shape is not None:
                self._fixed(None, [argument], [sharding], 1.0)
        self._block(main, 1.0)
        self._fixed(main.terminator, [], self._walked.results, 1.0)

    def _block(self, block: Block, times: float) -> None:
        for op in block.ops[:-1]:
            number = self._last = self._number[op]
            self._here = block
            if is_data_flow(op):
                self._data_flow(op, times)
            elif number in self._walked.passed:
                self._values[op.results[0]] = self._value(op.operands[0])
            elif number in self._walked.fixed and is_forwarding(op):
                self._constraint(op, self._walked.fixed[number][-1], times)
            elif number in self._walked.fixed:
                self._fixed(op, op.results, self._walked.fixed[number], times)
            elif number in self._walked.decided:
                self._decide(op, self._walked.decided[number], times)

    def _data_flow(self, op: Op, times: float) -> None:
        edges, walked, first = edges_of(op), self._walked.edges[self._number[op]], len(self.model.nodes)
        for target in (target for edge in edges for target in edge.targets):
            inside = isinstance(target.owner, Block)
            self._new_value(target, times * _trips(op) if inside else times)
        outside, manual = self._free, manual_axes(op)
        self._free = tuple([atom for atom in outside if atom.name not in manual])
        for block in op.blocks:
            self._block(block, times * _trips(op))
        assert op.block is not None
        self._here, self._free = op.block, outside
        for index, (edge, taken) in enumerate(zip(edges, walked, strict=True)):
            ways = self._stated.of_edge(op, edge, taken, self._free)
            node = self._edges[self._number[op], index] = self._add(ways, times, edge.slots, edge.targets)
            if op.name in COMPUTATIONS and edge.kind is EdgeKind.RESULT:
                self._made_outside.add(node)
        self._extents[op] = first, len(self.model.nodes)

    def _constraint(self, op: Op, own: TensorSharding, times: float) -> None:
        """Adds an op that states a layout of its operand. Its users may take the value from before it, as the walk
        does, but from the one layout of a group, and from one that is unreduced on demand."""
        (result,), group = op.results, group_of(op)
        if group is not None:
            self._new_value(result, times)
            ways, makes, tie = self._stated.of_member(op, own, self._free), [result], self._tie(group, result)
        elif own.unreduced_axes:
            self._new_value(result, times)
            ways, makes, tie = self._stated.of_constraint(op, own, self._free, makes=True), [result], None
        else:
            self._values[result] = self._taken(op, 0)
            ways, makes, tie = self._stated.of_constraint(op, own, self._free, makes=False), [], None
        self._constraints[self._number[op]] = self._add(ways, times, _slots(op), makes, tie=tie)

    def _tie(self, group: int, member: Value) -> int:
        """The number of what ties the members of a group: in which layout it is costs nothing, that it has one does."""
        if group not in self._ties:
            self._ties[group] = self.model.add_value((member.shape or (), 0.0), 1.0)
        return self._ties[group]

    def _decide(self, op: Op, decision: Decision, times: float) -> None:
        if all(depends_on_no_input(result) for result in op.results):
            self._values.update(dict.fromkeys(op.results, _FREE))
            return
        ways, slots = self._ways_here().of(op, decision), _slots(op)
        for use in reversed(op.results[0].uses if _is_made_anew(op) else []):
            self._new_value(op.results[0], times)
            self._made_anew[use] = self._values[op.results[0]]
            self._decided[self._number[op]] = self._add(ways, times, slots, op.results, [use[0]])
        if op.results[0] in self._values:
            return
        for result in op.results:
            self._new_value(result, times)
        self._decided[self._number[op]] = self._add(ways, times, slots, op.results)

    def _ways_here(self) -> Ways:
        if self._free not in self._ways:
            self._ways[self._free] = Ways(self.table, self._free, self._costs, self._pads)
        return self._ways[self._free]

    def _fixed(self, op: Op | None, makes: Sequence[Value], shardings: Sequence[TensorSharding], times: float) -> None:
        """Adds an op, or the border, that takes and makes values in these layouts and no others."""
        for value in makes:
            self._new_value(value, times)
        cost = self._ways_here().sent(op, shardings) if op is not None else 0.0
        ways = [Way(tuple(map(self.table.number, shardings)), cost, 0.0)]
        self._add(ways, times, _slots(op) if op is not None else [], makes)

    def _add(
        self,
        ways: list[Way],
        times: float,
        slots: Sequence[tuple[Op, int]],
        makes: Sequence[Value],
        users: Sequence[Op] = (),
        tie: int | None = None,
    ) -> int:
        """Adds a node that takes the operands at some slots, for other users than their ops if so said, and makes
        values; a member of a group, if it has a tie."""
        self._block_of.append(self._here)
        self._ops_of.append(list(users) or [op for op, _ in slots])
        self._until.append(self._last)
        self.ends.append(Ends(tuple(slots), tuple(makes)))
        takes = [self._taken(op, i) for op, i in slots]
        made = [self._values[value] for value in makes]
        if tie is None:
            node = self.model.add_node(ways, times, takes, made)
        else:
            node = self.model.add_member(ways, times, takes, made, tie)
        for slot, (op, i) in enumerate(slots):
            if takes[slot] == _FREE:
                self._free_uses.setdefault(op.operands[i], []).append(Port(node, slot))
        return node

    def _new_value(self, value: Value, times: float) -> None:
        known = value.shape is not None
        self._values[value] = self.model.add_value(_class(value), times) if known else _FREE

    def _taken(self, op: Op, index: int) -> int:
        """The number of the value that an operand is."""
        return self._made_anew.get((op, index), self._value(op.operands[index]))

    def _value(self, value: Value) -> int:
        """The number of a value; one that no node makes costs nothing in any layout."""
        return self._values.setdefault(value, _FREE)

    def _place_uses(self) -> None:
        """Says of each use from which node to which the value is needed for it: all of a loop, if the use is inside;
        what is fused reads its operands when its users run."""
        main, returned = self._graph.main.blocks[0], frozenset(self._graph.outputs)
        found = [*self._values.items(), *((op.operands[i], n) for (op, i), n in self._made_anew.items())]
        values = {number: value for value, number in reversed(found) if number != _FREE}
        anew, runs = set(self._made_anew.values()), [(node, node) for node in range(len(self.model.nodes))]
        for number in sorted(values, key=lambda number: self._maker(number), reverse=True):
            value, known = values[number], self.model.values[number]
            op, home = value.defining_op, value.owner if isinstance(value.owner, Block) else value.owner.block
            known.born = self._born(value, known)
            known.needed = [self._needed(use.node, runs[use.node], home, known.born) for use in known.uses]
            fused = op is not None and value not in returned and self._is_fused(op)
            known.is_at_hand = fused or (home is main and op is None)
            if not known.uses:
                continue
            begins, ends = zip(*known.needed, strict=True)
            if fused:
                runs[self._maker(number)] = min(begins), max(ends)
            elif number in anew:  # runs just before its user
                known.born, runs[self._maker(number)] = min(begins), (min(begins), min(begins))

    def _is_fused(self, op: Op) -> bool:
        """Whether the users of an op compute its result."""
        return can_fuse(op, self._products_fuse) and all(user.block is op.block for user, _ in op.results[0].uses)

    def _maker(self, number: int) -> int:
        maker = self.model.values[number].maker
        return maker.node if maker is not None else -1

    def _born(self, value: Value, known: ModelValue) -> int:
        """The node from which on a value is there: what a loop carries, from the first node inside."""
        block = value.owner
        if isinstance(block, Block) and block.parent in self._extents:
            return self._extents[block.parent][0]
        return known.maker.node if known.maker is not None else 0

    def _needed(self, node: int, extent: tuple[int, int], home: Block | None, born: int) -> tuple[int, int]:
        """From when to when what a node takes is needed, which it reads between two nodes of its own block; a loop
        reads what it carries on after its body has made it."""
        block = self._block_of[node]
        while block is not home and block.parent.block is not None:
            extent, block = self._extents.get(block.parent, extent), block.parent.block
        return max(extent[0], born), max(extent[1], born)

    def charge_holding(self, prices: Sequence[float]) -> None:
        """Sets what it costs to hold a byte while an op runs, per op by its number; at each node, the most of the ops
        since the node before."""
        before, found = -1, list[float]()
        for until in self._until:
            found.append(max(prices[min(before + 1, until) : until + 1], default=0.0))
            before = until
        self.model.charge_holding(found)

    # The plan.

    def plan(self, chosen: Chosen, copies: Mapping[PlannedUse, int] | None = None) -> LayoutPlan:
        """What a walk has to do to run the program so; `copies` as in the plan."""
        nodes, shardings = self.model.nodes, self.table.shardings
        ops = dict[int, PlannedOp]()
        for number, node in self._decided.items():
            way, decision = nodes[node].ways[chosen[node]], self._walked.decided[number]
            taken = tuple([shardings[layout] for layout in way.layouts])
            ops[number] = PlannedOp(taken, way.inside, way.strategy, decision.choice.gathered)
        edges = dict[int, list[TensorSharding]]()
        for (number, _), node in self._edges.items():
            layouts = nodes[node].ways[chosen[node]].layouts
            edges.setdefault(number, []).append(shardings[layouts[-1 if node in self._made_outside else 0]])
        return LayoutPlan(ops, dict(self._homes(chosen)), edges, copies or {}, tuple(chosen), dict(self._written()))

    def _written(self) -> Iterator[tuple[int, TensorSharding]]:
        """The layouts of operands of the user's collectives, which run as they do in the walk."""
        for number, shardings in self._walked.fixed.items():
            if is_written_collective(self._graph.ops[number]):
                yield number, shardings[0]

    def copies(self, chosen: Chosen) -> list[HeldCopy]:
        """The copies of values in other layouts that several ops use, and that could be made again for each."""
        anew = dict[Value, list[int]]()
        for (op, index), number in self._made_anew.items():
            anew.setdefault(op.operands[index], []).append(number)
        found = list[HeldCopy]()
        for value, number in self._values.items():
            if value in anew:
                found += self._copies_made_anew(value, anew[value], chosen)
            elif number != _FREE and (value.defining_op is not None or value.owner is self._graph.main.blocks[0]):
                copies = self.model.copies(self.model.values[number], chosen)
                found += [self._held_copy(value, copy) for copy in copies if len(copy.uses) > 1]
        return found

    def _held_copy(self, value: Value, copy: CopyInLayout) -> HeldCopy:
        maker, uses = value.defining_op, list[UseOfCopy]()
        for port in copy.uses:
            user = self._number[self._ops_of[port.node][port.slot]]
            known = self.model.values[self.model.nodes[port.node].values[port.slot]]
            begin, end = known.needed[known.uses.index(port)]
            planned = self._number[maker] if maker is not None else None, value.index, user
            uses.append(UseOfCopy(planned, self._until[begin], self._until[end]))
        return HeldCopy(uses, copy.bytes, copy.cost)

    def _copies_made_anew(self, value: Value, numbers: Sequence[int], chosen: Chosen) -> Iterator[HeldCopy]:
        """The copies of what is made anew for each use; those that are made and taken alike are one."""
        model, found = self.model, dict[tuple[int, int], list[ModelValue]]()
        for known in sorted(
            (model.values[n] for n in numbers if model.values[n].uses), key=lambda known: known.needed[0]
        ):
            assert known.maker is not None
            found.setdefault((model.layout(chosen, known.maker), model.layout(chosen, known.uses[0])), []).append(known)
        for (made, taken), each in found.items():
            maker = each[0].maker
            assert maker is not None
            own = model.nodes[maker.node].ways[chosen[maker.node]].cost
            cost = each[0].times * (own + model.prices.cost(each[0].shape, made, taken))
            uses = [known.uses[0] for known in each]
            if len(uses) > 1:
                yield self._held_copy(value, CopyInLayout(uses, model.prices.local_bytes(each[0].shape, taken), cost))

    def _homes(self, chosen: Chosen) -> Iterator[tuple[tuple[int, int], TensorSharding]]:
        """Per result of an op the layout in which several users expect it."""
        for number, node in self._constraints.items():
            layout = self.model.nodes[node].ways[chosen[node]].layouts[0]
            yield (number, 0), self.table.shardings[layout]
        for value, number in self._values.items():
            op = value.defining_op
            if op is None or (self._number[op] not in self._walked.decided and not is_data_flow(op)):
                continue
            if op.name in COMPUTATIONS:
                continue
            home = self._home(number, chosen) if number != _FREE else self._home_of_free(value, chosen)
            if home is not None:
                yield (self._number[op], value.index), home

    def _home_of_free(self, value: Value, chosen: Chosen) -> TensorSharding | None:
        """The layout in which most users take what every device can compute."""
        taken = [self.model.layout(chosen, port) for port in self._free_uses.get(value, ())]
        whole = [layout for layout in taken if not self.table.shardings[layout].unreduced_axes]
        return self.table.shardings[max(whole, key=whole.count)] if whole else None

    def _home(self, number: int, chosen: Chosen) -> TensorSharding:
        """The layout in which several users of a value expect it: the one in which it is made or, if that is unreduced,
        the one through which it goes to them most cheaply."""
        value, shardings = self.model.values[number], self.table.shardings
        assert value.maker is not None
        made = self.model.layout(chosen, value.maker)
        if not shardings[made].unreduced_axes:
            return shardings[made]
        wanted = sorted({self.model.layout(chosen, use) for use in value.uses} - {made})
        whole = [layout for layout in wanted if not shardings[layout].unreduced_axes]
        if not whole:  # nobody waits for the reduction
            return shardings[made]
        cost, spread = self.model.prices.cost, self.model.spread

        def through(layout: int) -> float:
            rest = frozenset(wanted) - {layout}
            return cost(value.shape, made, layout) + (spread(value.shape, layout, rest) if rest else 0.0)

        return shardings[min(whole, key=through)]


def _slots(op: Op) -> list[tuple[Op, int]]:
    return [(op, index) for index in range(len(op.operands))]


def _is_made_anew(op: Op) -> bool:
    """Whether an op had better run for each of its users alone than have its result moved: it widens what it takes, or
    only turns an argument around."""
    if len(op.results) != 1 or len(op.operands) != 1 or not 2 <= len(op.results[0].uses) <= _MOST_USERS:
        return False
    operand, result = op.operands[0], op.results[0]
    if op.name not in REMATERIALIZABLE and not is_elementwise(op):
        return False
    given = isinstance(operand.owner, Block) and operand.owner.parent.name == "func.func"
    return given or _bytes(result) >= _WIDENING * _bytes(operand)


def _bytes(value: Value) -> float:
    return math.prod(value.shape or ()) * value.itemsize


def _trips(op: Op) -> int:
    return trips(op) if op.name == "stablehlo.while" else 1


def _class(value: Value) -> ValueClass:
    return value.shape or (), value.itemsize


def atoms_of(walked: Walked, mesh: Mesh) -> tuple[AxisRef, ...]:
    """The mesh axes in mesh order, cut where the walk cut them."""
    edges = {axis.name: {1, axis.size} for axis in mesh.axes if axis.size > 1}
    shardings = itertools.chain(
        walked.arguments,
        walked.results,
        *(decision.shardings for decision in walked.decided.values()),
        *walked.fixed.values(),
        *itertools.chain(*walked.edges.values()),
    )
    for sharding in dict.fromkeys(shardings):
        for axis in itertools.chain(*sharding.axes, sharding.unreduced_axes):
            if axis.name in edges:
                edges[axis.name].update((axis.pre_size, axis.next_pre_size(mesh)))
    found = []
    for name, cuts in edges.items():
        for low, high in itertools.pairwise(sorted(cuts)):
            found.append(AxisRef.canonical(name, low, high // low, mesh))
    return tuple(found)
