"""The plan that a placement follows, the layouts that one made (the baseline), and choices without a search."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, combinations, pairwise
from typing import Literal, NamedTuple, Protocol

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Graph, Op
from sdy_jax.ir.meshes import Axes, AxisRef, Mesh, overlaps
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.lowering.planner.facts.factors import ProgramMeshes, cuts_of
from sdy_jax.lowering.planner.problem.op_problem import Decision, Shardings
from sdy_jax.lowering.planner.report import CollectiveRecord, PartitionReport
from sdy_jax.lowering.planner.setting import Setting
from sdy_jax.lowering.targets.axis_rates import with_cuts

# Arguments and results of a program whose layouts are left to the planner.


@dataclass(frozen=True, slots=True)
class FreeBorder:
    """Which arguments and results of the main function may have any layout.

    Attributes:
        arguments, results: their numbers.
        carried: arguments that come back as results, such as the weights of a training step: the layout in which they
            go in is that in which they come out.
    """

    arguments: frozenset[int] = frozenset()
    results: frozenset[int] = frozenset()
    carried: Mapping[int, int] = field(default_factory=dict)


class FreeEnd(NamedTuple):
    """The node of an argument, of a result, or of both."""

    node: int
    argument: int | None
    result: int | None


@dataclass(frozen=True, slots=True)
class BorderLayouts:
    """The layouts that the planner chose for arguments and results, by number."""

    arguments: Mapping[int, TensorSharding] = field(default_factory=dict)
    results: Mapping[int, TensorSharding] = field(default_factory=dict)


# The plan that a placement follows: layouts by the number of the op in the graph.

PlannedUse = tuple[int | None, int, int]
"""A use of a value: the number of the op that makes the value (None: an argument of the program), the index of its
result or of the argument, and the number of the op that uses it."""


@dataclass(frozen=True, slots=True)
class LayoutPlan:
    """What a placement is to follow: how ops run, the layouts of data-flow edges, and which copy of a value serves a
    use, where copies are freed and recomputed. `shared`: per result of an op, the layout in which several users expect
    it. `chosen`: the choice in the model of the program that says so. `user_collectives`: from which layout of its
    operand each of them runs. `border`: the layouts of arguments and results that may have any."""

    ops: Mapping[int, Decision]
    shared: Mapping[tuple[int, int], TensorSharding]
    edges: Mapping[int, list[TensorSharding]]
    copies: Mapping[PlannedUse, int] = field(default_factory=dict)
    chosen: tuple[int, ...] = ()
    user_collectives: Mapping[int, TensorSharding] = field(default_factory=dict)
    border: BorderLayouts = BorderLayouts()


# What a placement made of a program: the layouts in which each op takes and makes its values, and what it inserted.
#
# From that the whole program is planned. Ops are known by their number in the graph, which a copy of the module
# shares.


class EdgeLayouts(NamedTuple):
    """A data-flow edge: the layout in which values flow in and the one in which they come out."""

    sources: TensorSharding
    targets: TensorSharding


@dataclass(slots=True)
class PlacedLayouts:
    """The layouts in which each op takes and makes its values, by the number of the op in the graph.

    `decided`: of ops with a rule. `fixed`: of ops that leave no choice, the layouts of operands, then of results.
    `passed`: the ops whose result is their operand, in whatever layout. `edges`: of data-flow ops, one entry per edge.
    `arguments`, `results`: the border.
    """

    decided: dict[int, Decision] = field(default_factory=dict)
    fixed: dict[int, Shardings] = field(default_factory=dict)
    passed: set[int] = field(default_factory=set)
    edges: dict[int, list[EdgeLayouts]] = field(default_factory=dict)
    arguments: list[TensorSharding] = field(default_factory=list)
    results: list[TensorSharding] = field(default_factory=list)

    def shardings_of(self, number: int) -> Shardings:
        """The layouts of an op's operands, then of its results; of one with a say in them, in either table."""
        return self.decided[number].shardings if number in self.decided else self.fixed[number]

    def atoms(self, mesh: Mesh, major_parts: Mapping[str, int]) -> tuple[AxisRef, ...]:
        """The mesh axes in mesh order, cut where the layouts cut them, and behind parts with rates of their own."""
        return tuple(
            [
                AxisRef.canonical(name, low, high // low, mesh)
                for name, cuts in with_cuts(cuts_of(self._shardings(), mesh), major_parts).items()
                for low, high in pairwise(sorted(cuts))
            ]
        )

    def inverted(self, atoms: Sequence[AxisRef]) -> frozenset[tuple[AxisRef, AxisRef]]:
        """The pairs of atoms that follow each other in a dimension, but not in mesh order, somewhere, or that would
        where an argument is cut further: as an expert's weights, of which each device may take a part."""
        place = {atom: number for number, atom in enumerate(atoms)}
        used = (axes for sharding in self._shardings() for axes in sharding.axes)
        lists = dict.fromkeys(axes for axes in (*used, *self._cut_further(atoms)) if len(axes) > 1)
        return frozenset(
            (a, b)
            for axes in lists
            for first, second in combinations(axes, 2)
            for a in atoms
            for b in atoms
            if overlaps(a, first) and overlaps(b, second) and place[a] > place[b]
        )

    def _cut_further(self, atoms: Sequence[AxisRef]) -> Iterator[Axes]:
        """The axes of arguments' dimensions, each followed by an atom along which the argument is whole; not of
        vectors, which are small."""
        for sharding in dict.fromkeys(argument for argument in self.arguments if argument.rank > 1):
            used = (*chain(*sharding.axes), *sharding.unreduced_axes)
            free = [atom for atom in atoms if not any(overlaps(atom, axis) for axis in used)]
            yield from ((*axes, atom) for axes in sharding.axes if axes for atom in free)

    def _shardings(self) -> Iterable[TensorSharding]:
        """All layouts, each once."""
        decided = (decision.shardings for decision in self.decided.values())
        return dict.fromkeys(
            chain(
                self.arguments, self.results, *decided, *self.fixed.values(), *chain.from_iterable(self.edges.values())
            )
        )


@dataclass(frozen=True, eq=False)
class PlacedProgram:
    """What a placement made of a program, from which the whole program is planned.

    Attributes:
        graph: the program before it was rewritten; its module is what became of it.
        meshes: the program's meshes.
        layouts: those of all ops, edges, arguments and results.
        report: what was inserted and noted.
        inserted: the collectives in the module that were inserted, with their records.
        erased: the ops of the graph that the module does not have any more.
        last_read: the module as it was read since.
    """

    graph: Graph
    meshes: ProgramMeshes
    layouts: PlacedLayouts
    report: PartitionReport
    inserted: Mapping[ir.Operation, CollectiveRecord]
    erased: frozenset[Op]
    last_read: Graph | None = None

    @property
    def module(self) -> ir.Operation:
        """The partitioned program."""
        return self.graph.module

    @property
    def mesh(self) -> Mesh:
        """The base mesh of the program."""
        return self.meshes.base

    @cached_property
    def partitioned(self) -> Graph:
        """The partitioned program, read once: ops may be marked in it before it is rewritten further."""
        return Graph(self.module) if self.last_read is None else self.last_read

    @cached_property
    def remaining(self) -> dict[ir.Operation, int]:
        """The numbers of the ops of the graph that are in the module."""
        return dict(self.remaining_ops)

    @property
    def remaining_ops(self) -> Iterator[tuple[ir.Operation, int]]:
        """The ops of the graph that are in the module, as they are by now, with their numbers."""
        numbers = {op: n for n, op in enumerate(self.graph.ops)}
        waiting = list(self.graph.functions.values())
        while waiting:
            op = waiting.pop()
            if op not in self.erased:
                yield op.mlir, numbers[op]
                waiting += [inner for block in op.blocks for inner in block.ops]


# What was chosen where a program was partitioned, from which it can be partitioned again without a search.

RewriteKind = Literal["again", "local_sorts", "loops", "order", "parts", "unconstrained"]


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A rewrite of a program that is made where its plan is the better one.

    Attributes:
        kind: "again": what is held is computed again; "local_sorts": devices sort their own rows; "loops": what loops
            hold for other loops is computed again; "order": merged dimensions that loops carry are in the order in
            which devices hold their parts; "parts": the largest values are made part by part; "unconstrained": there
            are no constraints.
        memory_multiplier: seconds per byte that is held, at which ops run again.
        keeps_named: values that the user names are held.
        in_parts: what is computed again is so part by part, of what passes between them.
        shared: the bytes from which on a value that two groups share is computed again.
        size: the bytes that the values of a group may take.
        limit: the bytes above which what is live is made in parts; 0 where that is what a device may hold.
        axes: those by which devices sort their own rows.
    """

    kind: RewriteKind
    memory_multiplier: float = 0.0
    keeps_named: bool = False
    in_parts: bool = True
    shared: float = 0.0
    size: float = 0.0
    limit: float = 0.0
    axes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ProgramChoices:
    """The choices that were searched for; all else follows from them, the program and its setting.

    Attributes:
        plan: the layouts of the whole program, once it was rewritten; None where it stayed as the baseline.
        decided: how ops run, by their numbers, where it did.
        rewrites: those that were made before, each with the plan by which values were priced for it.
        saved: the bytes that are held less, of what is computed again.
    """

    plan: LayoutPlan | None = None
    decided: Mapping[int, Decision] = field(default_factory=dict)
    rewrites: tuple[tuple[Rewrite, LayoutPlan | None], ...] = ()
    saved: float = 0.0


class Follow(Protocol):
    """Gives choices in place of a search."""

    @property
    def rewrites(self) -> Sequence[Rewrite]:
        """Those of the program, in order."""

    @property
    def saved(self) -> float:
        """As of `ProgramChoices`."""

    def plan(self, number: int, graph: Graph, setting: Setting) -> LayoutPlan | None:
        """The plan of the program after so many rewrites."""


class Keep(Protocol):
    """Gives choices for some ops of a program, which are kept where they can be; all else is searched for."""

    @property
    def is_compared(self) -> bool:
        """Whether the plan says what it would cost if nothing were kept."""

    def plan(self, graph: Graph, setting: Setting) -> LayoutPlan:
        """What is kept of a program."""


class Partitioned(NamedTuple):
    """A program that was partitioned: what was inserted, and what was chosen."""

    report: PartitionReport
    choices: ProgramChoices
