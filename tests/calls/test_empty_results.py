"""Results without elements: read as any other, in blocks of the sharding that they have, however a function is called.

The class is generated: an op of each family, or a function that makes nothing of something, with zero sizes in some
dimensions, a border that is drawn, and a way to call it. Values, shapes and dtypes are those of the plain function.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy

MESH = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
SPECS = (None, P(), P("x"), P("y"), P(("y", "x")), P("x", "y"), P(None, "x"), P(None, "x", "y"), P(None, None, "y"))
SHAPES = ((0, 8, 8), (8, 0, 8), (8, 8, 0), (16, 0, 0), (0, 0, 0), (1000, 0, 0))


def doubled_by_host(x):
    return jax.pure_callback(lambda v: np.asarray(v) * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def square(x):
    return x[:, : min(x.shape[1:]), : min(x.shape[1:])]


OPS: dict[str, Callable[[Any], Any]] = {
    "add": lambda x: x + 1,
    "select": lambda x: jnp.where(x > 0, x, 2.0),
    "convert": lambda x: x.astype(jnp.bfloat16),
    "complex": lambda x: x + 1j,
    "bitcast": lambda x: lax.bitcast_convert_type(x, jnp.int32),
    "transpose": lambda x: x.swapaxes(1, 2),
    "reverse": lambda x: x[::-1, :, ::-1],
    "reshape": lambda x: x.ravel(),
    "broadcast": lambda x: jnp.broadcast_to(x[:, None], (x.shape[0], 2, *x.shape[1:])),
    "sum": lambda x: (x.sum(0), x.sum(2, keepdims=True), x.sum(0, keepdims=True) + x),
    "reductions": lambda x: (x.max(1, initial=0.0), (x > 0).any(2), x.mean(1)),
    "contraction": lambda x: jnp.einsum("bij,bjk->bik", x, x.swapaxes(1, 2)),
    "product": lambda x: x @ jnp.ones((x.shape[2], 8)),
    "outer product": lambda x: jnp.einsum("bij,k->bijk", x, jnp.ones(4)),
    "sort": lambda x: (jnp.sort(x, 0), jnp.argsort(x, 1)),
    "top_k": lambda x: lax.top_k(x, min(2, x.shape[2])),
    "cumulative": lambda x: (jnp.cumsum(x, 0), lax.cummax(x, axis=1)),
    "concatenate": lambda x: (jnp.concatenate([x, x]), jnp.concatenate([x, x], 1), jnp.stack([x, x], 1)),
    "pad": lambda x: jnp.pad(x, ((1, 0), (0, 0), (0, 0))),
    "slice": lambda x: x[1:],
    "split": lambda x: jnp.split(x, 2, axis=1),
    "dynamic slice": lambda x: lax.dynamic_slice(x, (0, 0, 0), tuple(min(n, 4) for n in x.shape)),
    "dynamic update": lambda x: lax.dynamic_update_slice(x, x[:1] * 2, (0, 0, 0)),
    "gather": lambda x: (x[jnp.arange(x.shape[0])], jnp.take(x, jnp.zeros(0, int), axis=1)),
    "scatter": lambda x: x.at[:1].add(1.0),
    "segment sum": lambda x: jax.ops.segment_sum(x, jnp.zeros(x.shape[0], int), num_segments=8),
    "window": lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2, 1), (1, 1, 1), "SAME"),
    "convolution": lambda x: lax.conv_general_dilated(x, jnp.ones((4, x.shape[1], 3)), (1,), "SAME"),
    "fft": lambda x: jnp.fft.rfft(x, axis=2) if x.shape[2] else x,
    "cholesky": lambda x: jnp.linalg.cholesky(square(x)),
    "qr": jnp.linalg.qr,
    "svd": lambda x: jnp.linalg.svd(x, compute_uv=False),
    "determinant": lambda x: jnp.linalg.det(square(x))[:, None, None],
    "solve": lambda x: jnp.linalg.solve(square(x), square(x)),
    "scan": lambda x: lax.scan(lambda c, r: (c, r * 2), 0.0, x)[1],
    "loop": lambda x: lax.fori_loop(0, 3, lambda i, c: c + i, x),
    "while": lambda x: lax.while_loop(lambda c: c[1] < 3, lambda c: (c[0] * 2, c[1] + 1), (x, 0))[0],
    "branch": lambda x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x),
    "random": lambda x: (
        jax.random.normal(jax.random.key(0), x.shape) + x,
        jax.random.bits(jax.random.key(1), x.shape),
    ),
    "keys": lambda x: jax.random.split(jax.random.key(0), x.shape[0]),
    "iota": lambda x: lax.broadcasted_iota(jnp.int32, x.shape, 0),
    "callback": doubled_by_host,
    "constraint": lambda x: lax.with_sharding_constraint(x * 2, NamedSharding(MESH, P("x"))),
    "shard_map": lambda x: jax.shard_map(lambda v: v * 2, mesh=MESH, in_specs=P(), out_specs=P())(x),
    "pair": lambda x: (x, {"whole": jnp.ones(8), "empty": x.astype(bool)}),
}
"""Functions of an array without elements, a family each."""

FULL = np.arange(512, dtype=np.float32).reshape(8, 8, 8)
MADE: dict[str, Callable[[Any], Any]] = {
    "no rows": lambda x: x[8:],
    "no columns": lambda x: x[:, 3:3],
    "no depth": lambda x: x[..., :0],
    "zeros": lambda x: (jnp.zeros((16, 0)), x),
    "a sum of no rows": lambda x: x[:0].sum(1),
    "a product over nothing": lambda x: x[:, :0] @ jnp.ones((8, 8)),
    "nothing and nothing": lambda x: jnp.concatenate([x[:0], x[8:]]),
    "no indices": lambda x: (jnp.nonzero(x > 0, size=0)[0], x[jnp.zeros(0, int)]),
    "a part of nothing": lambda x: jnp.split(x, [0]),
    "repeated no times": lambda x: jnp.tile(x, (0, 1, 1)),
    "none of the largest": lambda x: lax.top_k(x, 0),
    "all, none and a number": lambda x: (x * 2, x[:0], x.sum()),
}
"""Functions that make such an array of one with elements."""


def gradient(fun: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Of the sum of all that a function makes."""
    made = lambda x: [y for y in jax.tree.leaves(fun(x)) if jnp.issubdtype(y.dtype, jnp.inexact)]  # noqa: E731
    return jax.grad(lambda x: sum(jnp.real(y).astype(jnp.float32).sum() for y in made(x)))


WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "called": lambda f, x: f(x),
    "compiled": lambda f, x: f.lower(x).compile()(x),
    "compiled for types": lambda f, x: f.lower(jax.ShapeDtypeStruct(x.shape, x.dtype)).compile()(x),
    "traced": lambda f, x: f.trace(x).lower().compile()(x),
    "under jit": lambda f, x: jax.jit(lambda x: f(x))(x),
    "gradient": lambda f, x: gradient(f)(x),
    "mapped": lambda f, x: jax.vmap(f)(jnp.stack([x, x])),
    "mapped over nothing": lambda f, x: jax.vmap(f)(jnp.zeros((0, *x.shape), x.dtype)),
}
"""How a function is called. In the first four the user states what its results are split by."""

STATED = tuple(WAYS)[:4]


def fits(spec: P | None, shape: tuple[int, ...]) -> bool:
    """Whether a spec may be one of an array, and divides it."""
    return spec is None or (len(spec) <= len(shape) and not _remainders(spec, shape))


def _remainders(spec: P, shape: tuple[int, ...]) -> list[int]:
    names = [() if entry is None else (entry,) if isinstance(entry, str) else entry for entry in spec]
    counts = [int(np.prod([MESH.shape[name] for name in each])) for each in names]
    return [n for n in (size % count for size, count in zip(shape, counts, strict=False)) if n]


