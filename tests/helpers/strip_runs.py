"""Strips between blocks, on lists of integers."""

from __future__ import annotations

import collections

import numpy as np

from sdy_jax.lowering.reshard.strip_reads import block_length

FILL = -7.0


def split(x, shards, block=None):
    """The blocks of a dimension; NaN in the padding."""
    block = block_length(len(x), shards) if block is None else block
    padded = np.full(block * shards, np.nan)
    padded[: len(x)] = x
    return list(padded.reshape(shards, block))


def run(plan, operands, shards):
    """The result blocks, by a model of ppermute: whoever receives nothing gets zeros."""
    out = [np.full(plan.length, FILL) for _ in range(shards)]
    for strips in (*plan.copies, *plan.rounds):
        receivers = collections.Counter(t for _, t in strips.pairs)
        senders = collections.Counter(u for u, _ in strips.pairs)
        assert max(receivers.values()) == max(senders.values()) == 1
        received = [np.zeros(strips.length) for _ in range(shards)]
        for u, t in strips.pairs:
            strip = operands[strips.operands[u]][u][strips.offsets[u] :][: strips.length]
            received[t][: len(strip)] = strip
        for t in range(shards):
            n = strips.lengths[t]
            out[t][strips.starts[t] :][:n] = received[t][:n]
    check_counts(plan, shards)
    return out


def check_counts(plan, shards):
    """No device sends to itself by a round; every round has at least one pair, and a longest strip that is full."""
    degrees = collections.Counter()
    for strips in plan.rounds:
        degrees.update([("sender", u) for u, _ in strips.pairs] + [("receiver", t) for _, t in strips.pairs])
        assert all(u != t for u, t in strips.pairs)
    for strips in (*plan.copies, *plan.rounds):
        assert {t for t, n in enumerate(strips.lengths) if n} == {t for _, t in strips.pairs}
        assert max(strips.lengths) == strips.length
    assert all(u == t for strips in plan.copies for u, t in strips.pairs)
    assert len(plan.rounds) == max(degrees.values(), default=0)
    assert plan.wire_elements == sum(max(strips.lengths) for strips in plan.rounds)


def padded(x, low, high, dilation):
    """`lax.pad` in numpy."""
    spread = np.full((len(x) - 1) * dilation + 1, FILL)
    spread[::dilation] = x
    out = np.concatenate([np.full(max(low, 0), FILL), spread, np.full(max(high, 0), FILL)])
    return out[max(-low, 0) : len(out) - max(-high, 0)]
