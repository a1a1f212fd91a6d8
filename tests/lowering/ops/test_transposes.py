"""`jax.linear_transpose` of partitioned functions that are linear, next to jit's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy

X = np.arange(128, dtype=np.float32).reshape(8, 16) / 16
W = np.linspace(-1, 1, 512, dtype=np.float32).reshape(16, 32)
TYPE = jax.ShapeDtypeStruct(X.shape, X.dtype)

TRANSPOSES = {
    "of one": lambda jit: jax.linear_transpose(jit(lambda x: 3 * x.T), TYPE)(X.T),
    "of several": lambda jit: jax.linear_transpose(jit(lambda x, y: (x.T, y.sum() + x.sum())), TYPE, TYPE)(
        (X.T, np.float32(2))
    ),
    "of a tree": lambda jit: jax.linear_transpose(jit(lambda d: {"o": d["x"] * 2 + d["y"]}), {"x": TYPE, "y": TYPE})(
        {"o": X}
    ),
    "beside what is known": lambda jit: jax.linear_transpose(beside(jit), TYPE)(X @ W),
    "with stated shardings": lambda jit: jax.linear_transpose(
        jit(lambda x: x * 2, in_shardings=P("a"), out_shardings=P(None, "b")), TYPE
    )(X),
    "in jit": lambda jit: jax.jit(lambda c: jax.linear_transpose(jit(lambda x: 3 * x.T), TYPE)(c))(X.T),
    "twice": lambda jit: jax.linear_transpose(
        lambda c: jax.linear_transpose(jit(lambda x: 3 * x.T), TYPE)(c)[0], jax.ShapeDtypeStruct((16, 8), np.float32)
    )(X),
    "mapped": lambda jit: jax.vmap(jax.linear_transpose(jit(lambda x: 3 * x), jax.ShapeDtypeStruct((16,), X.dtype)))(X),
    "of a scan": lambda jit: jax.linear_transpose(
        lambda x: lax.scan(lambda c, _: (jit(lambda c: c * 2)(c), None), x, None, length=3)[0], TYPE
    )(X),
    "differentiated": lambda jit: jax.grad(
        lambda w: (jax.linear_transpose(lambda x: jit(jnp.matmul)(x, w), TYPE)(X @ W)[0] ** 2).sum()
    )(W),
}


def beside(jit):
    f = jit(lambda w, x: x @ w)
    return lambda x: f(W, x)


@pytest.mark.parametrize("name", TRANSPOSES)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_as_jit(kind, name):
    with jax.set_mesh(jax.make_mesh((2, 4), ("a", "b"), axis_types=(kind,) * 2)):
        ours, theirs = map(TRANSPOSES[name], (sdy.partition, jax.jit))
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), ours, theirs)


@pytest.mark.parametrize("jit", [sdy.partition, jax.jit])
def test_what_is_not_linear_is_refused(jit):
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh), pytest.raises(NotImplementedError, match="Transpose rule"):
        jax.linear_transpose(jit(jnp.sin), TYPE)(X)


def test_the_transpose_is_planned():
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    f = sdy.partition(lambda w, x: x @ w, mesh=mesh, in_shardings=(P(None, "b"), P("a")), out_shardings=P("a", "b"))
    jax.linear_transpose(lambda x: f(W, x), TYPE)(X @ W)
    (plan,) = [call.plan for call in f.plans[-1].derivatives]
    assert plan.name == "<lambda> (transposed)" and {c.kind for c in plan.collectives} == {"all_reduce"}
