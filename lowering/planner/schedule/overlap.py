"""Overlap: which collectives run beside work, one trip ahead, in rings with products, or as compilers move them.

See docs/explanation/schedule.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from jax.extend.mlir import ir

from sdy_jax.ir.attributes import reduction_from_attributes
from sdy_jax.ir.collectives import FILLED, PREFETCHED, RING, collective_from_attributes
from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.ir.meshes import Axes, Mesh, axes_size
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.lowering.ops.control_flow import ahead
from sdy_jax.lowering.ops.emit import value_shardings
from sdy_jax.lowering.planner.facts.fusion import CriticalPath
from sdy_jax.lowering.planner.facts.loops import filled_stacks, trip_count
from sdy_jax.lowering.planner.problem.layout_plan import PlacedProgram
from sdy_jax.lowering.planner.report import PartitionReport
from sdy_jax.lowering.planner.schedule.collective_times import CollectiveTimes
from sdy_jax.lowering.planner.schedule.hidden_time import (
    HiddenCollectives,
    Inserted,
    Schedule,
    Sending,
    WorkTimes,
    in_buckets,
    sendings_of,
)
from sdy_jax.lowering.planner.setting import Setting
from sdy_jax.lowering.targets.cost_model import CostModel
from sdy_jax.shardy.rules.op_attributes import dot_dimension_numbers

# Which collectives inside of loops run one trip ahead (`ops/control_flow.py`).
#
# A layer that a loop gathers for each trip, because there is no memory for all of them, makes the trip wait where
# nothing comes before its first use. Where the cost model knows time, such a gather runs while the trip before
# computes, if a device may hold one more layer. See docs/explanation/schedule.md#prefetching.

_FEWEST = 3
"""Trips from which on a loop is worth it. Guessed: its body is compiled twice, and of two trips only one is hidden."""


class Ahead(NamedTuple):
    """A gather of a loop's body that runs one trip ahead, and the loop's trips."""

    op: Op
    trips: int


def gathers_ahead(placed: PlacedProgram, schedule: Schedule, room: Callable[[], float]) -> list[Ahead]:
    """The gathers of a partitioned module that run one trip ahead.

    Args:
        placed: the module, whose collectives are all there.
        schedule: in which nothing runs ahead.
        room: says the bytes that a device may hold beside those that it holds without.
    """
    waiting, found = list(_exposed(placed, schedule)), list[Ahead]()
    left = room() if waiting else 0.0
    for gather in waiting:
        size = schedule.work.bytes(gather.op.results[0])
        if size <= left:
            left -= size
            found.append(gather)
    return found


def mark_ahead(found: Sequence[Ahead], hiding: HiddenCollectives) -> None:
    """Marks gathers that run one trip ahead, with the stacks that their loops fill."""
    for op, count in found:
        hiding.hide(op.mlir, is_ahead=True)
        integers = ir.IntegerType.get_signless(64, op.mlir.context)
        op.set_attribute(PREFETCHED, ir.IntegerAttr.get(integers, count))
    for loop in dict.fromkeys(op.block.parent for op, _ in found if op.block is not None):
        filled = [n for n, dim in filled_stacks(loop) if not _is_split(loop.results[n], dim)]
        loop.set_attribute(FILLED, ir.DenseI64ArrayAttr.get(filled, loop.mlir.context))


def _is_split(value: Value, dim: int) -> bool:
    return value.sharding is not None and bool(value.sharding.axes[dim])


def _exposed(placed: PlacedProgram, schedule: Schedule) -> Iterator[Ahead]:
    """The gathers in loops for which a trip waits longer than it takes to copy them, as long as its products leave the
    links idle."""
    for loop in [op for op in placed.partitioned.ops if op.name == "stablehlo.while"]:
        count, body = trip_count(loop), loop.blocks[1]
        if count is None or count < _FEWEST:
            continue
        gathers = [op for op in body.ops if op.name == "sdy.all_gather" and op.mlir in placed.inserted]
        gathers = [op for op in gathers if ahead(body, [op]) is not None]
        if not gathers:
            continue
        ran = schedule.of(body)
        waits = {wait.sending.ops[0]: wait.time - schedule.around(wait.sending) for wait in ran.waits}
        idle = ran.idle
        for op in gathers:
            hidden = min(waits.get(op, 0.0), idle)
            if hidden > schedule.copying(op):
                idle -= hidden
                yield Ahead(op, count)


# Which products run as rings with the collectives around them (`ops/collectives/movement.py`).
#
#     %1 = sdy.all_gather [{"x"}, {}] %a       {sdy_jax.ring}
#     %2 = stablehlo.dot_general %1, %w
#
# A product alone that takes what is gathered along one dimension, or alone makes what is scattered along one, may
# take as long as the slower of both instead of their sum. That is done where it takes less time by the cost model,
# which has to know time. What is gathered of arguments waits for no product, no product waits for gradients that are
# scattered, and both are left to the compiler's scheduler. Layouts are chosen before and do not depend on it: else
# all that is hidden would be free. See docs/explanation/schedule.md#rings.

_LARGEST = 32
"""Devices up to which a ring is made. Guessed, a guard: each is a product of its own in the program, which takes that
much longer to compile."""

_LEAST_SAVING = 0.1
"""The share of the collective's time that a ring has to save. Guessed: the estimate is no better than that; with none,
rings are made whose gain is noise, and each is more ops to compile."""

_DOT = "stablehlo.dot_general"


class _Pair(NamedTuple):
    """A collective along one dimension, of an operand of a product or of its result, and that dimension."""

    collective: Op
    product: Op
    dim: int
    axes: Axes

    @property
    def marked(self) -> list[Op]:
        """The ops that are marked: the product, too, where it is scattered, since it comes first."""
        return [self.collective, self.product] if self.collective.name == "sdy.reduce_scatter" else [self.collective]


class RingProduct(NamedTuple):
    """A collective that runs as a ring with a product, the time that this saves, and the ops that are marked."""

    collective: Op
    product: Op
    saved: float
    marked: Sequence[Op]


def ring_products(placed: PlacedProgram, inserted: Inserted, times: _Times) -> list[RingProduct]:
    """The products and collectives of a partitioned module that run as rings.

    Args:
        placed: the module, whose collectives are all there.
        inserted: those that nothing hides yet.
        times: of its products and collectives, which decide.
    """
    found, busy = list[RingProduct](), set[Op]()
    for pair in _pairs(placed.partitioned, inserted, placed.mesh):
        saved = times.saved(pair)
        if pair.product not in busy and saved >= _LEAST_SAVING * times.of_collective(pair):
            busy.add(pair.product)
            found.append(RingProduct(pair.collective, pair.product, saved, pair.marked))
    return found


def mark_rings(found: Iterable[RingProduct], hiding: HiddenCollectives) -> None:
    """Marks products and collectives that run as rings, and hides the collectives."""
    for ring in found:
        hiding.hide(ring.collective.mlir, ring.saved)
        for op in ring.marked:
            op.set_attribute(RING, ir.UnitAttr.get(op.mlir.context))


def _pairs(graph: Graph, inserted: Inserted, mesh: Mesh) -> Iterator[_Pair]:
    """The collectives that could run as rings with products, in program order."""
    shardings = value_shardings(graph)
    critical = CriticalPath(graph, (op for op in graph.ops if op.name == _DOT))
    for op in graph.ops:
        if op.mlir not in inserted or op.name not in ("sdy.all_gather", "sdy.reduce_scatter"):
            continue
        found = _along_one_dimension(op)
        if found is None or not _is_even(op, found[0], shardings, mesh):
            continue
        if op.name == "sdy.all_gather":
            product = _only_user(op.results[0])
            if product is not None and _is_plain(product, shardings, mesh) and op.operands[0] in critical.after:
                yield _Pair(op, product, *found)
        else:
            product = op.operands[0].defining_op
            if product is None or _only_user(product.results[0]) is not op:
                continue
            if op.results[0] not in critical.before:
                continue
            if _adds(op) and _is_plain(product, shardings, mesh) and _is_free(product, found[0]):
                yield _Pair(op, product, *found)


def _only_user(value: Value) -> Op | None:
    """The op that alone takes a value, if it runs as often as the one that makes it: not in a loop or branch behind."""
    user, maker = value.only_user, value.defining_op
    return user if user is not None and maker is not None and user.block is maker.block else None


def _along_one_dimension(op: Op) -> tuple[int, Axes] | None:
    lists = collective_from_attributes(op.name, op.attributes).axes
    split = [(dim, axes) for dim, axes in enumerate(lists) if axes]
    return split[0] if len(split) == 1 else None


def _is_even(op: Op, dim: int, shardings: Mapping[Value, TensorSharding], mesh: Mesh) -> bool:
    """Whether the blocks are equal, before and after, on the program's own mesh."""
    both = [shardings.get(value) for value in (op.operands[0], op.results[0])]
    shape = op.results[0].shape
    if shape is None or any(sharding is None for sharding in both):
        return False
    counts = [sharding.shard_counts(mesh)[dim] for sharding in both if sharding is not None]
    own = both[1].mesh if both[1] is not None else None
    return shape[dim] > 0 and all(shape[dim] % count == 0 for count in counts) and isinstance(own, str)


