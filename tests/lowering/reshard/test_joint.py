"""Several results of one exchange, run on numpy shards: the right elements at the stated places, and the bytes."""

import numpy as np
import pytest
from strip_runs import FILL, run, split

from sdy_jax.lowering.reshard.strip_reads import Piece, joint_fetch
from sdy_jax.lowering.reshard.strips import Source


def whole(operands, pieces):
    parts = [
        np.full(p.length, FILL) if p.operand is None else operands[p.operand][p.start : p.start + p.length]
        for p in pieces
    ]
    return np.concatenate(parts)


def check(sizes, results, shards, is_whole=()):
    """The number of elements that a device sends for all results together."""
    operands = [np.arange(n, dtype=float) + 1000 * k for k, n in enumerate(sizes)]
    kept = [k in is_whole for k in range(len(sizes))]
    sources = tuple(Source.whole(n) if stays else Source.split(n, shards) for n, stays in zip(sizes, kept, strict=True))
    fetch = joint_fetch(sources, results, shards)
    blocks = [[x] * shards if stays else split(x, shards) for x, stays in zip(operands, kept, strict=True)]
    found = run(fetch.plan, blocks, shards)
    for pieces, start, length in zip(results, fetch.starts, fetch.lengths, strict=True):
        wanted = whole(operands, pieces)
        joined = np.concatenate([block[start : start + length] for block in found])
        np.testing.assert_array_equal(joined[: len(wanted)], wanted)
    return fetch.plan.wire_elements


def inner(start, limit):
    return (Piece(0, start, limit - start),)


def padded(size, low):
    """Shifted by `low`, in as many elements."""
    return (
        (Piece(None, 0, low), Piece(0, 0, size - low))
        if low > 0
        else (Piece(0, -low, size + low), Piece(None, 0, -low))
    )


def rolled(size, shift):
    return (Piece(0, size - shift, shift), Piece(0, 0, size - shift))


@pytest.mark.parametrize("shards", [2, 4, 8])
@pytest.mark.parametrize("size", [64, 65, 67, 33])
def test_a_stencil_needs_one_halo(size, shards):
    assert check([size], (inner(0, size - 2), inner(1, size - 1), inner(2, size)), shards) <= 2 + shards
    assert check([size], (padded(size, 1), (Piece(0, 0, size),), padded(size, -1)), shards) == min(2, shards - 1)
    assert check([size], (rolled(size, 1), rolled(size, size - 1)), shards) == 2


@pytest.mark.parametrize("size", [1, 3, 7, 8, 13])
def test_few_elements(size):
    check([size], tuple(inner(i, size) for i in range(min(size, 3))), 8)
    check([size], ((Piece(None, 0, 9), Piece(0, 0, size), Piece(None, 0, 5)), inner(0, size)), 8)


def test_results_that_do_not_overlap_share_rounds():
    """The first half goes to the left and the second half to the right: all devices send as much."""
    assert check([64], (inner(0, 32), inner(32, 64)), 8) == 8
    assert sum(check([64], (half,), 8) for half in (inner(0, 32), inner(32, 64))) == 16


def test_results_of_several_operands():
    queue = (Piece(0, 1, 63), Piece(1, 0, 1))
    assert check([64, 1], (queue,), 8) == 1
    assert check([64, 1], (queue,), 8, is_whole=[1]) == 1
    assert check([64, 64], ((Piece(0, 0, 64), Piece(1, 0, 64)), (Piece(1, 0, 64), Piece(0, 0, 64))), 4) > 0


@pytest.mark.parametrize("seed", range(40))
def test_any_pieces(seed):
    random = np.random.default_rng(seed)
    sizes = [int(n) for n in random.integers(1, 40, random.integers(1, 4))]

    def piece():
        if random.random() < 0.2:
            return Piece(None, 0, int(random.integers(1, 5)))
        k = int(random.integers(len(sizes)))
        start = int(random.integers(sizes[k]))
        return Piece(k, start, int(random.integers(1, sizes[k] - start + 1)))

    results = tuple(tuple(piece() for _ in range(random.integers(1, 4))) for _ in range(random.integers(1, 4)))
    check(sizes, results, int(random.choice([2, 3, 4, 8])), is_whole=[0] if len(sizes) > 1 and seed % 3 == 0 else [])
