"""Kernels inside of programs: in loops, branches, regions and derivatives, under other transformations, in other types,
and through all that is done with plans and with partitioned functions."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from kept_plans import noted_searches
from kernel_splits import local_grids
from norm_kernel import norm, plain_norm
from partitioned_ops import PLANE
from uneven_blocks import assert_close

import sdy_jax as sdy
from sdy_jax.plan.digests import MODULE

RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 8)).astype(np.float32)
W = RNG.normal(size=8).astype(np.float32)
LAYERS = RNG.normal(size=(3, 8)).astype(np.float32)
MIXING = np.sin(np.arange(64.0)).reshape(8, 8).astype(np.float32)
ROWS, PARTS, WIDTH = P("x"), P(("y", "x")), P(None, "y")
"""Rows by two devices and by all, and columns, along which the kernel is whole."""


def gradients(function):
    return jax.grad(lambda *args: (function(*args) ** 2).sum(), (0, 1))


def scanned(x, layers):
    return lax.scan(lambda h, w: (norm(h, w) + h, None), x, layers)[0]


def computed_again(x, w):
    return jax.checkpoint(lambda x, w: jnp.sin(norm(jnp.cos(x), w)))(x, w)


def of_two_branches(x, w):
    return lax.cond(x.sum() > 0, lambda: norm(x, w), lambda: x)


def looped(x, w):
    return lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, norm(s[1], w) + x), (0, x))[1]


def mapped(x, w):
    return jax.vmap(norm, (0, None))(x.reshape(2, 8, 8), w)


def mapped_twice(x, w):
    rows = jnp.stack([x.reshape(8, 2, 8)] * 3)
    return jax.vmap(jax.vmap(norm, (1, None), 1))(rows, jnp.stack([w] * 3))


def beside_a_product(x, w):
    return jnp.tanh(norm(x @ MIXING, w)) @ jnp.ones((8, 4))


def in_a_region_over_one_axis(x, w):
    def local(x, w):
        return norm(x, w) * (1 + lax.axis_index("y"))

    run = jax.shard_map(local, mesh=PLANE, axis_names={"y"}, in_specs=(P("y"), P()), out_specs=P("y"), check_vma=False)
    return run(x, w)


def in_a_region_over_all_axes(x, w):
    specs = {"in_specs": (P(("x", "y")), P()), "out_specs": P(("x", "y"))}
    return jax.shard_map(norm, mesh=PLANE, check_vma=False, **specs)(x, w)


def constrained(x, w):
    return norm(lax.with_sharding_constraint(x, NamedSharding(PLANE, P("y"))), w)


PROGRAMS = [
    scanned,
    computed_again,
    of_two_branches,
    looped,
    mapped,
    mapped_twice,
    beside_a_product,
    in_a_region_over_one_axis,
    in_a_region_over_all_axes,
    constrained,
]


def partitioned(function, spec=ROWS, **options):
    return sdy.partition(function, mesh=PLANE, in_shardings=(spec, P()), on_unknown="ignore", **options)


def given(program):
    return X, LAYERS if program is scanned else W


@pytest.mark.parametrize("spec", [PARTS, ROWS, WIDTH], ids=str)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_numbers_of_programs_with_kernels(program, spec):
    args = given(program)
    assert_close(partitioned(program, spec)(*args), jax.jit(program)(*args), 1e-5)


@pytest.mark.dear(cases=12)
@pytest.mark.more("gradients of the programs")
@pytest.mark.parametrize("spec", [PARTS, ROWS, WIDTH], ids=str)
@pytest.mark.parametrize("program", [p for p in PROGRAMS if p is not looped], ids=lambda program: program.__name__)
def test_numbers_of_their_gradients(program, spec):
    step, args = gradients(program), given(program)
    assert_close(partitioned(step, spec)(*args), jax.jit(step)(*args), 1e-5)


@pytest.mark.parametrize("program", [scanned, of_two_branches, in_a_region_over_one_axis], ids=lambda p: p.__name__)
def test_kernels_inside_of_other_ops_are_split(program):
    args = given(program)
    (grid,) = local_grids(partitioned(program, PARTS), *args)
    assert grid == (1,)


def test_a_gradient_sends_what_is_summed_up_alone():
    """Of 16 rows on 8 devices, all that is sent is the sum of the scale's gradient, 32 bytes."""
    plan = partitioned(gradients(norm), PARTS).plan(X, W)
    assert [c.kind for c in plan.collectives if c.wire_bytes] == ["all_reduce"], plan
    assert plan.wire_bytes == 2 * 7 / 8 * W.nbytes


