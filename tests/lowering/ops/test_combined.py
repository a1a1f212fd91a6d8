"""Small collectives that run as one: numbers, bytes, counts in compiled programs, memory, and what stays apart."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from memory_programs import FIRST, PROGRAMS, drawn, size_of, specs, step_of, transformer
from partitioned_ops import LINE, PLANE

import sdy_jax as sdy
from sdy_jax.calls.options import Options
from sdy_jax.lowering.planner.facts.verifier import verify_partitioned
from sdy_jax.lowering.planner.schedule import buckets as buckets_of_program
from sdy_jax.lowering.planner.schedule.buckets import BlockOrder
from sdy_jax.lowering.planner.setting import Combining
from sdy_jax.lowering.targets.family import Collectives
from sdy_jax.lowering.targets.gpu import GPU
from sdy_jax.lowering.targets.rates import Copies
from sdy_jax.lowering.targets.target import CPU
from sdy_jax.lowering.targets.tpu import TPU
from sdy_jax.plan.profile import collectives_in_hlo, totals
from sdy_jax.testing import assert_same

KINDS = ("all_gather", "all_reduce", "all_to_all", "collective_permute", "reduce_scatter")

SHAPES = [(16, 8), (8, 24), (32, 8, 2), (8,), (24, 16)]


def arrays(shapes=SHAPES, dtype=np.float32):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.integers(0, 2 if dtype is bool else 9, shape), dtype) for shape in shapes]


def sent(function, args, **options):
    """What the compiled program sends: executions by kind, and bytes."""
    text = sdy.partition(function, **options).lower(*args).compile().as_text()
    found = totals(collectives_in_hlo(text))
    return {kind: count for kind, (count, _) in found.by_kind.items()}, found.wire_bytes


def both(function, args, combine="1MiB", rtol=None, atol=None, **options):
    """The plans without and with buckets, after a comparison of numbers and bytes; and what the latter runs."""
    apart = sdy.partition(function, combine=False, **options).plan(*args)
    together = assert_same(function, *args, combine=combine, rtol=rtol, atol=atol, **options)
    verify_partitioned(together.stages["partitioned"])
    assert together.stages["partitioned"].verify()
    assert together.wire_bytes == pytest.approx(apart.wire_bytes)
    found, wire = sent(function, args, combine=combine, **options)
    assert wire == pytest.approx(sent(function, args, combine=False, **options)[1])
    return apart, together, found


def buckets(plan):
    """The numbers of members."""
    return [len(record.members) for record in plan.collectives if record.members]


def each(f):
    return lambda xs: [f(x) for x in xs]


def changed(x):
    return x * x if x.dtype != bool else ~x


def total(x):
    return x.any(0) if x.dtype == bool else x.sum(0)


def summed(x):
    return x.T @ x


CASES = {
    "gathers": (changed, SHAPES, LINE, P("x"), P(), "all_gather"),
    "gathers of both axes": (changed, [(16, 8), (8, 3)], PLANE, P(("y", "x")), P(), "all_gather"),
    "gathers of one axis": (changed, [(8, 8), (16, 4)], PLANE, P("x", "y"), P("x"), "all_gather"),
    "gathers of dimensions": (changed, [(8, 8), (16, 4), (2, 8)], PLANE, P("x", "y"), P(), "all_gather"),
    "exchanges": (changed, [(16, 8), (8, 24), (8, 8, 3)], LINE, P("x"), P(None, "x"), "all_to_all"),
    "permutes": (changed, [(16, 8), (8, 3)], PLANE, P(("x", "y")), P(("y", "x")), "collective_permute"),
    "scatters": (total, [(16, 8), (24, 24), (32, 16)], LINE, P("x"), P("x"), "reduce_scatter"),
    "scatters of a dimension": (total, [(16, 3, 8), (24, 2, 24)], LINE, P("x"), P(None, "x"), "reduce_scatter"),
    "scatters of dimensions": (total, [(16, 4, 2), (8, 8, 6)], PLANE, P(("x", "y")), P("y", "x"), "reduce_scatter"),
    "sums": (summed, [(16, 8), (8, 24), (32, 16)], LINE, P("x"), P(), "all_reduce"),
    "maxima": (lambda x: x.max(0), [(16, 8), (8, 24), (32, 16)], LINE, P("x"), P(), "all_reduce"),
}


@pytest.mark.dear
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.int32, bool])
@pytest.mark.parametrize("case", CASES)
def test_collectives_of_one_kind_run_as_one(case, dtype):
    function, shapes, mesh, before, after, kind = CASES[case]
    if dtype is bool and function is summed:
        pytest.skip("products are of numbers")
    xs = arrays(shapes, dtype)
    options = {"mesh": mesh, "in_shardings": ([before] * len(xs),), "out_shardings": [after] * len(xs)}
    apart, together, found = both(each(function), (xs,), layouts="local", **options)
    assert {c.kind for c in apart.collectives if c.wire_bytes} == {kind}
    (bucket,) = [record for record in together.collectives if record.wire_bytes]
    assert bucket.kind == kind and len(bucket.members) == len(xs)
    assert bucket.wire_bytes == sum(member.wire_bytes for member in bucket.members)
    assert "sdy_jax.bucket = 0" in together.mlir()
    assert sum(found.values()) == 1


def test_sizes_that_do_not_divide():
    xs = arrays([(10, 3), (7, 5), (13,), (9, 8)])

    def function(xs):
        inner = [jax.lax.with_sharding_constraint(jnp.tanh(x), NamedSharding(LINE, P("x"))) for x in xs]
        return [jnp.cos(jax.lax.with_sharding_constraint(x, NamedSharding(LINE, P()))) for x in inner]

    plan, found = both(function, (xs,), mesh=LINE, in_shardings=P(), out_shardings=P(), layouts="propagated")[1:]
    assert buckets(plan) == [4] and found == {"all-gather": 1}


def test_a_collective_that_waits_for_another_runs_after_it():
    """The second gather needs the first one's result; the third needs neither."""

    def function(x, y):
        whole = jax.lax.with_sharding_constraint(jnp.tanh(x), NamedSharding(LINE, P()))
        parts = jax.lax.with_sharding_constraint(jnp.sin(whole) * whole.sum(), NamedSharding(LINE, P("x")))
        return jax.lax.with_sharding_constraint(jnp.cos(parts), NamedSharding(LINE, P())), changed(y)

    args = arrays([(16, 8), (8, 2)])
    options = {"mesh": LINE, "in_shardings": P("x"), "out_shardings": P(), "layouts": "propagated"}
    together = both(function, args, **options)[1]
    gathers = [record for record in together.collectives if record.kind == "all_gather"]
    assert sorted(len(record.members) for record in gathers) == [0, 2], together


