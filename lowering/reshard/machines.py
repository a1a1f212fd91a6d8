"""Machines: what is published of one device, its rates and its memory, by the kind that the device reports."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

_COMBINED = ("all_reduce",)
"""The kinds of collectives of which XLA runs small ones as one, on any machine; on CPUs and TPUs no others (libtpu
0.0.52, 2026-11)."""

_STACKED = ("all_gather", "collective_permute")
"""Eight of them on eight chips, each alone and as a stack, by the compiler's estimate for v5e and the links' rates:
gathers of 64 KiB 110 and 79 microseconds, of 256 KiB along columns 203 and 172, permutes of 1 MiB 232 and 211. The
slices of a stack are part of what reads them. All-to-alls of 4 MiB take longer so, 1181 and 1456; scatters take less,
219 and 179, but XLA made an all-reduce of a stack of blocks of 8 x 64, which is twice the bytes (libtpu 0.0.52,
2026-11)."""

_GIB = 2.0**30
ALLOCATED = 0.75
"""The share of a GPU's memory that jax's allocator takes, unless the environment says otherwise."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Peak rates of one device, and its memory.

    Attributes:
        flops: floating-point operations per second (bfloat16; a multiplication and an addition are two).
        bandwidth: bytes per second that it sends along one mesh axis over the machine's own links.
        latency: seconds per hop over these.
        memory: bytes per second of its memory.
        capacity: the bytes of it that programs can have; of several sizes of one kind, those of the smallest.
        network: bytes per second that it sends over the data-centre network.
        start: seconds before a collective sends anything.
        network_latency: seconds per hop over the network.
        launch: seconds between two ops.
        product_launch: seconds that a product or convolution takes beside its work.
        is_torus: the links lead to neighbours only.
        combines: the kinds of collectives of which XLA runs small ones as one, without copies.
        stacks: the kinds of others that run faster as one of a stack of their operands, where these have one shape.
    """

    flops: float
    bandwidth: float
    latency: float
    memory: float
    capacity: float
    network: float
    start: float
    network_latency: float
    launch: float
    product_launch: float
    is_torus: bool = False
    combines: tuple[str, ...] = _COMBINED
    stacks: tuple[str, ...] = ()


_TPU = partial(
    Machine,
    latency=1e-6,
    start=5e-6,
    network_latency=10e-6,
    launch=1.2e-6,
    product_launch=4e-6,
    is_torus=True,
    stacks=_STACKED,
)
_GPU = partial(
    Machine,
    latency=0.6e-6,
    start=7e-6,
    network_latency=5e-6,
    launch=2.5e-6,
    product_launch=2.5e-6,
    combines=("all_gather", *_COMBINED, "reduce_scatter"),
)


def _tpu(flops: float, memory: float, gib: float, bandwidth: float, network: float) -> Machine:
    return _TPU(flops=flops, memory=memory, capacity=gib * _GIB, bandwidth=bandwidth, network=network)


def _gpu(flops: float, memory: float, gib: float, bandwidth: float, network: float) -> Machine:
    capacity = ALLOCATED * gib * _GIB
    return _GPU(flops=flops, memory=memory, capacity=capacity, bandwidth=bandwidth, network=network)


MACHINES: Mapping[str, Machine] = {
    # TPUs: a mesh axis is a ring of the torus, with two links of a chip
    "tpu v4": _tpu(275e12, 1.2e12, 30.5, 90e9, 6.25e9),
    "tpu v5e": _tpu(197e12, 0.82e12, 15.75, 90e9, 3.125e9),
    "tpu v5p": _tpu(459e12, 2.8e12, 95.73, 180e9, 6.25e9),
    "tpu v6e": _tpu(918e12, 1.6e12, 31.24, 180e9, 12.5e9),
    "tpu7x": _tpu(1153e12, 3.7e12, 94.74, 100e9, 6.25e9),  # a device is one of the chip's two cores
    # GPUs: NVLink within one server, one direction; the network of NVIDIA's own servers, one port per device
    "v100": _gpu(125e12, 0.9e12, 16, 150e9, 6.25e9),
    "a100": _gpu(312e12, 2.0e12, 40, 300e9, 25e9),
    "h100": _gpu(989e12, 3.35e12, 80, 450e9, 50e9),
    "h200": _gpu(989e12, 4.8e12, 141, 450e9, 50e9),
    "b200": _gpu(2250e12, 8.0e12, 180, 900e9, 50e9),
}
"""Published peaks, rounded; for anything finer measure, or give `CostModel` your own.

