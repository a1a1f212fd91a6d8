"""The kernels of attention that people train with, as a model's `attention`: in `shard_map`, or called plainly."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import NamedSharding

from models.common import Layout, Names, attention

Attention = Callable[[jax.Array, jax.Array, jax.Array, Layout], jax.Array]
"""Causal attention of queries (batch, sequence, heads, width) to keys and values of as many heads, or fewer."""

QUERIES: Names = ("batch", "seq", "heads", None)
KEYS: Names = ("batch", None, "kv_heads", None)

BLOCK = 512
"""Queries, and keys, that splash attention takes at a time: MaxText's default."""

_CUDNN = 91300
"""The version that kernels are traced for: that of CUDA 13's images."""


def written_out(q: jax.Array, k: jax.Array, v: jax.Array, layout: Layout) -> jax.Array:
    """In plain JAX, which holds the scores."""
    return attention(q, k, v, jnp.tril(jnp.ones((q.shape[1],) * 2, bool)))


@dataclass(frozen=True)
class Splash:
    """Splash attention of JAX's kernels for TPUs.

    Attributes:
        mapped: in a `shard_map` around the call alone, as MaxText has it: batch and heads split as the layout says, and
            queries where it splits sequences, with all keys. Else called plainly.
        interpret: for devices that are no TPUs.
    """

    mapped: bool = True
    interpret: bool = False

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
        mask = masks.MultiHeadMask([masks.CausalMask((length, length))] * (q.shape[2] // k.shape[2]))
        block = min(BLOCK, length // parts)
        sizes = splash.BlockSizes(*(block,) * 8)
        return splash.make_splash_mqa(
            mask, head_shards=1, q_seq_shards=parts, block_sizes=sizes, interpret=self.interpret
        )


@dataclass(frozen=True)
class Cudnn:
    """cuDNN's fused attention, which takes fewer heads of keys as they are. `mapped`: as `Splash` has it."""

    mapped: bool = True

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, layout: Layout) -> jax.Array:
        attend = partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
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
    return found.transpose(0, 3, 1, 2, 4).reshape(q.shape)


def _shards(layout: Layout, name: str) -> int:
    """The parts that a dimension of a name is split into."""
    axes = layout.spec((name,))[0] or ()
    return math.prod(layout.mesh.shape[axis] for axis in ([axes] if isinstance(axes, str) else axes))
