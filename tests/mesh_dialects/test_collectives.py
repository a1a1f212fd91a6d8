"""Every collective on eight devices against a numpy model of who owns which block."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import sdy_jax as sdy
from sdy_jax.errors import InternalError, ShardingError
from sdy_jax.ir.device_orders import block_indices
from sdy_jax.ir.meshes import AxisRef, Mesh, axes_size, merge_neighbours, set_difference, sort_and_merge
from sdy_jax.ir.parsers import parse_sharding
from sdy_jax.ir.shardings import REDUCTION_KINDS, TensorSharding
from sdy_jax.lowering.ops.collectives import movement, reductions
from sdy_jax.lowering.targets.target import CPU, family_of_platform
from sdy_jax.runtime.meshes import Forms, RefinedMesh

MESH = Mesh.of(p=2, q=4)
CUTS = [AxisRef.sub("q", 1, 2), AxisRef.sub("q", 2, 2)]
REFINED = RefinedMesh.of(MESH, CUTS)
SHAPE = (8, 16, 8)


def sharding(text):
    return parse_sharding(text, "mesh")


def axes_of(text):
    """The axis lists of `[{...}, ...]`."""
    return sharding(text).axes


def blocks(array, target):
    """Stacks what each device holds of a global array: `[devices, *local shape]`."""
    index = [block_indices(axes, MESH) for axes in target.axes]
    local = target.local_shape(array.shape, MESH)
    cut = [array[tuple(slice(i[d] * n, (i[d] + 1) * n) for i, n in zip(index, local, strict=True))] for d in range(8)]
    return np.stack(cut)


def run(function, *stacked):
    """`function` on each device's entries of the stacked arrays."""
    jax_mesh = REFINED.to_jax(np.array(jax.devices()[:8]).reshape(2, 4))
    spec = jax.sharding.PartitionSpec(REFINED.axis_names)

    def local(*xs):
        return jax.tree.map(lambda y: y[None], function(*(x[0] for x in xs)))

    placed = jax.sharding.NamedSharding(jax_mesh, spec)
    arguments = [jax.device_put(x, placed) for x in stacked]
    mapped = jax.shard_map(local, mesh=jax_mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.tree.map(np.asarray, jax.jit(mapped)(*arguments))


def values(dtype, shape=SHAPE, seed=0):
    rng = np.random.default_rng(seed)
    dtype = np.dtype(dtype)
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(dtype)
    if dtype.kind in "iu":
        return rng.integers(0, 100, shape).astype(dtype)
    real = rng.integers(-8, 8, shape)
    return (real + 1j * rng.integers(-8, 8, shape)).astype(dtype) if dtype.kind == "c" else real.astype(dtype)


@pytest.fixture(params=[None, "cpu", "tpu"], ids=["devices", "cpus", "tpus"])
def on_devices(request):
    """The forms for any devices, and those for CPUs and TPUs."""
    return replace(REFINED, forms=family_of_platform(request.param).forms if request.param else Forms())


DTYPES = (np.float32, jnp.bfloat16, np.int32, np.bool_, np.complex64)

MOVES = [
    ("all_gather", "[{p, q}, {}, {}]", "[{q}, {}, {}]", "[{p}, {}, {}]"),
    ("all_gather", "[{p, q}, {}, {}]", '[{"q":(2)2}, {}, {}]', '[{p, "q":(1)2}, {}, {}]'),
    ("all_gather", "[{q, p}, {}, {}]", "[{q, p}, {}, {}]", "[{}, {}, {}]"),
    ("all_gather", '[{"q":(2)2}, {p}, {"q":(1)2}]', '[{"q":(2)2}, {p}, {"q":(1)2}]', "[{}, {}, {}]"),
    ("all_gather", '[{"q":(2)2, p, "q":(1)2}, {}, {}]', '[{p, "q":(1)2}, {}, {}]', '[{"q":(2)2}, {}, {}]'),
    ("all_slice", "[{}, {}, {}]", "[{q, p}, {}, {}]", "[{q, p}, {}, {}]"),
    ("all_slice", '[{"q":(1)2}, {}, {}]', '[{"q":(2)2}, {p}, {}]', "[{q}, {p}, {}]"),
    ("all_slice", "[{p}, {}, {}]", '[{"q":(2)2}, {}, {"q":(1)2}]', '[{p, "q":(2)2}, {}, {"q":(1)2}]'),
]


def quote(text):
    """`p` and `q` may be written without quotes in this file."""
    return text.replace('"q"', "q").replace("p", '"p"').replace("q", '"q"')


@pytest.mark.parametrize("dtype", DTYPES)
def test_gathers_and_slices_move_every_block_to_its_owner(dtype, on_devices):
    x = values(dtype)
    cases = [(name, *map(sharding, map(quote, texts))) for name, *texts in MOVES]

    def program(*xs):
        return [getattr(movement, n)(v, by.axes, on_devices) for v, (n, _, by, _) in zip(xs, cases, strict=True)]

    found = run(program, *(blocks(x, source) for _, source, _, _ in cases))
    for got, (_, _, _, target) in zip(found, cases, strict=True):
        np.testing.assert_array_equal(got, blocks(x, target))


# (axes, source dimension, target dimension) as text, source and target shardings.
EXCHANGES = [
    ("[{p, q}, {}, {}]", [("q", 0, 2)], "[{p}, {}, {q}]"),
    ("[{q, p}, {}, {}]", [("q, p", 0, 1)], "[{}, {q, p}, {}]"),
    ("[{p, q}, {}, {}]", [('"q":(2)2', 0, 1)], '[{p, "q":(1)2}, {"q":(2)2}, {}]'),
    ("[{q}, {}, {p}]", [("q", 0, 2)], "[{}, {}, {p, q}]"),
]
COMBINED = [
    ('[{p}, {"q":(1)2}, {}, {}]', [("p", 0, 2), ('"q":(1)2', 1, 3)], '[{}, {}, {p}, {"q":(1)2}]'),
    ('[{"q":(2)2}, {}, {}, {"q":(1)2, p}]', [('"q":(2)2', 0, 1), ('"q":(1)2, p', 3, 2)],
     '[{}, {"q":(2)2}, {"q":(1)2, p}, {}]'),
    ('[{}, {q}, {p}, {}]', [("q", 1, 3), ("p", 2, 0)], "[{p}, {}, {}, {q}]"),
    ('[{}, {q}, {p}, {}]', [('"q":(2)2', 1, 0), ("p", 2, 3)], '[{"q":(2)2}, {"q":(1)2}, {}, {p}]'),
]  # fmt: skip


def parse_params(params):
    return [(axes_of(quote(f"[{{{axes}}}]"))[0], source, target) for axes, source, target in params]


@pytest.mark.parametrize(("cases", "shape"), [(EXCHANGES, SHAPE), (COMBINED, (8, 4, 16, 8))], ids=["one", "several"])
def test_all_to_all_moves_axes_between_dimensions(cases, shape, on_devices):
    x = values(np.float32, shape)
    x = np.arange(x.size, dtype=np.float32).reshape(shape)
    parsed = [(sharding(quote(s)), parse_params(params), sharding(quote(t))) for s, params, t in cases]

    def program(*xs):
        return [movement.all_to_all(v, params, on_devices) for v, (_, params, _) in zip(xs, parsed, strict=True)]

    found = run(program, *(blocks(x, source) for source, _, _ in parsed))
    for got, (_, _, target) in zip(found, parsed, strict=True):
        np.testing.assert_array_equal(got, blocks(x, target))


def test_several_moves_are_one_collective():
    source, params, _ = COMBINED[0]
    local = sharding(quote(source)).local_shape((8, 4, 16, 8), MESH)
    jax_mesh = REFINED.to_jax(np.array(jax.devices()[:8]).reshape(2, 4))
    spec = jax.sharding.PartitionSpec()
    exchange = functools.partial(movement.all_to_all, params=parse_params(params), mesh=REFINED)
    mapped = jax.shard_map(exchange, mesh=jax_mesh, in_specs=spec, out_specs=spec, check_vma=False)
    assert str(jax.make_jaxpr(mapped)(jnp.zeros(local))).count("all_to_all[") == 1


@pytest.mark.parametrize(("forms", "count"), [(CPU.forms, 1), (Forms(), 2)], ids=["cpus", "devices"])
def test_gathers_and_scatters_of_several_dimensions_are_one_collective_on_cpus(forms, count):
    axes = axes_of(quote("[{q}, {}, {p}]"))
    local = sharding(quote("[{q}, {}, {p}]")).local_shape(SHAPE, MESH)
    jax_mesh = REFINED.to_jax(np.array(jax.devices()[:8]).reshape(2, 4))
    spec, mesh = jax.sharding.PartitionSpec(), replace(REFINED, forms=forms)

    def program(x):
        return reductions.reduce_scatter(movement.all_gather(x, axes, mesh), axes, "sum", mesh)

    mapped = jax.shard_map(program, mesh=jax_mesh, in_specs=spec, out_specs=spec, check_vma=False)
    text = str(jax.make_jaxpr(mapped)(jnp.zeros(local)))
    assert [text.count(f"{kind}[") for kind in ("all_gather", "reduce_scatter")] == [count, count]


PERMUTES = [
    ("[{p}, {q}]", '[{"q":(1)2}, {"q":(2)2, p}]'),
    ("[{q, p}, {}]", "[{p, q}, {}]"),
    ('[{"q":(2)2}, {p}]', '[{p}, {"q":(1)2}]'),
    ("[{p}, {}]", '[{"q":(2)2}, {}]'),
    ('[{"q":(2)2, p, "q":(1)2}, {}]', "[{q, p}, {}]"),
    ("[{p}, {}]", "[{p}, {}]"),
]


def test_permutes_compose_and_reach_the_new_owners():
    x = np.arange(8 * 16, dtype=np.float32).reshape(8, 16)
    cases = [(sharding(quote(s)), sharding(quote(t))) for s, t in PERMUTES]

    def program(*xs):
        return [movement.collective_permute(v, s, t, REFINED) for v, (s, t) in zip(xs, cases, strict=True)]

    found = run(program, *(blocks(x, source) for source, _ in cases))
    for got, (_, target) in zip(found, cases, strict=True):
        np.testing.assert_array_equal(got, blocks(x, target))


def test_permute_keeps_blocks_that_are_in_place():
    pairs = movement.permutation_pairs(sharding('[{"p"}]'), sharding('[{"p"}]'), REFINED)
    assert pairs == [(i, i) for i in range(8)]
    moved = movement.permutation_pairs(sharding('[{"p", "q"}]'), sharding('[{"q", "p"}]'), REFINED)
    assert (0, 0) in moved
    assert (7, 7) in moved
    assert sorted(receiver for _, receiver in moved) == list(range(8))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("[{q}], unreduced={p}", '[{p, "q":(2)2}], unreduced={"q":(1)2}'),
        ('[{"q":(1)2}], unreduced={p}', '[{p}], unreduced={"q":(2)2}'),
        ("[{}], unreduced={p}", '[{}], unreduced={"q":(1)2}'),
    ],
)
def test_permute_of_a_partial_value_delivers_each_term_once(source, target):
    source, target = sharding(quote(source)), sharding(quote(target))
    terms = values(np.float32, (2, 8))
    source_term = block_indices(source.unreduced_axes, MESH)
    held = np.stack([blocks(terms[source_term[d]], source)[d] for d in range(8)])
    got = run(lambda v: movement.collective_permute(v, source, target, REFINED), held)
    target_term = block_indices(target.unreduced_axes, MESH)
    summed = np.stack([blocks(terms.sum(0), target)[d] for d in range(8)])
    for device, block in enumerate(block_indices(target.axes[0], MESH)):
        same_block = block_indices(target.axes[0], MESH) == block
        others = [e for e in np.flatnonzero(same_block) if target_term[e] != target_term[device]]
        for other in others:
            np.testing.assert_array_equal(got[device] + got[other], summed[device])


