"""The rows of `bench_models`, and steps built as trainers build them."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType

import sdy_jax as sdy
from models.common import Layout, Program
from models.deepseek import DeepSeek, trained_deepseek
from models.experts import ByCapacity, Dropless, megablox
from models.gemma import Gemma, trained_gemma
from models.graphs import Weather, trained_weather
from models.kernels import Cudnn, Splash
from models.llama import Bert, Llama, Lstm, trained, trained_bert, trained_lstm
from models.mamba import Hybrid, Mamba, Mixer, trained_states
from models.pipelines import pipelined
from models.retrieval import TwoTowers, trained_towers
from models.serving import RaggedPages, SplitPages, decoded, decoded_from_pages, prefilled
from models.video import VideoTransformer, trained_on_videos
from models.vision import (
    ParallelTransformer,
    Segmenter,
    UNet,
    VisionTransformer,
    denoised,
    segmented,
    trained_on_images,
)

# The rows of `scripts/bench_models`: a model, chips, and how it lies on them, as MaxText and "How to Scale Your Model"
# state it: batch and weights along `fsdp`, heads, MLPs and vocabulary along `model`, experts along `expert`.

LLAMA_8B = Llama(32, 4096, 32, 8, 128, 14336, 128256)
LLAMA_70B = Llama(80, 8192, 64, 8, 128, 28672, 128256)
LLAMA_405B = Llama(126, 16384, 128, 8, 128, 53248, 128256)
TIED_256K = Llama(28, 3072, 16, 16, 256, 24576, 256000, tied=True)
LARGE_EXPERTS = Llama(32, 4096, 32, 8, 128, 14336, 32000, experts=8, chosen=2, routing=ByCapacity(1.25))
SMALL_EXPERTS = Llama(48, 2048, 32, 4, 128, 768, 151936, experts=128, chosen=8)
QWEN_235B = Llama(94, 4096, 64, 4, 128, 1536, 151936, experts=128, chosen=8, routing=ByCapacity(1.25))
MAXTEXT = {  # base.yml's model, scaled as `global_parameter_scale` says, and the sequences of a chip
    "16b": (Llama(32, 4096, 64, 64, 128, 28672, 32000), 6),
    "32b": (Llama(32, 8192, 64, 64, 128, 28672, 32000), 4),
    "64b": (Llama(64, 8192, 64, 64, 128, 28672, 32000), 2),
    "128b": (Llama(64, 8192, 128, 128, 128, 57344, 32000), 1),
}
"""The models of MaxText's published steps on v5e (MaxText/configs/v5e: 16b.sh to 128b.sh; 2048 tokens)."""
GEMMA_27B = Gemma(62, 5376, 32, 16, 128, 21504, 262144, 1024)
MAMBA_7B = Mamba(64, Mixer(4096, 128, 64, 128, 8), 32768)
JAMBA = Llama(1, 4096, 32, 8, 128, 14336, 65536)
HYBRID_52B = Hybrid(
    32, Mixer(4096, 128, 64, 128, 8), JAMBA, replace(JAMBA, experts=16, chosen=2, routing=ByCapacity(1.25))
)
DEEPSEEK_671B = DeepSeek(58, 7168, 128, 1536, 512, 128, 64, 18432, 2048, 256, 8, 129280, ByCapacity(1.25))
VIDEO_30B = VideoTransformer(48, 6144, 48, 16384, 32, 48, Cudnn(causal=False))
TOWERS = TwoTowers(10**9, 10**9, 64, 64, (1024, 512, 128))
WEATHER = Weather(16, 721 * 1440, 40962, 327660, 1618824, 3114720, 474, 227, 512)
VIT_22B = ParallelTransformer(48, 6144, 48, 24576, 14, 224, 29593)
VIT_H = VisionTransformer(32, 1280, 16, 5120, 14, 224, 1000)
UNET = UNet((320, 640, 1280), 64, 4)
SEGMENTER = Segmenter(64, 512, 4)
BERT_LARGE = Bert(24, 1024, 16, 4096, 30528)  # 30522 words, padded as Megatron does
LSTM = Lstm(2, 1024, 8192, 50000)

