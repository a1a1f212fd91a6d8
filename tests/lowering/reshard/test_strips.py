"""Plans of strips, run on numpy shards: the right elements, nothing of the padding, and as many bytes as stated."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math

import numpy as np
import pytest
from strip_runs import FILL, padded, run, split

from sdy_jax.errors import InternalError
from sdy_jax.lowering.reshard.strip_reads import (
    Level,
    Piece,
    Window,
    block_length,
    concatenate_plan,
    contracted_reads,
    joined_plan,
    relayout_plan,
    reshape_plan,
    reverse_plan,
    roll_plan,
    scattered_reads,
    slice_plan,
    window_reads,
)
from sdy_jax.lowering.reshard.strips import Source, Want, edge_colours, plan_strips

SHARDS = (2, 3, 4, 8)


def joined(blocks, size):
    """The elements of the result; what lies beyond was not asked for."""
    flat = np.concatenate(blocks)
    np.testing.assert_array_equal(flat[size:], FILL)
    return flat[:size]


def sizes(shards, seed, count=12):
    rng = np.random.default_rng(seed)
    return [1, shards - 1, shards, shards + 1, 5 * shards, *map(int, rng.integers(1, 9 * shards, count))]


@pytest.mark.parametrize("shards", SHARDS)
def test_slices_with_any_stride(shards):
    rng = np.random.default_rng(shards)
    for size in sizes(shards, 1):
        x = np.arange(size, dtype=float)
        for _ in range(6):
            start, limit = sorted(map(int, rng.integers(0, size + 1, 2)))
            stride = int(rng.integers(1, 6))
            cut = slice_plan(size, shards, start, limit, stride)
            taken = [np.full(cut.count, np.nan) for _ in range(shards)]
            for u, block in enumerate(split(x, shards)):
                found = block[cut.phases[u] :: stride]
                assert cut.phases[u] < stride and len(found) <= cut.count
                taken[u][: len(found)] = found
            expected = x[start:limit:stride]
            np.testing.assert_array_equal(joined(run(cut.plan, [taken], shards), len(expected)), expected)


@pytest.mark.parametrize("shards", SHARDS)
def test_concatenations_of_unequal_operands_of_which_some_are_whole(shards):
    rng = np.random.default_rng(shards)
    for _ in range(40):
        lengths = [int(n) for n in rng.integers(0, 5 * shards, rng.integers(2, 4))]
        whole = [bool(w) for w in rng.integers(0, 2, len(lengths))]
        xs = [100 * k + np.arange(n, dtype=float) for k, n in enumerate(lengths)]
        operands = [[x] * shards if w else split(x, shards) for x, w in zip(xs, whole, strict=True)]
        plan = concatenate_plan(lengths, shards, whole)
        np.testing.assert_array_equal(joined(run(plan, operands, shards), sum(lengths)), np.concatenate(xs))


@pytest.mark.parametrize("shards", SHARDS)
def test_reversals_and_rolls(shards):
    for size in sizes(shards, 2):
        x = np.arange(size, dtype=float)
        blocks = run(reverse_plan(size, shards), [split(x, shards)], shards)
        np.testing.assert_array_equal(joined([block[::-1] for block in blocks], size), x[::-1])
        for shift in (0, 1, -1, 3, size // 2, -2 * size - 1):
            found = joined(run(roll_plan(size, shards, shift), [split(x, shards)], shards), size)
            np.testing.assert_array_equal(found, np.roll(x, shift))


@pytest.mark.parametrize("shards", SHARDS)
def test_relayouts_between_block_lengths(shards):
    for size in sizes(shards, 3):
        x = np.arange(size, dtype=float)
        least = block_length(size, shards)
        for block, new in ((least, least + 1), (least + 2, least), (size, least), (least, size), (least, least)):
            found = run(relayout_plan(size, shards, block, new), [split(x, shards, block)], shards)
            np.testing.assert_array_equal(joined(found, size), x)


def level(shape, dim):
    return Level(math.prod(shape[:dim]), shape[dim], math.prod(shape[dim + 1 :]))


def blocks_of(x, dim, shards):
    """Blocks along a dimension, without padding at the end."""
    block = block_length(x.shape[dim], shards)
    return [np.take(x, range(t * block, min((t + 1) * block, x.shape[dim])), dim) for t in range(shards)]


RESHAPES = [((4, 65), (260,)), ((260,), (4, 65)), ((6, 4), (8, 3)), ((3, 5), (5, 3)), ((2, 3, 7), (42,))]


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize(("before", "after"), RESHAPES)
def test_reshapes_between_blocks_of_any_dimensions(before, after, shards):
    x = np.arange(math.prod(before), dtype=float)
    for k, m in itertools.product(range(len(before)), range(len(after))):
        source, target = level(before, k), level(after, m)
        block, part = (block_length(of.size, shards) * of.minor for of in (source, target))
        operands = [[np.full(block, np.nan) for _ in range(shards)] for _ in range(source.major)]
        for t, own in enumerate(blocks_of(x.reshape(before), k, shards)):
            for p, row in enumerate(own.reshape(source.major, own.size // source.major)):
                operands[p][t][: len(row)] = row
        found = run(reshape_plan(source, target, shards), operands, shards)
        for block, own in zip(found, blocks_of(x.reshape(after), m, shards), strict=True):
            rows = own.reshape(target.major, own.size // target.major)
            np.testing.assert_array_equal(block.reshape(target.major, part)[:, : rows.shape[1]], rows)


def windows_of(x, window):
    """Each window's elements: `[results, window]`."""
    wide = padded(x, window.low, window.high, window.base_dilation)
    starts = np.arange(window.result_size)[:, None] * window.stride
    return wide[starts + np.arange(window.window) * window.window_dilation]