def _is_plain(op: Op, shardings: Mapping[Value, TensorSharding], mesh: Mesh) -> bool:
    """Whether an op is a product of numbers of one type, in which no padding is contracted."""
    if op.name != _DOT or "algorithm" in op.attributes:
        return False
    types, (lhs, *_) = {value.dtype for value in (*op.operands, *op.results)}, op.operands
    if len(types) != 1 or types == {"i1"} or lhs.shape is None:
        return False
    counts = shardings[lhs].shard_counts(mesh) if lhs in shardings else (1,) * lhs.rank
    return all(lhs.shape[dim] % counts[dim] == 0 for dim in dot_dimension_numbers(op).lhs_contracting)


def _is_free(product: Op, dim: int) -> bool:
    """Whether a dimension of a product's result is one of an operand alone."""
    return dim >= len(dot_dimension_numbers(product).lhs_batching)


def _adds(op: Op) -> bool:
    return reduction_from_attributes(op.attributes) == "sum"


class _Times(WorkTimes):
    """How long products and collectives take, one after the other and in a ring."""

    def __init__(self, graph: Graph, mesh: Mesh, costs: CostModel):
        super().__init__(graph, costs)
        self._mesh = mesh

    def of_collective(self, pair: _Pair) -> float:
        kind = pair.collective.name.removeprefix("sdy.")
        before, after = (self.bytes(v) for v in (pair.collective.operands[0], pair.collective.results[0]))
        wire = self._costs.wire_bytes(kind, axes_size(pair.axes, self._mesh), before, after)
        return self._costs.sending_time(kind, pair.axes, self._mesh, wire)

    def saved(self, pair: _Pair) -> float:
        """The time that a ring saves; less than nothing where it takes longer."""
        count = axes_size(pair.axes, self._mesh)
        if count > _LARGEST:
            return -math.inf
        work, touched = self.operations(pair.product), self.touched(pair.product)
        whole = self._costs.work_time(work, sum(touched))
        # Every step reads what does not travel once more; what is added up is written once more.
        travels = min(map(self.bytes, (pair.collective.operands[0], pair.collective.results[0])))
        step = self._costs.work_time(work / count, max(touched) + 2 * travels)
        hop = self._costs.rate("collective_permute", tuple(pair.axes), self._mesh)
        ring = (hop.fixed + hop.per_byte * travels) * (count - 1)
        return self.of_collective(pair) + whole - (step + max(ring, step * (count - 1)))


