"""cuDNN's attention on CPU devices: `on_cpus` lets the primitives of jax run there, by jnp.

Blocks that do not belong together have shapes that do not fit, or give other numbers: the backward pass takes the
statistics of the forward pass, as cuDNN's does.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.interpreters import mlir

F32 = jnp.float32


@pytest.fixture
def on_cpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of jax, which takes the devices for GPUs that have all that it asks for."""
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91300)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda *_: True)
    _let_run()
    return cudnn


@functools.cache
def _let_run() -> None:
    for primitive, run in (
        (cudnn._dot_product_attention_fwd_p, _forward),
        (cudnn._dot_product_attention_bwd_p, _backward),
        (cudnn._dot_product_attention_fp8_fwd_p, _fp8_forward),
        (cudnn._dot_product_attention_fp8_bwd_p, _fp8_backward),
    ):
        mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=True), platform="cpu")


def _heads_first(x: jax.Array, layout: int, heads: int) -> jax.Array:
    """As [batch, heads, tokens, features], with each head as often as there are groups."""
    x = x.astype(F32) if layout == 1 else x.astype(F32).transpose(0, 2, 1, 3)
    return jnp.repeat(x, heads // x.shape[1], 1)


def _as_given(x: jax.Array, like: jax.Array, layout: int) -> jax.Array:
    """Back, the heads of a group added up."""
    heads = like.shape[1] if layout == 1 else like.shape[2]
    x = x.reshape(x.shape[0], heads, -1, *x.shape[2:]).sum(2)
    return (x if layout == 1 else x.transpose(0, 2, 1, 3)).astype(like.dtype)


def _logits(q: jax.Array, k: jax.Array, given: dict[str, Any], parameters: dict[str, Any]) -> jax.Array:
    logits = jnp.einsum("bntd,bnsd->bnts", q, k) * float(parameters["scale"])
    if parameters["variadic_args"][0]:
        logits += given["bias"].astype(F32)
    queries, keys = jnp.arange(q.shape[2])[:, None], jnp.arange(k.shape[2])[None]
    mask = jnp.ones((q.shape[0], 1, q.shape[2], k.shape[2]), bool)
    name = parameters["mask_type"].name
    if "CAUSAL" in name:
        mask &= queries >= keys
    if "PADDING" in name:
        assert given["kv_seqlen"].shape == given["q_seqlen"].shape == q.shape[:1]
        mask &= keys[None, None] < given["kv_seqlen"][:, None, None, None]
    if parameters["sliding_window_length"]:
        mask &= queries - keys < parameters["sliding_window_length"]
    return jnp.where(mask, logits, -1e30)


_OPERANDS = ["bias", "q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets", "page_table_k", "page_table_v"]


def _forward(q: Any, k: Any, v: Any, *others: Any, layout: int, is_training: bool, **parameters: Any) -> list[Any]:
    like = q
    heads = q.shape[1] if layout == 1 else q.shape[2]
    q, k, v = (_heads_first(x, layout, heads) for x in (q, k, v))
    logits = _logits(q, k, dict(zip(_OPERANDS, others, strict=True)), parameters)
    statistics = jax.nn.logsumexp(logits, -1).astype(F32)
    out = jnp.einsum("bnts,bnse->bnte", jnp.exp(logits - statistics[..., None]), v)
    out = (out if layout == 1 else out.transpose(0, 2, 1, 3)).astype(like.dtype)
    return [out, statistics] if is_training else [out]


def _backward(q: Any, k: Any, v: Any, *others: Any, layout: int, **parameters: Any) -> list[Any]:
    given = (q, k, v)
    *others, statistics, out, slope = others
    heads = q.shape[1] if layout == 1 else q.shape[2]
    q, k, v, out, slope = (_heads_first(x, layout, heads) for x in (q, k, v, out, slope))
    named = dict(zip(_OPERANDS, others, strict=True))
    shares = jnp.exp(_logits(q, k, named, parameters) - statistics[..., None])
    assert shares.shape[:2] == out.shape[:2] == slope.shape[:2] == statistics.shape[:2]
    of_shares = jnp.einsum("bnte,bnse->bnts", slope, v)
    of_logits = shares * (of_shares - (slope * out).sum(-1)[..., None])
    found = [
        jnp.einsum("bnts,bnsd->bntd", of_logits, k) * float(parameters["scale"]),
        jnp.einsum("bnts,bntd->bnsd", of_logits, q) * float(parameters["scale"]),
        jnp.einsum("bnts,bnte->bnse", shares, slope),
    ]
    slopes = [_as_given(x, like, layout) for x, like in zip(found, given, strict=True)]
    if not parameters["variadic_args"][1]:
        return slopes
    bias = named["bias"]
    summed = [dim for dim in range(2) if bias.shape[dim] == 1]
    return [*slopes, of_logits.sum(summed, keepdims=True).astype(bias.dtype)]


def _fp8_forward(q: Any, k: Any, v: Any, *scales: Any, use_causal_mask: bool, **parameters: Any) -> list[Any]:
    q, k, v = (x.astype(F32) * scale for x, scale in zip((q, k, v), scales, strict=False))
    out, *statistics = _forward(q, k, v, *[jnp.zeros(0)] * 7, **_as_for_floats(use_causal_mask, parameters))
    made = (out * scales[5]).astype(jnp.float8_e4m3fn)
    # What cuDNN gives of the probabilities is the largest one; any other thing of all of them would do here.
    return [made, _largest(q), _largest(out), *statistics]


def _fp8_backward(q: Any, k: Any, v: Any, out: Any, slope: Any, statistics: Any, *scales: Any, **options: Any) -> Any:
    parameters = dict(options)
    dtype, causal = q.dtype, parameters.pop("use_causal_mask")
    q, k, v, out, slope = (x.astype(F32) for x in (q, k, v, out, slope))
    taken = [q, k, v, *[jnp.zeros(0)] * 7, statistics, out, slope]
    found = _backward(*taken, **_as_for_floats(causal, parameters))
    return [*(x.astype(dtype) for x in found), *map(_largest, found), _largest(statistics)]


def _as_for_floats(is_causal: bool, parameters: dict[str, Any]) -> dict[str, Any]:
    mask = cudnn.MaskType.CAUSAL if is_causal else cudnn.MaskType.NO_MASK
    return {**parameters, "mask_type": mask, "variadic_args": (False, False), "sliding_window_length": None}


def _largest(x: jax.Array) -> jax.Array:
    return jnp.abs(x).max().reshape(1, 1, 1, 1).astype(F32)
