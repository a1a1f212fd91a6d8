"""Which collectives inside of loops run one trip ahead (`emission/prefetching.py`).

A layer that a loop gathers for each trip, because there is no memory for all of them, makes the trip wait where nothing
comes before its first use. Where the cost model knows time, such a gather runs while the trip before computes, if a
device may hold one more layer.
See docs/explanation/schedule.md#prefetching.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.lowering.analysis.filled_stacks import filled_stacks
from sdy_jax.lowering.analysis.trip_counts import trip_count
from sdy_jax.lowering.costs.cost_model import CostModel
from sdy_jax.lowering.emission.prefetching import ahead
from sdy_jax.lowering.interface.setting import Setting
from sdy_jax.lowering.proposal.proposal import Proposal
from sdy_jax.lowering.schedule.marks import HiddenCollectives
from sdy_jax.lowering.schedule.work_times import WorkTimes
from sdy_jax.representation.sdy_collectives import FILLED, PREFETCHED

_FEWEST = 3
"""Trips from which on a loop is worth it. Guessed: its body is compiled twice, and of two trips only one is hidden."""

_COPIED = 2
"""How often what is fetched is read or written beside. Given: what one trip fetched is read while the next is written,
so a loop copies it into what it carries."""


class Ahead(NamedTuple):
    """A gather of a loop's body that runs one trip ahead, the loop's trips, and how much of its time is hidden in
    each."""

    op: Op
    trips: int
    hidden: float


def gathers_ahead(proposal: Proposal, setting: Setting, room: Callable[[], float]) -> list[Ahead]:
    """The gathers of a partitioned module that run one trip ahead; none where the model does not know time.

    Args:
        proposal: the module, whose collectives are all there.
        setting: what collectives cost, and the devices.
        room: says the bytes that a device may hold beside those that it holds without.
    """
    if setting.costs.unit != "seconds":
        return []
    waiting, found = list(_exposed(proposal.partitioned, proposal, setting.costs)), list[Ahead]()
    left = room() if waiting else 0.0
    for gather, size in waiting:
        if size <= left:
            left -= size
            found.append(gather)
    return found


def mark_ahead(found: Sequence[Ahead], hiding: HiddenCollectives) -> None:
    """Marks gathers that run one trip ahead, with the stacks that their loops fill, and hides them."""
    for op, count, hidden in found:
        hiding.hide(op.mlir, hidden, is_ahead=True)
        integers = ir.IntegerType.get_signless(64, op.mlir.context)
        op.set_attribute(PREFETCHED, ir.IntegerAttr.get(integers, count))
    for loop in dict.fromkeys(op.block.parent for op, _, _ in found if op.block is not None):
        filled = [n for n, dim in filled_stacks(loop) if not _is_split(loop.results[n], dim)]
        loop.set_attribute(FILLED, ir.DenseI64ArrayAttr.get(filled, loop.mlir.context))


def _is_split(value: Value, dim: int) -> bool:
    return value.sharding is not None and bool(value.sharding.axes[dim])


def _exposed(graph: Graph, proposal: Proposal, costs: CostModel) -> Iterator[tuple[Ahead, float]]:
    """The gathers in loops for which a trip waits, of which the products of a trip could hide some time, and the bytes
    of their results."""
    times = WorkTimes(graph, costs)
    for loop in [op for op in graph.ops if op.name == "stablehlo.while"]:
        count = trip_count(loop)
        if count is None or count < _FEWEST:
            continue
        body = loop.blocks[1]
        left = sum(times.of(op) for op in body.ops)
        computed, sent = 0.0, 0.0
        for op in body.ops[:-1]:
            record = proposal.inserted.get(op.mlir)
            if record is None or op.name != "sdy.all_gather" or ahead(body, [op]) is None:
                computed += times.of(op)
                continue
            taken = record.costs(costs).sending_time(record.kind, record.axes, proposal.mesh, record.wire_bytes)
            hidden, size = min(sent + taken - computed, taken, left), times.bytes(op.results[0])
            copied = costs.memory * _COPIED * size
            if hidden > copied:
                left -= hidden
                yield Ahead(op, count, hidden - copied), size
            else:
                sent += taken