def test_permute_between_different_block_counts_is_a_bug():
    with pytest.raises(InternalError, match="number of blocks"):
        movement.permutation_pairs(sharding('[{"p"}]'), sharding('[{"q"}]'), REFINED)


NUMPY = {
    "sum": np.add, "max": np.maximum, "min": np.minimum, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor, "product": np.multiply,
}  # fmt: skip
BOOLEAN = {**NUMPY, "sum": np.logical_or, "product": np.logical_and}
REDUCED = ["{p}", "{q}", '{"q":(2)2}', "{q, p}", '{p, "q":(1)2}']


def kinds_of(dtype):
    exact = np.dtype(dtype).kind in "iub"
    return [kind for kind in REDUCTION_KINDS if exact or kind not in ("and", "or", "xor")]


def reduced(x, axes, kind):
    """`[devices, ...]` terms to their reduction over the devices that differ along `axes` alone."""
    rest = set_difference([AxisRef("p"), AxisRef("q")], sort_and_merge(axes, MESH), MESH)
    group = block_indices(rest, MESH)
    combine = (BOOLEAN if x.dtype == np.bool_ else NUMPY)[kind]
    return np.stack([functools.reduce(combine, x[group == group[d]]) for d in range(8)]).astype(x.dtype)


def terms_of(dtype, shape):
    """One random term per device; floats are powers of two, so that sums and products are exact in any order."""
    if np.dtype(dtype).kind in "iub":
        return values(dtype, (8, *shape))
    rng = np.random.default_rng(1)
    signed = rng.choice([-2.0, -1.0, -0.5, 0.5, 1.0, 2.0], (8, *shape))
    return (signed * (1 + 1j) if np.dtype(dtype).kind == "c" else signed).astype(dtype)


