"""Plans of strips on eight devices against numpy, in shard_map over refined meshes with axes in any order."""

from __future__ import annotations

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdy_jax.ir.device_orders import block_indices
from sdy_jax.ir.meshes import AxisRef, Mesh, axes_size
from sdy_jax.lowering.ops.registry import LocalOp
from sdy_jax.lowering.ops.shards import fetch, redistribute, reversed_, sliced
from sdy_jax.lowering.reshard.strip_reads import (
    Piece,
    Window,
    block_length,
    concatenate_plan,
    joined_plan,
    relayout_plan,
    reverse_plan,
    roll_plan,
    slice_plan,
    window_reads,
)
from sdy_jax.lowering.reshard.strips import Source
from sdy_jax.plan.profile import collectives_in_hlo, totals
from sdy_jax.runtime.meshes import RefinedMesh

MESH = Mesh.of(p=2, q=4)
P, Q, Q1, Q2 = AxisRef("p"), AxisRef("q"), AxisRef.sub("q", 1, 2), AxisRef.sub("q", 2, 2)
REFINED = RefinedMesh.of(MESH, [Q1, Q2])
AXES = {"p": (P,), "q": (Q,), "pq": (P, Q), "qp": (Q, P), "q2-p": (Q2, P), "q2-q1": (Q2, Q1), "q2-p-q1": (Q2, P, Q1)}
OTHER = Mesh((*MESH.axes,), (3, 1, 4, 0, 5, 7, 2, 6))
FILL = 7
ORDERS = pytest.mark.parametrize("axes", AXES.values(), ids=AXES)


def stacked(x, dim, axes, mesh=REFINED, block=None):
    """What each device holds of `x`, split along `dim`: `[devices, ...]`. The padding is NaN, or the largest number."""
    shards = axes_size(axes, MESH)
    block = block_length(x.shape[dim], shards) if block is None else block
    junk = np.nan if jnp.issubdtype(x.dtype, jnp.inexact) else True if x.dtype == bool else jnp.iinfo(x.dtype).max
    shape = [block * shards if d == dim else n for d, n in enumerate(x.shape)]
    padded = np.full(shape, junk, x.dtype)
    padded[tuple(slice(0, n) for n in x.shape)] = x
    blocks = np.split(padded, shards, dim)
    return np.stack([blocks[index] for index in mesh.block_indices(axes)])


def compiled(function, *arguments, mesh=REFINED):
    jax_mesh = mesh.to_jax(np.array(jax.devices()[:8]).reshape(2, 4))
    spec = jax.sharding.PartitionSpec(mesh.axis_names)
    placed = jax.sharding.NamedSharding(jax_mesh, spec)

    def local(*xs):
        return function(*(x[0] for x in xs))[None]

    mapped = jax.jit(jax.shard_map(local, mesh=jax_mesh, in_specs=spec, out_specs=spec, check_vma=False))
    arguments = [jax.device_put(x, placed) for x in arguments]
    return mapped.lower(*arguments).compile(), arguments


def check(function, expected, dim, axes, wire_elements, *arguments, mesh=REFINED):
    """All devices have their blocks of `expected`, and XLA's permutes send what the plan says and nothing else."""
    program, arguments = compiled(function, *arguments, mesh=mesh)
    out = np.asarray(program(*arguments))
    blocks = [out[list(mesh.block_indices(axes)).index(index)] for index in range(axes_size(axes, MESH))]
    np.testing.assert_array_equal(out, np.stack([blocks[index] for index in mesh.block_indices(axes)]))
    whole = np.concatenate(blocks, dim)
    kept = tuple(slice(0, n) for n in expected.shape)
    assert whole.dtype == expected.dtype
    np.testing.assert_array_equal(whole[kept], expected)
    sent = totals(collectives_in_hlo(program.as_text()))
    row = expected.nbytes // max(expected.shape[dim], 1)
    assert set(sent.by_kind) <= {"collective-permute"}
    assert sent.wire_bytes == wire_elements * row


def values(shape, dtype=np.float32):
    x = np.arange(1, 1 + int(np.prod(shape))).reshape(shape)
    return (x % 3 == 0) if dtype is bool else (x % 100).astype(dtype)


def roll(x, dim, axes, shift, local=REFINED):
    return redistribute(local, [x], dim, axes, roll_plan_of(axes, 19, shift))


def roll_plan_of(axes, size, shift):
    return roll_plan(size, axes_size(axes, MESH), shift)


@ORDERS
def test_rolls_follow_the_order_of_the_axes(axes):
    x = values((3, 19))
    plan = roll_plan_of(axes, 19, 3)
    run = functools.partial(roll, dim=1, axes=axes, shift=3)
    check(run, np.roll(x, 3, 1), 1, axes, plan.wire_elements, stacked(x, 1, axes))