def plain(way: str, fun: Callable[[Any], Any], x: Any) -> Any:
    """What the plain function gives; None where jax has no such derivative, or does not map it."""
    try:
        return WAYS[way](jax.jit(fun), x)
    except (TypeError, ValueError, IndexError, NotImplementedError):
        return None


def assert_read(found: Any, wanted: Any, spec: P | None) -> None:
    """Values and types are the wanted ones; what is empty is in the blocks of its sharding, which is the stated one."""
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    if jnp.issubdtype(found.dtype, jax.dtypes.prng_key):
        return np.testing.assert_array_equal(jax.random.key_data(found), jax.random.key_data(wanted))
    np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), rtol=1e-3, atol=1e-4)
    if not found.size:
        shapes = {shard.data.shape for shard in found.addressable_shards}
        assert shapes == {found.sharding.shard_shape(found.shape)}
        assert spec is None or found.sharding.is_equivalent_to(NamedSharding(MESH, spec), found.ndim)
    return None


def drawn(seed: str, fun: Callable[[Any], Any], shapes: tuple[tuple[int, ...], ...]) -> tuple[Any, ...]:
    """An array, a border that fits what the function makes of it, and a way to call it."""
    draw = random.Random(seed)
    shape = draw.choice(shapes)
    x = jnp.asarray(FULL) if 0 not in shape else jnp.zeros(shape)
    types = jax.tree.leaves(jax.eval_shape(fun, x))
    given = draw.choice([spec for spec in SPECS if fits(spec, shape)])
    made = draw.choice([spec for spec in SPECS if all(fits(spec, type_.shape) for type_ in types)])
    return x, given, made, draw.choice(tuple(WAYS))


def check(seed: str, fun: Callable[[Any], Any], shapes: tuple[tuple[int, ...], ...]) -> None:
    x, given, made, way = drawn(seed, fun, shapes)
    if (wanted := plain(way, fun, x)) is None:
        return
    f = sdy.partition(fun, mesh=MESH, in_shardings=given, out_shardings=made, on_unknown="ignore")
    for _ in range(2):  # the second call is not planned
        found = WAYS[way](f, x)
        assert jax.tree.structure(found) == jax.tree.structure(wanted)
        for own, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            assert_read(own, other, made if way in STATED else None)


@pytest.mark.dear(cases=60)
@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("name", OPS)
def test_functions_of_nothing(name: str, number: int) -> None:
    check(f"{name} {number}", OPS[name], SHAPES)


@pytest.mark.dear(cases=60)
@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("name", MADE)
def test_functions_that_make_nothing_of_something(name: str, number: int) -> None:
    check(f"{name} {number}", MADE[name], (FULL.shape,))


@pytest.mark.parametrize(
    ("shape", "spec", "found"),
    [((0, 8), P("x", "y"), P("x")), ((0, 8), P(None, ("x", "y")), P(None, "x")), ((8, 0), P("y", "x"), P(None, "x"))],
)
def test_axes_that_do_not_divide_are_left_out_as_of_results_with_elements(shape, spec, found) -> None:
    mesh = jax.make_mesh((2, 3), ("x", "y"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:6])
    f = sdy.partition(jnp.tanh, mesh=mesh, out_shardings=spec, on_unknown="ignore")
    empty = f(np.zeros(shape, np.float32))
    assert empty.shape == shape and not np.asarray(empty).size
    assert empty.sharding.is_equivalent_to(NamedSharding(mesh, found), 2)
    assert {shard.data.shape for shard in empty.addressable_shards} == {empty.sharding.shard_shape(shape)}


def test_they_are_arguments_of_the_next_call() -> None:
    def double(x: Any) -> Any:
        return x * 2

    run = sdy.partition(double, mesh=MESH, in_shardings=P("x"), out_shardings=P("x"), donate_argnums=0)
    x = jnp.zeros((16, 0))
    for _ in range(3):
        x = run(x)
    assert np.asarray(x).shape == (16, 0)