@pytest.mark.parametrize("dtype", [*DTYPES, np.int8, np.float16], ids=lambda t: np.dtype(t).name)
def test_all_reduce_combines_the_terms_of_a_group(dtype):
    x, scalar = terms_of(dtype, (13, 10)), terms_of(dtype, ())  # enough to be reduced in chunks, and few
    cases = [(axes_of(quote(f"[{axes}]"))[0], kind) for axes in REDUCED for kind in kinds_of(dtype)]

    def program(v, s):
        return [[reductions.all_reduce(y, axes, kind, REFINED) for y in (v, s)] for axes, kind in cases]

    for (got, got_scalar), (axes, kind) in zip(run(program, x, scalar), cases, strict=True):
        assert got.dtype == x.dtype
        np.testing.assert_array_equal(got, reduced(x, axes, kind), err_msg=f"{kind} over {axes}")
        np.testing.assert_array_equal(got_scalar, reduced(scalar, axes, kind), err_msg=f"{kind} over {axes}")


def test_several_arrays_are_reduced_together_in_the_order_of_the_axes():
    rng = np.random.default_rng(2)
    scale, shift = rng.choice([-2.0, -0.5, 0.5, 1.0, 2.0], (2, 8, 13, 10)).astype(np.float32)

    def composed(old, new):
        return old[0] * new[0], old[0] * new[1] + old[1]

    def combine(terms):
        return jax.lax.reduce(tuple(terms), (np.float32(1), np.float32(0)), composed, (0,))

    cases = [axes_of(quote(f"[{axes}]"))[0] for axes in REDUCED]

    def program(a, b):
        small = [reductions.all_reduce_by([a[0, :2], b[0, :2]], axes, combine, REFINED) for axes in cases]
        return [reductions.all_reduce_by([a, b], axes, combine, REFINED) for axes in cases], small

    large, small = run(program, scale, shift)
    for (got, first), axes in zip(zip(large, small, strict=True), cases, strict=True):
        place, rest = (block_indices(a, MESH) for a in (axes, set_difference([AxisRef("p"), AxisRef("q")],
                                                        sort_and_merge(axes, MESH), MESH)))  # fmt: skip
        for d in range(8):
            group = sorted(np.flatnonzero(rest == rest[d]), key=lambda e: place[e])
            expected = functools.reduce(composed, [(scale[e], shift[e]) for e in group])
            for part, whole in enumerate(expected):
                np.testing.assert_array_equal(got[part][d], whole, err_msg=f"{axes}")
                np.testing.assert_array_equal(first[part][d], whole[0, :2], err_msg=f"{axes}")


