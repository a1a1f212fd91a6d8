"""Attention by kernels of libraries, or written out, and how long the kernels take."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from gpu_work import SHARE
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import NamedSharding

from models.common import Layout, Names, attention
from sdy_jax.errors import SdyError
from sdy_jax.lowering.targets.target import machines
from sdy_jax.plan.hlo_module import HloInstruction

# The kernels of attention that people train with, as a model's `attention`: in `shard_map`, or called plainly.

Attention = Callable[[jax.Array, jax.Array, jax.Array, Layout], jax.Array]
"""Causal attention of queries (batch, sequence, heads, width) to keys and values of as many heads, or fewer."""

QUERIES: Names = ("batch", "seq", "heads", None)
KEYS: Names = ("batch", None, "kv_heads", None)

BLOCK = 512
"""Queries, and keys, that splash attention takes at a time: MaxText's default."""

_CUDNN = 91300
"""The version that kernels are traced for: that of CUDA 13's images."""


def written_out(q: jax.Array, k: jax.Array, v: jax.Array, layout: Layout, window: int = 0) -> jax.Array:
    """In plain JAX, which holds the scores. `window`: the tokens that one attends to; all before it where it is 0."""
    mask = jnp.tril(jnp.ones((q.shape[1],) * 2, bool))
    return attention(q, k, v, mask & ~jnp.tril(mask, -window) if window else mask)


