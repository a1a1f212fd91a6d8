"""The kernels that JAX ships and that run interpreted on CPUs, each at sizes of its own, with its arguments."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

_OPS = "jax.experimental.pallas.ops"


@contextmanager
def interpreted() -> Iterator[None]:
    """Inside, all kernels are interpreted."""
    call = pl.pallas_call
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pl, "pallas_call", lambda *args, **options: call(*args, **{**options, "interpret": True}))
        yield


@dataclass(frozen=True)
class Library:
    """A kernel of a library at some sizes.

    Attributes:
        make: makes the function from the sizes.
        arguments: per argument its dimensions, a letter each.
        sizes: of the dimensions.
        split: the dimensions along which each of its kernels may be split.
        gathers: those of them along which operands are gathered first.
        blocks: how many elements of a dimension stay together.
        gradient: whether it has one.
        given: arguments that are no random numbers, by index.
    """

    make: Callable[[Mapping[str, int]], Callable[..., Any]]
    arguments: str
    sizes: Mapping[str, int]
    split: str
    gathers: str = ""
    blocks: Mapping[str, int] | None = None
    gradient: bool = False
    given: Callable[[Mapping[str, int]], dict[int, np.ndarray]] = lambda sizes: {}

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(self.arguments.split())

    def sized(self, dim: str, count: int) -> Mapping[str, int]:
        """Sizes at which a dimension has so many blocks."""
        return {**self.sizes, dim: count * (self.blocks or {}).get(dim, 1)}

    def values(self, sizes: Mapping[str, int]) -> list[np.ndarray]:
        rng = np.random.default_rng(0)
        given = self.given(sizes)
        shapes = [tuple(sizes[d] for d in dims) for dims in self.names]
        return [given.get(i, rng.normal(size=shape).astype(np.float32)) for i, shape in enumerate(shapes)]

    def specs(self, axes: Mapping[str, Any]) -> tuple[P, ...]:
        return tuple(P(*map(axes.get, dims)) for dims in self.names)

    def gradients(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Those by all arguments of floating-point numbers, beside what the function returns."""

        def loss(*args: Any) -> tuple[jax.Array, jax.Array]:
            out = function(*args)
            return (out**2).sum(), out

        floats = tuple(i for i in range(len(self.names)) if i not in self.given(self.sizes))
        return jax.grad(loss, floats, has_aux=True)


def _flash(sizes: Mapping[str, int]) -> Callable[..., Any]:
    flash = importlib.import_module(f"{_OPS}.tpu.flash_attention")
    blocks = {f.name: 128 for f in fields(flash.BlockSizes)} | {"block_b": 1}
    return partial(flash.flash_attention, causal=True, block_sizes=flash.BlockSizes(**blocks))


def _flash_of_segments(sizes: Mapping[str, int]) -> Callable[..., Any]:
    """With a bias, of sequences that hold several."""
    flash = importlib.import_module(f"{_OPS}.tpu.flash_attention")
    run = _flash(sizes)
    return lambda q, k, v, bias, of_q, of_k: run(q, k, v, bias, flash.SegmentIds(of_q, of_k))