@ORDERS
def test_windows_reach_several_shards_and_corners(axes):
    x = values((21, 2))
    window = Window(21, 11, stride=2, low=6, high=4, window_dilation=1)
    reads = window_reads(window, axes_size(axes, MESH))

    def run(block):
        y = fetch(REFINED, block, 0, axes, reads, FILL)
        starts = jnp.arange(reads.block)[:, None] * window.stride
        return y[starts + jnp.arange(window.window)].sum(1)

    wide = np.pad(x, [(6, 4), (0, 0)], constant_values=FILL)
    expected = np.stack([wide[i * 2 :][:11].sum(0) for i in range(window.result_size)])
    check(run, expected, 0, axes, reads.plan.wire_elements, stacked(x, 0, axes))


@ORDERS
def test_pads_inside_and_outside(axes):
    x = values((10, 3))
    for low, high, interior in ((1, 2, 0), (-3, 30, 1), (25, -4, 2)):
        window = Window(10, low=low, high=high, base_dilation=interior + 1)
        reads = window_reads(window, axes_size(axes, MESH))
        expected = np.asarray(jax.lax.pad(x, np.float32(FILL), [(low, high, interior), (0, 0, 0)]))
        run = functools.partial(fetch, REFINED, dim=0, axes=axes, reads=reads, fill=FILL)
        check(run, expected, 0, axes, reads.plan.wire_elements, stacked(x, 0, axes))


@ORDERS
def test_slices_with_and_without_strides(axes):
    x = values((29, 2))
    for start, limit, stride in ((9, 29, 1), (3, 27, 4), (1, 29, 13), (5, 6, 1)):
        plan = slice_plan(29, axes_size(axes, MESH), start, limit, stride)
        run = functools.partial(sliced, REFINED, dim=0, axes=axes, plan=plan)
        check(run, x[start:limit:stride], 0, axes, plan.plan.wire_elements, stacked(x, 0, axes))


@ORDERS
def test_concatenations_of_split_and_whole_operands(axes):
    x, y, z = values((2, 13)), 100 + values((2, 6)), -values((2, 5))
    plan = concatenate_plan([13, 6, 5], axes_size(axes, MESH), [False, True, False])
    arguments = stacked(x, 1, axes), np.stack([y] * 8), stacked(z, 1, axes)
    run = lambda *blocks: redistribute(REFINED, blocks, 1, axes, plan)  # noqa: E731
    check(run, np.concatenate([x, y, z], 1), 1, axes, plan.wire_elements, *arguments)


@ORDERS
def test_reversals_and_relayouts(axes):
    x = values((13, 3))
    shards = axes_size(axes, MESH)
    reverse = reverse_plan(13, shards)
    run = functools.partial(reversed_, REFINED, dim=0, axes=axes, plan=reverse)
    check(run, x[::-1], 0, axes, reverse.wire_elements, stacked(x, 0, axes))
    block = block_length(13, shards)
    relayout = relayout_plan(13, shards, block + 3, block)
    run = lambda x: redistribute(REFINED, [x], 0, axes, relayout)  # noqa: E731
    check(run, x, 0, axes, relayout.wire_elements, stacked(x, 0, axes, block=block + 3))


@ORDERS
def test_devices_in_another_order(axes):
    view = RefinedMesh.of(MESH, [Q1, Q2]).with_meshes({"other": OTHER}).on("other")
    assert view.device_permutation
    x = values((19, 3))
    plan = roll_plan_of(axes, 19, 3)
    run = functools.partial(roll, dim=0, axes=axes, shift=3, local=view)
    check(run, np.roll(x, 3, 0), 0, axes, plan.wire_elements, stacked(x, 0, axes, view), mesh=view)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.int32, np.uint8, np.int64, bool, np.complex64])
def test_any_element_type_passes_unchanged(dtype):
    check_pieces(values((11, 8), dtype), lambda run, block: run(block))


@pytest.mark.parametrize("dtype", [jnp.int4, jnp.uint4, jnp.int2, jnp.uint2])
def test_small_integers_pass_unchanged(dtype):
    """As bytes outside: executables for four-bit arguments ask for a layout that arrays do not have (jax 0.10)."""
    x = np.abs(values((11, 8), np.int8) % 2)
    check_pieces(x, lambda run, block: run(block.astype(dtype)).astype(block.dtype))


def check_pieces(x, convert):
    axes = AXES["q2-p"]
    plan = joined_plan((Source.split(11, 4),), (Piece(0, 4, 7), Piece(None, 0, 3), Piece(0, 1, 2)), 4)
    expected = np.concatenate([x[4:], np.full((3, 8), 1, x.dtype), x[1:3]])

    def run(block):
        return redistribute(REFINED, [block], 0, axes, plan, 1)

    with jax.enable_x64(True):
        program, arguments = compiled(functools.partial(convert, run), stacked(x, 0, axes))
        out = np.asarray(program(*arguments))
    order = list(block_indices(axes, MESH))
    found = np.concatenate([out[order.index(t)] for t in range(4)])[:12]
    assert found.dtype == x.dtype
    np.testing.assert_array_equal(found, expected)


