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

from models.common import Layout, Program
from models.kernels import Splash
from models.llama import Llama, decoded, prefilled, trained
from models.text import Bert, Lstm, trained_bert, trained_lstm
from models.vision import UNet, VisionTransformer, denoised, trained_on_images

LLAMA_8B = Llama(32, 4096, 32, 8, 128, 14336, 128256)
LLAMA_70B = Llama(80, 8192, 64, 8, 128, 28672, 128256)
TIED_256K = Llama(28, 3072, 16, 16, 256, 24576, 256000, tied=True)
LARGE_EXPERTS = Llama(32, 4096, 32, 8, 128, 14336, 32000, experts=8, chosen=2, capacity=1.25)
SMALL_EXPERTS = Llama(48, 2048, 32, 4, 128, 768, 151936, experts=128, chosen=8)
VIT_H = VisionTransformer(32, 1280, 16, 5120, 14, 224, 1000)
UNET = UNet((320, 640, 1280), 64, 4)
BERT_LARGE = Bert(24, 1024, 16, 4096, 30528)  # 30522 words, padded as Megatron does
LSTM = Lstm(2, 1024, 8192, 50000)

Rules = Mapping[str, str | tuple[str, ...]]
_TENSOR: Rules = {"heads": "model", "kv_heads": "model", "mlp": "model", "vocabulary": "model"}
FSDP: Rules = {"batch": "fsdp", "embed": "fsdp"}
MEGATRON: Rules = {**FSDP, **_TENSOR}
SLICES: Rules = {**MEGATRON, "batch": ("slice", "fsdp")}
EXPERTS: Rules = {"batch": ("fsdp", "expert"), "tokens": "fsdp", "embed": "fsdp", "expert": "expert"}
SEQUENCE: Rules = {**_TENSOR, "seq": "seq", "cache": "seq"}
LONG: Rules = {"batch": "fsdp", "seq": "seq", "embed": ("fsdp", "seq")}
BATCH: Rules = {**_TENSOR, "batch": "data"}
CACHE: Rules = {**_TENSOR, "cache": "seq"}
SPACE: Rules = {"batch": "data", "embed": "data", "rows": "space"}

V5E_16, V5E_64, V5E_256, TWO_SLICES = (
    ("tpu:v5e:4x4", 1),
    ("tpu:v5e:8x8", 1),
    ("tpu:v5e:16x16", 1),
    ("tpu:v5e:16x16", 2),
)
H100_8, H100_64 = ("gpu:h100:1x1x8", 1), ("gpu:h100:1x8x8", 1)

Place = tuple[tuple[str, int], Mapping[str, int], Rules]
"""Chips, the mesh's axes on them, and what is split along these."""


@dataclass(frozen=True)
class Row:
    """A program on chips.

    Attributes:
        make: makes the program of a model and a layout.
        chips: the name of a topology, and how many slices of it.
        axes: the mesh's.
        free: nothing is said of activations only; else rows come with and without.
    """

    name: str
    model: Any
    make: Callable[[Any, Layout], Program]
    chips: tuple[str, int]
    axes: Mapping[str, int]
    rules: Rules

    @property
    def is_scanned(self) -> bool:
        return bool(getattr(self.model, "scanned", True))

    def with_layers(self, layers: int) -> Row:
        """The same with fewer layers, where the model has a number of them."""
        if not layers or not hasattr(self.model, "layers"):
            return self
        return dataclasses.replace(self, model=dataclasses.replace(self.model, layers=layers))


def _trained(batch: int, sequence: int = 4096) -> Callable[[Any, Layout], Program]:
    return partial(trained, batch=batch, sequence=sequence)


def _on(name: str, model: Any, per_chip: float, places: Iterable[Place]) -> Iterator[Row]:
    """A training step on several kinds of chips, with so many sequences per chip."""
    for place in places:
        _, axes, _ = place
        batch = max(int(per_chip * math.prod(axes.values())), axes.get("fsdp", 1) * axes.get("slice", 1))
        yield _row(name, model, _trained(batch), place)


