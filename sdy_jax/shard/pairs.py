"""Sends and receives of a block belong together in pairs."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable

from sdy_jax.shard.view import DialectOp


def pair_up(block: Iterable[DialectOp]) -> tuple[list[tuple[DialectOp, DialectOp]], list[DialectOp]]:
    """The pairs of sends and receives of a block, and the ops that are in none, both in the block's order.

    The n-th send and the n-th recv with the same mesh, axes and type are a pair; the send comes first.
    """
    waiting: dict[Hashable, deque[DialectOp]] = defaultdict(deque)
    pairs, alone = [], []
    order = [op for op in block if op.name in ("send", "recv")]
    for op in order:
        sends = waiting[(op.dialect, op.mesh, op.axes, op["input"].type)]
        if op.name == "send":
            sends.append(op)
        elif sends:
            pairs.append((sends.popleft(), op))
        else:
            alone.append(op)
    alone += [send for sends in waiting.values() for send in sends]
    return pairs, sorted(alone, key=order.index)