def _segments(sizes: Mapping[str, int]) -> dict[int, np.ndarray]:
    shapes = {4: (sizes["b"], sizes["s"]), 5: (sizes["b"], sizes["t"])}
    return {
        i: np.broadcast_to(np.arange(shape[1]) * 2 // shape[1], shape).astype(np.int32) for i, shape in shapes.items()
    }


def _splash(sizes: Mapping[str, int], heads: str = "h", kind: str = "causal") -> Callable[..., Any]:
    """Under `vmap`; of several key and value heads, or of one, with masks that are alike or not."""
    kernels = importlib.import_module(f"{_OPS}.tpu.splash_attention.splash_attention_kernel")
    masks = importlib.import_module(f"{_OPS}.tpu.splash_attention.splash_attention_mask")
    shape, count = (sizes["s"],) * 2, sizes[heads[0]] * sizes.get("g", 1)

    def mask(head: int) -> Any:
        is_local = kind == "unlike" and not head % 2
        return masks.LocalMask(shape, (64, 64), 0) if is_local else masks.CausalMask(shape)

    names = "block_q", "block_kv", "block_kv_compute"
    blocks = {name + end: 128 for name in names for end in ("", "_dkv")}
    blocks |= {"block_q_dq": 128, "block_kv_dq": 128}
    blocks["block_kv_dkv_compute"] = blocks.pop("block_kv_compute_dkv")
    if kind == "fused":
        blocks |= {"block_q_dq": None, "block_kv_dq": None, "use_fused_bwd_kernel": True}
    make = kernels.make_splash_mqa if kind == "mqa" else kernels.make_splash_mha
    return jax.vmap(
        make(
            mask=masks.MultiHeadMask([mask(head) for head in range(count)]),
            head_shards=1,
            q_seq_shards=1,
            block_sizes=kernels.BlockSizes(**blocks),
        )
    )


def _splash_of_groups(sizes: Mapping[str, int]) -> Callable[..., Any]:
    """Query heads in groups that share key and value heads: (batch, heads, group, ...)."""
    splash = _splash(sizes)

    def run(q: Any, k: Any, v: Any) -> Any:
        b, h, g, s, d = q.shape
        return splash(q.reshape(b, h * g, s, d), k, v).reshape(q.shape)

    return run


def _group_sizes(sizes: Mapping[str, int]) -> dict[int, np.ndarray]:
    ends = np.linspace(0, sizes["m"], sizes["g"]).astype(np.int32) // 16 * 16
    return {2: np.diff(ends, append=sizes["m"]).astype(np.int32)}


def _grouped(sizes: Mapping[str, int]) -> Callable[..., Any]:
    megablox = importlib.import_module(f"{_OPS}.tpu.megablox")
    return lambda x, w, groups: megablox.gmm(x, w, groups, jnp.float32, (128,) * 3, None, None, False, True)


def _grouped_weights(sizes: Mapping[str, int]) -> Callable[..., Any]:
    backend = importlib.import_module(f"{_OPS}.tpu.megablox.gmm")
    return partial(backend.tgmm, preferred_element_type=jnp.float32, tiling=(128,) * 3, interpret=True)


def _product(sizes: Mapping[str, int]) -> Callable[..., Any]:
    matmul = importlib.import_module(f"{_OPS}.tpu.matmul")
    return partial(matmul.matmul, block_shape=(128, 128), block_k=128)


def _pages(sizes: Mapping[str, int]) -> dict[int, np.ndarray]:
    rng = np.random.default_rng(1)
    pages = rng.integers(0, sizes["n"], (sizes["b"], sizes["p"]))
    return {3: rng.integers(1, 16 * sizes["p"], sizes["b"]).astype(np.int32), 4: pages.astype(np.int32)}


def _paged(sizes: Mapping[str, int]) -> Callable[..., Any]:
    return partial(importlib.import_module(f"{_OPS}.tpu.paged_attention").paged_attention, pages_per_compute_block=2)


def _paged_on_gpus(sizes: Mapping[str, int]) -> Callable[..., Any]:
    """Of query heads in groups that share key and value heads: (batch, heads, group, ...)."""
    paged = importlib.import_module(f"{_OPS}.gpu.paged_attention").paged_attention
    options = {"interpret": True, "k_splits": 2, "pages_per_compute_block": 2}

    def run(q: Any, k: Any, v: Any, lengths: Any, pages: Any) -> Any:
        return paged(q.reshape(len(q), -1, q.shape[-1]), k, v, pages, lengths, **options).reshape(q.shape)

    return run


def _mha(sizes: Mapping[str, int]) -> Callable[..., Any]:
    attention = importlib.import_module(f"{_OPS}.gpu.attention")
    names = "block_q", "block_k", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"
    blocks = attention.BlockSizes(**dict.fromkeys(names, 32))
    return lambda q, k, v: attention.mha(q, k, v, None, causal=True, interpret=True, block_sizes=blocks)


def _decode(sizes: Mapping[str, int], name: str) -> Callable[..., Any]:
    """Of query heads in groups that share key and value heads: (batch, heads, group, ...)."""
    decode = getattr(importlib.import_module(f"{_OPS}.gpu.decode_attention"), name)
    return lambda q, k, v: decode(q.reshape(len(q), -1, q.shape[-1]), k, v, interpret=True, k_splits=2).reshape(q.shape)


def _norm(sizes: Mapping[str, int], name: str) -> Callable[..., Any]:
    norm = getattr(importlib.import_module(f"{_OPS}.gpu.{name}"), name)
    return lambda x, w, b: norm(x, w, b, None, 3, 1e-5, "triton", True)


def _softmax(sizes: Mapping[str, int]) -> Callable[..., Any]:
    return partial(importlib.import_module(f"{_OPS}.gpu.softmax").softmax, interpret=True)


_ATTENTION = {"b": 2, "h": 2, "s": 256, "d": 16}
_WIDE = {**_ATTENTION, "d": 128}
_BLOCKS = {"s": 128}

LIBRARY = {
    "flash": Library(_flash, "bhsd bhsd bhsd", _ATTENTION, "bhs", "s", _BLOCKS, True),
    "splash": Library(_splash, "bhsd bhsd bhsd", _WIDE, "bhs", "s", _BLOCKS, True),
    "flash of segments": Library(
        _flash_of_segments,
        "bhsd bhtd bhtd bhst bs bt",
        {**_ATTENTION, "t": 256},
        "bhs",
        "s",
        _BLOCKS,
        True,
        _segments,
    ),
    "splash with one backward kernel": Library(
        partial(_splash, kind="fused"), "bhsd bhsd bhsd", _WIDE, "bhs", "s", _BLOCKS, True
    ),
    "splash of one kv head": Library(partial(_splash, kind="mqa"), "bhsd bsd bsd", _WIDE, "bhs", "s", _BLOCKS, True),
    "splash of groups": Library(_splash_of_groups, "bhgsd bhsd bhsd", {**_WIDE, "g": 2}, "bhs", "s", _BLOCKS, True),
    "splash of unlike heads": Library(
        partial(_splash, kind="unlike"), "bhsd bhsd bhsd", _WIDE, "bhs", "s", _BLOCKS, True
    ),
    "paged": Library(
        _paged, "bhd kntd kntd b bp", {"b": 4, "h": 8, "d": 128, "k": 2, "n": 16, "t": 16, "p": 4}, "", given=_pages
    ),
    "paged on GPUs": Library(
        _paged_on_gpus,
        "bkgd kntd kntd b bp",
        {"b": 2, "k": 2, "g": 16, "d": 32, "n": 16, "t": 16, "p": 4},
        "bk",
        given=_pages,
    ),
    "megablox": Library(
        _grouped, "mk gkn g", {"m": 256, "k": 128, "n": 256, "g": 4}, "n", "", {"n": 128}, True, _group_sizes
    ),
    "megablox weights": Library(
        _grouped_weights, "km mn g", {"m": 256, "k": 128, "n": 256, "g": 4}, "n", "", {"n": 128}, False, _group_sizes
    ),
    "product": Library(_product, "mk kn", {"m": 256, "k": 256, "n": 256}, "mn", "", {"m": 128, "n": 128}),
    "mha": Library(_mha, "bshd bshd bshd", {"b": 2, "s": 64, "h": 2, "d": 32}, "bhs", "s", {"s": 32}, True),
    "decode": Library(partial(_decode, name="mqa"), "bhd bsd bsd", {"b": 2, "h": 8, "s": 64, "d": 32}, "b"),
    "decode of groups": Library(
        partial(_decode, name="gqa"), "bkgd bskd bskd", {"b": 2, "k": 2, "g": 8, "s": 64, "d": 32}, "bk"
    ),
    "rms norm": Library(partial(_norm, name="rms_norm"), "bsd d d", {"b": 2, "s": 4, "d": 64}, "bs", "", None, True),
    "layer norm": Library(
        partial(_norm, name="layer_norm"), "bsd d d", {"b": 2, "s": 4, "d": 64}, "bs", "", None, True
    ),
    "softmax": Library(_softmax, "bsd", {"b": 2, "s": 4, "d": 64}, "bs"),
}
