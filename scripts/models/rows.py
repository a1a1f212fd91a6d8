"""The rows of `scripts/bench_models`: a model, chips, and how it lies on them, as MaxText and "How to Scale Your Model"
state it: batch and weights along `fsdp`, heads, MLPs and vocabulary along `model`, experts along `expert`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from models.common import Layout, Program
from models.experts import ByCapacity, Dropless, megablox
from models.kernels import Cudnn, Splash
from models.llama import Llama, trained
from models.serving import RaggedPages, SplitPages, decoded, decoded_from_pages, prefilled
from models.text import Bert, Lstm, trained_bert, trained_lstm
from models.vision import UNet, VisionTransformer, denoised, trained_on_images

LLAMA_8B = Llama(32, 4096, 32, 8, 128, 14336, 128256)
LLAMA_70B = Llama(80, 8192, 64, 8, 128, 28672, 128256)
TIED_256K = Llama(28, 3072, 16, 16, 256, 24576, 256000, tied=True)
LARGE_EXPERTS = Llama(32, 4096, 32, 8, 128, 14336, 32000, experts=8, chosen=2, routing=ByCapacity(1.25))
SMALL_EXPERTS = Llama(48, 2048, 32, 4, 128, 768, 151936, experts=128, chosen=8)
VIT_H = VisionTransformer(32, 1280, 16, 5120, 14, 224, 1000)
UNET = UNet((320, 640, 1280), 64, 4)
BERT_LARGE = Bert(24, 1024, 16, 4096, 30528)  # 30522 words, padded as Megatron does
LSTM = Lstm(2, 1024, 8192, 50000)

Rules = Mapping[str, str | tuple[str, ...]]
TENSOR: Rules = {"heads": "model", "kv_heads": "model", "mlp": "model", "vocabulary": "model"}
FSDP: Rules = {"batch": "fsdp", "embed": "fsdp"}
MEGATRON: Rules = {**FSDP, **TENSOR}
SLICES: Rules = {**MEGATRON, "batch": ("slice", "fsdp")}
EXPERTS: Rules = {"batch": ("fsdp", "expert"), "tokens": "fsdp", "embed": "fsdp", "expert": "expert"}
SEQUENCE: Rules = {**TENSOR, "seq": "seq", "cache": "seq"}
LONG: Rules = {"batch": "fsdp", "seq": "seq", "embed": ("fsdp", "seq")}
BATCH: Rules = {**TENSOR, "batch": "data"}
CACHE: Rules = {**TENSOR, "cache": "seq"}
SPACE: Rules = {"batch": "data", "embed": "data", "rows": "space"}

V5E_8, V5E_16, V5E_64, V5E_256, TWO_SLICES = (
    ("tpu:v5e:2x4", 1),
    ("tpu:v5e:4x4", 1),
    ("tpu:v5e:8x8", 1),
    ("tpu:v5e:16x16", 1),
    ("tpu:v5e:16x16", 2),
)
H100_8, H100_64 = ("gpu:h100:1x1x8", 1), ("gpu:h100:1x8x8", 1)

Place = tuple[tuple[str, int], Mapping[str, int], Rules]
"""Chips, the mesh's axes on them, and what is split along these."""


Make = Callable[[Any, Layout], Program]
"""The program of a model and a layout."""


@dataclass(frozen=True)
class Row:
    """A program on chips.

    Attributes:
        chips: the name of a topology, and how many slices of it.
        axes: the mesh's.
        trains_by_kernels: a training step whose attention, or experts, are kernels: it has goals of its own.
        jits: the row whose program jit takes, where it is not this one.
    """

    name: str
    model: Any
    make: Make
    chips: tuple[str, int]
    axes: Mapping[str, int]
    rules: Rules
    trains_by_kernels: bool = False
    jits: Row | None = None

    @property
    def is_scanned(self) -> bool:
        return bool(getattr(self.model, "scanned", True))

    def with_layers(self, layers: int) -> Row:
        """The same with fewer layers, where the model has a number of them."""
        if not layers or not hasattr(self.model, "layers"):
            return self
        jits = self.jits and self.jits.with_layers(layers)
        return dataclasses.replace(self, model=dataclasses.replace(self.model, layers=layers), jits=jits)


