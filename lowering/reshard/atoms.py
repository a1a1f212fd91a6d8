"""From shardings with names to states of numbered atoms, and back to collectives with names."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from sdy_jax.errors import InternalError
from sdy_jax.lowering.costs.cost_model import CostModel
from sdy_jax.lowering.costs.major_parts import with_cuts
from sdy_jax.lowering.reshard.plan import Collective
from sdy_jax.lowering.reshard.problem import ReshardProblem
from sdy_jax.lowering.reshard.solution import priced
from sdy_jax.lowering.reshard.states import ReshardStep, State, atoms_of, mask_of
from sdy_jax.representation.mesh import AxisRef, Mesh
from sdy_jax.representation.sdy_collectives import BY_STRIPS, FLAT, SdyCollective
from sdy_jax.representation.sharding import TensorSharding

Piece = tuple[str, int, int]
"""Axis name, pre-size, size."""


def _pieces(axes: Sequence[AxisRef], mesh: Mesh) -> list[Piece]:
    pieces = [(a.name, a.pre_size, a.size(mesh)) for a in axes]
    return [p for p in pieces if p[2] > 1]


def _lists(sharding: TensorSharding, mesh: Mesh) -> list[list[Piece]]:
    return [_pieces(axes, mesh) for axes in (*sharding.axes, sharding.unreduced_axes)]


def _edges(lists: Iterable[list[Piece]]) -> dict[str, set[int]]:
    """The positions at which each axis is cut; atoms are the pieces between them."""
    edges: dict[str, set[int]] = {}
    for axes in lists:
        for name, pre, size in axes:
            edges.setdefault(name, set()).update((pre, pre * size))
    return edges


def _cut(piece: Piece, edges: dict[str, set[int]]) -> list[Piece]:
    name, pre, size = piece
    if len(edges[name]) == 2:
        return [piece]
    inside = sorted(e for e in edges[name] if pre <= e <= pre * size)
    return [(name, lo, hi // lo) for lo, hi in pairwise(inside)]


def problem_of(
    shape: tuple[int, ...],
    itemsize: float,
    source: TensorSharding,
    target: TensorSharding,
    mesh: Mesh,
    costs: CostModel,
) -> tuple[ReshardProblem, list[Piece]]:
    """The problem without names, and the atoms that its numbers stand for, in order of first appearance."""
    ends = _lists(source, mesh), _lists(target, mesh)
    edges = with_cuts(_edges([*ends[0], *ends[1]]), costs.major_parts)
    atoms = list(dict.fromkeys([a for lists in ends for axes in lists for p in axes for a in _cut(p, edges)]))
    numbers = {atom: number for number, atom in enumerate(atoms)}

    def state(lists: list[list[Piece]]) -> State:
        *dims, unreduced = [tuple([numbers[a] for p in axes for a in _cut(p, edges)]) for axes in lists]
        return State(tuple(dims), mask_of(unreduced))

    states, sizes = (state(ends[0]), state(ends[1])), [size for *_, size in atoms]
    min_shards = min([math.prod([sizes[atom] for axes in dims for atom in axes]) for dims, _ in states])
    links = tuple([costs.link(AxisRef.canonical(*atom, mesh), mesh) for atom in atoms])
    reorders = source.mesh != target.mesh
    return ReshardProblem(shape, itemsize, links, costs.combines, *states, min_shards, reorders), atoms


def pieces_of_atom(atom: Piece, sizes: tuple[int, ...]) -> list[Piece]:
    parts, (name, pre, _) = [], atom
    for size in sizes:
        parts.append((name, pre, size))
        pre *= size
    return parts


@dataclass(frozen=True, slots=True)
class AtomNames:
    """The mesh's names for the atoms of a solved problem."""

    pieces: list[Piece]
    mesh: Mesh

    def collectives(
        self, problem: ReshardProblem, steps: tuple[ReshardStep, ...], source: TensorSharding, target: TensorSharding
    ) -> tuple[Collective, ...]:
        kind = source.reduction if source.unreduced_axes else target.reduction
        made, before, mesh = [], problem.source, source.mesh
        for step in steps:
            mesh = target.mesh if step.kind == "collective_permute" else mesh  # one permute at least, if they differ
            result = self.sharding(step.state, mesh, kind)
            collective = self.collective_of(step, before)
            made.append(Collective(collective, result, self.wire_bytes(problem, step, before), kind))
            before = step.state
        if before != problem.target:
            raise InternalError(f"the plan from <{source}> to <{target}> ends at another sharding: {made}")
        return tuple(made)

    def wire_bytes(self, problem: ReshardProblem, step: ReshardStep, before: State) -> float:
        """What a device sends in a step."""
        if step.kind == BY_STRIPS:
            return problem.price_of_planned_strips(before, step.state).wire_bytes
        return priced(problem, step, before).wire_bytes

    def collective_of(self, step: ReshardStep, before: State) -> SdyCollective:
        """What a step says with names."""
        pairs = list(zip(before.dims, step.state.dims, strict=True))
        if step.kind == "collective_permute":
            return SdyCollective(step.kind)
        if step.kind == "all_to_all":
            return SdyCollective(step.kind, params=self.exchanged(pairs))
        if step.kind == BY_STRIPS:
            return SdyCollective(step.kind, self.in_mesh_order(step.group))
        if step.kind in FLAT:
            return SdyCollective(step.kind, self.in_mesh_order(step.group))
        return SdyCollective(step.kind, tuple(self.axes(max(pair, key=len)[min(map(len, pair)) :]) for pair in pairs))

    def exchanged(self, pairs: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> tuple:
        """Which atoms went from where to where, sorted by source."""
        arrived = {after[len(before) :]: dim for dim, (before, after) in enumerate(pairs) if len(after) > len(before)}
        params = []
        for dim, (before, after) in enumerate(pairs):
            if len(after) < len(before):
                moved = before[len(after) :]
                params.append((self.axes(moved), dim, arrived[moved]))
        return tuple(params)

    def sharding(self, state: State, mesh_name: str | Mesh, kind: str) -> TensorSharding:
        unreduced = self.in_mesh_order(state.unreduced)
        dims = [self.axes(axes) for axes in state.dims]
        return TensorSharding.closed(mesh_name, dims, unreduced, kind if unreduced else "sum")

    def in_mesh_order(self, mask: int) -> tuple[AxisRef, ...]:
        pieces = sorted((self.pieces[a] for a in atoms_of(mask)), key=lambda p: (self.mesh.positions[p[0]], p[1]))
        return self.joined(pieces)

    def axes(self, atoms: Sequence[int]) -> tuple[AxisRef, ...]:
        return self.joined([self.pieces[a] for a in atoms])

    def joined(self, pieces: list[Piece]) -> tuple[AxisRef, ...]:
        """Neighbours of one axis that continue one another become one reference."""
        made: list[Piece] = []
        for name, pre, size in pieces:
            if made and made[-1][0] == name and made[-1][1] * made[-1][2] == pre:
                made[-1] = (name, made[-1][1], made[-1][2] * size)
            else:
                made.append((name, pre, size))
        return tuple(AxisRef.canonical(name, pre, size, self.mesh) for name, pre, size in made)
