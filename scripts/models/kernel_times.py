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
from typing import NamedTuple

from models.kernels import BLOCK
from sdy_jax.errors import SdyError
from sdy_jax.lowering.targets.target import machines
from sdy_jax.plan.measuring.hlo_module import HloInstruction


class Operand(NamedTuple):
    dtype: str
    shape: tuple[int, ...]


Work = Callable[[list[Operand]], tuple[float, float]]
"""The floating-point operations of a kernel on some operands, and the bytes of memory that it moves."""

SHARE = 0.6
"""Of the chip's peak, what kernels reach. Published for attention of TPUs and GPUs, rounded; it decides how much of a
step is attention, not which of two programs that run the same kernels is faster."""

_PEAK = machines()["tpu v5e"].chip

_OPERANDS = re.compile(r"operand_layout_constraints=\{((?:[^{}]|\{[^{}]*\})*)\}")
_ARRAY = re.compile(r"\b([a-z]+\d+)\[([\d,]+)\]")


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
    found = _ARRAY.findall(listed[1] if listed else "")
    arrays = [Operand(dtype, tuple(map(int, dims.split(",")))) for dtype, dims in found]
    for pattern, work in _WORK.items():
        if re.search(pattern, body):
            return work(arrays)
    raise SdyError(f"the kernel of {call.name} states no work, and none is known of it; add its name to `_WORK`")


def _products(count: int) -> Work:
    """Those of causal attention between queries (..., sequence, width) and keys: half of the pairs of blocks, and half
    of those on the diagonal, which are computed whole."""

    def work(operands: list[Operand]) -> tuple[float, float]:
        queries, keys = [shape for dtype, shape in operands if dtype in ("bf16", "f32")][:2]
        return 2 * count * math.prod(queries) * (keys[-2] + min(BLOCK, keys[-2])) / 2, 0.0

    return work


def _pages(operands: list[Operand]) -> tuple[float, float]:
    """All pages of the sequences' tables, each read once, and 4 operations of each query's head per key and its width:
    the score, and the value."""
    table = operands[1].shape
    (_, (_, heads, width)), (_, (_, page, parts, _)) = operands[-2:]
    tokens = math.prod(table) * page
    return 4.0 * tokens * heads * width, 2.0 * tokens * parts * width


_WORK: dict[bytes, Work] = {
    rb"\bsplash_m[hq]a_fwd": _products(2),  # scores, and values
    rb"\bsplash_m[hq]a_dq": _products(3),  # scores again, those of the gradient, and queries
    rb"\bsplash_m[hq]a_dkv": _products(4),  # both scores, keys and values
    rb"\bragged_paged_attention_kernel": _pages,
}
"""By the name of a kernel, which its body has: whoever partitions a program may call the instruction otherwise."""