def test_loops_and_branches_have_buckets_of_their_own():
    def function(xs, n):
        whole = [x * x for x in xs]

        def body(_, carried):
            return [jnp.sin(c) + (jnp.tanh(c) * x).sum(0) for c, x in zip(carried, xs, strict=True)]

        looped = jax.lax.fori_loop(0, 3, body, whole)
        taken = jax.lax.cond(n > 0, lambda xs: [x.sum(0) for x in xs], lambda xs: [x.max(0) for x in xs], xs)
        return looped, taken

    xs = arrays([(16, 8), (24, 8), (32, 4)])
    options = {"mesh": LINE, "in_shardings": (P("x"), P()), "out_shardings": ([P("x")] * 3, [P()] * 3)}
    plan, found = both(function, (xs, jnp.int32(1)), layouts="local", rtol=1e-4, **options)[1:]
    assert sum(found.values()) == sum(record.times for record in plan.totals.counted if record.wire_bytes)
    assert max(record.depth for record in plan.collectives if record.members) == 1
    assert any(record.branches for record in plan.collectives if record.members)


def by_shard_map(x):
    return jax.shard_map(lambda v: jax.lax.psum(v, "x"), mesh=LINE, in_specs=P(), out_specs=P())(x)


def by_sdy(x):
    return sdy.all_gather(sdy.reshard(x, P("x")), [["x"], []])


