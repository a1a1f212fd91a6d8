"""A norm of rows as users write one: a kernel, one for its derivative, and `custom_vjp`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

ROWS = 2
"""Of a block."""


def _forward(x_ref: Any, w_ref: Any, out_ref: Any) -> None:
    x = x_ref[...].astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + 1e-6)
    out_ref[...] = (x * scale * w_ref[...]).astype(out_ref.dtype)


def _backward(x_ref: Any, w_ref: Any, given_ref: Any, x_grad_ref: Any, w_grad_ref: Any) -> None:
    x, given = x_ref[...].astype(jnp.float32), given_ref[...].astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + 1e-6)
    normal, scaled = x * scale, given * w_ref[...]
    x_grad = scale * (scaled - normal * jnp.mean(normal * scaled, axis=1, keepdims=True))
    x_grad_ref[...] = x_grad.astype(x_grad_ref.dtype)
    w_grad_ref[...] = jnp.sum(given * normal, axis=0, keepdims=True)[None]


def _specs(x: jax.Array) -> tuple[int, pl.BlockSpec, pl.BlockSpec]:
    rows, width = x.shape
    return rows // ROWS, pl.BlockSpec((ROWS, width), lambda i: (i, 0)), pl.BlockSpec((width,), lambda i: (0,))


@jax.custom_vjp
def norm(x: jax.Array, w: jax.Array) -> jax.Array:
    """Of rows f[n, d], an even number of them, scaled by f[d]."""
    count, rows, whole = _specs(x)
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    run = pl.pallas_call(
        _forward, grid=(count,), in_specs=[rows, whole], out_specs=rows, out_shape=shape, interpret=True
    )
    return run(x, w)


def _given(x: jax.Array, w: jax.Array) -> Any:
    return norm(x, w), (x, w)


def _gradients(kept: Any, given: jax.Array) -> Any:
    x, w = kept
    count, rows, whole = _specs(x)
    per_block = pl.BlockSpec((1, 1, x.shape[1]), lambda i: (i, 0, 0))
    shapes = jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((count, 1, x.shape[1]), jnp.float32)
    run = pl.pallas_call(
        _backward,
        grid=(count,),
        in_specs=[rows, whole, rows],
        out_specs=[rows, per_block],
        out_shape=shapes,
        interpret=True,
    )
    x_grad, w_grad = run(x, w, given)
    return x_grad, jnp.sum(w_grad, axis=(0, 1)).astype(w.dtype)


norm.defvjp(_given, _gradients)


def plain_norm(x: jax.Array, w: jax.Array) -> jax.Array:
    """What it computes."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6) * w).astype(x.dtype)
