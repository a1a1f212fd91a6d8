"""The marks that steps after the walk leave on ops for emission: rings, trips ahead, buckets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from jax.extend.mlir import ir

from sdy_jax.ir.operations import pre_order
from sdy_jax.lowering.interface.collective_record import CollectiveRecord
from sdy_jax.lowering.interface.report import PartitionReport
from sdy_jax.representation.sdy_collectives import BUCKET, FILLED, PACKED, PREFETCHED, RING


def erase_marks(module: ir.Operation) -> None:
    """Removes those of a program that was partitioned before."""
    for op in pre_order(module):
        attributes = op.attributes
        for mark in (RING, PREFETCHED, FILLED, BUCKET, PACKED):
            if mark in attributes:
                del attributes[mark]


Inserted = Mapping[ir.Operation, CollectiveRecord]
"""The collectives of a module that the partitioner made, with their records."""


class HiddenCollectives:
    """The collectives of a program that run while something is computed. `others` are those that do not."""

    def __init__(self, inserted: Inserted):
        self.others, self._hidden = dict(inserted), dict[int, CollectiveRecord]()

    def hide(self, collective: ir.Operation, hidden: float, is_ahead: bool = False) -> None:
        """Says for how long of its time one is hidden, and whether it runs a trip ahead of its loop."""
        record = self.others.pop(collective)
        self._hidden[id(record)] = replace(record, hidden=hidden, is_ahead=is_ahead)

    def reported(self, report: PartitionReport) -> Inserted:
        """Puts the new records in the place of the old ones; the other collectives."""
        report.exchange(self._hidden)
        return self.others
