"""The baseline from which a program is planned, op by op; and a planned program's model again, to say why it is so."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from jax.extend.mlir import ir

from sdy_jax.base.errors import InternalError
from sdy_jax.ir.collectives import COLLECTIVE_OPS
from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.ir.meshes import AxisRef
from sdy_jax.ir.operations import CONSTRAINTS, copied
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.lowering.planner.facts.factors import cuts_of, stated_at_manual
from sdy_jax.lowering.planner.facts.loops import executions
from sdy_jax.lowering.planner.placement.program_placement import ProgramPlacement
from sdy_jax.lowering.planner.problem.candidates import MOST_ATOMS, Candidate, Openness, layouts_of_shape
from sdy_jax.lowering.planner.problem.layout_plan import PlacedProgram
from sdy_jax.lowering.planner.problem.op_problem import flops_per_operation, work_done
from sdy_jax.lowering.planner.problem.planning_problem import planning_problem
from sdy_jax.lowering.planner.problem.program_model import Chosen, Port
from sdy_jax.lowering.planner.rewrites.preparation import prepared
from sdy_jax.lowering.planner.setting import Setting
from sdy_jax.lowering.planner.solve.certificate import Term
from sdy_jax.lowering.planner.solve.moves import everything, moves_of

# The baseline from which a program is planned: op by op, along parts of mesh axes that are few enough.

_LARGE = 10_000
"""Ops from which on a program is planned along whole axes. Measured (2026-11, `scripts/bench_models`): 32 layers of an
8B model that are no loop have 28,900, and take 17 and 9 s of planning on 64 GPUs for 26 and 13, to equal plans; with
layouts that are chosen, 0.98 of the time on 256 chips, in two thirds of the planning. One layer has 900."""

MOST_PLANNED = 5
"""Axes, or parts of axes, up to which a program is planned as a whole, from more than `MOST_ATOMS` on where it repeats
much work op by op. Measured (2026-11, `scripts/bench_models`): two layers of Mixtral on five axes of v5p take 0.58 of
the time, and three minutes of planning on a busy machine, for six seconds."""

_MUCH_REPEATED = 1e-3
"""Seconds of a step, on products that others compute as well, from which on that is much. Chosen: then minutes of
planning are won back in 100,000 steps."""


def is_large(graph: Graph) -> bool:
    """Whether a program has so many ops that it is planned along whole axes, as far as it states no parts."""
    return len(graph.ops) >= _LARGE


class Baseline(NamedTuple):
    """A baseline, what it was made with, and the parts of mesh axes that it knows. `repeats`: whether devices take long
    for products that others compute, too, which is asked of those on more than `MOST_ATOMS`."""

    setting: Setting
    placed: PlacedProgram
    atoms: tuple[AxisRef, ...]
    repeats: bool = False

    @property
    def can_be_planned(self) -> bool:
        """Whether the program is on few enough axes, for what there is to gain."""
        return self.lists_all or (len(self.atoms) <= MOST_PLANNED and self.repeats)

    @property
    def lists_all(self) -> bool:
        """Whether it is on so few that all candidates are listed, not those near the baseline alone."""
        return len(self.atoms) <= MOST_ATOMS


def baseline_of(graph: Graph, setting: Setting) -> Baseline:
    """The baseline for a copy of a program.

    Of one that cuts axes into too many parts, or at all where the search is coarse or the program large, it is a
    baseline that cuts them where the program itself does, if that makes few enough.
    """
    is_coarse = setting.whole_axes or is_large(graph)
    if is_coarse and (along_whole := _along_whole_axes(graph, setting)) is not None:
        return along_whole  # where heads do not divide an axis, its parts take many times as long
    found = _baseline(graph, setting)
    if found.lists_all or is_coarse:
        return found
    along_whole = _along_whole_axes(graph, setting)
    return along_whole if along_whole and (along_whole.lists_all or not found.can_be_planned) else found


def _along_whole_axes(graph: Graph, setting: Setting) -> Baseline | None:
    """The baseline that cuts axes only where the program does; None where these are too many, or on another mesh."""
    stated = [*_stated_shardings(graph)]
    if any(sharding.mesh != setting.mesh_name for sharding in stated):
        return None
    found = _baseline(graph, replace(setting, cuts=cuts_of(stated, graph.meshes[setting.mesh_name])))
    return found if found.can_be_planned else None


def _baseline(graph: Graph, setting: Setting) -> Baseline:
    placed = ProgramPlacement(Graph(copied(graph.module)), setting).run()
    found = Baseline(setting, placed, placed.layouts.atoms(placed.mesh, setting.costs.major_parts))
    return found if found.lists_all else found._replace(repeats=_repeated(graph, found) > _MUCH_REPEATED)


def _repeated(graph: Graph, baseline: Baseline) -> float:
    """The seconds that a device takes for products beyond an equal share of all; 0 where costs are not in seconds."""
    costs, placed = baseline.setting.costs, baseline.placed
    if costs.unit != "seconds":
        return 0.0
    mesh, own, whole = placed.mesh, 0.0, 0.0
    for number, decision in placed.layouts.decided.items():
        if decision.kind.multiplies:
            times = executions(graph.ops[number]).estimate
            nowhere = [TensorSharding.replicated(s.mesh, s.rank) for s in decision.shardings]
            own += times * work_done(decision.kind, decision.shardings, mesh).operations
            whole += times * work_done(decision.kind, nowhere, mesh).operations
    return costs.work_time(own - whole / mesh.size, 0.0)


def _stated_shardings(graph: Graph) -> Iterator[TensorSharding]:
    """What the border, constraints, manual computations and the user's collectives state."""
    yield from (value.sharding for value in graph.arguments if value.sharding is not None)
    yield from (sharding for sharding in graph.result_shardings(graph.main) if sharding is not None)
    for op in graph.main.walk():
        if op.name in CONSTRAINTS | COLLECTIVE_OPS:
            yield from (value.sharding for value in op.results if value.sharding is not None)
        yield from stated_at_manual(op)