Sources. TPUs: "How to Scale Your Model" (jax-ml.github.io/scaling-book, chapter "How to Think About TPUs": operations,
memory, links and network per chip, 1 microsecond per hop); of TPU7x, and as a check of the others, Google Cloud's pages
on each version (2307 TFLOP/s, 7380 GB/s and 1200 GB/s over six links in both directions per chip of two devices).
GPUs: NVIDIA's data sheets of the SXM modules (dense bfloat16, of V100 float16; memory; half of NVLink's total) and of
DGX-1V, A100, H100, H200 and B200 (four ports of 100 Gb/s for eight devices, then a port of 200 or 400 Gb/s for each).
Memory of TPUs is what the compiler says is there when a program is too large (libtpu 0.0.52; of v4 that of both cores,
which are one device), of GPUs the data sheets', whose GB are GiB by what the driver reports.
Latencies are orders of magnitude: of GPUs those with which NCCL tunes rings over NVLink, 7 microseconds and 0.6 per
hop; of networks 5 and 10. Of TPUs those that the compiler for v5e states: 1.2 microseconds for an op that does next to
nothing, about 4 for a small product, about 5 for what it puts around a collective (`scripts/bench_model`, 2026-11).
"""

_KINDS = {
    # pattern of `device_kind`, in small letters: name in MACHINES
    r"tpu v4": "tpu v4",
    r"tpu v5( lite|e)": "tpu v5e",
    r"tpu v5p?": "tpu v5p",
    r"tpu v6( lite|e)": "tpu v6e",
    r"tpu ?(v?7x?)": "tpu7x",
    r".*\bv100\b.*": "v100",
    r".*\ba100\b.*": "a100",
    r".*\bh100\b.*": "h100",
    r".*\bh200\b.*": "h200",
    r".*\bb200\b.*": "b200",
}


def combined_kinds(device_kind: str) -> tuple[str, ...]:
    """The kinds of collectives of which XLA runs small ones as one, without copies, on a kind of device.

    >>> combined_kinds("cpu")
    ('all_reduce',)
    """
    name = machine_name(device_kind)
    return _COMBINED if name is None else MACHINES[name].combines


def stacked_kinds(device_kind: str) -> tuple[str, ...]:
    """The kinds of collectives that run faster as one of a stack of their operands, on a kind of device.

    >>> stacked_kinds("TPU v5 lite")
    ('all_gather', 'collective_permute')
    """
    name = machine_name(device_kind)
    return () if name is None else MACHINES[name].stacks


def device_memory(device_kind: str) -> float:
    """The bytes of its memory that programs can have on a kind of device; 0 where that is not known.

    A GPU of a kind with several sizes says its own, and so does a part of one: the least that it says.

    >>> [device_memory(kind) / 2**30 for kind in ("TPU v5 lite", "NVIDIA A100-SXM4-80GB", "cpu")]
    [15.75, 60.0, 0.0]
    """
    name, said = machine_name(device_kind), re.findall(r"\b(\d+) ?gb\b", device_kind.lower())
    if name is None:
        return 0.0
    return ALLOCATED * min(map(int, said)) * _GIB if said else MACHINES[name].capacity


def machine_name(device_kind: str) -> str | None:
    """The name in `MACHINES` of a kind of device, as `jax.Device.device_kind` says it; None where it is not there.

    >>> [machine_name(kind) for kind in ("TPU v5 lite", "NVIDIA H100 80GB HBM3", "cpu")]
    ['tpu v5e', 'h100', None]
    """
    kind = device_kind.lower().strip()
    return next((name for pattern, name in _KINDS.items() if re.fullmatch(pattern, kind)), None)
