"""Which dimensions of an array follow which dimensions of a grid, by index maps and tables of their values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from sdy_jax.ir.kernels.index_arithmetic import IndexEntry, entries, evaluate

FLOATS = jax.ShapeDtypeStruct((4,), jnp.int32)


def entries_of(index_map, *grid):
    """Those of a map of a grid's indices to block indices, as a tuple."""
    jaxpr = jax.make_jaxpr(index_map)(*(jnp.int32(0) for _ in grid)).jaxpr
    return entries(jaxpr, grid)


def follows(dim, steps=1):
    return IndexEntry(frozenset([dim]), dim, steps)


def repeats(dim, steps):
    return IndexEntry(frozenset([dim]), None, steps, dim)


def odd(*dims):
    return IndexEntry(frozenset(dims))


CASES = {
    "an index itself": (lambda i, j: (i, j), (4, 8), (follows(0), follows(1))),
    "the same one twice": (lambda i: (i, i), (4,), (follows(0), follows(0))),
    "constants": (lambda i: (0, 3), (4,), (IndexEntry(), IndexEntry())),
    "computed constants": (lambda i: (i * 0, i // 4, jnp.minimum(i, 0)), (4,), (IndexEntry(),) * 3),
    "major parts": (lambda h: (h // 4, h // 2, h >> 1), (8,), (follows(0, 4), follows(0, 2), follows(0, 2))),
    "major parts that do not divide": (lambda h: (h // 3,), (8,), (follows(0, 3),)),
    "minor parts": (lambda h: (h % 4, jax.lax.rem(h, 2), h & 1), (8,), (repeats(0, 4), repeats(0, 2), repeats(0, 2))),
    "minor parts that do not divide": (lambda h: (h % 3,), (8,), (odd(0),)),
    "the index, in a roundabout way": (
        lambda i: (i * 2 // 2, i + 1 - 1, jnp.where(i > 2, i, i), jnp.clip(i, 0, 7)),
        (8,),
        (follows(0),) * 4,
    ),
    "another order": (lambda i: (3 - i, (i + 1) % 4, i * 2), (4,), (odd(0),) * 3),
    "two dimensions": (lambda i, j: (i * 4 + j, jnp.where(i > j, j, 0)), (4, 4), (odd(0, 1), odd(0, 1))),
    "of which one does not count": (lambda i, j: (jnp.where(j < 9, i, 0),), (4, 4), (odd(0, 1),)),
    "floats": (lambda i: ((i / 2 * 2).astype(jnp.int32), jnp.round(i / 2).astype(jnp.int32)), (4,), (odd(0),) * 2),
    "an extent known only when it runs": (lambda i, j: (i, i // 2, j), (None, 4), (follows(0), odd(0), follows(1))),
    "one step": (lambda i: (i, i // 2), (1,), (follows(0), IndexEntry())),
    "a call": (lambda i: (jax.jit(lambda x: x // 2)(i),), (4,), (follows(0, 2),)),
    "a branch": (lambda i: (jax.lax.cond(i > 1, lambda: 1, lambda: 0),), (4,), (odd(0),)),
    "a loop": (lambda i: (jax.lax.fori_loop(0, 2, lambda _, x: x + 0, i),), (4,), (odd(0),)),
}


@pytest.mark.parametrize("name", CASES)
def test_entries_follow_repeat_or_mention_dimensions(name):
    index_map, grid, expected = CASES[name]
    assert entries_of(index_map, *grid) == expected


@pytest.mark.parametrize("name", CASES)
def test_what_is_said_of_entries_is_true_of_their_values(name):
    index_map, grid, expected = CASES[name]
    grid = [4 if n is None else n for n in grid]
    values = np.array([index_map(*map(jnp.int32, steps)) for steps in np.ndindex(*grid)])
    values = np.moveaxis(values.reshape(*grid, -1), -1, 0)
    for entry, table in zip(expected, values, strict=True):
        for dim, extent in enumerate(grid):
            along = np.moveaxis(table, dim, 0)
            steps = np.arange(extent).reshape(-1, *[1] * (len(grid) - 1))
            if entry.follows == dim:
                assert (along == steps // entry.steps).all()
            if entry.repeats == dim:
                assert (along == along[steps.ravel() % entry.steps]).all()
            if dim not in entry.mentions:
                assert (along == along[:1]).all()


def test_tables_of_scalars_make_an_entry_odd_to_what_looks_them_up():
    def index_map(i, j, table):
        return table[i], table[0], i

    spec = pl.BlockSpec((1, 1, 1), index_map)
    from jax.experimental.pallas import tpu as pltpu
    from kernel_splits import calls_of

    def run(table, x):
        grid_spec = pltpu.PrefetchScalarGridSpec(1, (4, 2), [spec], [pl.BlockSpec((1, 1), lambda i, j, _: (i, j))])
        shape = jax.ShapeDtypeStruct((4, 2), jnp.float32)
        return pl.pallas_call(lambda t, x, o: None, grid_spec=grid_spec, out_shape=[shape], interpret=True)(table, x)

    (call,) = calls_of(run, FLOATS, jax.ShapeDtypeStruct((4, 4, 4), jnp.float32))
    mapping = call.params["grid_mapping"].block_mappings[0]
    assert entries(mapping.index_map_jaxpr.jaxpr, (4, 2)) == (odd(0), IndexEntry(), follows(0))


@pytest.mark.parametrize("dtype", [np.int32, np.int8, np.uint32, np.bool_])
def test_integer_arithmetic_is_that_of_lax(dtype):
    rng = np.random.default_rng(0)
    a, b = rng.integers(-9, 9, 32).astype(dtype), rng.integers(1, 4, 32).astype(dtype)
    lax = jax.lax
    bits = (lax.bitwise_and, lax.bitwise_or, lax.bitwise_xor, lax.eq, lax.ne, lax.lt, lax.le, lax.gt, lax.ge)
    numbers = (lax.add, lax.sub, lax.mul, lax.div, lax.rem, lax.min, lax.max, lax.shift_left)
    signed = (lax.shift_right_arithmetic, lambda x, y: lax.neg(x), lambda x, y: lax.abs(x), lambda x, y: lax.sign(x))
    more = (lambda x, y: lax.select(x > y, x, y), lambda x, y: lax.clamp(y, x, y), lambda x, y: x.astype(np.int16))
    functions = [*bits, lambda x, y: lax.bitwise_not(x)]
    functions += [] if dtype == np.bool_ else [*numbers, *more]
    functions += signed if np.issubdtype(dtype, np.signedinteger) else []
    for function in functions:
        jaxpr = jax.make_jaxpr(function)(a[0], b[0]).jaxpr
        known = dict(zip(jaxpr.invars, (a, b), strict=True))
        for equation in jaxpr.eqns:
            evaluate(equation, known)
        np.testing.assert_array_equal(known[jaxpr.outvars[0]], jax.vmap(function)(a, b), str(jaxpr))
