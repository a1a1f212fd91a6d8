"""What kernels take on a TPU, whose compiler states no cycles for them: by their work and a share of the chip's peak.

Measured (2026-11, libtpu 0.0.52): of a `tpu_custom_call` the compiler states no `estimated_cycles`, with a
`pl.CostEstimate` or without; an estimate counts among the `flops` of `cost_analysis()`, and in its `optimal_seconds`.
Splash and paged attention have none. So a step takes what the compiler states, and its kernels what is counted here,
the same for whoever partitioned the program.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from models.kernels import BLOCK
from sdy_jax.errors import SdyError
from sdy_jax.lowering.targets.registry import machines
from sdy_jax.plan.hlo_module import HloInstruction

Shape = tuple[int, ...]

SHARE = 0.6
"""Of the chip's peak, what kernels reach. Published for attention of TPUs and GPUs, rounded; it decides how much of a
step is attention, not which of two programs that run the same kernels is faster."""

_PEAK = machines()["tpu v5e"].chip

_OPERANDS = re.compile(r"operand_layout_constraints=\{((?:[^{}]|\{[^{}]*\})*)\}")
_ARRAY = re.compile(r"\b(?:bf16|f32)\[([\d,]+)\]")


def kernel_seconds(call: HloInstruction) -> float:
    """The seconds of a call on a v5e.

    Raises:
        SdyError: neither the call states its work, nor is it one of those whose work is known here.
    """
    flops, moved = call.stated_work
    if not flops and not moved:
        flops, moved = _known_work(call)
    return max(flops / (SHARE * _PEAK.flops), moved / _PEAK.memory)


def _known_work(call: HloInstruction) -> tuple[float, float]:
    listed, body = _OPERANDS.search(call.attributes), call.kernel_body
    arrays = [tuple(map(int, dims.split(","))) for dims in _ARRAY.findall(listed[1] if listed else "")]
    for pattern, work in _WORK.items():
        if re.search(pattern, body):
            return work(arrays)
    raise SdyError(f"the kernel of {call.name} states no work, and none is known of it; add its name to `_WORK`")


def _products(count: int) -> Callable[[list[Shape]], tuple[float, float]]:
    """Those of causal attention between queries (..., sequence, width) and keys: half of the pairs of blocks, and half
    of those on the diagonal, which are computed whole."""

    def work(arrays: list[Shape]) -> tuple[float, float]:
        queries, keys = arrays[:2]
        return 2 * count * math.prod(queries) * (keys[-2] + min(BLOCK, keys[-2])) / 2, 0.0

    return work


_WORK: dict[bytes, Callable[[list[Shape]], tuple[float, float]]] = {
    rb"\bsplash_m[hq]a_fwd": _products(2),  # scores, and values
    rb"\bsplash_m[hq]a_dq": _products(3),  # scores again, those of the gradient, and queries
    rb"\bsplash_m[hq]a_dkv": _products(4),  # both scores, keys and values
}
"""Floating-point operations and bytes by the shapes of a kernel's floating operands, by its name. What partitions a
program may call the instruction otherwise."""