Rules = Mapping[str, str | tuple[str, ...]]
TENSOR: Rules = dict.fromkeys(("heads", "kv_heads", "groups", "mlp", "vocabulary"), "model")
FSDP: Rules = {"batch": "fsdp", "embed": "fsdp"}
MEGATRON: Rules = {**FSDP, **TENSOR}
SLICES: Rules = {**MEGATRON, "batch": ("slice", "fsdp")}
EXPERTS: Rules = {"batch": ("fsdp", "expert"), "tokens": "fsdp", "embed": "fsdp", "expert": "expert"}
SEQUENCE: Rules = {**TENSOR, "seq": "seq", "cache": "seq"}
LONG: Rules = {"batch": "fsdp", "seq": "seq", "embed": ("fsdp", "seq")}
BATCH: Rules = {**TENSOR, "batch": "data"}
CACHE: Rules = {**TENSOR, "cache": "seq"}
ROWS_OF_TABLES: Rules = {"batch": ("data", "rows"), "rows": ("data", "rows")}
STATES: Rules = {"batch": "data"}
GRAPH: Rules = {**STATES, "points": "graph", "nodes": "graph", "edges": "graph"}
FIVE_AXES: Rules = {
    **dict.fromkeys(("heads", "kv_heads", "mlp", "vocabulary"), "tensor"),
    "batch": ("data", "fsdp", "expert"),
    "tokens": ("data", "fsdp"),
    "seq": "context",
    "embed": ("fsdp", "context"),
    "expert": "expert",
}
"""As MaxText's rules of logical axes have it, whose names of mesh axes these are."""
SIX_AXES: Rules = {**FIVE_AXES, "stage": "stage"}
ROWS_OF_IMAGES: Rules = {"rows": "rows"}
IMAGES: Rules = {**ROWS_OF_IMAGES, "batch": "data"}
SPACE: Rules = {"batch": "data", "embed": "data", "rows": "space"}

V5E_8, V5E_16, V5E_64, V5E_256, TWO_SLICES = (
    ("tpu:v5e:2x4", 1),
    ("tpu:v5e:4x4", 1),
    ("tpu:v5e:8x8", 1),
    ("tpu:v5e:16x16", 1),
    ("tpu:v5e:16x16", 2),
)
H100_8, H100_64 = ("gpu:h100:1x1x8", 1), ("gpu:h100:8x1x8", 1)

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
        """The same with fewer layers, where the model has a number of them: so many cycles, where layers are of several
        kinds that come in turn."""
        if not layers or not hasattr(self.model, "layers"):
            return self
        jits, count = self.jits and self.jits.with_layers(layers), layers * getattr(self.model, "cycle", 1)
        return dataclasses.replace(self, model=dataclasses.replace(self.model, layers=count), jits=jits)

    def described(self) -> tuple[AbstractMesh, sdy.CostModel]:
        """The row's mesh on no devices, and the published rates of its chips: what a plan takes, and no compiler."""
        sizes = tuple(self.axes.values())
        mesh = AbstractMesh(sizes, tuple(self.axes), axis_types=(AxisType.Auto,) * len(sizes))
        platform, machine, shape = self.chips[0].split(":")
        *outer, last = map(int, shape.split("x"))
        hosts, each = (math.prod(outer), last) if platform == "gpu" else (self.chips[1], math.prod([*outer, last]))
        return mesh, sdy.CostModel.of_machine(f"{hosts} x {machine} x{each}", mesh)

    def on_shapes(
        self, constrained: bool, automatic: bool = False, **options: Any
    ) -> tuple[Program, sdy.PartitionedFunction[..., Any]]:
        """The row's program on shapes alone, and partitioned as `described`; `options`: further ones of `partition`."""
        mesh, costs = self.described()
        layout = Layout(mesh, self.rules, constrained)
        program = self.make(self.model, layout)
        return program, program.partitioned(layout, automatic, costs=costs, on_unknown="ignore", **options)


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


def _from_pages(model: Llama, sequence: int, batch: int = 64) -> Kernels:
    """A token for each of some sequences, from a cache of pages."""

    def made(place: Place, mapped: bool) -> tuple[Any, Make]:
        pages = SplitPages(mapped) if _is_gpu(place) else RaggedPages(mapped)
        return model, partial(decoded_from_pages, batch=batch, sequence=sequence, pages=pages)

    return made