def test_transformations_of_a_partitioned_function():
    function, many = partitioned(norm), np.stack([X, X * 2, X + 1])
    assert_close(gradients(function)(X, W), gradients(plain_norm)(X, W), 1e-5)
    assert_close(jax.vmap(function, (0, None))(many, W), plain_norm(many, W), 1e-5)
    wanted = jax.vmap(gradients(plain_norm), (0, None))(many, W)
    assert_close(jax.vmap(gradients(function), (0, None))(many, W), wanted, 1e-5)
    assert_close(jax.jit(lambda x, w: function(x, w) + 1)(X, W), plain_norm(X, W) + 1, 1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(dtype):
    x, w = jnp.asarray(X, dtype), jnp.asarray(W, dtype)
    assert_close(partitioned(gradients(norm))(x, w), jax.jit(gradients(norm))(x, w), 2e-2)


def test_wide_types():
    def numbered(x_ref, out_ref):
        out_ref[...] = x_ref[...] + pl.program_id(0)

    def run(x):
        rows, reversed_ = (pl.BlockSpec((2, 8), index_map) for index_map in (lambda i: (i, 0), lambda i: (7 - i, 0)))
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        call = pl.pallas_call(
            numbered, grid=(8,), in_specs=[reversed_], out_specs=rows, out_shape=shape, interpret=True
        )
        return call(x)

    with jax.enable_x64(True):
        for x in (X.astype(np.float64), np.arange(128, dtype=np.int64).reshape(16, 8)):
            function = sdy.partition(run, mesh=PLANE, in_shardings=P(), out_shardings=ROWS, layouts="local")
            assert_close(function(x), run(x), 0.0)
            assert local_grids(function, x) == [(4,)]


def test_donated_arguments():
    x = jax.device_put(X, NamedSharding(PLANE, ROWS))
    assert_close(partitioned(norm, donate_argnums=0, out_shardings=ROWS)(x, W), plain_norm(X, W), 1e-5)
    assert x.is_deleted()


def test_compiled_ahead():
    assert_close(partitioned(norm).lower(X, W).compile()(X, W), plain_norm(X, W), 1e-5)


def test_exported():
    pytest.importorskip("flatbuffers")
    function = partitioned(norm)
    written = export.export(jax.jit(function))(X, W).serialize()
    args = (jax.device_put(x, NamedSharding(PLANE, spec)) for x, spec in ((X, ROWS), (W, P())))
    assert_close(jax.jit(export.deserialize(written).call)(*args), plain_norm(X, W), 1e-5)


def test_threads_that_plan_and_run_at_once():
    functions = [partitioned(lambda x, w, i=i: norm(x, w) * i) for i in range(1, 5)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda function: np.asarray(function(X, W)), functions))
    for i, each in enumerate(found, 1):
        assert_close(each, np.asarray(plain_norm(X, W) * i), 1e-5)


def test_a_plan_in_python_says_that_kernels_cannot_be_written():
    with pytest.raises(sdy.UnsupportedError, match=r"norm_kernel\.py:\d+ cannot be written in Python: .*pallas_call"):
        partitioned(norm).plan(X, W).to_python()


def test_a_pinned_plan_runs_the_kernel_of_now(tmp_path):
    partitioned(norm).plan(X, W).save(tmp_path / "norm.plan")
    pinned = partitioned(norm, plan=tmp_path / "norm.plan")
    assert_close(pinned(X, W), plain_norm(X, W), 1e-5)


def scaled_by(number, place=0):
    """Kernels of one name, one rule and one amount of work that compute something else."""

    def body(x_ref, out_ref):
        out_ref[...] = x_ref[...] * number + pl.program_id(0) * place

    def run(x):
        rows, shape = pl.BlockSpec((2, 8), lambda i: (i, 0)), jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(body, grid=(8,), in_specs=[rows], out_specs=rows, out_shape=shape, interpret=True)(x)

    return run


def test_a_plan_that_is_kept_runs_the_kernel_of_now(folder, monkeypatch):
    """Kernels that have one rule have one plan; what runs is never that of another one."""
    searches = noted_searches(monkeypatch)
    for number in (2.0, 3.0, 4.0):
        jax.clear_caches()
        function = sdy.partition(scaled_by(number, 1), mesh=PLANE, in_shardings=ROWS)
        wanted = X * np.float32(number) + np.arange(16, dtype=np.float32)[:, None] // 2
        assert_close(function(X), wanted, 1e-6)
    assert len(searches) == 1
    assert not list(folder.rglob(f"*{MODULE}"))


def test_kernels_of_one_rule_in_one_program_stay_apart():
    def both(x):
        return scaled_by(2.0)(x) + 10 * scaled_by(3.0)(x) - scaled_by(2.0)(x[::-1])[::-1]

    function = sdy.partition(both, mesh=PLANE, in_shardings=ROWS)
    assert_close(function(X), both(X), 1e-6)


def test_a_plan_names_kernels_that_stay_whole_and_why():
    function = sdy.partition(norm, mesh=PLANE, in_shardings=(WIDTH, P()), layouts="local")
    with pytest.warns(sdy.PartitionWarning, match="each step of `_forward` has all of it"):
        function.plan(X, W)