def _row(name: str, model: Any, make: Make, place: Place, by_kernels: bool = False, jits: Row | None = None) -> Row:
    """A program at a place, which is in the row's name."""
    chips, axes, rules = place
    label = ",".join(f"{axis}={size}" for axis, size in axes.items())
    kind, count = chips[0].partition(":")[2], f"{chips[1]}x" if chips[1] > 1 else ""
    return Row(f"{name} {label} {count}{kind}", model, make, chips, axes, rules, by_kernels, jits)


Kernels = Callable[[Place, bool], tuple[Any, Make]]
"""A program with the kernels of a place, in `shard_map` or called plainly: its model, and how it is made."""


def _with_kernels(name: str, made: Kernels, place: Place, plainly: bool) -> Iterator[Row]:
    """A program with kernels in `shard_map`; `plainly`: and one that calls them plainly, which jit refuses."""
    model, make = made(place, True)
    trains = isinstance(make, partial) and make.func is trained
    mapped = _row(name, model, make, place, trains)
    yield mapped
    if plainly:
        yield _row(f"{name}-plain", *made(place, False), place, trains, mapped)


def _is_gpu(place: Place) -> bool:
    return place[0][0].startswith("gpu:")


def _attending(model: Any, make: Make) -> Kernels:
    """With the attention that people use on the chips of a place."""

    def made(place: Place, mapped: bool) -> tuple[Any, Make]:
        return dataclasses.replace(model, attention=Cudnn(mapped) if _is_gpu(place) else Splash(mapped)), make

    return made


def _dropless(model: Llama, make: Make) -> Kernels:
    """With grouped products, too."""

    def made(place: Place, mapped: bool) -> tuple[Any, Make]:
        routing = Dropless(jax.lax.ragged_dot if _is_gpu(place) else megablox, mapped)
        return _attending(dataclasses.replace(model, routing=routing), make)(place, mapped)

    return made


def _from_pages(model: Llama, sequence: int) -> Kernels:
    """A token for each of 64 sequences, from a cache of pages."""

    def made(place: Place, mapped: bool) -> tuple[Any, Make]:
        pages = SplitPages(mapped) if _is_gpu(place) else RaggedPages(mapped)
        return model, partial(decoded_from_pages, batch=64, sequence=sequence, pages=pages)

    return made


def _trained(batch: int, sequence: int = 4096) -> Make:
    return partial(trained, batch=batch, sequence=sequence)


def _batch(per_chip: float, place: Place) -> int:
    """So many sequences per chip, and at least one for each group of chips that has a batch of its own."""
    axes = place[1]
    return max(int(per_chip * math.prod(axes.values())), axes.get("fsdp", 1) * axes.get("slice", 1))


def _on(name: str, model: Any, per_chip: float, places: Iterable[Place], plainly: bool = False) -> Iterator[Row]:
    """A training step on several kinds of chips, with the attention of these."""
    for place in places:
        yield from _with_kernels(name, _attending(model, _trained(_batch(per_chip, place))), place, plainly)


_POD = (V5E_256, {"fsdp": 256}, FSDP)
_POD_BY_HEADS = (V5E_256, {"fsdp": 16, "model": 16}, MEGATRON)
_TWO = (TWO_SLICES, {"slice": 2, "fsdp": 16, "model": 16}, SLICES)
_QUARTER = (V5E_64, {"fsdp": 64}, FSDP)
_SERVER = (H100_8, {"fsdp": 8}, FSDP)
_CLUSTER = (H100_64, {"fsdp": 64}, FSDP)
_CLUSTER_BY_HEADS = (H100_64, {"fsdp": 8, "model": 8}, MEGATRON)
_FEW = (
    (V5E_16, {"fsdp": 16}, FSDP),
    (V5E_16, {"fsdp": 4, "model": 4}, MEGATRON),
    _SERVER,
    (H100_8, {"fsdp": 2, "model": 4}, MEGATRON),
)
_unrolled = partial(dataclasses.replace, scanned=False)
_kept = partial(dataclasses.replace, checkpointed=False)


