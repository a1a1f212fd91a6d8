"""The planner of reshards: shardings become an abstract problem, its solution the plan, collectives in order.

Reshards between meshes with their devices in different orders go over a permute.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from sdy_jax.base.errors import InternalError, ShardingError
from sdy_jax.ir.collectives import BY_STRIPS, FLAT, SdyCollective
from sdy_jax.ir.device_orders import common_part, hold_the_same
from sdy_jax.ir.meshes import Axes, AxisRef, Mesh, axes_size, merge_neighbours, set_difference
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.lowering.reshard.problem import ReshardProblem, ReshardStep, State, atoms_of, mask_of, refined
from sdy_jax.lowering.reshard.solution import priced, solved
from sdy_jax.lowering.targets.axis_rates import with_cuts
from sdy_jax.lowering.targets.cost_model import CostModel
from sdy_jax.lowering.targets.torus import SCATTERED_AT_ONCE
from sdy_jax.runtime.devices import LineParts

# A reshard as a plan: its collectives in order, what they send, and their time.


@dataclass(frozen=True, slots=True)
class Collective:
    """One step of a plan.

    `op` is what the op says that it becomes; `result` is the closed, canonical sharding after the step; `wire_bytes` is
    per device; `reduction` is the kind of an all_reduce or reduce_scatter.
    """

    op: SdyCollective
    result: TensorSharding
    wire_bytes: float
    reduction: str = "sum"

    def __str__(self) -> str:
        """The attribute of the op as the dialect prints it; nothing for a permute."""
        return str(self.op)

    @property
    def kind(self) -> str:
        return self.op.kind


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """The steps in order, the bytes that each device sends in all of them, and their time by the cost model."""

    steps: tuple[Collective, ...]
    wire_bytes: float
    cost: float


# Reduce-scatters along one dimension of a torus after the other.
#
#     %s = reduce_scatter [{"fsdp"}] %x             256 chips of 16 x 16
#
# Where a compiler does so (`Collectives.along_lines`), it makes an all-reduce of one whose chips do not lie in a
# line, and every chip sends twice as much:
#
#     %r = reduce_scatter [{"fsdp":(1)16}] %x       255/256 of %x in all
#     %s = reduce_scatter [{"fsdp":(16)16}] %r
#
# stay what they are (libtpu 0.0.52, v5e:16x16, bfloat16 and float32, either dimension; 2026-11). Where an axis
# follows no lines, as one of 16 chips that goes around 4 x 4, the all-reduce is what is counted.
#
# Of chips with others between them, as `fsdp` of `fsdp=32, expert=8` has in one dimension of 16 x 16, a single one
# stays what it is, around one ring of all of them. Cut, the first part would send half of %x eight chips far: with the
# product that makes bfloat16[4096, 14336], 6.5 ms for 1.8; of `fsdp=16, seq=4` on 8 x 8, 7.1 for 2.7 (by the links'
# rates).

Lines = Mapping[str, LineParts]
"""How each mesh axis lies on the torus."""


def along_lines(
    step: Collective, before: TensorSharding, shape: Sequence[int], itemsize: float, lines: Lines, mesh: Mesh
) -> tuple[Collective, ...]:
    """A step of a reshard as the steps that run for it.

    Args:
        step: of any kind; reduce-scatters alone become several.
        before: the sharding in front of it.
        shape, itemsize: of the global value.
        lines: empty where the devices' places are not known.
        mesh: of both shardings.
    """
    if step.kind != "reduce_scatter" or not lines or before.mesh != step.result.mesh:
        return (step,)
    cut = [[each for axis in axes for each in _cut_at_lines(axis, lines, mesh)] for axes in step.op.axes]
    if not _are_neighbours(itertools.chain(*cut), mesh):
        return (step,)
    parts = [(dim, part) for dim, of_dim in enumerate(cut) for part in _parts(of_dim)]
    if len(parts) < 2 or any(n % k for n, k in zip(shape, step.result.shard_counts(mesh), strict=True)):
        axes = [axis for _, part in parts for axis in part]
        goes_around = any(lines.get(axis.name) == () for axis in axes) and axes_size(axes, mesh) > SCATTERED_AT_ONCE
        return (replace(step, wire_bytes=2 * step.wire_bytes) if goes_around else step,)
    return tuple(_scatters(step, before, parts, shape, itemsize, mesh))


def _scatters(
    step: Collective,
    before: TensorSharding,
    parts: Sequence[tuple[int, Axes]],
    shape: Sequence[int],
    itemsize: float,
    mesh: Mesh,
) -> Iterator[Collective]:
    """One per part, the major ones first: so the blocks come out in the order of all of them."""
    current = before
    for number, (dim, axes) in enumerate(parts):
        lists = [merge_neighbours((*old, *axes), mesh) if d == dim else old for d, old in enumerate(current.axes)]
        left = set_difference(current.unreduced_axes, axes, mesh)
        held = itemsize * math.prod(current.local_shape(shape, mesh))
        result = TensorSharding.closed(current.mesh or "", lists, left, current.reduction if left else "sum")
        count = axes_size(axes, mesh)
        yield replace(
            step,
            op=replace(step.op, axes=tuple(axes if d == dim else () for d in range(len(shape)))),
            result=step.result if number == len(parts) - 1 else result,
            wire_bytes=held * (count - 1) / count,
        )
        current = result


class _OnLine(NamedTuple):
    """A part of an axis, the dimension of the torus in which it lies, and how many neighbours on its next chip is."""

    axis: AxisRef
    dimension: object
    far: int


def _parts(cut: Sequence[_OnLine]) -> list[Axes]:
    """A list of axes where it turns into another dimension of the torus."""
    return [tuple(each.axis for each in group) for _, group in itertools.groupby(cut, key=lambda each: each.dimension)]


def _are_neighbours(cut: Iterable[_OnLine], mesh: Mesh) -> bool:
    """Whether the chips along parts of axes have no others between them, in any dimension."""
    reached = defaultdict[object, int](lambda: 1)
    for each in sorted(cut, key=lambda each: each.far):
        if each.far != reached[each.dimension]:
            return False
        reached[each.dimension] *= each.axis.size(mesh)
    return True


def _cut_at_lines(axis: AxisRef, lines: Lines, mesh: Mesh) -> Iterator[_OnLine]:
    """The parts of an axis with the dimension in which each lies; all of it where they are not parts of it."""
    first, end, pre, found = axis.pre_size, axis.next_pre_size(mesh), 1, []
    for size, dimension, far in lines.get(axis.name, ()):
        low, high = max(first, pre), min(end, pre * size)
        if low < high:
            found.append((low, high, dimension, far * pre * size // high))
        pre *= size
    if pre != mesh.sizes[axis.name] or any(high % low or low % first for low, high, *_ in found):
        yield _OnLine(axis, axis, 1)
        return
    for low, high, dimension, far in found:
        yield _OnLine(AxisRef.canonical(axis.name, low, high // low, mesh), dimension, far)


# From shardings with names to states of numbered atoms, and back to collectives with names.

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


def _cut_piece(piece: Piece, edges: dict[str, set[int]]) -> list[Piece]:
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
    atoms = list(dict.fromkeys([a for lists in ends for axes in lists for p in axes for a in _cut_piece(p, edges)]))
    numbers = {atom: number for number, atom in enumerate(atoms)}

    def state(lists: list[list[Piece]]) -> State:
        *dims, unreduced = [tuple([numbers[a] for p in axes for a in _cut_piece(p, edges)]) for axes in lists]
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


# From one sharding to another as the cheapest sequence of collectives.
#
#     ReshardPlanner.plan   names -> problem (`problem_of`) -> its solution (`solution.py`) -> collectives with names
#
# Each call is remembered, and each problem without names (`solution.py`).


@dataclass(frozen=True)
class ReshardPlanner:
    """How tensors are taken from one sharding to another on a mesh.

    Attributes:
        mesh: that of both. Shardings that name different meshes are on meshes with these axes and the same devices in
            different orders: the results up to some permute are on the source's mesh, from there on the target's.
        costs: default: bytes on the wire.
        whole_axes: whether steps may use only the axes that the shardings name, none of their parts: a `shard_map` that
            somebody else has written cannot be refined.
        strips: whether a dimension whose blocks neither join to blocks nor are cut into blocks may be sent in strips,
            which are no collective of the dialect: such a step is an `sdy.reshard`.
    """

    mesh: Mesh
    costs: CostModel = CostModel()  # noqa: RUF009 - immutable
    whole_axes: bool = False
    strips: bool = True

    def plan(
        self, shape: tuple[int, ...], itemsize: float, source: TensorSharding, target: TensorSharding
    ) -> ReshardPlan:
        """The cheapest collectives that take a tensor of global `shape` from one sharding to another.

        Args:
            shape: the global shape. A dimension that does not divide lies in padded blocks, `ceil(n / shards)` long.
            itemsize: bytes per element.
            source, target: explicit replication, openness and priorities are ignored. Unreduced axes that the target
                does not have are reduced with the source's reduction; new ones become unreduced by the target's for
                free. Where both have unreduced axes and the reductions or meshes differ, all of the source's are
                reduced first.

        Raises:
            ShardingError: ranks differ.

        >>> from sdy_jax.ir.meshes import AxisRef, Mesh
        >>> x, = (AxisRef("x"),)
        >>> source, target = (TensorSharding.closed("m", axes) for axes in ([[x], []], [[], [x]]))
        >>> plan = ReshardPlanner(Mesh.of(x=2)).plan((16, 8), 4, source, target)
        >>> [(step.kind, str(step), step.wire_bytes) for step in plan.steps]
        [('all_to_all', '[{"x"}: 0->1]', 128.0)]
        """
        return _planned(self, tuple(shape), itemsize, source, target)


def plan_reshard(
    shape: tuple[int, ...],
    itemsize: float,
    source: TensorSharding,
    target: TensorSharding,
    mesh: Mesh,
    costs: CostModel = CostModel(),  # noqa: B008 - immutable
) -> ReshardPlan:
    """As `ReshardPlanner.plan`, by all steps that there are."""
    return ReshardPlanner(mesh, costs).plan(shape, itemsize, source, target)


@lru_cache(maxsize=1 << 14)
def _planned(
    how: ReshardPlanner, shape: tuple[int, ...], itemsize: float, source: TensorSharding, target: TensorSharding
) -> ReshardPlan:
    _check(shape, source, target)
    if source.unreduced_axes and target.unreduced_axes and _combine_differently(source, target):
        whole = replace(target, unreduced_axes=(), reduction="sum")
        first, second = (_planned(how, shape, itemsize, *ends) for ends in ((source, whole), (whole, target)))
        return ReshardPlan(first.steps + second.steps, first.wire_bytes + second.wire_bytes, first.cost + second.cost)
    problem, atoms = problem_of(shape, itemsize, source, target, how.mesh, how.costs)
    if how.whole_axes or not how.strips:
        problem = replace(problem, divides=not how.whole_axes, strips=how.strips)
    cut, steps, price = solved(problem)
    pieces = [part for atom, sizes in zip(atoms, cut, strict=True) for part in pieces_of_atom(atom, sizes)]
    collectives = AtomNames(pieces, how.mesh).collectives(refined(problem, cut), steps, source, target)
    return ReshardPlan(collectives, price.wire_bytes, price.time)


def strips_time(
    shape: tuple[int, ...],
    itemsize: float,
    source: TensorSharding,
    target: TensorSharding,
    mesh: Mesh,
    costs: CostModel,
) -> float:
    """The time of strips that lead from one sharding to another at once, on one mesh; infinite where none do."""
    problem, _ = problem_of(shape, itemsize, source, target, mesh, costs)
    before, after = problem.source, problem.target
    if before.unreduced != after.unreduced or not problem.change(before, after):
        return math.inf
    return problem.price(BY_STRIPS, 0, before, after).time


def _combine_differently(source: TensorSharding, target: TensorSharding) -> bool:
    """Whether two unreduced shardings cannot share axes: their reductions or their meshes differ."""
    return source.reduction != target.reduction or source.mesh != target.mesh


def _check(shape: tuple[int, ...], source: TensorSharding, target: TensorSharding) -> None:
    for sharding in (source, target):
        if sharding.rank != len(shape):
            raise ShardingError(f"sharding <{sharding}> has rank {sharding.rank}, but the tensor has shape {shape}")


# Reshards between meshes that have the same axes and devices, the devices in different orders.
#
# A permute leads from any blocks to any others of the same shard counts, also on another mesh: `plan_reshard` finds
# the plans with one. Cheaper plans may go through a sharding that is the same on both meshes, because every device
# has the same coordinate along all of its axes. The change of mesh is then a permute that sends nothing, since a
# permute is the dialect's only op that may change the mesh.


@lru_cache(maxsize=1 << 12)
def plan_across(
    shape: tuple[int, ...],
    itemsize: float,
    source: TensorSharding,
    target: TensorSharding,
    meshes: tuple[Mesh, Mesh],
    costs: CostModel,
) -> ReshardPlan:
    """The cheapest collectives from a sharding on the first of two meshes to one on the second.

    Args:
        shape, itemsize, source, target, costs: as in `ReshardPlanner.plan`; the shardings name different meshes.
        meshes: the source's and the target's mesh. They have the same axes; their devices are in different orders.
    """
    if _is_whole(source) and _is_whole(target) and _coincide(source, target, meshes):
        return ReshardPlan((_renamed(target),), 0.0, 0.0)
    plans = [plan_reshard(shape, itemsize, source, target, meshes[0], costs)]
    for shared in dict.fromkeys(_shared(source, target, meshes)):
        there = replace(shared, mesh=target.mesh)
        before = plan_reshard(shape, itemsize, source, shared, meshes[0], costs)
        after = plan_reshard(shape, itemsize, there, target, meshes[1], costs)
        plans.append(_joined(_joined(before, ReshardPlan((_renamed(there),), 0.0, 0.0)), after))
    cap = min(_shards(source, meshes[0]), _shards(target, meshes[0]))
    return min(plans, key=lambda plan: (_fewest_shards(plan, meshes[0]) < cap, plan.cost, plan.wire_bytes))


def _is_whole(sharding: TensorSharding) -> bool:
    return not sharding.unreduced_axes


def _coincide(source: TensorSharding, target: TensorSharding, meshes: tuple[Mesh, Mesh]) -> bool:
    alike = source.shard_counts(meshes[0]) == target.shard_counts(meshes[1])
    return alike and hold_the_same(source, meshes[0], target, meshes[1])


def _renamed(sharding: TensorSharding) -> Collective:
    """A permute that sends nothing, and states on which of several equal meshes a value is sharded."""
    return Collective(SdyCollective("collective_permute"), sharding, 0.0)


def _shared(source: TensorSharding, target: TensorSharding, meshes: tuple[Mesh, Mesh]) -> Iterator[TensorSharding]:
    """The parts of source and target, on the source's mesh, whose axes coincide on both meshes."""
    for end in (source, target):
        yield TensorSharding.closed(source.mesh, [common_part(axes, *meshes) for axes in end.axes])


def _joined(first: ReshardPlan, second: ReshardPlan) -> ReshardPlan:
    return ReshardPlan(first.steps + second.steps, first.wire_bytes + second.wire_bytes, first.cost + second.cost)


def _shards(sharding: TensorSharding, mesh: Mesh) -> int:
    return math.prod(sharding.shard_counts(mesh))


def _fewest_shards(plan: ReshardPlan, mesh: Mesh) -> int:
    return min(_shards(step.result, mesh) for step in plan.steps)