@pytest.mark.parametrize("dtype", [ml_dtypes.int4, ml_dtypes.uint4], ids=lambda t: t.__name__)
def test_four_bit_integers_wrap_around(dtype):
    x = np.random.default_rng(3).integers(0, 8, (8, 8)).astype(dtype)
    axes = (AxisRef("q"), AxisRef("p"))
    kinds = kinds_of(np.int8)

    def program(v):
        return [reductions.all_reduce(v, axes, kind, REFINED) for kind in kinds]

    for kind, got in zip(kinds, run(program, x), strict=True):
        assert got.dtype == x.dtype
        whole = functools.reduce(NUMPY[kind], x.astype(np.int32)).astype(np.int8).astype(dtype)
        np.testing.assert_array_equal(got[3], whole, err_msg=kind)


def test_two_bit_integers_travel_as_bytes():
    """The CPU's own collectives of them corrupt memory: what travels is looked up in the program, not run."""
    x = jax.ShapeDtypeStruct((8, 8), ml_dtypes.int2)
    axes = ((AxisRef("q"),), ())

    def program(v):
        moved = movement.all_gather(movement.all_slice(v, axes, REFINED), axes, REFINED)
        exchanged = movement.all_to_all(moved, [((AxisRef("q"),), 0, 1)], REFINED)
        permuted = movement.collective_permute(v, sharding('[{"p"},{}]'), sharding('[{"q":(1)2}, {}]'), REFINED)
        return moved, exchanged, permuted, reductions.all_reduce(v, axes[0], "sum", REFINED)

    jax_mesh = REFINED.to_jax(np.array(jax.devices()[:8]).reshape(2, 4))
    spec = jax.sharding.PartitionSpec()
    mapped = jax.shard_map(program, mesh=jax_mesh, in_specs=spec, out_specs=spec, check_vma=False)
    text = str(jax.make_jaxpr(mapped)(x))
    for name in ("all_gather", "all_to_all", "psum"):
        lines = [line for line in text.splitlines() if f"= {name}" in line]
        assert lines and all(":i8[" in line for line in lines), text