@pytest.mark.parametrize("collective", [by_shard_map, by_sdy])
def test_nothing_moves_across_the_users_collectives(collective):
    def function(x, y):
        first = jax.lax.with_sharding_constraint(jnp.cos(x), NamedSharding(LINE, P()))
        own = collective(first @ first.T)
        return own, jnp.cos(jax.lax.with_sharding_constraint(jnp.sin(y), NamedSharding(LINE, P()))) * own.sum()

    args = arrays([(16, 8), (8, 2)])
    plan = both(function, args, mesh=LINE, in_shardings=P("x"), out_shardings=P(), layouts="propagated")[1]
    assert not buckets(plan)
    sent = [record.origin for record in plan.collectives if record.wire_bytes]
    assert sent == ["partitioner", "user", "partitioner"]


@pytest.mark.more("copies that are freed")
def test_freed_copies_stay_freed():
    blocks, arguments, spec = PROGRAMS["unrolled"]
    step = step_of(blocks)
    options = {"mesh": LINE, **specs(spec), "memory": size_of(arguments[0]) * 2}
    apart, together, _ = both(step, arguments, rtol=1e-4, combine=True, **options)
    again = [record for record in apart.collectives if record.again]
    assert len(again) > 5
    assert len([m for record in together.collectives for m in record.members or [record] if m.again]) == len(again)
    assert together.memory.peak <= options["memory"]
    assert len(together.collectives) < len(apart.collectives)


@pytest.mark.parametrize("name", PROGRAMS)
def test_limits_of_memory_hold(name):
    blocks, arguments, spec = PROGRAMS[name]
    options = {"mesh": LINE, **specs(spec)}
    peak = sdy.partition(step_of(blocks), combine=False, **options).plan(*arguments).memory.peak
    plan = assert_same(step_of(blocks), *arguments, memory=int(peak), combine=True, rtol=1e-4, **options)
    assert plan.memory.peak <= peak


def test_a_bucket_is_as_large_as_was_asked_for():
    xs = arrays([(64, 64)] * 8)
    options = {"mesh": LINE, "in_shardings": P("x"), "out_shardings": P()}
    one = 7 / 8 * xs[0].nbytes
    sizes = {False: [], "1MiB": [8], int(4 * one): [4, 4], int(3.5 * one): [3, 3, 2], int(one): []}
    for combine, wanted in sizes.items():
        assert buckets(sdy.partition(each(changed), combine=combine, **options).plan(xs)) == wanted


def test_buckets_by_the_cost_model():
    """Up to the size at which latency is a tenth of the time, of members that are copied in less than it takes."""
    xs = arrays([(64, 64)] * 64)
    options = {"mesh": LINE, "in_shardings": P("x"), "out_shardings": P(), "combine": True}
    one = 7 / 8 * xs[0].nbytes
    fixed, copied = 8 * one / 9, 2 * 9 / 8 * xs[0].nbytes
    for bucket, memory, most in (
        (1, 0, 8),
        (1 / 2, 0, 4),
        (1 / 9, 0, 0),
        (1, fixed / copied, 8),
        (1, 1.1 * fixed / copied, 0),
    ):
        costs = sdy.CostModel(latency=bucket * fixed / 7, memory=memory)
        assert max(buckets(sdy.partition(each(changed), costs=costs, **options).plan(xs)), default=0) == most


def test_what_members_wait_for_is_found_once_for_each(monkeypatch):
    found, closure = [], BlockOrder._closure
    monkeypatch.setattr(BlockOrder, "_closure", lambda self, *args: found.append(args) or closure(self, *args))
    for number in (4, 16):
        xs = arrays([(16, 8)] * number)
        function = sdy.partition(each(summed), mesh=LINE, in_shardings=([P("x")] * number,), combine="1MiB")
        assert buckets(function.plan(xs)) == [number]
        assert len(found) <= 3 * number  # and the makers and users of each in the one bucket
        found.clear()