def _rows() -> Iterator[Row]:
    yield from _on(
        "llama-8b", LLAMA_8B, 1, (_POD, _POD_BY_HEADS, _TWO, _QUARTER, _CLUSTER, _CLUSTER_BY_HEADS), plainly=True
    )
    yield from _on("llama-8b-2k", LLAMA_8B, 0.5, (_SERVER,))
    yield from _on("llama-8b-unrolled", _unrolled(LLAMA_8B), 1, (_POD, _CLUSTER))
    yield from _on("llama-8b-kept", _kept(LLAMA_8B), 1, (_QUARTER, _CLUSTER_BY_HEADS))
    yield from _on("llama-70b", LLAMA_70B, 0.25, (_POD, _POD_BY_HEADS, _TWO, _CLUSTER_BY_HEADS), plainly=True)
    yield from _on("tied-256k", TIED_256K, 1, (_POD, _POD_BY_HEADS, _CLUSTER))
    large = (V5E_256, {"fsdp": 32, "expert": 8}, EXPERTS), (H100_64, {"fsdp": 8, "expert": 8}, EXPERTS)
    yield from _on("experts-8-large", LARGE_EXPERTS, 1, large)
    for place in (_POD, *large):
        step = _trained(_batch(1, place))
        yield from _with_kernels("dropless-8-large", _dropless(LARGE_EXPERTS, step), place, place is _POD)
    small = (V5E_256, {"fsdp": 16, "expert": 16}, EXPERTS), large[1]
    yield from _on("experts-128-small", SMALL_EXPERTS, 1, small)
    yield from _with_kernels("llama-8b-32k", _attending(LLAMA_8B, _trained(64, 32768)), _QUARTER, False)
    for name, sequence, parts in (("llama-8b-32k", 32768, 4), ("llama-8b-128k", 131072, 8)):
        axes, step = {"fsdp": 64 // parts, "seq": parts}, _trained(64 // parts, sequence)
        yield from _with_kernels(name, _attending(LLAMA_8B, step), (V5E_64, axes, LONG), True)
        yield _row(f"{name}-by-hand", LLAMA_8B, step, (H100_64, axes, LONG))  # cuDNN's mask has no offset of queries
    long = partial(prefilled, batch=1, sequence=32768)
    by_sequence = (H100_8, {"seq": 8}, {"seq": "seq", "cache": "seq"})
    of_pod = (V5E_256, {"seq": 16, "model": 16}, SEQUENCE)
    yield from _with_kernels("prefill-32k", _attending(LLAMA_8B, long), of_pod, True)
    yield _row("prefill-32k-by-hand", LLAMA_8B, long, by_sequence)
    yield from (_row("llama-8b-by-hand", LLAMA_8B, _trained(_batch(1, place)), place) for place in (_POD, _CLUSTER))
    for model, sequence, place in (
        (LLAMA_8B, 4096, (V5E_16, {"data": 4, "model": 4}, BATCH)),
        (LLAMA_8B, 4096, (H100_8, {"data": 2, "model": 4}, BATCH)),
    ):
        yield from _with_kernels("decode-by-batch", _from_pages(model, sequence), place, False)
    for model, sequence, place in (
        (LLAMA_8B, 4096, (V5E_8, {"model": 8}, TENSOR)),
        (LLAMA_70B, 8192, (H100_8, {"model": 8}, TENSOR)),
    ):
        yield from _with_kernels("decode-by-heads", _from_pages(model, sequence), place, True)
    step = partial(decoded, batch=64, sequence=4096)
    by_heads = {key: TENSOR[key] for key in ("heads", "mlp", "vocabulary")} | {"cache": "model"}
    yield _row("decode-by-hand", LLAMA_8B, step, (V5E_16, {"model": 16}, by_heads))
    yield _row("decode-by-sequence", LLAMA_8B, step, (V5E_16, {"seq": 4, "model": 4}, CACHE))
    yield _row("decode-by-sequence", LLAMA_8B, step, (H100_8, {"seq": 2, "model": 4}, CACHE))
    images = partial(trained_on_images, batch=512)
    yield from (_row("vit-h", VIT_H, images, place) for place in _FEW)
    space = partial(denoised, batch=64)
    yield _row("unet", UNET, space, (V5E_16, {"data": 4, "space": 4}, SPACE))
    yield _row("unet", UNET, space, (H100_8, {"data": 2, "space": 4}, SPACE))
    words = partial(trained_bert, batch=64, sequence=512)
    yield from (_row("bert-large", BERT_LARGE, words, place) for place in _FEW)
    cells = partial(trained_lstm, batch=512, sequence=128)
    yield from (_row("lstm", LSTM, cells, place) for place in _FEW)


ROWS = tuple(_rows())