# A planned program looked at again, to say why it was planned so: its model, the choice, and what numbers mean.
#
# Planning keeps nothing but the choice, a number per node. The placement that made the baseline is deterministic, so
# the model is built once more when somebody asks.


class Reconsidered:
    """The model of a planned program, and its values by number.

    Args:
        module: what was partitioned, which is rewritten.
        chosen: `LayoutChoice.chosen`.
        setting: what it was planned with.
    """

    def __init__(self, module: ir.Operation, chosen: Sequence[int], setting: Setting):
        self._module = module  # handles of ops do not keep the module alive
        self.graph = prepared(module, setting)
        start = baseline_of(self.graph, setting)
        self._meshes, self.costs = start.placed.meshes, setting.costs
        ops, decided = self.graph.ops, start.placed.layouts.decided
        self._decided = {ops[number]: decision for number, decision in decided.items()}
        self.program = planning_problem(self.graph, start.placed, setting, start.atoms)
        self.model, self.start = self.program.model, self.program.start
        self.chosen: Chosen = list(chosen) or list(self.start)
        if len(self.chosen) != len(self.start):
            raise InternalError(f"a choice for {len(chosen)} nodes, of a program that has {len(self.start)}")
        self.moves = moves_of(self.program.table, self.program.atoms) or [everything()]
        self.values = dict(self._numbered())

    def _numbered(self) -> Iterator[tuple[int, Value]]:
        """The values by number. Values that only state another layout share their operand's."""
        for node, part in reversed(list(zip(self.model.nodes, self.program.parts, strict=True))):
            made = node.values[node.takes :]
            both = zip(made, part.makes, strict=False)  # the tie of a group is no value of the program
            yield from ((number, value) for number, value in both if number >= 0)

    def op(self, node: int) -> Op | None:
        """The op of a node; None for an argument."""
        return self.program.parts[node].op

    def flops(self, term: Term) -> float:
        """The floating-point operations, as people count them, of those that a term is about."""
        op = self.op(term.node)
        decision = self._decided.get(op) if op is not None else None
        return 0.0 if op is None or decision is None else term.operations * flops_per_operation(op, decision.kind)

    def made(self, number: int, choice: Sequence[int]) -> TensorSharding:
        """The layout in which a choice makes a value."""
        maker = self.model.values[number].maker
        assert maker is not None
        return self._layout(choice, maker)

    def taken(self, number: int, choice: Sequence[int]) -> list[TensorSharding]:
        """The layouts in which the users of a value take it, in order."""
        return [self._layout(choice, use) for use in self.model.values[number].uses]

    def _layout(self, choice: Sequence[int], port: Port) -> TensorSharding:
        return self.program.table.shardings[self.model.layout(choice, port)]

    def collectives(self, number: int, choice: Sequence[int]) -> list[str]:
        """The kinds of collectives that bring a value to its users."""
        (shape, itemsize, _, is_rounded), made = self.model.values[number].shape, self.made(number, choice)
        costs = self.costs.of_rounded if is_rounded else self.costs
        plans = [
            self._meshes.plan(shape, itemsize, made, target, costs)
            for target in dict.fromkeys(self.taken(number, choice))
            if not target.same_layout_as(made)
        ]
        return list(dict.fromkeys(step.kind for plan in plans for step in plan.steps if step.wire_bytes))

    @contextmanager
    def freed(self, candidates: Mapping[int, Sequence[Candidate]]) -> Iterator[None]:
        """Nodes may meanwhile have further candidates."""
        stated = {node: self.model.nodes[node].candidates for node in candidates}
        for node, others in candidates.items():
            self.model.nodes[node].candidates = [*stated[node], *others]
        try:
            yield
        finally:
            for node, own in stated.items():
                self.model.nodes[node].candidates = own

    def constraint_candidates(self, nodes: Iterable[int]) -> dict[int, list[Candidate]]:
        """The candidates of constraints if they could have any layout."""
        found = {}
        for node in nodes:
            slots = range(len(self.model.nodes[node].values))
            found[node] = [self._stating(node, layout, slots) for layout in self._layouts(node, 0)]
        return found

    def result_candidates(self, index: int) -> dict[int, list[Candidate]]:
        """The candidates of the program's end if one result could have any layout."""
        node = len(self.model.nodes) - 1
        return {node: [self._stating(node, layout, (index,)) for layout in self._layouts(node, index)]}

    def result_cost(self, index: int) -> float:
        """What it costs to bring a result to its layout, if nobody else took it there."""
        node = len(self.model.nodes) - 1
        number = self.model.nodes[node].values[index]
        if number < 0:
            return 0.0
        value = self.model.values[number]
        assert value.maker is not None
        made, taken = (self.model.layout(self.chosen, port) for port in (value.maker, Port(node, index)))
        return value.times * self.model.prices.cost(value.shape, made, taken)

    def _layouts(self, node: int, slot: int) -> list[int]:
        shape = self.model.values[self.model.nodes[node].values[slot]].shape.shape
        stated, (atoms, table) = Openness.of_rank(len(shape)), (self.program.atoms, self.program.table)
        return list(layouts_of_shape(shape, atoms, table, stated, summed=False, pads=False))

    def _stating(self, node: int, layout: int, slots: Collection[int]) -> Candidate:
        """The present candidate of a node, with a layout at some slots."""
        now = self.model.nodes[node].candidates[self.chosen[node]].layouts
        return Candidate(tuple(layout if slot in slots else known for slot, known in enumerate(now)), 0.0, 0.0)