def local_windows(y, reads, window):
    starts = np.arange(reads.block)[:, None] * window.stride
    return y[starts + np.arange(window.window) * window.window_dilation]


def cut_for_windows(block, phase, reads):
    """What a device runs its windows over."""
    spread = np.full(len(block) * reads.dilation, FILL)
    spread[:: reads.dilation] = block
    assert phase + reads.length <= len(spread)
    return spread[phase:][: reads.length]


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("seed", range(4))
def test_windows_of_any_length_stride_padding_and_dilation(shards, seed):
    """Also such as reach over several shards, and pads that are longer than one."""
    rng = np.random.default_rng([shards, seed])
    seen = 0
    for _ in range(60):
        size, low, high = int(rng.integers(1, 7 * shards)), *map(int, rng.integers(-4, 12, 2))
        length, stride, base, dilation = (int(n) for n in rng.integers(1, (3 * shards, 5, 4, 4)))
        window = Window(size, length, stride, low, high, base, dilation)
        if not window.result_size or low + (size - 1) * base + 1 <= 0 or high + (size - 1) * base + 1 <= 0:
            continue
        seen += 1
        x = np.arange(size, dtype=float)
        reads = window_reads(window, shards)
        fetched = run(reads.plan, [split(x, shards)], shards)
        read = [cut_for_windows(y, phase, reads) for y, phase in zip(fetched, reads.phases, strict=True)]
        found = np.concatenate([local_windows(y, reads, window) for y in read])
        np.testing.assert_array_equal(found[: window.result_size], windows_of(x, window))
    assert seen > 10


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("is_reversed", [False, True])
def test_terms_of_windows_whose_elements_are_split(shards, is_reversed):
    rng = np.random.default_rng(shards)
    for _ in range(40):
        size, length, low = (int(n) for n in rng.integers(1, (7 * shards, 5 * shards, 6)))
        stride, base, dilation = (int(n) for n in rng.integers(1, 4, 3))
        window = Window(size, length, stride, low, low + length * dilation, base, dilation, is_reversed)
        x = np.arange(size, dtype=float)
        reads = contracted_reads(window, shards)
        fetched = run(reads.plan, [split(x, shards)], shards)
        for t, (y, phase) in enumerate(zip(fetched, reads.phases, strict=True)):
            found = local_windows(
                cut_for_windows(y, phase, reads), reads, dataclasses.replace(window, window=reads.window)
            )
            own = np.arange(length)[t * reads.window :][: reads.window]
            kept = slice(-len(own), None) if is_reversed else slice(len(own))
            if len(own):
                expected = windows_of(x, window)[:, np.sort(length - 1 - own if is_reversed else own)]
                np.testing.assert_array_equal(found[:, kept], expected)


