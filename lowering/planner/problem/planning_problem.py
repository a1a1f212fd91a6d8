"""A program's planning problem: its model, what nodes and values stand for, and how both are built.

See docs/explanation/planner.md#the-problem and docs/explanation/planner.md#candidates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sdy_jax.ir.graph import Block, Graph, Op, Value, group_of
from sdy_jax.ir.meshes import AxisRef
from sdy_jax.ir.operations import COMPUTATIONS, manual_axes
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.lowering.ops.registry import REMATERIALIZABLE, is_forwarding
from sdy_jax.lowering.planner.facts.fusion import (
    free_values,
    held_rounded,
    is_sum,
    rounded_values,
    sent_alone,
    sums_of,
)
from sdy_jax.lowering.planner.facts.loops import runs_of
from sdy_jax.lowering.planner.problem.candidates import Candidate, ConstraintCandidates, OpCandidates
from sdy_jax.lowering.planner.problem.layout_plan import FreeBorder, FreeEnd, PlacedLayouts, PlacedProgram
from sdy_jax.lowering.planner.problem.layout_table import LayoutTable, Prices, ValueClass
from sdy_jax.lowering.planner.problem.op_problem import Decision
from sdy_jax.lowering.planner.problem.program_model import Chosen, Port, ProgramModel
from sdy_jax.lowering.planner.setting import Setting
from sdy_jax.lowering.targets.cost_model import CostModel
from sdy_jax.shardy.propagation.data_flow import EdgeKind, edges_of, is_data_flow
from sdy_jax.shardy.rules.elementwise import is_elementwise

# A program as the planner sees it: its model, and what of the program the numbers of nodes and values stand for.
#
# See docs/explanation/planner.md#the-problem.

FREE = -1
"""In place of a value's number: it costs nothing in any layout."""


class Part(NamedTuple):
    """The part of a program that a node stands for.

    `slots`: what it takes, as operands of ops; `users`: per slot, the op for which that is taken. `makes`: the values
    that it makes. `block`: where it is. `until`: the number of its op, or of the last op before it.
    """

    slots: tuple[tuple[Op, int], ...]
    users: tuple[Op, ...]
    makes: tuple[Value, ...]
    block: Block
    until: int

    @property
    def op(self) -> Op | None:
        """The op that the node is, or to which it belongs; None for an argument of the program."""
        return self.slots[0][0] if self.slots else self.makes[0].defining_op if self.makes else None