def _of_videos(place: Place, mapped: bool) -> tuple[Any, Make]:
    """A step on 32 videos, by cuDNN's attention to all tokens."""
    return replace(VIDEO_30B, attention=Cudnn(mapped, causal=False)), partial(trained_on_videos, batch=32)


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
_FOUR = (("tpu:v5e:16x16", 4), {"slice": 4, "fsdp": 16, "model": 16}, {**SLICES, "embed": ("slice", "fsdp")})
_QUARTER = (V5E_64, {"fsdp": 64}, FSDP)
_SERVER = (H100_8, {"fsdp": 8}, FSDP)
_CLUSTER = (H100_64, {"fsdp": 64}, FSDP)
_CLUSTER_BY_HEADS = (H100_64, {"fsdp": 8, "model": 8}, MEGATRON)
_CLUSTER_BY_EXPERTS = (("gpu:h100:32x1x8", 1), {"fsdp": 32, "expert": 8}, EXPERTS)
_LARGEST_BY_HEADS = (("gpu:h100:256x1x8", 1), {"fsdp": 256, "model": 8}, MEGATRON)
_CUBE = (("tpu:v5p:8x8x8", 1), {"fsdp": 64, "model": 8}, MEGATRON)
_SERVERS_BY_EXPERTS = (("gpu:h100:16x1x8", 1), {"fsdp": 16, "expert": 8}, EXPERTS)
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
    yield from _on("llama-405b", LLAMA_405B, 1 / 16, (_FOUR, _LARGEST_BY_HEADS))
    yield from _on("qwen3-235b", QWEN_235B, 1, (_CLUSTER_BY_EXPERTS,))
    yield from _on("tied-256k", TIED_256K, 1, (_POD, _POD_BY_HEADS, _CLUSTER))
    for size, (model, per_chip) in MAXTEXT.items():
        place = _POD_BY_HEADS if size == "128b" else _POD
        yield from _with_kernels(f"maxtext-{size}", _attending(model, _trained(256 * per_chip, 2048)), place, False)
    for place in (_POD, _CUBE):
        step = partial(trained_gemma, batch=_batch(1, place), sequence=4096)
        yield from _with_kernels("gemma-27b", _attending(GEMMA_27B, step), place, False)
    for place in (_POD_BY_HEADS, _CLUSTER_BY_HEADS):
        states = partial(trained_states, batch=_batch(1, place), sequence=8192)
        yield _row("mamba-7b", MAMBA_7B, states, place)
    yield _row("hybrid-52b", HYBRID_52B, partial(trained_states, batch=128, sequence=4096), _SERVERS_BY_EXPERTS)
    by_experts = (("tpu:v5p:8x8x8", 1), {"fsdp": 8, "expert": 64}, EXPERTS)
    step = partial(trained_deepseek, batch=512, sequence=4096)
    yield from _with_kernels("deepseek-671b", _attending(DEEPSEEK_671B, step), by_experts, False)
    staged = partial(pipelined, scanned=True)
    for rules, chips, made in ((FIVE_AXES, "tpu:v5p:2x4x4", trained), (SIX_AXES, "tpu:v5p:4x4x4", staged)):
        axes = dict.fromkeys(("data", "fsdp", "expert", "tensor", "context", *(["stage"] if made is staged else [])), 2)
        step = partial(made, batch=64, sequence=4096)
        yield from _with_kernels("mixtral", _attending(LARGE_EXPERTS, step), ((chips, 1), axes, rules), False)
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
    servers = (("gpu:h100:4x1x8", 1), {"data": 4, "model": 8}, BATCH)
    yield from _with_kernels("decode-512", _from_pages(LLAMA_70B, 4096, 512), servers, False)
    step = partial(decoded, batch=64, sequence=4096)
    by_heads = {key: TENSOR[key] for key in ("heads", "mlp", "vocabulary")} | {"cache": "model"}
    yield _row("decode-by-hand", LLAMA_8B, step, (V5E_16, {"model": 16}, by_heads))
    yield _row("decode-by-sequence", LLAMA_8B, step, (V5E_16, {"seq": 4, "model": 4}, CACHE))
    yield _row("decode-by-sequence", LLAMA_8B, step, (H100_8, {"seq": 2, "model": 4}, CACHE))
    images = partial(trained_on_images, batch=512)
    yield from (_row("vit-h", VIT_H, images, place) for place in _FEW)
    for axes, rules in (({"fsdp": 1024}, FSDP), ({"fsdp": 128, "model": 8}, MEGATRON)):
        images = partial(trained_on_images, batch=65536)
        yield _row("vit-22b", VIT_22B, images, (("tpu:v4:8x8x16", 1), axes, rules))
    of_videos = (("gpu:h100:32x1x8", 1), {"fsdp": 32, "seq": 8}, LONG)
    yield from _with_kernels("video-30b", _of_videos, of_videos, True)
    towers = partial(trained_towers, batch=65536)
    yield _row("two-towers", TOWERS, towers, (V5E_64, {"data": 8, "rows": 8}, ROWS_OF_TABLES))
    yield _row("two-towers", TOWERS, towers, (("gpu:h100:8x1x8", 1), {"data": 8, "rows": 8}, ROWS_OF_TABLES))
    for chips, axes, rules in (
        ("tpu:v4:4x4x2", {"data": 32}, STATES),
        ("tpu:v4:4x4x4", {"data": 16, "graph": 4}, GRAPH),
    ):
        yield _row("weather", WEATHER, partial(trained_weather, batch=axes["data"]), ((chips, 1), axes, rules))
    space = partial(denoised, batch=64)
    yield _row("unet", UNET, space, (V5E_16, {"data": 4, "space": 4}, SPACE))
    yield _row("unet", UNET, space, (H100_8, {"data": 2, "space": 4}, SPACE))
    images = partial(segmented, batch=16)
    for axes, rules in (({"rows": 16}, ROWS_OF_IMAGES), ({"data": 4, "rows": 4}, IMAGES)):
        yield _row("segmenter", SEGMENTER, images, (V5E_16, axes, rules))
    words = partial(trained_bert, batch=64, sequence=512)
    yield from (_row("bert-large", BERT_LARGE, words, place) for place in _FEW)
    cells = partial(trained_lstm, batch=512, sequence=128)
    yield from (_row("lstm", LSTM, cells, place) for place in _FEW)


