"""Batches in microbatches, and stacks of layers in groups on stages; and back."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from sdy_jax.pipelines.explicit_types import entries_of, entries_without, moved, with_entries
from sdy_jax.pipelines.group_passes import Grouping


def cut(x: Any, microbatches: int) -> Any:
    """A batch as (microbatches, rows, ...). Microbatch `m` has the rows `m`, `m + microbatches`, ...: each has a part
    of every block of rows, so a batch that is split over an axis need not move."""
    rows, (first, *others) = x.shape[0] // microbatches, entries_of(x)
    parts = with_entries(x.reshape(rows, microbatches, *x.shape[1:]), [first, (), *others])
    return jnp.swapaxes(parts, 0, 1)


def joined(x: Any) -> Any:
    """What was cut, as a batch."""
    return with_entries(jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:]), entries_of(x)[1:])


def grouped(stack: Any, grouping: Grouping, axis: str, stages: int) -> Any:
    """A stack of layers as (stages, rounds, depth, ...); where layers are too few, with copies of the last one."""
    missing = grouping.depth * grouping.groups - grouping.layers

    def arranged(stack: Any) -> Any:
        if missing:
            last = jnp.broadcast_to(stack[-1:], (missing, *stack.shape[1:]))
            stack = jnp.concatenate([stack, last])
        return jnp.swapaxes(stack.reshape(-1, stages, grouping.depth, *stack.shape[1:]), 0, 1)

    return moved(arranged, stack, [axis, None, None, *entries_without(axis, stack)[1:]])


def ungrouped(x: Any, grouping: Grouping, axis: str, stages: int) -> Any:
    """What stages have, (stages, rounds, microbatches, depth, ...), as (layers, microbatches, ...): split over stages
    where these divide the layers."""

    def arranged(x: Any) -> Any:
        ordered = jnp.moveaxis(x, (1, 0, 3, 2), (0, 1, 2, 3))
        return ordered.reshape(-1, *ordered.shape[3:])[: grouping.layers]

    return moved(arranged, x, [None if grouping.layers % stages else axis, None, *entries_of(x)[4:]])