# What of a partitioned program's collectives runs beside work: one trip ahead, in rings, and as compilers move them.
#
# Nothing is marked here, so that programs which hide more can be told from those which hide less before one is
# chosen. See docs/explanation/schedule.md.


class Overlap(NamedTuple):
    """What runs beside work.

    Attributes:
        ahead: the gathers that run one trip ahead of their loops.
        rings: the collectives that run as rings with products.
        hidden: the time that is hidden of these, and of all that compilers move.
    """

    ahead: Sequence[Ahead] = ()
    rings: Sequence[RingProduct] = ()
    hidden: float = 0.0

    def mark(self, inserted: Inserted, report: PartitionReport) -> Inserted:
        """Marks what runs beside work in the module that was looked at, and says so in its records. Returns the
        collectives that the partitioner made, without those that are marked."""
        hiding = HiddenCollectives(inserted)
        mark_ahead(self.ahead, hiding)
        mark_rings(self.rings, hiding)
        return hiding.reported(report)


def overlap_of(
    placed: PlacedProgram, together: CollectiveTimes, setting: Setting, room: Callable[[], float]
) -> Overlap:
    """What of the collectives of a partitioned module runs beside work; nothing where the model does not know time.

    Args:
        placed: the module, whose collectives are all there.
        together: says which of them run as one.
        setting: what collectives cost, and the devices.
        room: says the bytes that a device may hold beside those that it holds if none runs ahead.
    """
    costs, mesh, compiler = setting.costs, placed.mesh, setting.target.compiler.collectives
    if costs.unit != "seconds":
        return Overlap()
    times, sendings = _Times(placed.partitioned, mesh, costs), sendings_of(placed)
    found = gathers_ahead(placed, Schedule(times, sendings, mesh, costs, compiler), room)
    sendings |= {op: Sending((op,), replace(sendings[op].record, is_ahead=True)) for op, _ in found}
    fetched = {op.mlir for op, _ in found}
    rings = ring_products(placed, {op: each for op, each in placed.inserted.items() if op not in fetched}, times)
    turned = [(sendings.pop(ring.collective).record, ring.saved) for ring in rings]
    busy = {ring.product: ring.saved for ring in rings}
    schedule = Schedule(times, in_buckets(sendings, together), mesh, costs, compiler, busy)
    ran = schedule.of(placed.partitioned.main.blocks[0])
    in_rings = math.fsum([record.estimated_times * time for record, time in turned])
    return Overlap(found, rings, in_rings + ran.hidden)