@pytest.mark.parametrize("shards", SHARDS)
def test_windows_that_touch_a_block(shards):
    """Every element gets the values of all windows over it."""
    rng = np.random.default_rng(shards)
    for _ in range(40):
        size, length, stride = (int(n) for n in rng.integers(1, (7 * shards, 3 * shards, 6)))
        window = Window(size, length, stride, *map(int, rng.integers(0, length, 2)))
        values = np.arange(1.0, window.result_size + 1)
        expected = np.zeros(size + 2 * length + stride)
        for i, value in enumerate(values):
            expected[length + i * stride - window.low :][:length] += value
        reads, x = scattered_reads(window, shards), np.arange(size, dtype=float)
        operands = run(reads.operand, [split(x, shards)], shards)
        sources = run(reads.source, [split(values, shards)], shards)
        found = []
        for operand, source, start in zip(operands, sources, reads.starts, strict=True):
            out = np.zeros_like(operand)
            for i in np.flatnonzero(source != FILL):
                first = (int(source[i]) - 1) * stride - window.low
                wide = np.concatenate([np.full(length, FILL), x, np.full(length + stride, FILL)])
                np.testing.assert_array_equal(operand[i * stride :][:length], wide[length + first :][:length])
                out[i * stride :][:length] += source[i]
            found.append(out[start:][: reads.block])
        np.testing.assert_array_equal(np.concatenate(found)[:size], expected[length:][:size])