@dataclass(eq=False, slots=True)
class PlanningProblem:
    """A program, its layouts in the baseline, and the planner's model of both.

    `atoms`: the parts of mesh axes that are somewhere in a layout. `parts`: per node, what it stands for. `values`: the
    numbers of values, `FREE` where one has no price; `recomputed`: per use of what is made for each user alone, the
    number of its value; `unrounded`: of values that are rounded for products, the numbers of what sums take;
    `free_uses`: where values without a price are taken.

    The nodes of ops by the ops' numbers: `decided`, those with a rule; `constraints`, those that state a layout; and
    `edges`, by the index of the edge, too. The last layout of the edges in `made_outside` is that outside of a
    computation; of others the first one is. `free_ends`: arguments and results that may have any layout. `extents`: of
    data-flow ops, their first and last node. `most_operations`: those that one device may perform.
    """

    graph: Graph
    baseline: PlacedLayouts
    table: LayoutTable
    atoms: tuple[AxisRef, ...]
    model: ProgramModel
    parts: list[Part] = field(default_factory=list)
    values: dict[Value, int] = field(default_factory=dict)
    recomputed: dict[tuple[Op, int], int] = field(default_factory=dict)
    unrounded: dict[Value, int] = field(default_factory=dict)
    free_uses: dict[Value, list[Port]] = field(default_factory=dict)
    decided: dict[int, int] = field(default_factory=dict)
    constraints: dict[int, int] = field(default_factory=dict)
    edges: dict[tuple[int, int], int] = field(default_factory=dict)
    made_outside: set[int] = field(default_factory=set)
    free_ends: list[FreeEnd] = field(default_factory=list)
    extents: dict[Op, tuple[int, int]] = field(default_factory=dict)
    most_operations: float = math.inf
    numbers: dict[Op, int] = field(init=False)

    def __post_init__(self) -> None:
        self.numbers = {op: number for number, op in enumerate(self.graph.ops)}

    @property
    def start(self) -> Chosen:
        """The baseline's choices."""
        return [0] * len(self.model.nodes)

    def saved(self, chosen: Chosen) -> float:
        """What a choice saves of what the baseline's costs."""
        return self.model.cost(self.start) - self.model.cost(chosen) if chosen != self.start else 0.0

    def leave_out_repeated_work(self) -> dict[int, list[Candidate]]:
        """Leaves nodes the candidates that repeat no work of products, which come first; those that had others, with
        all that they had."""
        every, left = dict[int, list[Candidate]](), dict[int, list[Candidate]]()
        for number, node in enumerate(self.model.nodes):
            if node.candidates[-1].repeats:
                every[number] = node.candidates
                if id(node.candidates) not in left:  # nodes share their lists
                    left[id(node.candidates)] = [candidate for candidate in node.candidates if not candidate.repeats]
                node.candidates = left[id(node.candidates)]
        return every

    def number(self, value: Value) -> int:
        """The number of a value; one that no node makes costs nothing in any layout."""
        return self.values.setdefault(value, FREE)

    def taken(self, op: Op, index: int) -> int:
        """The number of the value that an operand is."""
        value, use = op.operands[index], (op, index)
        if use in self.recomputed:
            return self.recomputed[use]
        return self.unrounded[value] if value in self.unrounded and is_sum(op) else self.number(value)

    def maker(self, number: int) -> int:
        """The node that makes a value; -1 if none does."""
        maker = self.model.values[number].maker
        return maker.node if maker is not None else -1

    def set_memory_multipliers(self, multipliers: Sequence[float]) -> None:
        """Sets the Lagrange multipliers of memory: what it costs to hold a byte while an op runs, per op by its number;
        at each node, the most of the ops since the node before."""
        before, found = -1, list[float]()
        for part in self.parts:
            found.append(max(multipliers[min(before + 1, part.until) : part.until + 1], default=0.0))
            before = part.until
        self.model.set_memory_multipliers(found)
        for end in self.free_ends:
            self._charge_border(end)

    def _charge_border(self, end: FreeEnd) -> None:
        """Sets what it costs to hold an argument and a result all the time."""
        model, node = self.model, self.model.nodes[end.node]
        always = model.memory_price(0, len(model.nodes) - 1) if model.charges_memory else 0.0
        sizes = [model.values[number].shape for number in node.values if number >= 0]
        if sizes:
            held = (
                [model.prices.local_bytes(sizes[0], layout) for layout in candidate.layouts]
                for candidate in node.candidates
            )
            node.candidates = [
                candidate._replace(cost=always * sum(each))
                for candidate, each in zip(node.candidates, held, strict=True)
            ]


# From a program and its baseline to the planner's model.
#
# Every op with a rule is a node with all candidates to run its kind; ops that leave no choice, constraints and the
# border are nodes with one candidate. Each data-flow edge is a node that takes its sources and makes its targets in
# one layout, so what a loop carries is chosen with the trip count on its inner side. Values that every device can
# compute have no price. See docs/explanation/planner.md#candidates.

_MORE_WORK = 0.02
"""The share of the baseline's operations that a program may perform more, where those that are no products cost next to
nothing: a model of time charges what they read and write. Guessed, as the 1.02 that `scripts/bench_bytes` allows: with
more, layer norms and updates are repeated on every device to save few bytes."""

_MOST_USERS, _WIDENING = 16, 4
"""What is recomputed for each user has at most so many, and is that many times as large as what it is made of, or as
large where that is an argument. Guessed, a guard: each user is one more node; what is wider is always worth it, and
what hardly widens costs its op again."""


