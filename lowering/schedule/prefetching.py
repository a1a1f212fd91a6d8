"""Which collectives inside of loops run one trip ahead (`emission/prefetching.py`).

A layer that a loop gathers for each trip, because there is no memory for all of them, makes the trip wait where nothing
comes before its first use. Where the cost model knows time, such a gather runs while the trip before computes, if a
device may hold one more layer.
See docs/explanation/schedule.md#prefetching.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Graph, Op
from sdy_jax.lowering.analysis.trip_counts import trip_count
from sdy_jax.lowering.costs.cost_model import CostModel
from sdy_jax.lowering.emission.prefetching import ahead
from sdy_jax.lowering.interface.setting import Setting
from sdy_jax.lowering.memory.peak import peak_of
from sdy_jax.lowering.proposal.proposal import Proposal
from sdy_jax.lowering.schedule.marks import HiddenCollectives, Inserted
from sdy_jax.lowering.schedule.work_times import WorkTimes
from sdy_jax.representation.sdy_collectives import PREFETCHED

_FEWEST = 3
"""Trips from which on a loop is worth it. Guessed: its body is compiled twice, and of two trips only one is hidden."""


def prefetch(proposal: Proposal, setting: Setting, limit: Callable[[], float]) -> Inserted:
    """Marks the gathers of a partitioned module that run one trip ahead, and says so in their records.

    Args:
        proposal: the module, whose collectives are all there.
        setting: what collectives cost, and the devices.
        limit: says the bytes that a device may hold.

    Returns:
        The collectives that the partitioner made, without those that are marked.
    """
    hiding = HiddenCollectives(proposal.inserted)
    if setting.costs.unit != "seconds":
        return hiding.others
    graph = proposal.partitioned
    exposed = list(_exposed(graph, proposal, setting.costs))
    held, most = (peak_of(graph, setting.target).total, limit()) if exposed else (0.0, 0.0)
    for op, count, hidden, size in exposed:
        if held + size > most:
            continue
        held += size
        hiding.hide(op.mlir, hidden, is_ahead=True)
        integers = ir.IntegerType.get_signless(64, graph.context)
        op.set_attribute(PREFETCHED, ir.IntegerAttr.get(integers, count))
    return hiding.reported(proposal.report)


def _exposed(graph: Graph, proposal: Proposal, costs: CostModel) -> Iterator[tuple[Op, int, float, float]]:
    """The gathers in loops for which a trip waits: the number of trips, how much of that time the products of a trip
    could hide, and the bytes of the result."""
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
            hidden = min(sent + taken - computed, taken, left)
            if hidden > 0:
                left -= hidden
                yield op, count, hidden, times.bytes(op.results[0])
            else:
                sent += taken
