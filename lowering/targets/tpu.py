"""TPUs: a torus of chips, whose memory holds arrays in tiles, and XLA's compiler for them."""

from __future__ import annotations

from sdy_jax.lowering.targets.family import (
    GIB,
    Arrays,
    Chip,
    Collectives,
    Compiler,
    Family,
    Fusion,
    Links,
    Machine,
    Network,
    Order,
)
from sdy_jax.lowering.targets.rates import LANES, SUBLANES, Copies, Tiles
from sdy_jax.lowering.targets.torus import Torus
from sdy_jax.runtime.meshes import Forms

_STACKED = frozenset(("all_gather", "collective_permute"))
"""Eight of them on eight chips, each alone and as a stack, by the compiler's estimate for v5e and the links' rates:
gathers of 64 KiB 110 and 79 microseconds, of 256 KiB along columns 203 and 172, permutes of 1 MiB 232 and 211. The
slices of a stack are part of what reads them. All-to-alls of 4 MiB take longer so, 1181 and 1456; scatters take less,
219 and 179, but XLA made an all-reduce of a stack of blocks of 8 x 64, which is twice the bytes (libtpu 0.0.52,
2026-11)."""

_COMBINED = frozenset(("all_reduce",))
"""All of which XLA runs small ones as one (libtpu 0.0.52, 2026-11)."""

_STARTED = frozenset(("all_gather", "collective_permute"))
"""What XLA starts before other work (libtpu 0.0.51)."""

_BFLOAT16 = 2
"""Given: bytes to which products of open precision round an element of float32."""


_LAUNCH, _PRODUCT, _START = 1.2e-6, 4e-6, 5e-6
"""Seconds of an op that does next to nothing, of a small product, and of what stands around a collective. Measured
(2026-11, by what the compiler for v5e states, `scripts/bench_model`)."""

_HOP = 1e-6
"""Seconds per hop. Published ("How to Scale Your Model")."""

_NETWORK = 10e-6
"""Seconds per hop over the network. Guessed, an order of magnitude: it decides from which size on bytes count there."""

_EXCHANGED, _ROWS, _NARROW, _FOLDED = 2, 6, 10, 40
"""Bytes of memory per byte sent, in the order of `Copies`. Measured (2026-11, libtpu 0.0.52) by what the compiler for
v5e states of single collectives of 4 KiB to 7 MiB over 2, 4 and 8 chips: gathers and scatters 0, all_to_alls 0 to 3.5,
but those that join the rows of a matrix 9. Of narrow blocks scatters and collectives of matrices 4 to 8, beside 1.2 to
1.8 microseconds (all_to_alls 1.3 to 5); gathers of more dimensions and all_to_alls of three 6 to 12 beside 3 to 7
microseconds, all_to_alls of four 25 to 63."""


def _copies(memory: float, launch: float) -> Copies:
    return Copies(0.0, _EXCHANGED * memory, LANES, _ROWS * memory, _NARROW * memory, _FOLDED * memory, launch)


def _machine(
    kind: str, flops: float, memory: float, gib: float, links: Links, peaks: dict[str, float], *also: str
) -> Machine:
    """`peaks`: of other types than bfloat16."""
    return Machine(kind, Chip(flops, memory, gib * GIB, _LAUNCH, _PRODUCT, peaks=peaks), links, also)


def _ici(torus: Torus, joins: int, bandwidth: float, network: float) -> Links:
    """Of a chip two links lie along each dimension."""
    beyond, name = Network(network, latency=_NETWORK), f"ICI, in {torus.dimensions} dimensions,"
    return Links(bandwidth, _HOP, _START, beyond, torus, joins_hosts=True, name=name, joins=joins)


_2D, _3D = Torus(2, around=16, as_rings=16), Torus(3, around=4, in_cubes=True)
"""The tori of v5e and v6e, and those of the others, whose slices are of cubes of 64 chips. Published ("How to Scale
Your Model", "TPU Networking"; what is a ring: by the coordinates that `jax.make_mesh` gives, jax 0.10.2)."""


_PASSES = {"HIGH": 3, "HIGHEST": 6}
"""Products of bfloat16 that one of float32 takes at higher precisions than the default, which rounds to bfloat16.
Published (`jax.lax.Precision`)."""


def _products(chip: Chip, dtype: str, precision: str) -> float:
    return chip.flops / _PASSES.get(precision, 1) if dtype == "f32" else chip.peak(dtype)


_FEW_BATCHES = 2.5
"""How long a convolution takes whose batches do not fill the rows of a tile, in which they lie. Measured (2026-11,
libtpu 0.0.52, by what the compiler for v5e states of convolutions of 3 x 3 and 5 x 5, of 64 to 256 features, forward
and for the gradient of what they take): 1.8 to 2.9, be it 1, 2 or 4 batches. Gradients of kernels, whose batches are
features, take as long as ever."""


def _batches(count: int) -> float:
    return _FEW_BATCHES if count < SUBLANES else 1.0


TPU = Family(
    "tpu",
    {
        "tpu v4": _machine(r"tpu v4", 275e12, 1.2e12, 30.5, _ici(_3D, 4096, 90e9, 6.25e9), {"int8": 275e12}),
        "tpu v5e": _machine(
            r"tpu v5( lite|e)", 197e12, 0.82e12, 15.75, _ici(_2D, 256, 90e9, 3.125e9), {"int8": 393e12}
        ),
        "tpu v5p": _machine(r"tpu v5p?", 459e12, 2.8e12, 95.73, _ici(_3D, 8960, 180e9, 6.25e9), {"int8": 918e12}),
        "tpu v6e": _machine(
            r"tpu v6( lite|e)",
            918e12,
            1.6e12,
            31.24,
            _ici(_2D, 256, 180e9, 12.5e9),
            {"int8": 1836e12, "float8": 918e12},
        ),
        # A device is one of the chip's two cores.
        "tpu7x": _machine(
            r"tpu ?(v?7x?)", 1153e12, 3.7e12, 94.74, _ici(_3D, 18432, 100e9, 6.25e9), {"float8": 2307e12}, "tpu v7x"
        ),
    },
    Compiler(
        Fusion(into_products=True, dear_again=True),
        Order(runs_late=True, keeps_whole=True),
        Collectives(starts=_STARTED, combines=_COMBINED, buckets=_COMBINED | _STACKED, merges=True, along_lines=True),
    ),
    Arrays(Tiles(), _BFLOAT16, _copies),
    Forms(in_lanes=True, in_halves=True, looked_up_apart=True, barriers_last=True),
    usual="tpu v5e",
    products=_products,
    batches=_batches,
)
"""Published (sources below), rounded; for anything finer measure, or give `CostModel` your own.

Sources: "How to Scale Your Model" (jax-ml.github.io/scaling-book, chapter "How to Think About TPUs": operations,
memory, links and network per chip, 1 microsecond per hop); of TPU7x, of other types and of pods, and as a check of the
others, Google Cloud's pages on each version (of TPU7x 2307 TFLOP/s, 7380 GB/s and 1200 GB/s over six links in both
directions per chip of two devices, 9216 chips in a pod). Memory is what the compiler says is there when a program is
too large (libtpu 0.0.52; of v4 that of both cores, which are one device).
"""
