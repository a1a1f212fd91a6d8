"""The layouts that values may have by what the user stated for them: constraints, data-flow edges, groups.

See docs/explanation/planner.md#what-you-stated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from sdy_jax.ir.graph import Graph, Op
from sdy_jax.ir.operations import COMPUTATIONS, manual_axes
from sdy_jax.ir.statements import group_of, stated_for
from sdy_jax.lowering.interface.outcomes import ChangedLayout
from sdy_jax.lowering.model.enumeration import Candidate, Openness, layouts_of_shape
from sdy_jax.lowering.model.layout_table import LayoutTable
from sdy_jax.lowering.model.op_candidates import is_inexact
from sdy_jax.lowering.proposal.proposal import EdgeLayouts, ProposedLayouts
from sdy_jax.lowering.strategies.registry import is_forwarding
from sdy_jax.op_rules.carried_sums import is_carried_sum
from sdy_jax.op_rules.dataflow import DataFlowEdge, EdgeKind
from sdy_jax.representation.manual_axes import erase_manual_axes
from sdy_jax.representation.mesh import AxisRef
from sdy_jax.representation.named import has_sub_axes
from sdy_jax.representation.sharding import TensorSharding

Atoms = Sequence[AxisRef]


class ConstraintCandidates:
    """The candidates of what only states layouts: the walk's own first, then all others that what is stated allows."""

    def __init__(self, table: LayoutTable, pads: bool):
        self._table, self._pads = table, pads
        self._known: dict[tuple[tuple[int, ...], ...], list[Candidate]] = {}

    def of_constraint(self, op: Op, own: TensorSharding, atoms: Atoms, makes: bool) -> list[Candidate]:
        """The candidates of an op that states a layout of its operand, and may make a value in it: closed dimensions
        stay, open ones may be split further. A barrier to propagation states nothing."""
        (result,) = op.results
        nothing = op.name == "sdy.propagation_barrier" and not own.unreduced_axes
        stated = Openness.of_rank(result.rank) if nothing else self._openness(own, stated_for(result))
        found = self._layouts(result.shape or (), own, stated, atoms)
        return self._candidates((layout,) * (1 + makes) for layout in found)

    def of_member(self, op: Op, own: TensorSharding, atoms: Atoms) -> list[Candidate]:
        """The candidates of a member of a group; the third slot is what ties it to the others."""
        shape = op.results[0].shape or ()
        return self._candidates((n, n, n) for n in self._layouts(shape, own, Openness.of_rank(len(shape)), atoms))

    def of_border(self, shape: Sequence[int], ends: Sequence[TensorSharding], atoms: Atoms) -> list[Candidate]:
        """The candidates of an argument or a result that may have any layout of jax's arrays, or of both where it is
        carried from one to the other, in layouts that are alike at both ends."""
        layouts = self._layouts(shape, ends[0], Openness.of_rank(len(shape)), atoms, evenly=True)
        every = (layout for layout in layouts if not has_sub_axes(self._table.shardings[layout]))
        own = tuple(map(self._table.number, ends))
        return self._candidates(dict.fromkeys([own, *((n,) * len(ends) for n in every)]))

    def of_edge(self, op: Op, edge: DataFlowEdge, proposed: EdgeLayouts, atoms: Atoms) -> list[Candidate]:
        """The candidates of a data-flow edge of an op, in layouts that are alike outside and inside of it."""
        stated, sides = stated_for(edge.owner), (len(edge.sources), len(edge.targets))
        if op.name in COMPUTATIONS:
            return self._candidates(_at_ends(ends, sides) for ends in self._ends(op, edge, proposed, stated, atoms))
        own = self._table.number(proposed.sources), self._table.number(proposed.targets)
        open_ones = Openness.of_rank(edge.owner.rank) if stated is None else self._openness(proposed.sources, stated)
        summed = stated is None and is_carried_sum(edge) and is_inexact(edge.owner)
        every = self._layouts(edge.owner.shape or (), proposed.sources, open_ones, atoms, summed)
        return self._candidates(_at_ends(ends, sides) for ends in dict.fromkeys([own, *((n, n) for n in every)]))

    def _candidates(self, layouts: Iterable[tuple[int, ...]]) -> list[Candidate]:
        """Candidates of these layouts, which cost nothing themselves; one list for all that have the same."""
        key = tuple(layouts)
        if key not in self._known:
            self._known[key] = [Candidate(each, 0.0, 0.0) for each in key]
        return self._known[key]

    def _ends(
        self, op: Op, edge: DataFlowEdge, proposed: EdgeLayouts, stated: TensorSharding | None, atoms: Atoms
    ) -> Iterator[tuple[int, int]]:
        """The layouts of sources and of targets at the border of a computation; manual axes stay where they are."""
        manual, inward = manual_axes(op), edge.kind is EdgeKind.BODY_ARGUMENT
        outer = proposed.sources if inward else proposed.targets
        outside = edge.sources[0] if inward else edge.owner
        free = [atom for atom in atoms if atom.name not in manual]
        nothing = stated is None and not manual
        open_ones = Openness.of_rank(outside.rank) if nothing else self._openness(outer, stated)
        for layout in self._layouts(outside.shape or (), outer, open_ones, free, evenly=bool(manual)):
            inner = self._table.number(erase_manual_axes(self._table.shardings[layout], manual))
            yield (layout, inner) if inward else (inner, layout)

    def _layouts(
        self,
        shape: Sequence[int],
        own: TensorSharding,
        stated: Openness,
        atoms: Atoms,
        summed: bool = False,
        evenly: bool = False,
    ) -> list[int]:
        """The layouts that are allowed, the walk's own first."""
        first = self._table.number(own)
        if not shape or not any(stated.is_open):
            return [first]
        every = layouts_of_shape(shape, atoms, self._table, stated, summed, self._pads and not evenly)
        return list(dict.fromkeys([first, *every]))

    def _is_at_home(self, sharding: TensorSharding) -> bool:
        return sharding.layout[0] in (None, self._table.mesh_name)

    def _openness(self, own: TensorSharding, stated: TensorSharding | None) -> Openness:
        """What is stated, as far as the walk followed it; closed where it did not."""
        # On a single device a sharding has no dimensions, whatever its value's rank.
        followed = stated is not None and (stated.rank, stated.unreduced_axes) == (own.rank, own.unreduced_axes)
        if stated is None or not (followed and self._is_at_home(stated) and self._is_at_home(own)):
            return Openness(own.axes, (False,) * own.rank, ())
        is_open = tuple(
            not dim.is_closed and axes[: len(dim.axes)] == dim.axes
            for dim, axes in zip(stated.dimensions, own.axes, strict=True)
        )
        leading = zip(is_open, stated.axes, own.axes, strict=True)
        fixed = tuple(given if opened else axes for opened, given, axes in leading)
        kept = (*(axis for axes in fixed for axis in axes), *stated.replicated_axes, *own.unreduced_axes)
        return Openness(fixed, is_open, kept, own.unreduced_axes, own.reduction)


def changed_statements(graph: Graph, chosen: ProposedLayouts, proposed: ProposedLayouts) -> Iterator[ChangedLayout]:
    """The constraints with open dimensions, and the members of groups, that have other layouts in one walk than in
    another."""
    for number in sorted(chosen.fixed.keys() & proposed.fixed.keys()):
        op, new, old = graph.ops[number], chosen.fixed[number][-1], proposed.fixed[number][-1]
        if not is_forwarding(op) or new.same_layout_as(old):
            continue
        (result,), stated = op.results, stated_for(op.results[0])
        name = "sdy.sharding_constraint" if group_of(op) is None else "sdy.sharding_group"
        text = "like its group" if stated is None else f"[{', '.join(map(str, stated.dimensions))}]"
        yield ChangedLayout(name, op.mlir.location, result.dtype, result.shape or (), new, old, text)


def _at_ends(ends: tuple[int, int], sides: tuple[int, int]) -> tuple[int, ...]:
    (source, target), (sources, targets) = ends, sides
    return (*(source,) * sources, *(target,) * targets)