def _long(name: str, chips: tuple[str, int], axes: Mapping[str, int], sequence: int) -> Row:
    """A training step whose sequences are split, one for each group of chips along `seq`."""
    return _row(name, LLAMA_8B, _trained(axes["fsdp"], sequence), (chips, axes, LONG))


def _row(name: str, model: Any, make: Callable[[Any, Layout], Program], place: Place) -> Row:
    """A program at a place, which is in the row's name."""
    chips, axes, rules = place
    label = ",".join(f"{axis}={size}" for axis, size in axes.items())
    kind, count = chips[0].partition(":")[2], f"{chips[1]}x" if chips[1] > 1 else ""
    return Row(f"{name} {label} {count}{kind}", model, make, chips, axes, rules)


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
    yield from _on("llama-8b", LLAMA_8B, 1, (_POD, _POD_BY_HEADS, _TWO, _QUARTER, _CLUSTER, _CLUSTER_BY_HEADS))
    yield from _on("llama-8b-splash", dataclasses.replace(LLAMA_8B, attention=Splash()), 1, (_QUARTER, _POD))
    yield from _on("llama-8b-2k", LLAMA_8B, 0.5, (_SERVER,))
    yield from _on("llama-8b-unrolled", _unrolled(LLAMA_8B), 1, (_POD, _CLUSTER))
    yield from _on("llama-8b-kept", _kept(LLAMA_8B), 1, (_QUARTER, _CLUSTER_BY_HEADS))
    yield from _on("llama-70b", LLAMA_70B, 0.25, (_POD, _POD_BY_HEADS, _TWO, _CLUSTER_BY_HEADS))
    yield from _on("tied-256k", TIED_256K, 1, (_POD, _POD_BY_HEADS, _CLUSTER))
    mixed = {"fsdp": 32, "expert": 8}
    yield from _on(
        "experts-8-large", LARGE_EXPERTS, 1, ((V5E_256, mixed, EXPERTS), (H100_64, {"fsdp": 8, "expert": 8}, EXPERTS))
    )
    mixed = {"fsdp": 16, "expert": 16}
    yield from _on(
        "experts-128-small", SMALL_EXPERTS, 1, ((V5E_256, mixed, EXPERTS), (H100_64, {"fsdp": 8, "expert": 8}, EXPERTS))
    )
    yield _row("llama-8b-32k", LLAMA_8B, _trained(64, 32768), _QUARTER)  # scores of 64 GiB
    yield _long("llama-8b-32k", V5E_64, {"fsdp": 16, "seq": 4}, 32768)
    yield _long("llama-8b-32k", H100_64, {"fsdp": 16, "seq": 4}, 32768)
    yield _long("llama-8b-128k", V5E_64, {"fsdp": 8, "seq": 8}, 131072)
    yield _long("llama-8b-128k", H100_64, {"fsdp": 8, "seq": 8}, 131072)
    long = partial(prefilled, batch=1, sequence=32768)
    yield _row("prefill-32k", LLAMA_8B, long, (V5E_256, {"seq": 16, "model": 16}, SEQUENCE))
    yield _row("prefill-32k", LLAMA_8B, long, (H100_8, {"seq": 8}, {"seq": "seq", "cache": "seq"}))
    step = partial(decoded, batch=64, sequence=4096)
    many = partial(decoded, batch=64, sequence=8192)
    by_heads = {key: _TENSOR[key] for key in ("heads", "mlp", "vocabulary")} | {"cache": "model"}
    yield _row("decode-by-batch", LLAMA_8B, step, (V5E_16, {"data": 4, "model": 4}, BATCH))
    yield _row("decode-by-heads", LLAMA_8B, step, (V5E_16, {"model": 16}, by_heads))
    yield _row("decode-by-sequence", LLAMA_8B, step, (V5E_16, {"seq": 4, "model": 4}, CACHE))
    yield _row("decode-by-batch", LLAMA_8B, step, (H100_8, {"data": 2, "model": 4}, BATCH))
    yield _row("decode-by-heads", LLAMA_70B, many, (H100_8, {"data": 1, "model": 8}, BATCH))
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
