"""Products keep their largest array as it lies: numbers, gradients, and what a compiler copies then."""

from __future__ import annotations

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax import testing

_PRODUCTS = [
    "bqkgd,btkd->bkgqt",
    "bkgqt,btkd->bqkgd",
    "bkgqt,bqkgd->btkd",
    "bqd,btd->btq",
    "bqd,tbd->tbq",
    "qd,td->qt",
    "dq,td->tq",
    "abq,abt->atbq",
    "abcq,t->qctab",
    "qd,dkt->kqt",
]
_SIZES = dict(zip("abcqtkgd", (2, 4, 2, 8, 16, 2, 4, 4), strict=True))


def _operands(product: str, dtype: str = "float32") -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    taken = product.split("->")[0].split(",")
    return [draw.standard_normal([_SIZES[dim] for dim in dims]).astype(dtype) for dims in taken]


@pytest.mark.parametrize("product", _PRODUCTS)
@pytest.mark.parametrize("spec", [P("data"), P("model", "data")], ids=str)
def test_products_in_any_order_are_the_same(mesh: Mesh, product: str, spec: P) -> None:
    operands = _operands(product)
    specs = tuple(P(*spec[: x.ndim]) for x in operands)

    def f(x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
        found, pullback = jax.vjp(lambda x, y: jnp.einsum(product, x, jnp.sin(y)), x, y)
        return found, *pullback(jnp.cos(found))

    testing.assert_same(f, *operands, mesh=mesh, in_shardings=specs)


def test_products_of_scalars_have_no_order(mesh: Mesh) -> None:
    testing.assert_same(
        lambda x: jax.lax.dot(x, x) + jax.lax.dot_general(x[0], x[1], (((), ()), ((), ()))), np.ones(4), mesh=mesh
    )


def _attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    scores = jax.nn.softmax(jnp.einsum("bqkgd,btkd->bkgqt", grouped, k), -1)
    return jnp.einsum("bkgqt,btkd->bqkgd", scores, v).reshape(q.shape)


def _gradients(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
    return jax.grad(lambda *x: (_attention(*x) ** 2).sum(), (0, 1, 2))(q, k, v)


def _transposed_scores(compiled: str, size: int) -> int:
    """How many arrays of this size a compiled program makes by a transposition or a copy."""
    made = re.findall(r"= \w+\[([\d,]+)\]\S* (?:transpose|copy)\(", compiled)
    return sum(math.prod(map(int, shape.split(","))) == size for shape in made)


def test_scores_of_groups_of_heads_are_not_transposed(mesh: Mesh) -> None:
    draw = np.random.default_rng(0)
    batch, length, groups = 8, 64, 8
    q, k = (draw.standard_normal((batch, length, heads, 4)).astype("float32") for heads in (2 * groups, groups))
    spec = P("data", None, "model")
    testing.assert_same(_gradients, q, k, k[::-1], mesh=mesh, in_shardings=spec, out_shardings=spec)
    size = batch * 2 * groups * length**2 // 8
    specs = [jax.sharding.NamedSharding(mesh, spec)] * 3
    ours = sdy.partition(_gradients, mesh=mesh, in_shardings=spec, out_shardings=spec).lower(q, k, k)
    theirs = jax.jit(_gradients, in_shardings=specs, out_shardings=specs[0]).lower(q, k, k)
    assert _transposed_scores(theirs.compile().as_text(), size) > 0
    assert _transposed_scores(ours.compile().as_text(), size) == 0


def _weight_gradient(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.grad(lambda w: (jnp.tanh(jnp.einsum("bsd,dhk->bshk", x, w)) ** 2).sum())(w)


@pytest.mark.parametrize(
    ("spec", "made"),
    [(P("data", "model"), "16x8x4"), (P(None, "model"), "8x4x16"), (P(None, None, "data"), "8x4x16")],
    ids=str,
)
def test_gradients_of_weights_are_made_as_their_weights_lie(mesh: Mesh, spec: P, made: str) -> None:
    """Where what jax would transpose is split along its last dimension, and they are not."""
    draw = np.random.default_rng(0)
    x, w = (draw.standard_normal(shape).astype("float32") for shape in ((8, 4, 16), (16, 8, 4)))
    options = {"mesh": mesh, "in_shardings": (P("data"), spec), "out_shardings": spec}
    testing.assert_same(_weight_gradient, x, w, **options)
    text = sdy.partition(_weight_gradient, **options).plan(x, w).mlir()
    assert re.findall(r"dot_general .*-> tensor<(\S+)xf32>", text)[-1] == made
    assert text.count("stablehlo.transpose") == (made == "8x4x16")


def test_products_keep_their_precision_where_operands_change_places(mesh: Mesh) -> None:
    def f(x: jax.Array, y: jax.Array) -> jax.Array:
        return jax.lax.dot(x, y, precision=("highest", "default")).T

    arguments, options = (np.ones((8, 4)), np.ones((4, 16))), {"mesh": mesh, "in_shardings": (P(), P(None, "data"))}
    testing.assert_same(f, *arguments, **options)
    text = sdy.partition(f, **options).plan(*arguments).mlir()
    assert "precision = [DEFAULT, HIGHEST]" in text
    assert "stablehlo.transpose" not in text
