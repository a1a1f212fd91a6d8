"""GPUs, with NCCL over NVLink."""

from __future__ import annotations

from sdy_jax.ir.collectives import KINDS
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
from sdy_jax.lowering.targets.rates import Copies
from sdy_jax.runtime.meshes import Forms

ALLOCATED = 0.75
"""The share of a GPU's memory that jax's allocator takes, unless the environment says otherwise. Published (JAX, "GPU
memory allocation")."""

_LAUNCH = 2.5e-6
"""Seconds of a kernel beside its work. Guessed, an order of magnitude: with less, plans take more and smaller ops."""

_HOP, _START = 0.6e-6, 7e-6
"""Seconds per hop, and before a collective sends anything. Published (NCCL's tuning of rings over NVLink)."""

_NETWORK = 5e-6
"""Seconds per hop over the network. Guessed, an order of magnitude: it decides from which size on bytes count there."""

_ROWS = 1 << 14
"""Elements of a row. Measured (2026-11, XLA of jax 0.10 for H100): the softmax of scores between two products, and a
layer norm, take twice the memory of what they read with rows of 512 to 16384 elements, once with rows of 32768."""

_COMBINED = frozenset(("all_gather", "all_reduce", "reduce_scatter"))


def _copies(memory: float, launch: float) -> Copies:
    """What is sent is read and written once more, in the buffers of NCCL."""
    return Copies(2 * memory)


def _machine(flops: float, memory: float, gib: float, bandwidth: float, network: float, kind: str) -> Machine:
    """NVLink within one server, one direction; the network of NVIDIA's own servers, one port per device."""
    return Machine(
        rf".*\b{kind}\b.*",
        Chip(flops, memory, gib * GIB, launch=_LAUNCH, product_launch=_LAUNCH, allocated=ALLOCATED),
        Links(bandwidth, latency=_HOP, start=_START, network=Network(network, latency=_NETWORK)),
    )


GPU = Family(
    "gpu",
    {
        "v100": _machine(125e12, 0.9e12, 16, 150e9, 6.25e9, "v100"),
        "a100": _machine(312e12, 2.0e12, 40, 300e9, 25e9, "a100"),
        "h100": _machine(989e12, 3.35e12, 80, 450e9, 50e9, "h100"),
        "h200": _machine(989e12, 4.8e12, 141, 450e9, 50e9, "h200"),
        "h20": _machine(148e12, 4.0e12, 96, 450e9, 50e9, "h20"),
        "b200": _machine(2250e12, 8.0e12, 180, 900e9, 50e9, "b200"),
    },
    Compiler(
        Fusion(dear_again=True, rows=_ROWS),
        order=Order(reduces_late=True, multiplies_late=True),
        collectives=Collectives(starts=frozenset(KINDS), combines=_COMBINED, buckets=_COMBINED, joins_major=True),
    ),
    Arrays(copies=_copies),
    Forms(in_order=True),
    usual="h100",
)
"""Published (sources below), rounded; for anything finer measure, or give `CostModel` your own.

Sources: NVIDIA's data sheets of the SXM modules (dense bfloat16, of V100 float16; memory; half of NVLink's total) and
of DGX-1V, A100, H100, H200 and B200 (four ports of 100 Gb/s for eight devices, then a port of 200 or 400 Gb/s for
each; H20 as H200). Memory is the data sheets', whose GB are GiB by what the driver reports.
"""