SCATTERED = ["[{p}, {}]", "[{q}, {p}]", "[{}, {q}]", '[{"q":(2)2}, {p}]', "[{q, p}, {}]", '[{p}, {"q":(2)2, "q":(1)2}]']


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: np.dtype(t).name)
def test_reduce_scatter_is_all_reduce_then_all_slice(dtype, on_devices):
    x = terms_of(dtype, (8, 8))
    cases = [(axes_of(quote(text)), kind) for text in SCATTERED for kind in kinds_of(dtype)]

    def program(v):
        return [reductions.reduce_scatter(v, axes, kind, on_devices) for axes, kind in cases]

    for got, (axes, kind) in zip(run(program, x), cases, strict=True):
        whole = reduced(x, [axis for dim in axes for axis in dim], kind)
        target = TensorSharding.closed("mesh", axes)
        expected = np.stack([blocks(whole[d], target)[d] for d in range(8)])
        assert got.dtype == x.dtype
        np.testing.assert_array_equal(got, expected, err_msg=f"{kind} {axes}")


@pytest.mark.parametrize(("shape", "dim"), [((4, 1, 3), 0), ((1, 4, 1), 1), ((4, 1), 0), ((1, 1, 8), 2)])
def test_sums_are_scattered_without_dimensions_of_size_1(shape, dim):
    """The compiler for TPUs does not take some that have them."""
    x, axes = values(np.float32, (8, *shape)), tuple((AxisRef("q"),) if d == dim else () for d in range(len(shape)))
    whole = reduced(x, [AxisRef("q")], "sum")
    target = TensorSharding.closed("mesh", axes)
    got = run(lambda v: reductions.reduce_scatter(v, axes, "sum", REFINED), x)
    np.testing.assert_array_equal(got, np.stack([blocks(whole[d], target)[d] for d in range(8)]))


SENT = [
    # block, the dimension that is scattered, the block that is scattered on TPUs
    ((3, 4, 8, 128), 1, (3, 32, 128)),
    ((2, 3, 8, 2, 8, 128), 2, (6, 128, 128)),
    ((6, 4, 2, 64), 1, (6, 512)),
    ((6, 1, 4, 16, 8), 2, (6, 512)),
    ((6, 4, 8, 5), 1, (6, 4, 40)),
    ((3, 8, 8, 5), 1, (3, 4, 2, 8, 5)),
    ((2, 3, 8, 1, 8, 5), 2, (6, 4, 80)),
    ((3, 8), 1, (3, 4, 2)),
    ((6, 512), 1, (6, 512)),
    ((3, 2, 512), 2, (3, 2, 512)),
    ((4, 3, 8, 5), 0, (4, 1, 3, 8, 5)),
]


