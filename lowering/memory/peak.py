"""The bytes that a device holds while it runs a partitioned program: an estimate from live ranges.

Compilers fuse: what is computed element by element, or only moved, exists as a buffer only where something that is
not fused reads it, or where several kernels read what is dear to compute. An op in a fusion reads its operands when the
fusion runs, so these live until then. Every other value has a buffer on each device, of its local shape, from its op to
the last op that reads it; a result may take over the buffer of an operand of its size that nothing reads later.

    h = dot(x, w)           h is live from here ...
    g = tanh(h)             (fused: no buffer)
    y = dot(g, v)           not fused: g has a buffer
    d = multiply(h, h)      (fused)
    z = subtract(c, d)      ... to here

Ops run in program order but for two kinds, which a compiler moves for the sake of memory: results of the program that
are computed element by element are computed as soon as their operands are there (updated weights do not wait for the
last gradient), and what only reads values that are live anyway is computed just before its first use.

A loop's carried values have one buffer each, updated in place where an op can do that; values from outside that its
body reads live until its end. While a bucket of collectives runs, there are copies of what its members take and make,
side by side. A branch's values end with it, so that the largest branch counts.

Beside `memory_analysis()` of training steps (2026-11): 38 of 44 within a factor of 1.5 for CPUs, where convolutions and
reductions over batches keep copies (resnet 0.45) and temporaries may lie in the memory of later results (mlp 1.7, data
parallel steps with AdamW up to 4); with arguments and results 11 of 13 steps with AdamW within it (0.60 to 1.27). Of
eight pairs of plans of a program of which one took a fifth more it was known which in seven: in a graph network the
choice of what lies in VMEM outweighed the rest.

For slices of v5e what counts is what the compiler takes where there is no more than that: with memory to spare it packs
loosely, and says up to 2.1 times as much. Of 24 training steps, beside temporaries where the device had about what was
estimated (`xla_tpu_max_hbm_size_mib`): 0.73 to 1.34, one 1.56; 18 within 0.9 to 1.2. Weights that a loop takes rounded,
and what convolutions rearrange, are missing (an LSTM 0.73, resnet 0.76). Programs themselves take 6 to 8 MiB beside.
See docs/explanation/memory.md#what-a-device-holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from jax.extend.mlir import ir

from sdy_jax.ir.extensions import load_extensions
from sdy_jax.ir.graph import Graph, Value
from sdy_jax.lowering.analysis.local_bytes import LocalBytes
from sdy_jax.lowering.memory.buffers import HeldBuffer, most_live
from sdy_jax.lowering.memory.live_ranges import LiveRanges
from sdy_jax.lowering.targets.target import Target


class LiveValue(NamedTuple):
    """A value and the bytes of its buffer on one device."""

    value: Value
    bytes: float

    @property
    def source(self) -> str:
        """The line of the op that makes the value."""
        op = self.value.defining_op
        return op.source if op is not None else ""


@dataclass(frozen=True, slots=True)
class Peak:
    """What a device holds at most.

    Attributes:
        bytes: temporaries at the peak: buffers of values made inside of the program that are not its results.
        arguments, results: bytes of the program's arguments and results.
        shared: bytes of results that lie in the memory of donated arguments.
        live: the temporaries at the peak, largest first.
    """

    bytes: float
    arguments: float
    results: float
    live: tuple[LiveValue, ...]
    at: tuple[tuple[ir.Operation, float], ...] = ()
    """The ops of the program in order, with the bytes of temporaries that are live while each runs, about."""

    shared: float = 0.0

    @property
    def border(self) -> float:
        """Bytes of arguments and results together."""
        return self.arguments + self.results - self.shared

    @property
    def total(self) -> float:
        """Bytes of arguments, results and temporaries together."""
        return self.border + self.bytes


def peak_of(graph: Graph, target: Target = Target()) -> Peak:  # noqa: B008 - immutable
    """What a device holds at most while it runs a partitioned program.

    Args:
        graph: the program, whose values have global shapes and shardings.
        target: the devices.
    """
    sizes = LocalBytes(graph, target.arrays)
    return _peak(graph, sizes, _live_ranges(graph, sizes, target))


def peak_and_buffers(graph: Graph, target: Target = Target()) -> tuple[Peak, list[HeldBuffer]]:  # noqa: B008
    """As `peak_of`, with all temporaries that a device holds while the program runs."""
    sizes = LocalBytes(graph, target.arrays)
    ranges = _live_ranges(graph, sizes, target)
    return _peak(graph, sizes, ranges), list(ranges.held())


def _live_ranges(graph: Graph, sizes: LocalBytes, target: Target) -> LiveRanges:
    load_extensions()
    return LiveRanges(graph, sizes, target.compiler)


def _peak(graph: Graph, sizes: LocalBytes, ranges: LiveRanges) -> Peak:
    live, most = most_live(ranges.buffers)
    found = sorted((LiveValue(b.value, b.bytes) for b in live), key=lambda one: -one.bytes)
    arguments, results = (sum(map(sizes.of, values)) for values in (graph.arguments, graph.outputs))
    at = tuple(zip(*ranges.held_at(), strict=True))
    shared = sum([sizes.of(result) for result, _ in ranges.in_donated_memory])
    return Peak(most, arguments, results, tuple(found), at, shared)