@pytest.mark.parametrize("shards", SHARDS)
def test_pads_are_windows_of_one_element(shards):
    rng = np.random.default_rng(shards)
    for size in sizes(shards, 4):
        x = np.arange(size, dtype=float)
        for _ in range(4):
            low, high, dilation = *map(int, rng.integers(-size // 2, 2 * size, 2)), int(rng.integers(1, 4))
            window = Window(size, low=low, high=high, base_dilation=dilation)
            expected = padded(x, low, high, dilation)
            assert window.result_size == len(expected)
            reads = window_reads(window, shards)
            if not len(expected):
                assert reads.block == reads.length == 0
                continue
            fetched = run(reads.plan, [split(x, shards)], shards)
            read = [cut_for_windows(y, phase, reads) for y, phase in zip(fetched, reads.phases, strict=True)]
            np.testing.assert_array_equal(joined(read, len(expected)), expected)


def test_pieces_without_an_operand_are_fill():
    x = np.arange(10.0)
    plan = joined_plan(
        (Source.split(10, 4),), (Piece(None, 0, 3), Piece(0, 2, 6), Piece(None, 0, 2), Piece(0, 0, 1)), 4
    )
    found = np.concatenate(run(plan, [split(x, 4)], 4))[:12]
    np.testing.assert_array_equal(found, [FILL] * 3 + [2, 3, 4, 5, 6, 7] + [FILL] * 2 + [0])


def test_wire_elements_of_shifts_stencils_pools_and_halves():
    shift = (Piece(None, 0, 1), Piece(0, 0, 1023))
    assert joined_plan((Source.split(1024, 8),), shift, 8).wire_elements == 1
    assert roll_plan(1024, 8, 3).wire_elements == 3
    assert window_reads(Window(1024, 3, low=1, high=1), 8).plan.wire_elements == 2
    assert window_reads(Window(64, 3, low=1, high=1), 8).plan.wire_elements == 2
    assert window_reads(Window(64, 3, stride=2, low=0, high=1), 8).plan.wire_elements == 1
    assert window_reads(Window(64, 2, stride=2), 8).plan.wire_elements == 0
    assert slice_plan(1024, 8, 512, 1024).plan.wire_elements == 128
    assert slice_plan(1024, 8, 0, 1024, 2).plan.wire_elements == 0
    assert concatenate_plan([512, 512], 8).wire_elements == 128
    assert reverse_plan(64, 4).wire_elements == 16


def test_strides_send_only_what_the_result_has():
    assert slice_plan(4096, 8, 2048, 4096, 4).plan.wire_elements == 512 // 8 * 2


def test_regular_patterns_have_tables_of_one_number():
    plan = window_reads(Window(1024, 3, low=1, high=1), 8).plan
    for strips in (*plan.copies, *plan.rounds):
        assert len(set(strips.offsets)) == len(set(strips.starts)) == 1
    assert plan.copies[0].is_full


def test_copies_that_most_devices_have_alike_need_no_mask():
    """The first row repeated in front of all rows: the first device has two strips, the others one."""
    plan = joined_plan((Source.split(1024, 8),), (Piece(0, 0, 1), Piece(0, 0, 1023)), 8)
    assert [(strips.length, strips.is_full) for strips in plan.copies] == [(127, True), (1, False)]


def test_strips_of_opposed_lengths_are_cut_into_parts():
    """Every device sends 4 elements at most, but the rounds of whole strips are 3 and 3 long."""
    wants = [[Want(0, 4 * (t - 1), 0, t)] if 1 <= t <= 3 else [] for t in range(5)]
    for t in (2, 3, 4):
        wants[t].append(Want(0, 4 * (t - 2), 3, 5 - t))
    plan = plan_strips((Source.split(20, 5),), tuple(map(tuple, wants)), 6)
    assert [strips.length for strips in plan.rounds] == [2, 2, 1]
    x = np.arange(20.0)
    blocks = run(plan, [split(x, 5)], 5)
    for block, strips in zip(blocks, wants, strict=True):
        for _, source, start, length in strips:
            np.testing.assert_array_equal(block[start:][:length], x[source:][:length])


def run_by_itself(block, shard, reads, window):
    """The windows of an op that dilates and pads by itself, and keeps its own results."""
    wide = padded(block, *reads.padding, reads.dilation)
    count = (len(wide) - window.span) // window.stride + 1
    found = local_windows(wide, dataclasses.replace(reads, block=count), window)
    return found[reads.starts[shard] :][: reads.block]


@pytest.mark.parametrize("size", [64, 65, 13, 5])
def test_ops_may_dilate_by_themselves(size):
    x = np.arange(size, dtype=float)
    for length, stride, low, high, base in ((3, 1, 1, 2, 2), (3, 1, 2, 2, 3), (4, 3, 5, 0, 3), (2, 2, 0, 1, 2)):
        window = Window(size, length, stride, low, high, base)
        reads = window_reads(window, 8)
        if reads.starts is None:
            assert stride > 1
            continue
        blocks = run(reads.plan, [split(x, 8)], 8)
        found = np.concatenate([run_by_itself(block, t, reads, window) for t, block in enumerate(blocks)])
        np.testing.assert_array_equal(found[: window.result_size], windows_of(x, window))
    assert set(window_reads(Window(64, 3, low=1, high=2, base_dilation=2), 8).starts) == {0}


def test_plans_of_many_shards_are_made_of_their_neighbours_alone():
    plan = window_reads(Window(256 * 100 - 7, 31, low=15, high=15), 256).plan
    assert len(plan.rounds) == 2
    assert plan.wire_elements == 30
    relayout = relayout_plan(65 * 255, 256, 100, 65)
    assert len(relayout.rounds) <= 6
    assert relayout.wire_elements <= 120


@pytest.mark.parametrize("seed", range(20))
def test_edge_colourings_need_as_many_colours_as_the_largest_degree(seed):
    rng = np.random.default_rng(seed)
    edges = [tuple(map(int, pair)) for pair in rng.integers(0, rng.integers(1, 9), (rng.integers(1, 60), 2))]
    colours = edge_colours(edges)
    degree = max(collections.Counter(end for edge in edges for end in enumerate(edge)).values())
    assert set(colours) == set(range(degree))
    for side in (0, 1):
        ends = [(edge[side], colour) for edge, colour in zip(edges, colours, strict=True)]
        assert len(set(ends)) == len(ends)


def test_wants_that_do_not_exist_are_bugs():
    source = Source.split(8, 4)
    with pytest.raises(InternalError, match="outside of an operand that holds 0 to 8"):
        plan_strips((source,), ((Want(0, 7, 0, 2),), (), (), ()), 2)
    with pytest.raises(InternalError, match="outside of a block of 2 elements"):
        plan_strips((source,), ((Want(0, 0, 1, 2),), (), (), ()), 2)
    with pytest.raises(InternalError, match="cannot hold 9"):
        Source.split(9, 4, 2)
