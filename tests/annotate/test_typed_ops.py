"""Ops on arrays with types, each with `jax.jit` and `sdy.partition`: values, types, shardings and errors are the same.

Many are ambiguous as they are called here, and an error; most are not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beside_jit import assert_as_jit
from jax import lax
from jax.sharding import AxisType, reshard
from jax.sharding import PartitionSpec as P

RNG = np.random.default_rng(0)
X = RNG.standard_normal((8, 16), dtype=np.float32)
W = RNG.standard_normal((16, 8), dtype=np.float32)
KEY = jax.random.key(0)

Op = Callable[[Any], Any]
OPS: dict[str, Op] = {}

for _name in [
    "relu",
    "relu6",
    "sigmoid",
    "softplus",
    "silu",
    "soft_sign",
    "log_sigmoid",
    "leaky_relu",
    "hard_sigmoid",
    "hard_silu",
    "hard_tanh",
    "elu",
    "celu",
    "selu",
    "gelu",
    "glu",
    "squareplus",
    "mish",
    "softmax",
    "log_softmax",
    "logsumexp",
    "standardize",
]:
    OPS[f"nn.{_name}"] = getattr(jax.nn, _name)
for _name in [
    "sum",
    "mean",
    "max",
    "min",
    "prod",
    "any",
    "all",
    "var",
    "std",
    "argmax",
    "argmin",
    "cumsum",
    "cumprod",
    "sort",
    "argsort",
    "flip",
    "median",
    "ptp",
    "count_nonzero",
]:
    for _axis in (None, 0, 1):
        OPS[f"{_name} over {_axis}"] = lambda x, name=_name, axis=_axis: getattr(jnp, name)(x, axis=axis)


def rows(x: Any) -> Any:
    """Whole rows, split over `a`."""
    return reshard(x, P("a"))


def columns(x: Any) -> Any:
    return reshard(x, P(None, "b"))


def whole(x: Any) -> Any:
    return reshard(x, P())


OPS |= {
    "roll": lambda x: jnp.roll(x, 1, 0),
    "slice": lambda x: x[2:6],
    "slice of columns": lambda x: x[:, :8],
    "a row": lambda x: x[3],
    "a column": lambda x: x[:, 3],
    "strided": lambda x: x[::2],
    "reversed": lambda x: x[::-1],
    "a new dimension": lambda x: x[None],
    "concatenate": lambda x: jnp.concatenate([x, x]),
    "concatenate columns": lambda x: jnp.concatenate([x, x], 1),
    "stack": lambda x: jnp.stack([x, x]),
    "split": lambda x: jnp.split(x, 2, 1),
    "pad": lambda x: jnp.pad(x, ((0, 0), (0, 16))),
    "pad unevenly": lambda x: jnp.pad(x, 1),
    "tile": lambda x: jnp.tile(x, (2, 1)),
    "repeat": lambda x: jnp.repeat(x, 2, 0),
    "where": lambda x: jnp.where(x > 0, x, 0.0),
    "triu": jnp.triu,
    "outer": lambda x: jnp.outer(x[0], x[1]),
    "clip": lambda x: jnp.clip(x, -1, 1),
    "astype": lambda x: x.astype(jnp.bfloat16),
    "transpose": jnp.transpose,
    "ravel": jnp.ravel,
    "moveaxis": lambda x: jnp.moveaxis(x, 0, 1),
    "diag": jnp.diag,
    "diff": lambda x: jnp.diff(x, axis=0),
    "take": lambda x: jnp.take(x, jnp.array([1, 2]), axis=0),
    "take_along_axis": lambda x: jnp.take_along_axis(x, jnp.zeros((8, 1), int), 1),
    "top_k": lambda x: lax.top_k(rows(x), 2),
    "at set": lambda x: x.at[0].set(1.0),
    "at add": lambda x: x.at[:, 0].add(1.0),
    "at get": lambda x: x.at[jnp.array([0, 1])].get(out_sharding=P()),
    "dynamic_slice": lambda x: lax.dynamic_slice(x, (1, 0), (2, 16)),
    "dynamic_update_slice": lambda x: lax.dynamic_update_slice(x, jnp.ones((2, 16)), (1, 0)),
    "norm": lambda x: jnp.linalg.norm(x, axis=1),
    "einsum": lambda x: jnp.einsum("ij,kj->ik", x, x),
    "einsum of rows": lambda x: jnp.einsum("ij,ij->i", x, x),
    "a product": lambda x: x @ x.T,
    "a product with whole weights": lambda x: x @ jnp.asarray(W),
    "fft": jnp.fft.fft,
    "fft of rows": lambda x: jnp.fft.fft(rows(x), axis=1),
    "cholesky": lambda x: jnp.linalg.cholesky(whole(x) @ whole(x).T + 9 * jnp.eye(8)),
    "dropout": lambda x: jnp.where(jax.random.bernoulli(KEY, 0.5, x.shape, out_sharding=P("a", "b")), x, 0),
    "dropout by whole masks": lambda x: jnp.where(jax.random.bernoulli(KEY, 0.5, x.shape), x, 0),
    "one_hot": lambda x: jax.nn.one_hot(jnp.argmax(rows(x), 1), 4),
    "scan": lambda x: lax.scan(lambda c, r: (c + r, c * r), jnp.zeros_like(x[0]), columns(x)),
    "scan over what is split": lambda x: lax.scan(lambda c, r: (c + r.sum(), r), 0.0, x),
    "while_loop": lambda x: lax.while_loop(lambda c: c[1] < 3, lambda c: (c[0] * 2, c[1] + 1.0), (x, 0.0))[0],
    "fori_loop": lambda x: lax.fori_loop(0, 3, lambda i, c: c + i, x),
    "map": lambda x: lax.map(lambda r: r * 2, columns(x)),
    "cond": lambda x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x),
    "switch": lambda x: lax.switch(1, [jnp.sin, jnp.cos], x),
    "associative_scan": lambda x: lax.associative_scan(jnp.add, columns(x)),
    "vmap": lambda x: jax.vmap(lambda c: c * 2, 1, 1)(x),
    "vmap with spmd_axis_name": lambda x: jax.vmap(lambda r: r.sum(), spmd_axis_name="a")(x),
    "vmap of a product": lambda x: jax.vmap(
        lambda r, w: jnp.dot(r, w, out_sharding=P()), (0, None), spmd_axis_name="a"
    )(x, reshard(jnp.asarray(W), P("b"))),
    "vmap of psum": lambda x: jax.vmap(lambda r: lax.psum(r, "i"), axis_name="i")(columns(x)),
    "vmap of scan": lambda x: jax.vmap(lambda r: lax.scan(lambda c, y: (c + y, None), 0.0, r)[0])(rows(x)),
    "checkpoint": lambda x: jax.grad(jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)).sum()))(x),
    "hessian": lambda x: jax.hessian(lambda v: (v**2).sum())(whole(x[0])),
    "linearize": lambda x: jax.linearize(jnp.sin, x)[1](x),
    "convolution": lambda x: lax.conv_general_dilated(rows(x)[:, None], jnp.ones((2, 1, 3)), (1,), "SAME"),
    "reduce_window": lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2), (1, 2), "VALID"),
    "meshgrid": lambda x: jnp.meshgrid(x[0], x[:, 0]),
    "shard_map": lambda x: jax.shard_map(lambda b: lax.psum(b, "b"), out_specs=P("a"))(x),
    "optimization_barrier": lax.optimization_barrier,
    "broadcast": lambda x: jnp.broadcast_to(x, (4, 8, 16)),
    "with arange": lambda x: x + jnp.arange(16),
    "a tree": lambda x: (x.sum(0), x.sum(1), x.T, {"k": x * 2}),
}

FEW = (
    "nn.softmax", "nn.glu", "mean over 1", "max over 0", "a product", "concatenate", "pad unevenly", "slice", "at get",
    "scan", "while_loop", "switch", "fft of rows", "dropout", "shard_map", "a tree", "vmap of a product",
)  # fmt: skip


def on(array: Any, *entries: Any) -> jax.Array:
    return jax.device_put(array, P(*entries))


@pytest.mark.parametrize("types", ["Explicit", "mixed"])
@pytest.mark.parametrize("name", OPS)
def test_ops_are_jits(name: str, types: str) -> None:
    second = AxisType.Explicit if types == "Explicit" else AxisType.Auto

    def row(jit: Callable[..., Any]) -> Any:
        result = jit(lambda x: OPS[name](x))(on(X, "a", "b"))
        if types == "Explicit":
            return result
        # Along Auto axes results lie as the plan says, and as XLA says.
        return [(str(jax.typeof(leaf)), np.asarray(leaf)) for leaf in jax.tree.leaves(result)]

    assert_as_jit(row, (2, 4), ("a", "b"), (AxisType.Explicit, second))


def total(tree: Any) -> Any:
    return sum(jnp.sum(jnp.abs(x) ** 2) for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact))


OUTSIDE: dict[str, Callable[[Callable[..., Any], Op], Any]] = {
    "gradient": lambda jit, op: jax.grad(lambda x: total(jit(op)(x)))(on(X, "a", "b")),
    "gradient inside": lambda jit, op: jit(jax.grad(lambda x: total(op(x))))(on(X, "a", "b")),
    "tangent": lambda jit, op: jax.jvp(jit(op), (on(X, "a", "b"),), (on(X, "a", "b"),)),
    "vmap": lambda jit, op: jax.vmap(jit(op))(on(np.stack([X, X]), None, "a", "b")),
    "vmap along an axis": lambda jit, op: jax.vmap(jit(op), spmd_axis_name="a")(on(np.stack([X, X]), "a", None, "b")),
    "outer jit": lambda jit, op: jax.jit(lambda x: jax.tree.map(lambda y: y * 2, jit(op)(x)))(on(X, "a", "b")),
}


@pytest.mark.dear(cases=51)
@pytest.mark.parametrize("transformation", OUTSIDE)
@pytest.mark.parametrize("name", FEW)
def test_transformations_of_ops_are_jits(name: str, transformation: str) -> None:
    def row(jit: Callable[..., Any]) -> Any:
        return OUTSIDE[transformation](jit, lambda x: OPS[name](x))

    assert_as_jit(row, (2, 4), ("a", "b"), (AxisType.Explicit,) * 2)
