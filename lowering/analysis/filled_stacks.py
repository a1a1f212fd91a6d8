"""Stacks that a loop fills: each of its trips writes an entry, together all of them, and none is read."""

from __future__ import annotations

from collections.abc import Iterator

from sdy_jax.ir.graph import Op
from sdy_jax.lowering.analysis.trip_counts import numbers_in_trips
from sdy_jax.lowering.strategies.registry import PARTIAL_ACCESS


def filled_stacks(loop: Op) -> Iterator[tuple[int, int]]:
    """The numbers of what a loop carries that its trips fill, with the dimension along which entries lie. What a stack
    holds before does not matter."""
    condition, body = loop.blocks
    for number, stack in enumerate(body.arguments):
        write = stack.only_user
        if condition.arguments[number].uses or write is None or PARTIAL_ACCESS.get(write.name) != "write":
            continue
        if write.operands[0] is not stack or write.results[0].uses != [(body.terminator, number)]:
            continue
        dim = _entry_dim(write)
        numbers = None if dim is None else numbers_in_trips(loop, write.operands[2 + dim])
        if dim is not None and numbers is not None and sorted(numbers) == list(range((stack.shape or ())[dim])):
            yield number, dim


def _entry_dim(write: Op) -> int | None:
    """The dimension along which an op writes one entry, whole along all others; None where it is no such write."""
    whole, entry = write.operands[0].shape or (), write.operands[1].shape or ()
    dims = [dim for dim, sizes in enumerate(zip(whole, entry, strict=True)) if sizes[0] != sizes[1]]
    return dims[0] if len(dims) == 1 and entry[dims[0]] == 1 else None