def test_by_default_nothing_is_rearranged():
    kinds, stacked = frozenset(KINDS), frozenset({"all_gather", "collective_permute"})
    for family, joined, default in (
        (CPU, {"all_reduce"}, Combining()),
        (TPU, {"all_reduce"}, Combining(stacked | {"all_reduce"}, stacked, stacked)),
        (GPU, (gpu := kinds - {"all_to_all", "collective_permute"}), Combining(gpu)),
    ):
        does = family.compiler.collectives
        assert Combining.of(None, does) == default
        assert Combining.of(True, does) == Combining(kinds, kinds - joined)
        assert Combining.of(1e6, does) == Combining(kinds, kinds - joined, sent=1e6)
        assert Combining.of(False, does) == Combining()


@pytest.fixture
def as_on_tpus(monkeypatch):
    """What is combined by default on TPUs is combined on CPU devices."""
    found = Combining.of(None, TPU.compiler.collectives)

    def chosen(said, *_):
        return found if said is None else replace(found, sent=2.0**20) if said else Combining()

    monkeypatch.setattr(Combining, "of", chosen)


ALIKE = {
    "gathers": (changed, LINE, P("x"), P(), "all_gather"),
    "gathers of columns": (changed, LINE, P(None, "x"), P(), "all_gather"),
    "permutes": (changed, PLANE, P(("x", "y")), P(("y", "x")), "collective_permute"),
}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, bool])
@pytest.mark.parametrize("case", ALIKE)
def test_blocks_of_one_shape_are_stacked(case, dtype, as_on_tpus):
    """Those of other shapes run alone."""
    function, mesh, before, after, kind = ALIKE[case]
    xs = arrays([(16, 8, 2)] * 3 + [(8, 16, 2), (16, 24, 2)], dtype)
    options = {"mesh": mesh, "in_shardings": ([before] * len(xs),), "out_shardings": [after] * len(xs)}
    together, found = both(each(function), (xs,), combine=True, layouts="local", **options)[1:]
    assert buckets(together) == [3] and sum(found.values()) == 3
    assert [record.kind for record in together.collectives if record.members] == [kind]
    assert together.mlir().count("sdy_jax.packed") == 3


@pytest.mark.parametrize(("spec", "stack"), [(P("x"), "2,3,8,2"), (P(None, "x"), "16,1,3,2")], ids=str)
def test_gathered_blocks_are_stacked_behind_the_dimension_that_is_gathered(spec, stack, as_on_tpus):
    xs = arrays([(16, 8, 2)] * 3)
    step = sdy.partition(each(changed), mesh=LINE, in_shardings=([spec] * 3,), out_shardings=P(), combine=True)
    assert re.findall(r"f32\[([\d,]+)\] = concatenate", str(jax.make_jaxpr(step)(xs))) == [stack]


@pytest.mark.parametrize("case", CASES)
def test_all_blocks_of_one_shape_are_stacked_where_others_would_be_copied(case):
    function, shapes, mesh, before, after, _ = CASES[case]
    xs = arrays([shapes[0]] * 3)
    options = {"mesh": mesh, "in_shardings": ([before] * len(xs),), "out_shardings": [after] * len(xs)}
    together, found = both(each(function), (xs,), layouts="local", **options)[1:]
    assert buckets(together) == [3] and sum(found.values()) == 1


def test_gathers_of_several_dimensions_are_not_stacked(as_on_tpus):
    """Each dimension would be gathered for itself."""
    xs = arrays([(16, 8)] * 3)
    options = {"mesh": PLANE, "in_shardings": ([P("y", "x")] * 3,), "out_shardings": P(), "layouts": "local"}
    assert not buckets(both(each(changed), (xs,), combine=True, **options)[1])