def shapes_scattered(shape, dim, platform):
    """The shapes that psum_scatter takes for sums of blocks along a dimension, whose numbers are right."""
    x, axes = values(np.float32, (8, *shape)), tuple((AxisRef("q"),) if d == dim else () for d in range(len(shape)))
    whole, target = reduced(x, [AxisRef("q")], "sum"), TensorSharding.closed("mesh", axes)
    taken = []

    def program(v):
        with pytest.MonkeyPatch.context() as patch:
            native = jax.lax.psum_scatter
            patch.setattr(
                jax.lax, "psum_scatter", lambda v, *args, **kw: (taken.append(v.shape), native(v, *args, **kw))[1]
            )
            mesh = replace(REFINED, forms=family_of_platform(platform).forms)
            return reductions.reduce_scatter(v, axes, "sum", mesh)

    got = run(program, x)
    np.testing.assert_array_equal(got, np.stack([blocks(whole[d], target)[d] for d in range(8)]))
    return set(taken)


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
@pytest.mark.parametrize(("shape", "dim", "sent"), SENT)
def test_sums_are_scattered_as_they_stay_scatters_on_tpus(shape, dim, sent, platform, monkeypatch):
    monkeypatch.setattr(reductions, "LEAST_MOVED", 0)
    expected = sent if platform == "tpu" else tuple(n for d, n in enumerate(shape) if n != 1 or d == dim)
    assert shapes_scattered(shape, dim, platform) == {expected}


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16], ids=lambda t: np.dtype(t).name)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_max_and_min_keep_nan_and_infinities(dtype, sign):
    x = np.linspace(-3, 4, 8 * 4).reshape(8, 4).astype(dtype)
    x[2, 0] = np.copysign(np.nan, sign)
    x[3, 1], x[4, 2] = np.inf, -np.inf
    x[:, 3] = -np.inf if sign > 0 else np.inf
    axes = (AxisRef("q"), AxisRef("p"))

    def program(v):
        scattered = [reductions.reduce_scatter(v, ((AxisRef("q"),),), kind, REFINED) for kind in ("max", "min")]
        return [reductions.all_reduce(v, axes, kind, REFINED) for kind in ("max", "min")], scattered

    whole, parts = jax.tree.map(lambda y: y.astype(np.float32), run(program, x))
    x = x.astype(np.float32)
    for got, part, combine in zip(whole, parts, (np.maximum, np.minimum), strict=True):
        np.testing.assert_array_equal(got[5], combine.reduce(x, axis=0))
        by_row = combine.reduce(x.reshape(2, 4, 4), axis=1)
        np.testing.assert_array_equal(part.reshape(2, 4), by_row)


@pytest.mark.dear
@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.float64, np.complex64], ids=lambda t: np.dtype(t).name)
def test_collectives_that_tpus_lack_are_made_of_moves(dtype, monkeypatch):
    taken = []

    def as_on_tpus(x, *, tpu, default):
        taken.append(x.dtype)
        return tpu(x)

    monkeypatch.setattr(jax.lax, "platform_dependent", as_on_tpus)
    with jax.enable_x64(True):
        test_all_reduce_combines_the_terms_of_a_group(dtype)
        test_reduce_scatter_is_all_reduce_then_all_slice(dtype, REFINED)
        if dtype == np.float64:
            test_max_and_min_keep_nan_and_infinities(dtype, 1.0)
    assert taken


