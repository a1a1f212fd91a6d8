"""What a partitioner made of a program: the layouts in which each op takes and makes its values, and what it inserted.

From that the whole program is planned. Ops are known by their number in the graph, which a copy of the module shares.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, combinations, pairwise
from typing import NamedTuple

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Graph, Op
from sdy_jax.lowering.analysis.cuts import cuts_of
from sdy_jax.lowering.analysis.program_meshes import ProgramMeshes
from sdy_jax.lowering.candidates.op_problem import Decision, Shardings
from sdy_jax.lowering.costs.major_parts import with_cuts
from sdy_jax.lowering.interface.collective_record import CollectiveRecord
from sdy_jax.lowering.interface.report import PartitionReport
from sdy_jax.representation.axes import overlaps
from sdy_jax.representation.mesh import Axes, AxisRef, Mesh
from sdy_jax.representation.sharding import TensorSharding


class EdgeLayouts(NamedTuple):
    """A data-flow edge: the layout in which values flow in and the one in which they come out."""

    sources: TensorSharding
    targets: TensorSharding


@dataclass(slots=True)
class ProposedLayouts:
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
class Proposal:
    """What a partitioner made of a program, from which the whole program is planned.

    Attributes:
        graph: the program before it was rewritten; its module is what became of it.
        meshes: the program's meshes.
        layouts: those of all ops, edges, arguments and results.
        report: what was inserted and noted.
        inserted: the collectives in the module that the partitioner made, with their records.
        erased: the ops of the graph that the module does not have any more.
        last_read: the module as it was read since.
    """

    graph: Graph
    meshes: ProgramMeshes
    layouts: ProposedLayouts
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
        numbers, found = {op: n for n, op in enumerate(self.graph.ops)}, dict[ir.Operation, int]()
        waiting = list(self.graph.functions.values())
        while waiting:
            op = waiting.pop()
            if op not in self.erased:
                found[op.mlir] = numbers[op]
                waiting += [inner for block in op.blocks for inner in block.ops]
        return found
