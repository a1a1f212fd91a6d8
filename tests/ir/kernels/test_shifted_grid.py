"""Bodies and index maps that count steps from another one on: kernels run once per block of their operands, each with
a shorter grid, make what they make at once, wherever in a body the number of a step is read."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plgpu
from kernel_splits import calls_of, rule_of, run_on_blocks

X = np.arange(64, dtype=np.float32).reshape(16, 4)
ROWS = pl.BlockSpec((2, 4), lambda i: (i, 0))
WHOLE = pl.BlockSpec((16, 4), lambda i: (0, 0))


def place():
    return pl.program_id(0)


def kernel(body, *, spec=ROWS, **options):
    """A kernel of 8 blocks of two rows, interpreted as on a TPU: where reads may be anywhere."""

    def run(x):
        shape = jax.ShapeDtypeStruct((16, 4), jnp.float32)
        given = {"interpret": pltpu.InterpretParams(), **options}
        return pl.pallas_call(body, grid=(8,), in_specs=[spec], out_specs=ROWS, out_shape=shape, **given)(x)

    return run


def check(run, *args, parts=(2, 4), factor=0):
    (equation,) = calls_of(run, *args)
    expected = jax.tree.leaves(jax.jit(run)(*args))
    assert factor in rule_of(equation).shifted
    for count in parts:
        for found, wanted in zip(run_on_blocks(equation, args, {factor: count}), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)


def at_the_top(x, out):
    out[...] = x[...] * place().astype(jnp.float32)


def in_a_branch(x, out):
    out[...] = x[...]

    @pl.when(x[0, 0] > 16)
    def _():
        out[...] += place().astype(jnp.float32)


def in_the_other_branch(x, out):
    value = lax.cond(x[0, 0] > 16, lambda y: y, lambda y: y + place(), jnp.int32(7))
    out[...] = x[...] + value.astype(jnp.float32)


def in_a_loop(x, out):
    out[...] = x[...] + lax.fori_loop(0, 3, lambda i, total: total + i * place(), jnp.int32(0)).astype(jnp.float32)


def in_a_loop_over_values(x, out):
    _, found = lax.scan(lambda total, y: (total + place(), y * place()), jnp.int32(1), jnp.arange(4))
    out[...] = x[...] + found.astype(jnp.float32)


def in_the_condition_of_a_loop(x, out):
    total = lax.while_loop(lambda n: n < place() * 2, lambda n: n + 3, jnp.int32(0))
    out[...] = x[...] + total.astype(jnp.float32)


def in_the_body_of_a_loop(x, out):
    total = lax.while_loop(lambda n: n < 20, lambda n: n + 3 + place(), jnp.int32(0))
    out[...] = x[...] + total.astype(jnp.float32)


def in_both_of_a_loop(x, out):
    limit = jnp.int32(x[0, 0])
    total = lax.while_loop(lambda n: n < place() + limit, lambda n: n + 3 + place() * limit, jnp.int32(0))
    out[...] = x[...] + total.astype(jnp.float32)


def in_a_call(x, out):
    out[...] = jax.jit(lambda y: y + place())(x[...]) + jax.jit(lambda: place() * 2)().astype(jnp.float32)


def in_a_scope(x, out):
    def scoped(scratch):
        scratch[...] = x[...] * place()
        out[...] = scratch[...]

    pl.run_scoped(scoped, pltpu.VMEM((2, 4), jnp.float32))


def deep_inside(x, out):
    def body(i, total):
        return lax.cond(i > 0, lambda: jax.jit(lambda y: y + place())(total), lambda: total + 1)

    out[...] = x[...] + lax.fori_loop(0, 3, body, jnp.int32(0)).astype(jnp.float32)


def with_the_extent(x, out):
    is_last = place() == pl.num_programs(0) - 1
    out[...] = jnp.where(is_last, 0.0, x[...]) + pl.num_programs(0)


def only_the_extent(x, out):
    out[...] = x[...] / pl.num_programs(0)


BODIES = [
    at_the_top,
    in_a_branch,
    in_the_other_branch,
    in_a_loop,
    in_a_loop_over_values,
    in_the_condition_of_a_loop,
    in_the_body_of_a_loop,
    in_both_of_a_loop,
    in_a_call,
    in_a_scope,
    deep_inside,
    with_the_extent,
]


@pytest.mark.dear(cases=6)
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_a_body_that_reads_its_place(body):
    check(kernel(body), X)


def test_a_body_that_reads_an_extent_alone_needs_no_place():
    run = kernel(only_the_extent)
    (equation,) = calls_of(run, X)
    assert not rule_of(equation).shifted
    np.testing.assert_array_equal(run_on_blocks(equation, [X], {0: 4})[0], X / 8)


def test_a_body_that_picks_its_rows_from_a_whole_operand():
    def body(x, out):
        out[...] = x[pl.ds(place() * 2, 2), :]

    check(kernel(body, spec=WHOLE), X)


def test_a_body_that_copies_its_rows_from_memory():
    def body(x, out, semaphore):
        copy = pltpu.make_async_copy(x.at[pl.ds(place() * 2, 2)], out, semaphore)
        copy.start()
        copy.wait()

    options = {"compiler_params": pltpu.CompilerParams(dimension_semantics=("parallel",))}
    spec = pl.BlockSpec(memory_space=pl.ANY)
    check(kernel(body, spec=spec, scratch_shapes=[pltpu.SemaphoreType.DMA], **options), X)


@pytest.mark.parametrize(
    "index_map",
    [lambda i: (7 - i, 0), lambda i: (i * 3 % 8, 0), lambda i: (jnp.where(i < 4, i, 0), 0), lambda i: (i // 3, 0)],
)
def test_index_maps_of_whole_operands_count_steps_of_the_whole_grid(index_map):
    def body(x, out):
        out[...] = x[...]

    check(kernel(body, spec=pl.BlockSpec((2, 4), index_map), interpret=True), X)


def test_tables_are_looked_up_with_steps_of_the_whole_grid():
    def body(table, x, y, out):
        out[...] = x[...] * 100 + y[...] + table[place()].astype(jnp.float32)

    def run(table, x, y):
        grid_spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(8,),
            in_specs=[
                pl.BlockSpec((2, 4), lambda i, table: (table[i], 0)),
                pl.BlockSpec((2, 4), lambda i, table: (i, 0)),
            ],
            out_specs=pl.BlockSpec((2, 4), lambda i, table: (i, 0)),
        )
        shape = jax.ShapeDtypeStruct((16, 4), jnp.float32)
        return pl.pallas_call(body, grid_spec=grid_spec, out_shape=shape, interpret=True)(table, x, y)

    check(run, np.random.default_rng(0).permutation(8).astype(np.int32), X, X[::-1].copy())


def test_several_dimensions_are_shifted_at_once_beside_those_of_vmap():
    def body(x, out):
        out[...] = x[...] + (100 * pl.program_id(0) + 10 * pl.program_id(2)).astype(jnp.float32)

    def run(x):
        spec = pl.BlockSpec((None, 1, None), lambda i, j, k: (i, j, k))
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(body, grid=(4, 2, 6), in_specs=[spec], out_specs=spec, out_shape=shape, interpret=True)(x)

    x = np.zeros((2, 4, 2, 6), np.float32)
    (equation,) = calls_of(jax.vmap(run), x)
    assert rule_of(equation).shifted == {1, 3}
    expected = jax.vmap(run)(x)
    for parts in ({1: 2, 3: 3}, {3: 6}, {0: 2, 1: 4, 2: 2, 3: 2}):
        np.testing.assert_array_equal(run_on_blocks(equation, [x], parts)[0], expected)


def test_kernels_for_gpus_get_their_place_as_one_more_array():
    def run(x, y):
        def body(x, y, out, total):
            out[...] = x[...] + y[...] * place()

        specs = {"in_specs": [ROWS, ROWS], "out_specs": [ROWS, ROWS], "input_output_aliases": {1: 1}}
        shapes = [jax.ShapeDtypeStruct((16, 4), jnp.float32)] * 2
        params = plgpu.CompilerParams()
        return pl.pallas_call(body, grid=(8,), out_shape=shapes, interpret=True, compiler_params=params, **specs)(x, y)

    check(run, X, X[::-1].copy())
    (equation,) = calls_of(run, X, X)
    jaxpr = str(jax.make_jaxpr(lambda *xs: run_on_blocks_traced(equation, xs))(X[:8], X[:8]))
    assert "smem" not in jaxpr


def run_on_blocks_traced(equation, blocks):
    from sdy_jax.ir.kernels.grid_rule import PallasCall, call_on_blocks

    return call_on_blocks(PallasCall(equation.params), [4], blocks, [(8, 4)] * 2, {0: jnp.int32(4)}, False)
