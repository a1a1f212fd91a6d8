"""What XLA for TPUs sends as it is made, and what it copies.

An array lies in tiles, with one of its dimensions in their 128 lanes, and a scatter sends it with the scattered
dimension before the others. The gradient of a weight with heads, such as [512, 3, 8, 64] that is scattered along its
first dimension, would fill half of the lanes with its last one. So XLA has a product make it with the first dimension
in lanes, and copies all of it before it is sent; or it sends more: an all-reduce of [512, 8, 64], of which each device
keeps a part. As matrices, [512, 1536] and [512, 512], both are made as they are sent. On v5e that is 55 us, not 76, for
the first one with its product and the update of a weight (libtpu 0.0.52, 2026-11).

It scatters the first dimension, or one of the last two, and of a sum that is scattered along another one makes an
all-reduce, of which each device keeps a part. With all dimensions but the last as rows it is one of the last two, and
moves for nothing where rows fill tiles: [8, 16, 8, 256] along its second one takes 15 us on v5e, not 30. A part of the
second last dimension that fills no tile is copied before it is sent, or all-reduced where a product makes it: heads of
[16, 32, 8, 64] take 40 us with the product, and 26 us where they come before the 32 rows.

Along the last dimension it sends halves of a part around both ways of a ring, in whole lanes. Where these are an odd
number of tiles it makes an all-reduce: of bfloat16[4096, 2048] in 16 parts of 128, made by a product, 2.44 ms in a loop
of four trips; 1.67 with the parts as a dimension of their own. The same where they fill no lanes, but for products that
are made with the scattered dimension in front: these are fewer the more rows there are (libtpu 0.0.51, v5e:16x16).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from sdy_jax.lowering.emission.platforms import are_tpus
from sdy_jax.lowering.reshard.tiles import LANES, SUBLANES

LEAST_BYTES = 2**20
"""What is scattered as a matrix at least: half of the bytes of an all-reduce are saved, and a latency is lost where
XLA would have made one of several (scanned layers whose products have 256 KiB take 1.01 of the time so)."""

_MANY_ROWS = 2048
"""Rows from which on parts of a last dimension that fill no lanes are no slower as a dimension of their own."""


def as_rows(shape: Sequence[int], itemsize: int, dim: int, parts: int) -> bool:
    """Whether the devices are TPUs, where an array that is scattered in so many parts along a dimension is sent as rows
    of all that is behind it: neither the last dimension nor a part fills lanes, and rows make whole tiles."""
    part, behind = shape[dim] // parts, [size for size in shape[dim + 1 :] if size > 1]
    if not are_tpus() or len(behind) < 2 or math.prod(shape) * itemsize < LEAST_BYTES:
        return False
    return bool(behind[-1] % LANES and part % LANES) and part % SUBLANES == 0


def rows_between(shape: Sequence[int], dim: int) -> bool:
    """Whether the devices are TPUs, where an array that is scattered along a dimension is sent as rows of that and
    those behind it, but the last: there are dimensions before it, and rows that fill tiles."""
    return are_tpus() and 0 < dim < len(shape) - 2 and shape[-2] % SUBLANES == 0


def is_between_rows(shape: Sequence[int], itemsize: int, dim: int, parts: int) -> bool:
    """Whether the devices are TPUs, where an array that is scattered along its second last dimension is sent with that
    in front of the one before it, and rows of both: a part of it alone fills no tile, as of heads, and rows do."""
    if not are_tpus() or not 1 < dim == len(shape) - 2 or shape[dim - 1] % SUBLANES:
        return False
    part, rows = shape[dim] // parts, 4 * SUBLANES // itemsize  # two of two bytes share a sublane
    return part % SUBLANES != 0 and part * shape[dim - 1] % rows == 0


def parts_apart(shape: Sequence[int], itemsize: int, dim: int, parts: int) -> bool:
    """Whether the devices are TPUs, where an array that is scattered along its last dimension is sent with the parts as
    a dimension of their own: the lanes of a part are no even number of tiles."""
    if not are_tpus() or not 0 < dim == len(shape) - 1 or math.prod(shape) * itemsize < LEAST_BYTES:
        return False
    part, rows = shape[dim] // parts, math.prod(shape[:dim])
    if part % LANES:
        return rows >= _MANY_ROWS
    # XLA makes kernels of convolutions with another dimension in front: a resnet's step takes 1.02 so (libtpu 0.0.51).
    return len(shape) == 2 and part % (2 * LANES) != 0
