"""The marks that steps after the walk leave on ops for emission: rings, trips ahead, buckets."""

from __future__ import annotations

from jax.extend.mlir import ir

from sdy_jax.ir.operations import pre_order
from sdy_jax.representation.sdy_collectives import BUCKET, PACKED, PREFETCHED, RING


def erase_marks(module: ir.Operation) -> None:
    """Removes those of a program that was partitioned before."""
    for op in pre_order(module):
        attributes = op.attributes
        for mark in (RING, PREFETCHED, BUCKET, PACKED):
            if mark in attributes:
                del attributes[mark]