def test_unreduced_values_sum_to_what_they_came_from():
    x = values(np.float32)
    spread = sharding(quote('[{p}, {}, {"q":(1)2}]'))
    gathered = axes_of(quote('[{p}, {}, {"q":(1)2}]'))
    flat = sort_and_merge([axis for dim in gathered for axis in dim], MESH)
    q = (AxisRef("q"),)

    def program(full, block):
        partial = reductions.sharded_to_unreduced(block, gathered, "sum", REFINED)
        marked = [
            reductions.replicated_to_unreduced(full, q, kind, REFINED) for kind in ("sum", "max", "min", "product")
        ]
        back = [reductions.all_reduce(m, q, k, REFINED)
                for m, k in zip(marked, ("sum", "max", "min", "product"), strict=True)]  # fmt: skip
        return reductions.all_reduce(partial, flat, "sum", REFINED), back

    joined, back = run(program, np.stack([x] * 8), blocks(x, spread))
    for got in (joined, *back):
        np.testing.assert_array_equal(got, np.stack([x] * 8))


def test_a_gathered_slice_and_a_sliced_gather_are_unchanged():
    target = axes_of(quote("[{q, p}, {}, {}]"))

    def program(full, block):
        there = movement.all_gather(movement.all_slice(full, target, REFINED), target, REFINED)
        return there, movement.all_slice(movement.all_gather(block, target, REFINED), target, REFINED)

    x = values(np.int32)
    full, block = np.stack([x] * 8), blocks(x, TensorSharding.closed("mesh", target))
    got_full, got_block = run(program, full, block)
    np.testing.assert_array_equal(got_full, full)
    np.testing.assert_array_equal(got_block, block)


@pytest.mark.parametrize(
    "dtype", [*DTYPES, np.int8, np.uint16, jnp.int4, jnp.uint4, jnp.float8_e4m3fn], ids=lambda t: np.dtype(t).name
)
def test_identities_change_nothing(dtype):
    for kind in kinds_of(dtype):
        neutral = reductions.identity(kind, dtype)
        assert neutral.dtype == np.dtype(dtype)
        sample = values(dtype, (16,))
        combine = (BOOLEAN if np.dtype(dtype) == np.bool_ else NUMPY)[kind]
        np.testing.assert_array_equal(combine(sample, neutral).astype(dtype), sample)


def test_float_identities_are_infinite_where_infinity_exists():
    assert reductions.identity("max", np.float32) == -math.inf
    assert reductions.identity("min", jnp.bfloat16) == math.inf
    assert np.isfinite(reductions.identity("min", jnp.float8_e4m3fn).astype(np.float32))


def test_unknown_and_unfit_kinds_are_refused():
    with pytest.raises(ShardingError, match="one of sum, max"):
        reductions.identity("mean", np.float32)
    with pytest.raises(ShardingError, match="bits of integers"):
        reductions.identity("xor", np.float32)


def test_splitting_without_padding_is_a_bug():
    x = jnp.zeros((6, 8))
    for call in (
        lambda: movement.all_slice(x, ((AxisRef("q"),), ()), REFINED),
        lambda: reductions.reduce_scatter(x, ((AxisRef("q"),), ()), "sum", REFINED),
        lambda: movement.all_to_all(x, [((AxisRef("q"),), 1, 0)], REFINED),
    ):
        with pytest.raises(InternalError, match="without padding"):
            call()


def test_the_model_itself_cuts_as_axis_sizes_say():
    lists = [(AxisRef("q"), AxisRef("p")), merge_neighbours(CUTS, MESH), (CUTS[1], AxisRef("p"), CUTS[0])]
    for axes in lists:
        assert sorted(set(block_indices(axes, MESH))) == list(range(axes_size(axes, MESH)))


def test_two_bit_integers_that_are_reduced_together_travel_as_bytes():
    """The greatest of each column, and what stands beside it."""
    x = np.random.default_rng(0).integers(-2, 2, (64, 16)).astype(np.int8)

    def greater(a, b):
        is_first = a[0] >= b[0]
        return lax.select(is_first, a[0], b[0]), lax.select(is_first, a[1], b[1])

    def function(x):
        pair = x.astype(jnp.int2), (x >> 1).astype(jnp.int2)
        found = lax.reduce(pair, (jnp.int2(-2), jnp.int2(-2)), greater, (0,))
        return [y.astype(jnp.int8) for y in found]

    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    run = sdy.partition(function, mesh=mesh, in_shardings=jax.sharding.PartitionSpec("d"))
    for got, expected in zip(run(x), function(x), strict=True):
        np.testing.assert_array_equal(got, expected)