def planning_problem(
    graph: Graph,
    placed: PlacedProgram,
    setting: Setting,
    atoms: tuple[AxisRef, ...],
    border: FreeBorder = FreeBorder(),  # noqa: B008 - immutable
) -> PlanningProblem:
    """The planning problem of a program.

    Args:
        graph, placed: the program, and what a placement made of a copy of it.
        setting: what it is planned with.
        atoms: the axes of its mesh, cut where the baseline cut them.
        border: the arguments and results that may have any layout.
    """
    costs, meshes = setting.costs, placed.meshes

    def price(
        costs: CostModel, shape: tuple[int, ...], itemsize: float, source: TensorSharding, target: TensorSharding
    ) -> float:
        return meshes.plan(shape, itemsize, source, target, costs).cost

    table = LayoutTable(meshes.base_name, meshes.base, placed.layouts.inverted(atoms))
    model = ProgramModel(Prices(table, costs, price, setting.target.arrays, setting.memo))
    program = PlanningProblem(graph, placed.layouts, table, atoms, model)
    _Builder(program, setting, border).read()
    if costs.flop and not costs.may_repeat:
        program.most_operations = (1 + _MORE_WORK) * program.model.operations(program.start)
    return program


class _Builder:
    """Adds nodes and values in program order."""

    def __init__(self, program: PlanningProblem, setting: Setting, border: FreeBorder):
        costs, pads = setting.costs, setting.policy.uneven == "pad"
        self._border, self._memo = border, setting.memo
        self._program, self._baseline, self._model = program, program.baseline, program.model
        self._costs, self._pads = costs, pads
        self._rounded = rounded_values(program.graph, costs)
        self._held_rounded = held_rounded(program.graph, self._rounded) if self._model.prices.arrays.rounds else ()
        self._alone = sent_alone(program.graph) if costs.combines else frozenset()
        self._candidates: dict[tuple[AxisRef, ...], OpCandidates] = {}
        self._made_twice: dict[tuple[int, tuple[int, ...]], tuple[list[Candidate], list[Candidate]]] = {}
        self._free_values = free_values(program.graph)
        self._stated = ConstraintCandidates(program.table, pads, stacks_sums=costs.unit == "seconds")
        self._ties = dict[int, int]()
        self._free = program.atoms
        """The atoms that are not manual here."""
        self._here, self._last = program.graph.main.blocks[0], 0

    def read(self) -> None:
        main = self._program.graph.main.blocks[0]
        for argument, sharding in zip(main.arguments, self._baseline.arguments, strict=True):
            if argument.shape is None:
                continue
            if argument.index in self._border.carried:
                self._new_value(argument, 1.0)
            elif argument.index in self._border.arguments:
                self._free_end(main, argument.index, None)
            else:
                self._fixed(None, [argument], [sharding], 1.0)
        self._block(main, 1.0)
        self._here = main
        for argument_index, result in self._border.carried.items():
            self._free_end(main, argument_index, result)
        for result in sorted(self._border.results - set(self._border.carried.values())):
            self._free_end(main, None, result)
        stated = [index for index in range(len(self._baseline.results)) if index not in self._border.results]
        slots = [(main.terminator, index) for index in stated]
        self._add([self._only_candidate([self._baseline.results[index] for index in stated])], 1.0, slots, [])

    def _free_end(self, main: Block, argument: int | None, result: int | None) -> None:
        """Adds an argument that may have any layout, a result, or both as one that comes back as it went in."""
        slots = [] if result is None else [(main.terminator, result)]
        makes = [] if argument is None else [main.arguments[argument]]
        taken = [] if result is None else [self._baseline.results[result]]
        made = [] if argument is None else [self._baseline.arguments[argument]]
        value = makes[0] if makes else main.terminator.operands[slots[0][1]]
        if argument is not None and result is None:
            self._new_value(value, 1.0)
        candidates = self._stated.of_border(value.shape or (), [*taken, *made], self._program.atoms)
        self._program.free_ends.append(FreeEnd(self._add(candidates, 1.0, slots, makes), argument, result))

    def _block(self, block: Block, times: float) -> None:
        for op in block.ops[:-1]:
            number = self._last = self._program.numbers[op]
            self._here = block
            if is_data_flow(op):
                self._data_flow(op, times)
            elif number in self._baseline.passed:
                self._program.values[op.results[0]] = self._program.number(op.operands[0])
            elif number in self._baseline.fixed and is_forwarding(op):
                self._constraint(op, self._baseline.fixed[number][-1], times)
            elif self._is_free(op, number):
                self._program.values.update(dict.fromkeys(op.results, FREE))
            elif number in self._baseline.fixed:
                self._fixed(op, op.results, self._baseline.fixed[number], times)
            elif number in self._baseline.decided:
                self._decide(op, self._baseline.decided[number], times)

    def _data_flow(self, op: Op, times: float) -> None:
        edges, baseline, first = edges_of(op), self._baseline.edges[self._program.numbers[op]], len(self._model.nodes)
        for target in (target for edge in edges for target in edge.targets):
            inside = isinstance(target.owner, Block)
            self._new_value(target, times * runs_of(op.blocks[-1]) if inside else times)
        outside, manual = self._free, manual_axes(op)
        self._free = tuple([atom for atom in outside if atom.name not in manual])
        for block in op.blocks:
            self._block(block, times * runs_of(block))
        assert op.block is not None
        self._here, self._free = op.block, outside
        for index, (edge, taken) in enumerate(zip(edges, baseline, strict=True)):
            candidates = self._stated.of_edge(op, edge, taken, self._free)
            node = self._program.edges[self._program.numbers[op], index] = self._add(
                candidates, times, edge.slots, edge.targets
            )
            if op.name in COMPUTATIONS and edge.kind is EdgeKind.RESULT:
                self._program.made_outside.add(node)
        self._program.extents[op] = first, len(self._model.nodes)

    def _constraint(self, op: Op, own: TensorSharding, times: float) -> None:
        """Adds an op that states a layout of its operand. Its users may take the value from before it, as placement
        does, but from the one layout of a group, and from one that is unreduced on demand."""
        (result,), group = op.results, group_of(op)
        if group is not None:
            self._new_value(result, times)
            candidates, makes, tie = self._stated.of_member(op, own, self._free), [result], self._tie(group, result)
        elif own.unreduced_axes:
            self._new_value(result, times)
            candidates, makes, tie = self._stated.of_constraint(op, own, self._free, makes=True), [result], None
        else:
            self._program.values[result] = self._program.taken(op, 0)
            candidates, makes, tie = self._stated.of_constraint(op, own, self._free, makes=False), [], None
        self._program.constraints[self._program.numbers[op]] = self._add(candidates, times, _slots(op), makes, tie=tie)

    def _tie(self, group: int, member: Value) -> int:
        """The number of what ties the members of a group: in which layout it is costs nothing, that it has one does."""
        if group not in self._ties:
            self._ties[group] = self._model.add_value(ValueClass(member.shape or (), 0.0), 1.0)
        return self._ties[group]

    def _is_free(self, op: Op, number: int) -> bool:
        """Whether each device makes the results of an op in whatever layout they are taken. Where a rewrite has put the
        op, which fixes its layout, constants alone, as a stack that all of a loop writes."""
        is_free = bool(op.results) and self._free_values.issuperset(op.results)
        return is_free and (number not in self._baseline.fixed or op.name == "stablehlo.constant")

    def _decide(self, op: Op, decision: Decision, times: float) -> None:
        candidates, slots = self._candidates_here().of(op, decision), _slots(op)
        for use in reversed(op.results[0].uses if _is_recomputed(op) else []):
            self._new_value(op.results[0], times)
            self._program.recomputed[use] = self._program.values[op.results[0]]
            self._program.decided[self._program.numbers[op]] = self._add(candidates, times, slots, op.results, [use[0]])
        if any(result in self._program.values for result in op.results):
            return
        for result in op.results:
            self._new_value(result, times)
        self._program.decided[self._program.numbers[op]] = self._add(candidates, times, slots, op.results)

    def _candidates_here(self) -> OpCandidates:
        if self._free not in self._candidates:
            own = self._costs, self._pads, self._memo
            self._candidates[self._free] = OpCandidates(self._program.table, self._free, *own)
        return self._candidates[self._free]

    def _fixed(self, op: Op | None, makes: Sequence[Value], shardings: Sequence[TensorSharding], times: float) -> None:
        """Adds an op, or an argument, that takes and makes values in these layouts and no others."""
        for value in makes:
            self._new_value(value, times)
        cost = self._candidates_here().sent(op, shardings) if op is not None else 0.0
        self._add([self._only_candidate(shardings, cost)], times, _slots(op) if op is not None else [], makes)

    def _only_candidate(self, shardings: Sequence[TensorSharding], cost: float = 0.0) -> Candidate:
        return Candidate(tuple(map(self._program.table.number, shardings)), cost, 0.0)

    def _add(
        self,
        candidates: list[Candidate],
        times: float,
        slots: Sequence[tuple[Op, int]],
        makes: Sequence[Value],
        users: Sequence[Op] = (),
        tie: int | None = None,
    ) -> int:
        """Adds a node that takes the operands at some slots, for other users than their ops if so said, and makes
        values; a member of a group, if it has a tie."""
        taken_for = tuple(users) or tuple(op for op, _ in slots)
        self._program.parts.append(Part(tuple(slots), taken_for, tuple(makes), self._here, self._last))
        takes = [self._program.taken(op, i) for op, i in slots]
        made = [self._program.values[value] for value in makes]
        if apart := [value for value in makes if value in self._program.unrounded]:
            made += [self._program.unrounded[value] for value in apart]
            candidates = self._twice(candidates, tuple(len(slots) + makes.index(value) for value in apart))
        if tie is None:
            node = self._model.add_node(candidates, times, takes, made)
        else:
            node = self._model.add_member(candidates, times, takes, made, tie)
        for slot, (op, i) in enumerate(slots):
            if takes[slot] == FREE:
                self._program.free_uses.setdefault(op.operands[i], []).append(Port(node, slot))
        return node

    def _new_value(self, value: Value, times: float) -> None:
        if value.shape is None:
            self._program.values[value] = FREE
            return
        shape = ValueClass(value.shape, value.itemsize, value in self._alone, value in self._rounded)
        self._program.values[value] = number = self._model.add_value(shape, times)
        self._model.values[number].is_held_rounded = value in self._held_rounded
        if shape.is_rounded and sums_of(value):
            whole = shape._replace(is_rounded=False)
            self._program.unrounded[value] = self._model.add_value(whole, times)

    def _twice(self, candidates: list[Candidate], slots: tuple[int, ...]) -> list[Candidate]:
        """Candidates that make what they make at some slots twice; one list for all nodes with the same candidates."""
        key = id(candidates), slots
        if key not in self._made_twice:
            twice = [
                candidate._replace(layouts=(*candidate.layouts, *(candidate.layouts[n] for n in slots)))
                for candidate in candidates
            ]
            self._made_twice[key] = candidates, twice  # with the list itself, so that no other one gets its id
        return self._made_twice[key][1]


def _slots(op: Op) -> list[tuple[Op, int]]:
    return [(op, index) for index in range(len(op.operands))]


def _is_recomputed(op: Op) -> bool:
    """Whether an op had better run for each of its users alone than have its result moved: it widens what it takes, or
    only turns an argument around. What it makes smaller, as a weight that is rounded, is sent once for all users."""
    if len(op.results) != 1 or len(op.operands) != 1 or not 2 <= len(op.results[0].uses) <= _MOST_USERS:
        return False
    operand, result = op.operands[0], op.results[0]
    if op.name not in REMATERIALIZABLE and not is_elementwise(op):
        return False
    given = isinstance(operand.owner, Block) and operand.owner.parent.name == "func.func"
    return result.bytes >= (1 if given else _WIDENING) * operand.bytes