ROWS = tuple(_rows())


# Small steps whose structure is rich: tiny widths, but all that trainers have around their layers. What planning them
# takes is what a first step waits for.

_TINY = Llama(4, 128, 4, 2, 32, 512, 512)
_MIXED = replace(_TINY, experts=4, chosen=2, routing=ByCapacity(1.25))
_MIXTRAL = replace(_TINY, layers=2, experts=8, chosen=2, routing=Dropless(jax.lax.ragged_dot))

STAGED: Rules = {**FSDP, "stage": "stage"}


@dataclass(frozen=True)
class Structure:
    """A step on a mesh of eight devices. `most`: CPU seconds that planning may take."""

    make: Callable[[Layout], Program]
    axes: dict[str, int]
    rules: Rules
    most: float


STRUCTURES = {
    "fsdp and tensor": Structure(partial(trained, _TINY, batch=8, sequence=64), {"fsdp": 4, "model": 2}, MEGATRON, 4),
    "experts": Structure(partial(trained, _MIXED, batch=8, sequence=64), {"fsdp": 4, "expert": 2}, EXPERTS, 4),
    "context": Structure(partial(trained, _TINY, batch=4, sequence=128), {"fsdp": 4, "seq": 2}, LONG, 4),
    "experts in shard_map": Structure(
        partial(trained, _MIXTRAL, batch=8, sequence=64), {"fsdp": 4, "expert": 2}, EXPERTS, 20
    ),
    "pipeline": Structure(partial(pipelined, _TINY, batch=16, sequence=64), {"stage": 2, "fsdp": 4}, STAGED, 10),
}


@dataclass(frozen=True)
class Planned:
    """CPU seconds of planning, and of jit's lowering and compilation of the same step; infinite where CPUs cannot."""

    name: str
    plan: float
    jit: float
    most: float

    @property
    def is_late(self) -> bool:
        """Whether planning takes longer than it may, or than three times what jit takes, of what that takes 2 s for."""
        return self.plan > self.most or (self.jit > 2 and self.plan > 3 * self.jit)

    def __str__(self) -> str:
        return f"{self.name:<22}{self.plan:10.2f}{self.jit:10.2f}{self.plan / self.jit:8.2f}{self.most:8.0f}"


HEAD = f"{'structure':<22}{'planned':>10}{'jit':>10}{'ratio':>8}{'most':>8}"


def measured(forget: Callable[[], None]) -> Iterator[Planned]:
    """What all structures take; `forget` empties all caches."""
    for name, structure in STRUCTURES.items():
        mesh = jax.make_mesh(tuple(structure.axes.values()), tuple(structure.axes), (AxisType.Auto,) * 2)
        program = structure.make(layout := Layout(mesh, structure.rules, constrained=True))
        function = program.partitioned(layout, on_unknown="ignore")
        forget()
        plan = _seconds(lambda function=function, program=program: function.plan(*program.arguments))
        forget()
        yield Planned(name, plan, _by_jit(program, layout), structure.most)


def _by_jit(program: Program, layout: Layout) -> float:
    step = program.jitted(layout)
    try:
        return _seconds(lambda: step.lower(*program.arguments).compile())
    except jax.errors.JaxRuntimeError:  # ragged_all_to_all, which CPUs do not have
        return float("inf")


def _seconds(run: Callable[[], Any]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start