def test_convolutions_of_two_split_dimensions_meet_in_the_corners():
    x, kernel = values((13, 9)), values((3, 5))
    rows, columns = (Q2, P), (Q1,)
    reads = [window_reads(Window(13, 3, stride=2, low=1, high=1), 4), window_reads(Window(9, 5, low=2, high=2), 2)]

    def convolution(y, padding):
        return jax.lax.conv_general_dilated(y[None, None], kernel[None, None], (2, 1), padding)[0, 0]

    def run(block):
        y = fetch(REFINED, block, 0, rows, reads[0])
        return convolution(fetch(REFINED, y, 1, columns, reads[1]), [(0, 0), (0, 0)])

    expected = np.asarray(convolution(x, [(1, 1), (2, 2)]))
    blocks = np.stack([stacked(half, 0, rows) for half in np.split(np.pad(x, [(0, 0), (0, 1)]), 2, 1)])
    blocks[1, :, :, -1] = np.nan
    arguments = np.stack([blocks[half, d] for d, half in enumerate(REFINED.block_indices(columns))])
    program, arguments = compiled(run, arguments)
    out = np.asarray(program(*arguments))
    for d, (row, column) in enumerate(zip(*map(REFINED.block_indices, (rows, columns)), strict=True)):
        part = expected[row * 2 :][:2, column * 5 :][:, :5]
        np.testing.assert_array_equal(out[d][: part.shape[0], : part.shape[1]], part)


def test_collectives_are_named_after_the_op_and_its_source():
    op = types.SimpleNamespace(name="stablehlo.slice", source="/home/me/model.py:3")
    local = LocalOp(op, REFINED, (), (), None)
    axes = AXES["q2-p"]
    program, _ = compiled(
        functools.partial(roll, dim=0, axes=axes, shift=3, local=local), stacked(values((19,)), 0, axes)
    )
    permutes = [line for line in program.as_text().splitlines() if " collective-permute" in line]
    assert permutes
    assert all("stablehlo.slice[q.2.2_p] model.py:3" in line for line in permutes)


def test_empty_and_single_elements():
    for size in (1, 2):
        x = values((size, 2))
        for axes in (AXES["pq"], AXES["q2-p"]):
            plan = roll_plan_of(axes, size, 1)
            run = lambda x, axes=axes, plan=plan: redistribute(REFINED, [x], 0, axes, plan)  # noqa: E731
            check(run, np.roll(x, 1, 0), 0, axes, plan.wire_elements, stacked(x, 0, axes))


STATED = {
    "a shift by one row": (
        lambda: joined_plan((Source.split(1024, 8),), (Piece(None, 0, 1), Piece(0, 0, 1023)), 8),
        256,
    ),
    "a roll by three": (lambda: roll_plan(1024, 8, 3), 768),
    "a 3-point stencil": (lambda: window_reads(Window(1024, 3, low=1, high=1), 8).plan, 512),
    "the second half": (lambda: slice_plan(1024, 8, 512, 1024).plan, 32768),
    "two halves joined": (lambda: concatenate_plan([512, 512], 8), 32768),
}


@pytest.mark.parametrize("name", STATED)
def test_bytes_of_rows_of_f32_1024_64(name):
    make, wire_bytes = STATED[name]
    plan, axes = make(), AXES["pq"]
    x = values((1024, 64))
    parts = [x[:512], x[512:]] if name == "two halves joined" else [x]
    run = lambda *blocks: redistribute(REFINED, blocks, 0, axes, plan)  # noqa: E731
    program, _ = compiled(run, *(stacked(part, 0, axes) for part in parts))
    assert totals(collectives_in_hlo(program.as_text())).by_kind == {
        "collective-permute": (len(plan.rounds), wire_bytes)
    }


def test_gradients_come_back_to_where_the_strips_came_from():
    """The transposed plan adds up what several windows read."""
    axes, reads = AXES["qp"], window_reads(Window(19, 5, low=2, high=2), 8)
    x = values((19,))

    def run(block):
        fetched, back = jax.vjp(lambda v: fetch(REFINED, v, 0, axes, reads, 0.0), block)
        return back(jnp.ones_like(fetched))[0]

    program, arguments = compiled(run, stacked(x, 0, axes))
    out = np.asarray(program(*arguments))
    order = list(block_indices(axes, MESH))
    found = np.concatenate([out[order.index(t)] for t in range(8)])[:19]
    counts = np.zeros(19)
    for t in range(8):
        window = np.arange(t * reads.block - 2, t * reads.block - 2 + reads.length)
        last = min(19, t * reads.block + reads.block) + 2
        for index in window[(window >= 0) & (window < 19) & (window < last)]:
            counts[index] += 1
    np.testing.assert_array_equal(found, counts)
