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

_HOP, _PCIE_HOP, _START = 0.6e-6, 1e-6, 7e-6
"""Seconds per hop over NVLink and over PCIe, and before a collective sends anything. Published (NCCL's tuning of
rings). Of Infinity Fabric nothing is published that we know: it is taken for NVLink in this."""

_NETWORK = 5e-6
"""Seconds per hop over the network. Guessed, an order of magnitude: it decides from which size on bytes count there."""

_ROWS = 1 << 14
"""Elements of a row. Measured (2026-11, XLA of jax 0.10 for H100): the softmax of scores between two products, and a
layer norm, take twice the memory of what they read with rows of 512 to 16384 elements, once with rows of 32768."""

_COMBINED = frozenset(("all_gather", "all_reduce", "reduce_scatter"))

_PIPELINED = frozenset(("reduce_scatter",))
"""Measured (2026-11, XLA of jax 0.10 for H100): reduce_scatters of gradients that a loop stacks start in one trip and
end in the next, so that 8B on 64 devices waits for none of 30 in loops, which take 56 ms."""

_SENDING = 20 / 132
"""The share of a GPU's multiprocessors that send. Published (DeepSeek-V3, section 3.2.2: 20 of an H800's fill its
NVLink and InfiniBand)."""


def _copies(memory: float, launch: float) -> Copies:
    """What is sent is read and written once more, in the buffers of NCCL."""
    return Copies(2 * memory)


_PEAKS: dict[str, dict[str, float]] = {
    "v100": {"float32": 15.7e12},
    "a100": {"float32": 19.5e12, "tf32": 156e12, "int8": 624e12},
    "h100-pcie": {"float32": 51e12, "tf32": 378e12, "float8": 1513e12, "int8": 1513e12},
    "h100": {"float32": 67e12, "tf32": 494e12, "float8": 1979e12, "int8": 1979e12},
    "h20": {"float32": 44e12, "tf32": 74e12, "float8": 296e12, "int8": 296e12},
    "l40s": {"float32": 91.6e12, "tf32": 183e12, "float8": 733e12, "int8": 733e12},
    "b200": {"float32": 75e12, "tf32": 1125e12, "float8": 4500e12, "int8": 4500e12, "float4": 9000e12},
    "gb200": {"float32": 80e12, "tf32": 1250e12, "float8": 5000e12, "int8": 5000e12, "float4": 10000e12},
    "b300": {"float32": 75e12, "tf32": 1125e12, "float8": 4500e12},
    "mi300x": {"float32": 163.4e12, "tf32": 653.7e12, "float8": 2614.9e12, "int8": 2614.9e12},
}
"""Operations per second of other types than bfloat16, of dense operands. Published (the data sheets that are named
below). About int8 and float4 of B300 these differ: they are left out."""


def _machine(
    kind: str, flops: float, memory: float, gib: float, links: Links, peaks: str, also: tuple[str, ...] = ()
) -> Machine:
    """`peaks`: whose rates of other types."""
    chip = Chip(flops, memory, gib * GIB, _LAUNCH, _LAUNCH, ALLOCATED, _PEAKS[peaks])
    return Machine(rf".*\b{kind}\b.*", chip, links, also)


_GEN_3, _GEN_4, _GEN_5 = 16e9, 32e9, 64e9
"""Bytes per second over 16 lanes of PCIe, which join a device and its host. Published (the data sheets below, which
count both directions). Of B200, GB200 and B300 sources differ: they are left out."""


def _links(
    name: str, hop: float, bandwidth: float, network: float, host: float = 0.0, joins: int = 8, peers: int = 0
) -> Links:
    """What a device sends in one direction over all its links, over its share of the network's ports, and to its
    host."""
    beyond = Network(network, latency=_NETWORK)
    return Links(bandwidth, hop, _START, beyond, name=name, joins=joins, peers=peers, host=host)


def _products(chip: Chip, dtype: str, precision: str) -> float:
    """Of float32 in TensorFloat-32, where there is that, but at the highest precision (`jax.lax.Precision`)."""
    if dtype != "f32":
        return chip.peak(dtype)
    name = "tf32" if precision != "HIGHEST" and "tf32" in chip.peaks else "float32"
    return chip.peaks.get(name, chip.flops)


