"""Kernels in programs state their work, by the tables that are constants wherever these come from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sharding_dump import parse

import sdy_jax as sdy
from sdy_jax.annotate.kernels import ConstantValues
from sdy_jax.ir.custom_ops import KERNEL, calls_of_functions, stated_work
from sdy_jax.ir.graph import Graph

MESH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
B, H, T, D = 8, 4, 1024, 128
SIZES = splash_attention_kernel.BlockSizes(256, 256, 256, 256, 256, 256, 256, 256)
CAUSAL = 2 * 2 * B * H * T * T * D * 10 / 16
"""The products of attention in the blocks that the mask leaves."""


def attention(heads_apart: int) -> Any:
    mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((T, T)) for _ in range(H)])
    return splash_attention_kernel.make_splash_mha(mask, head_shards=heads_apart, q_seq_shards=1, block_sizes=SIZES)


def plain(x: jax.Array) -> jax.Array:
    return jax.vmap(attention(1))(x, x, x)


def in_shard_map(x: jax.Array) -> jax.Array:
    """As MaxText calls it: the kernel, with its tables, is an argument."""
    kernel, heads = attention(2), P("data", "model")
    specs = kernel.manual_sharding_spec(NamedSharding(MESH, P("model", None)))
    body = jax.shard_map(
        lambda kernel, x: jax.vmap(kernel)(x, x, x),
        mesh=MESH,
        in_specs=(specs, heads),
        out_specs=heads,
        check_vma=False,
    )
    return body(kernel, x)


def in_a_scan(x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, _: (plain(x), None), x, None, length=1)[0]


PROGRAMS: dict[str, Callable[..., jax.Array]] = {
    "plain": plain,
    "jit": jax.jit(plain),
    "scan": in_a_scan,
    "remat": jax.checkpoint(plain),
    "shard_map": in_shard_map,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_work_of_each_device_is_its_share_of_the_mask(name: str) -> None:
    """The same wherever the kernel is called, with nothing sent."""
    kinds, x = P("data", "model"), jax.ShapeDtypeStruct((B, H, T, D), jnp.bfloat16)
    step = sdy.partition(PROGRAMS[name], mesh=MESH, in_shardings=kinds, out_shardings=kinds, layouts="local")
    plan = step.plan(x)
    (call,) = calls_of_functions(parse(plan.mlir()).operation, (KERNEL,))
    work = stated_work(call)
    assert work is not None and work.basis == "counted"
    assert work.flops * (8 if name == "shard_map" else 1) == pytest.approx(CAUSAL, rel=0.05)
    assert not plan.wire_bytes
    assert sum(row.flops for row in plan.table("kernels")) == pytest.approx(CAUSAL / 8, rel=0.05)


def test_values_are_followed_to_constants() -> None:
    table, rows = np.arange(8, dtype=np.int32), np.zeros((4, 2), np.int32)

    @jax.jit
    def inner(x: jax.Array, y: jax.Array) -> jax.Array:
        return x + y

    def fun(x: jax.Array) -> tuple[jax.Array, ...]:
        looped = jax.lax.fori_loop(0, 3, lambda i, s: s + table[0], x[0])
        return inner(x, jnp.asarray(table)), looped, jnp.asarray(rows).reshape(8) + x

    lowered = jax.jit(fun).lower(jax.ShapeDtypeStruct((8,), jnp.int32))
    module = lowered.compiler_ir()
    known = ConstantValues(module.operation, [])
    found = [known.of(v.mlir) for op in Graph(module.operation).ops for v in op.operands]
    shapes = [x for x in found if x is not None and x.shape == (8,)]
    assert any(np.array_equal(x, table) for x in shapes)