def test_sizes_that_do_not_divide_are_stacked(as_on_tpus):
    xs = arrays([(10, 3), (10, 3), (9, 3)])

    def function(xs):
        inner = [jax.lax.with_sharding_constraint(jnp.tanh(x), NamedSharding(LINE, P("x"))) for x in xs]
        return [jnp.cos(jax.lax.with_sharding_constraint(x, NamedSharding(LINE, P()))) for x in inner]

    options = {"mesh": LINE, "in_shardings": P(), "out_shardings": P(), "layouts": "propagated"}
    plan, found = both(function, (xs,), combine=True, **options)[1:]
    assert buckets(plan) == [2] and found == {"all-gather": 2}


def test_what_is_taken_from_a_stack_is_not_copied(as_on_tpus, monkeypatch):
    """Its operands are: that has to take less than latency. And it adds little to what a device holds."""
    xs = arrays([(64, 64)] * 64)
    options = {"mesh": LINE, "in_shardings": P("x"), "out_shardings": P()}
    fixed, copied = 7e-6, 2 * xs[0].nbytes / 8
    for memory, added, is_stacked in (
        (fixed / copied, 1 / 8, True),
        (1.1 * fixed / copied, 1 / 8, False),
        (fixed / copied, 1 / 256, False),
    ):
        monkeypatch.setattr(buckets_of_program, "_STACKS", added)
        costs = sdy.CostModel(latency=fixed / 7, memory=memory, bandwidth={"x": 1e9})
        assert bool(buckets(sdy.partition(each(changed), costs=costs, **options).plan(xs))) == is_stacked


@pytest.mark.parametrize(
    ("shape", "split", "lanes", "is_stacked"),
    [
        ((64, 1024), P(None, "x"), 128, True),
        ((64, 512), P(None, "x"), 128, False),  # 64 of 128 lanes
        ((64, 512), P("x"), 128, True),
        ((512, 4, 16), P("x"), 128, False),  # the first dimension is in lanes
        ((512, 4, 16), P(None, None, "x"), 128, True),
        ((64, 512), P(None, "x"), 0, True),  # no tiles
    ],
)
def test_what_is_taken_from_a_stack_in_another_layout_is_copied(
    shape, split, lanes, is_stacked, as_on_tpus, monkeypatch
):
    monkeypatch.setattr(buckets_of_program, "_STACKS", 1 / 8)
    xs = arrays([shape] * 64)
    memory = 7e-6 / (4 * xs[0].nbytes / 8)  # half of the latency for the operands
    costs = sdy.CostModel(latency=1e-6, memory=memory, bandwidth={"x": 1e10}, copies=Copies(lanes=lanes))
    options = {"mesh": LINE, "in_shardings": split, "out_shardings": P(), "costs": costs}
    assert bool(buckets(sdy.partition(each(changed), **options).plan(xs))) == is_stacked


def test_what_xla_makes_one_of_is_not_copied(monkeypatch):
    """Gathers on GPUs: they follow each other, each for itself."""
    made, does = Combining.of, Collectives(combines=frozenset({"all_gather"}), buckets=frozenset())
    monkeypatch.setattr(Combining, "of", lambda said, _: made(said, does))
    xs = arrays()
    together, found = both(each(changed), (xs,), mesh=LINE, in_shardings=P("x"), out_shardings=P())[1:]
    assert buckets(together) == [len(xs)] and found == {"all-gather": len(xs)}
    assert "sdy_jax.bucket" in together.mlir() and "sdy_jax.packed" not in together.mlir()


def test_what_is_combined_has_its_share_of_latency():
    given = sdy.CostModel(latency=1e-6, bandwidth={"x": 1e9}, combines=("all_reduce",))
    assert Options(costs=given).costs_of(LINE) == Options(costs=given, combine=False).costs_of(LINE) == given
    assert set(Options(costs=given, combine=True).costs_of(LINE).combines) == set(KINDS)
    assert Options(combine=True).costs_of(LINE) == sdy.CostModel.of_mesh(LINE)


