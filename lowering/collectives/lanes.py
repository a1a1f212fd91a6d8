"""Shapes in which what is scattered fills the lanes of tiles, and is sent as it is made.

An array lies in tiles, with one of its dimensions in their 128 lanes, and a scatter sends it with the scattered
dimension before the others. The gradient of a weight with heads, such as [512, 3, 8, 64] that is scattered along its
first dimension, would fill half of the lanes with its last one. So XLA for TPUs has a product make it with the first
dimension in lanes, and copies all of it before it is sent; or it sends more: an all-reduce of [512, 8, 64], of which
each device keeps a part. As matrices, [512, 1536] and [512, 512], both are made as they are sent. On v5e that is 55 us,
not 76, for the first one with its product and the update of a weight (libtpu 0.0.52, 2026-11).

It scatters the first dimension, as it is. Of a sum that is scattered along another one it often makes an all-reduce, of
which each device keeps a part: where parts are no whole tiles, or where it puts another dimension in lanes than the
last. With a part, and all that is behind it, as one last dimension it never does: it sends halves of a part around both
ways of a ring, in whole lanes, so a part has to be a number of tiles, of two bytes an even one. Where it is not, the
parts are a dimension of their own. In 8 parts, with the product that makes it, bfloat16[64, 8, 128, 4] along its second
dimension takes 20.6 us, and 26.5 as it is; [4096, 1024] along its last one 181, not 274; [16, 32, 8, 64] along its
third 22.5, not 37. What has up to four rows in front stays a scatter with the parts a dimension of their own and
nothing joined: float32[4, 64, 64] takes 10.8 us so, and 16.1 with all behind as one. Where the last dimension fills
lanes, and rows of it the tiles of a part, rows are not moved: [64, 8, 16, 128] along its second one takes 25 us so, and
39 with all behind it as one (`scripts/bench_collectives`, libtpu 0.0.51, v5e:4x4).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from sdy_jax.lowering.targets.tiles import LANES, SUBLANES
from sdy_jax.runtime.forms import Forms

LEAST_BYTES = 2**20
"""What is scattered as a matrix at least: half of the bytes of an all-reduce are saved, and a latency is lost where XLA
would have made one of several. Measured (2026-11, by the compiler for v5e): scanned layers whose products have 256 KiB
take 1.01 of the time so."""

LEAST_MOVED = 2**16
"""What is sent in another form at least. Measured (2026-11, libtpu 0.0.51, v5e:2x4, `scripts/bench_collectives`): with
the product that makes it, a sum of 64 to 512 KiB takes 0.6 to 1.1 of its time as it is, and half of the bytes where
that is an all-reduce; one of 4 to 8 KiB 1.0 to 1.8."""

_COMPACT = SUBLANES // 2
"""Rows that lie in tiles of fewer sublanes. Measured (2026-11, as above): XLA scatters matrices of 6 rows along their
columns, and all-reduces those of 4."""


def as_rows(shape: Sequence[int], itemsize: int, dim: int, parts: int, forms: Forms) -> bool:
    """Whether an array that is scattered in so many parts along a dimension is sent as rows of all that is behind it,
    which is a form where there are lanes: the last dimension fills none, a part is no number of them, and rows make
    tiles."""
    part, behind = shape[dim] // parts, [size for size in shape[dim + 1 :] if size > 1]
    if not forms.in_lanes or len(behind) < 2 or math.prod(shape) * itemsize < LEAST_BYTES:
        return False
    return bool(behind[-1] % LANES and part % _lanes(itemsize)) and part % SUBLANES == 0


class Sent(NamedTuple):
    """How an array is scattered: in which shape, along which dimension, and whether that is in parts (`is_tiled`), or
    has one element per part."""

    shape: tuple[int, ...]
    dim: int
    is_tiled: bool = True


def scattered_as(shape: Sequence[int], itemsize: int, dim: int, parts: int, forms: Forms) -> Sent:
    """How an array without dimensions of size 1 is sent that is scattered in so many parts along a dimension."""
    as_it_is = Sent(tuple(shape), dim)
    if not forms.in_lanes:
        return as_it_is
    if as_rows(shape, itemsize, dim, parts, forms):
        return Sent((*shape[: dim + 1], math.prod(shape[dim + 1 :])), dim)
    if dim == 0:
        return as_it_is
    before, rows = math.prod(shape[:dim]), math.prod(shape[dim:-1])
    if dim < len(shape) - 1 and shape[-1] % LANES == 0 and rows // parts % _packed(itemsize) == 0:
        return Sent((before, rows, shape[-1]), 1)
    part = math.prod(shape[dim:]) // parts
    # XLA makes kernels of convolutions with another dimension in front: a resnet's step takes 1.02 so (libtpu 0.0.51).
    is_kernel = dim == len(shape) - 1 > 1
    if is_kernel or math.prod(shape) * itemsize < LEAST_MOVED:
        return as_it_is
    if before <= _COMPACT:
        return Sent((*shape[:dim], parts, shape[dim] // parts, *shape[dim + 1 :]), dim, is_tiled=False)
    if part % _lanes(itemsize) == 0:
        return Sent((before, parts * part), 1)
    return Sent((before, parts, part), 1, is_tiled=False)


def _lanes(itemsize: int) -> int:
    """The lanes of which parts are made: those of two bytes fill them in pairs."""
    return max(4 // itemsize, 1) * LANES


def _packed(itemsize: int) -> int:
    """The rows of a tile: elements of two bytes share a sublane."""
    return 4 * SUBLANES // itemsize