GPU = Family(
    "gpu",
    {
        "v100": _machine("v100", 125e12, 0.9e12, 16, _links("NVLink 2", _HOP, 150e9, 6.25e9, _GEN_3), "v100"),
        "a100-40gb": _machine(
            r"a100-sxm\d?-40gb", 312e12, 1.555e12, 40, _links("NVLink 3", _HOP, 300e9, 25e9, _GEN_4), "a100"
        ),
        "a100-80gb": _machine(
            r"a100-sxm\d?-80gb", 312e12, 2.039e12, 80, _links("NVLink 3", _HOP, 300e9, 25e9, _GEN_4), "a100"
        ),
        # Of either size, and cards, too: with the least memory, at a rate between both.
        "a100": _machine("a100", 312e12, 2.0e12, 40, _links("NVLink 3", _HOP, 300e9, 25e9, _GEN_4), "a100"),
        "h100-pcie": _machine(
            "h100 pcie", 756e12, 2.0e12, 80, _links("PCIe 5", _PCIE_HOP, _GEN_5, 25e9, _GEN_5), "h100-pcie"
        ),
        "h100": _machine(
            "h100", 989e12, 3.35e12, 80, _links("NVLink 4", _HOP, 450e9, 50e9, _GEN_5), "h100", ("h100-sxm",)
        ),
        "h200": _machine(
            "h200", 989e12, 4.8e12, 141, _links("NVLink 4", _HOP, 450e9, 50e9, _GEN_5), "h100", ("h200-sxm",)
        ),
        "h20": _machine("h20", 148e12, 4.0e12, 96, _links("NVLink 4", _HOP, 450e9, 50e9, _GEN_5), "h20"),
        "l40s": _machine("l40s", 362e12, 0.864e12, 48, _links("PCIe 4", _PCIE_HOP, _GEN_4, 25e9, _GEN_4), "l40s"),
        "b200": _machine("b200", 2250e12, 8.0e12, 180, _links("NVLink 5", _HOP, 900e9, 50e9), "b200"),
        "gb200": _machine("gb200", 2500e12, 8.0e12, 186, _links("NVLink 5", _HOP, 900e9, 50e9, joins=72), "gb200"),
        "b300": _machine("b300", 2250e12, 8.0e12, 270, _links("NVLink 5", _HOP, 900e9, 100e9), "b300"),
        # Seven links of 64 GB/s, one to each other device of a server.
        "mi300x": _machine(
            "mi300x", 1307e12, 5.3e12, 192, _links("Infinity Fabric", _HOP, 448e9, 50e9, _GEN_5, peers=7), "mi300x"
        ),
    },
    Compiler(
        Fusion(dear_again=True, rows=_ROWS),
        order=Order(reduces_late=True, multiplies_late=True),
        collectives=Collectives(
            starts=frozenset(KINDS),
            pipelines=_PIPELINED,
            combines=_COMBINED,
            buckets=_COMBINED,
            joins_major=True,
            units=_SENDING,
        ),
    ),
    Arrays(copies=_copies),
    Forms(in_order=True),
    usual="h100",
    products=_products,
)
"""Published (sources below), rounded; for anything finer measure, or give `CostModel` your own.

Sources: NVIDIA's data sheets of its SXM modules, of H100 PCIe and L40S, and of HGX B200, HGX B300 and GB200 NVL72, by
device (dense bfloat16, of V100 float16; memory; half of NVLink's or PCIe's total); of DGX-1V, A100, H100, H200, B200
and B300 (four ports of 100 Gb/s for eight devices, then a port of 200, 400 and 800 Gb/s for each; H20 as H200), and of
GB200 NVL72 (72 devices in a rack, 400 Gb/s for each); its reference servers of eight cards (2-8-5: 200 Gb/s for each),
where NVLink bridges of pairs are not counted; AMD's of MI300X and its platform (seven links, 400 Gb/s for each). Memory
is the data sheets', whose GB are GiB by what the driver reports; of B300 the 270 GB that HGX B300 has per device, of
288 on a module.
"""
