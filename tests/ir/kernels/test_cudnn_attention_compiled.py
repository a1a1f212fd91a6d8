"""cuDNN's attention compiled for described H100s: devices call it on their own batches and heads, and send nothing."""

from __future__ import annotations

import importlib.util
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cudnn_on_cpus import cudnn, on_cpus
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax.cli.devices import COMPILER_OPTIONS, described_gpus
from sdy_jax.cli.main import GPU
from sdy_jax.plan.profile import collectives_in_hlo

__all__ = ["on_cpus"]

HAS_COMPILER = any(map(importlib.util.find_spec, GPU.compiler.modules))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_COMPILER, reason=f"needs {GPU.compiler.name}"),
    pytest.mark.usefixtures("on_cpus"),
]

B, T, N, H = 16, 1024, 8, 128
BOTH, BATCH, HEADS = P("data", None, "model"), P(("data", "model")), P(None, None, ("data", "model"))
_CALL = re.compile(r"= \(?\w+\[([\d,]+)\].* custom-call\(.*custom_call_target=\"__cudnn")


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    devices, _ = described_gpus("h100:8")
    return Mesh(np.array(devices).reshape(2, 4), ("data", "model"))


def causal(q: Any, k: Any, v: Any) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def biased(q: Any, k: Any, v: Any, bias: Any) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, bias, implementation="cudnn")


def slopes(fun: Any) -> Any:
    def loss(args: Any) -> jax.Array:
        return jnp.sum(fun(*args).astype(jnp.float32) ** 2)

    return lambda *args: jax.grad(loss)(args)


def in_8_bits(q: Any, k: Any, v: Any) -> jax.Array:
    scales = {name: jnp.ones((1, 1, 1, 1)) for name in cudnn.fp8_params_keys}
    out, *_ = cudnn.dot_product_attention(q, k, v, fp8_params=scales, use_fp8=True, scale=0.1)
    return jnp.asarray(out)


def shaped(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


QKV = (shaped(B, T, N, H),) * 3
NARROW = (shaped(B, T, N, H, dtype=jnp.float8_e4m3fn),) * 3
GROUPS = (shaped(B, T, N, H), *(shaped(B, T, 4, H),) * 2)
BIASED = (*QKV, shaped(B, N, T, T))

CASES = {
    "both": (causal, QKV, BOTH, 1),
    "batch": (causal, QKV, BATCH, 1),
    "heads": (causal, QKV, HEADS, 1),
    "groups": (causal, GROUPS, BOTH, 1),
    "bias": (biased, BIASED, (*[BOTH] * 3, P("data", "model")), 1),
    "8 bits": (in_8_bits, NARROW, BOTH, 1),
    "gradient": (slopes(causal), QKV, BOTH, 2),
    "gradient by batch": (slopes(causal), QKV, BATCH, 2),
    "gradient of groups": (slopes(causal), GROUPS, BOTH, 2),
    "gradient of a bias": (slopes(biased), BIASED, (*[BOTH] * 3, P("data", "model")), 2),
}


@pytest.mark.parametrize("name", CASES)
def test_devices_call_it_on_their_own_batches_and_heads(name: str, mesh: Mesh) -> None:
    fun, args, specs, calls = CASES[name]
    run = sdy.partition(fun, mesh=mesh, in_shardings=specs)
    assert run.plan(*args).wire_bytes == 0
    text = run.lower(*args).compile(COMPILER_OPTIONS).as_text()
    assert not collectives_in_hlo(text)
    shapes = [tuple(map(int, shape.split(","))) for shape in _CALL.findall(text)]
    assert [math.prod(shape) * 8 for shape in shapes] == [math.prod(args[0].shape)] * calls, shapes


@pytest.mark.parametrize("axes", [{"data": 2, "model": 4}, {"fsdp": 8}])
def test_a_step_of_two_layers_sends_nothing_around_it(axes: dict[str, int], mesh: Mesh) -> None:
    mesh = Mesh(mesh.devices.reshape(tuple(axes.values())), tuple(axes))
    batch, *heads = axes
    weights = {"qkv": shaped(2, 3, N * H, N, H), "out": shaped(2, N, H, N * H)}
    specs = {"qkv": P(None, None, None, *heads), "out": P(None, *heads)}
    if not heads:
        specs = {"qkv": P(None, None, "fsdp"), "out": P(None, None, None, "fsdp")}

    def layer(x: Any, w: Any) -> Any:
        q, k, v = jnp.einsum("btm,cmnh->cbtnh", x, w["qkv"])
        return x + jnp.einsum("btnh,nhm->btm", causal(q, k, v), w["out"]), None

    def step(w: Any, x: Any) -> Any:
        slope = jax.grad(lambda w: jnp.sum(jax.lax.scan(layer, x, w)[0].astype(jnp.float32) ** 2))(w)
        return jax.tree.map(lambda a, b: a - b, w, slope)

    run = sdy.partition(step, mesh=mesh, in_shardings=(specs, P(batch)), out_shardings=specs)
    args = weights, shaped(B, T, N * H)
    assert "all_to_all" not in {c.kind for c in run.plan(*args).collectives}
    text = run.lower(*args).compile(COMPILER_OPTIONS).as_text()
    shapes = [tuple(map(int, shape.split(","))) for shape in _CALL.findall(text)]
    # XLA may unroll a trip of the loops.
    assert len(shapes) >= 2 and {math.prod(shape) * 8 for shape in shapes} == {B * T * N * H}, shapes