@dataclass(frozen=True)
class Splash:
    """Splash attention of JAX's kernels for TPUs.

    Attributes:
        mapped: in a `shard_map` around the call alone, as MaxText has it: batch and heads split as the layout says, and
            queries where it splits sequences, with all keys. Else called plainly.
        interpret: for devices that are no TPUs.
        window: the tokens that one attends to; all before it where it is 0.
        causal: a token attends to none after it.
    """

    mapped: bool = True
    interpret: bool = False
    window: int = 0
    causal: bool = True

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, layout: Layout) -> jax.Array:
        shards = _shards(layout, "heads")
        repeats = max(1, shards // k.shape[2])  # keys of at least one head on each device
        k, v = (jnp.repeat(x, repeats, 2) if repeats > 1 else x for x in (k, v))
        q = q * q.shape[-1] ** -0.5
        kernel = self._kernel(q, k, _shards(layout, "seq") if self.mapped else 1)
        if not self.mapped:
            return _by_heads(kernel, q, k, v)
        queries, keys = layout.spec(QUERIES), layout.spec(KEYS)
        of_kernel = kernel.manual_sharding_spec(NamedSharding(layout.mesh, layout.spec((None, "seq"))))
        mapped = jax.shard_map(
            _by_heads, mesh=layout.mesh, in_specs=(of_kernel, queries, keys, keys), out_specs=queries, check_vma=False
        )
        return mapped(kernel, q, k, v)

    def _kernel(self, q: jax.Array, k: jax.Array, parts: int) -> Any:
        """That of the queries of one head of keys; `parts`: those that the sequence is split into."""
        length = q.shape[1]
        whole = masks.CausalMask if self.causal else masks.FullMask
        shape = (length, k.shape[1])
        of_head = masks.LocalMask(shape, (self.window - 1, 0), 0) if self.window else whole(shape)
        mask = masks.MultiHeadMask([of_head] * (q.shape[2] // k.shape[2]))
        block = min(BLOCK, length // parts)
        sizes = splash.BlockSizes(*(block,) * 8)
        return splash.make_splash_mqa(
            mask, head_shards=1, q_seq_shards=parts, block_sizes=sizes, interpret=self.interpret
        )


@dataclass(frozen=True)
class Cudnn:
    """cuDNN's fused attention, which takes fewer heads of keys as they are. Its fields are as those of `Splash`."""

    mapped: bool = True
    window: int = 0
    causal: bool = True

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, layout: Layout) -> jax.Array:
        local = (self.window - 1, 0) if self.window else None
        attend = partial(jax.nn.dot_product_attention, is_causal=True, local_window_size=local, implementation="cudnn")
        if not self.mapped:
            return attend(q, k, v)
        queries, keys = layout.spec(QUERIES), layout.spec(KEYS)
        specs = (queries, keys, keys)
        return jax.shard_map(attend, mesh=layout.mesh, in_specs=specs, out_specs=queries, check_vma=False)(q, k, v)


def assume_cudnn() -> None:
    """Lets cuDNN's attention be traced where no GPU is: jax asks the one at hand for its version."""
    fused: Any = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    fused.check_cudnn_version = lambda: _CUDNN
    fused.check_compute_capability = lambda capability: True


def _by_heads(kernel: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """A kernel of one sequence, and of the queries of one head of keys, for all of them."""
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1]).transpose(0, 2, 3, 1, 4)
    found = jax.vmap(jax.vmap(kernel))(grouped, k.swapaxes(1, 2), v.swapaxes(1, 2))
    return found.transpose(0, 3, 1, 2, 4).reshape(*q.shape[:-1], v.shape[-1])


def _shards(layout: Layout, name: str) -> int:
    """The parts that a dimension of a name is split into."""
    axes = layout.spec((name,))[0] or ()
    return math.prod(layout.mesh.shape[axis] for axis in ([axes] if isinstance(axes, str) else axes))


# What kernels take on a TPU, whose compiler states no cycles for them: by their work and a share of the chip's peak.
#
# Measured (2026-11, libtpu 0.0.52): of a `tpu_custom_call` the compiler states no `estimated_cycles`, with a
# `pl.CostEstimate` or without; an estimate counts among the `flops` of `cost_analysis()`, and in its `optimal_seconds`.
# Splash and paged attention have none. So a step takes what the compiler states, and its kernels what is counted here,
# the same for whoever partitioned the program.


class Operand(NamedTuple):
    dtype: str
    shape: tuple[int, ...]


Work = Callable[[list[Operand]], tuple[float, float]]
"""The floating-point operations of a kernel on some operands, and the bytes of memory that it moves."""

_PEAK = machines()["tpu v5e"].chip

_OPERANDS = re.compile(r"operand_layout_constraints=\{((?:[^{}]|\{[^{}]*\})*)\}")
_ARRAY = re.compile(r"\b([a-z]+\d+)\[([\d,]+)\]")


def kernel_seconds(call: HloInstruction) -> float:
    """The seconds of a call on a v5e.

    Raises:
        SdyError: neither the call states its work, nor is it one of those whose work is known here.
    """
    flops, moved = call.stated_work
    if not flops and not moved:
        flops, moved = _known_work(call)
    return max(flops / (SHARE * _PEAK.flops), moved / _PEAK.memory)


def _known_work(call: HloInstruction) -> tuple[float, float]:
    listed, body = _OPERANDS.search(call.attributes), call.kernel_body
    found = _ARRAY.findall(listed[1] if listed else "")
    arrays = [Operand(dtype, tuple(map(int, dims.split(",")))) for dtype, dims in found]
    for pattern, work in _WORK.items():
        if re.search(pattern, body):
            return work(arrays)
    raise SdyError(f"the kernel of {call.name} states no work, and none is known of it; add its name to `_WORK`")


def _products(count: int) -> Work:
    """Those of causal attention between queries (..., sequence, width) and keys: of a query's keys those before it, and
    half of a block on the diagonal, which is computed whole. Where a device has a part of the queries, those of the
    last one: all others wait for it."""

    def work(operands: list[Operand]) -> tuple[float, float]:
        queries, keys = [shape for dtype, shape in operands if dtype in ("bf16", "f32")][:2]
        seen = keys[-2] - (queries[-2] - min(BLOCK, keys[-2])) / 2
        return 2 * count * math.prod(queries) * seen, 0.0

    return work


def _pages(operands: list[Operand]) -> tuple[float, float]:
    """All pages of the sequences' tables, each read once, and 4 operations of each query's head per key and its width:
    the score, and the value."""
    table = operands[1].shape
    (_, (_, heads, width)), (_, (_, page, parts, _)) = operands[-2:]
    tokens = math.prod(table) * page
    return 4.0 * tokens * heads * width, 2.0 * tokens * parts * width


_WORK: dict[bytes, Work] = {
    rb"\bsplash_m[hq]a_fwd": _products(2),  # scores, and values
    rb"\bsplash_m[hq]a_dq": _products(3),  # scores again, those of the gradient, and queries
    rb"\bsplash_m[hq]a_dkv": _products(4),  # both scores, keys and values
    rb"\bragged_paged_attention_kernel": _pages,
}
"""By the name of a kernel, which its body has: whoever partitions a program may call the instruction otherwise."""