def test_what_is_stacked_with_its_likes_alone_has_all_of_its_latency(as_on_tpus):
    given = sdy.CostModel(latency=1e-6, bandwidth={"x": 1e9})
    assert Options(costs=given).costs_of(LINE).combines == ("all_reduce",)


@pytest.mark.parametrize("given", [-1, "many", 0.0, [1]])
def test_sizes_that_are_none(given):
    with pytest.raises(sdy.SdyError, match=r"combine=.*; expected None, True, False, or the bytes of a bucket"):
        sdy.partition(changed, mesh=LINE, combine=given)(jnp.ones((8, 8)))


@pytest.mark.more("derivatives")
def test_derivatives_and_donated_arguments():
    blocks, arguments, spec = PROGRAMS["unrolled"]
    options = {"mesh": LINE, "in_shardings": (spec, FIRST), "out_shardings": FIRST}
    f = sdy.partition(blocks, combine="1MiB", **options)
    found = jax.grad(lambda w: jnp.sum(f(w, arguments[1]) ** 2))(arguments[0])
    wanted = jax.grad(lambda w: jnp.sum(blocks(w, arguments[1]) ** 2))(arguments[0])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-3), found, wanted)

    step = step_of(blocks)
    wanted = jax.jit(step)(*arguments)
    donated = sdy.partition(step, mesh=LINE, **specs(spec), donate_argnums=0, combine="1MiB")
    mine = jax.tree.map(lambda w: jax.device_put(np.asarray(w), NamedSharding(LINE, spec)), arguments[0])
    weights, value = donated(mine, *arguments[1:])
    np.testing.assert_allclose(value, wanted[1], rtol=1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), weights, wanted[0])
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(mine))


def test_plans_and_profiles_show_buckets():
    xs = arrays([(16, 8), (8, 24)])
    f = sdy.partition(each(changed), mesh=LINE, in_shardings=P("x"), out_shardings=P(), combine="1MiB")
    text = str(f.plan(xs))
    assert 'all_gather {"x"} bucket 0' in text and "2 of f32" in text
    assert text.count("  all_gather [{") == 2
    assert "1 collective (2 before merging)," in text
    assert "bucket_0_sdy.all_gather[x]" in f.lower(xs).compile().as_text()


@pytest.mark.more("buckets of whole training steps")
def test_training_steps_run_less_than_a_third_of_the_collectives():
    """Of a transformer with weights split over all devices, and copied to all."""
    d, weights = 64, []
    for _ in range(3):
        weights.append(tuple(drawn((3 * d, d), (d, d), (4 * d, d), (d, 4 * d))))
    arguments = weights, *drawn((32, 32, d), (32, 32, d))
    for spec in (P("x"), P()):
        options = {"mesh": LINE, "in_shardings": (spec, FIRST, FIRST), "out_shardings": (spec, P())}
        apart, together, found = both(step_of(transformer), arguments, combine=True, rtol=3e-2, atol=1e-2, **options)
        assert 3 * len(together.collectives) < len(apart.collectives)
        assert sum(found.values()) <= len(together.collectives)
        assert together.memory.peak <= 9 / 8 * apart.memory.peak


def test_what_a_loop_carries_is_permuted_from_the_layout_of_its_edge(mesh, monkeypatch):
    """A value that enters the body of a loop has no sharding of its own."""
    monkeypatch.setattr("sdy_jax.lowering.planner.search.layout_search._TOLERATED", 0.01)

    def layers(weights, x):
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights)[0]

    weights, x = (
        np.random.default_rng(n).standard_normal(s).astype(np.float32) for n, s in enumerate([(4, 32, 32), (16, 32)])
    )
    plan = assert_same(layers, weights, x, mesh=mesh, in_shardings=(P(None, "data", "model"), P()), combine=True)
    assert "collective_permute" in {record.kind for record in plan.collectives}
