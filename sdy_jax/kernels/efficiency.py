"""The share of a chip's peak that kernels reach, by what they do.

It is of arithmetic alone: a kernel that waits for its memory takes as long as that (`StatedWork`). The peak is that of
`lowering/targets`, at which products of the compiler's own are priced.
"""

from __future__ import annotations

ATTENTION = 0.6
"""Products with exponentials between them. Given (the specification of kernels): where no figure of the very kernel is
published or measured; FlashAttention-3 is published at 0.75 on an H100."""

ATTENTION_BY_TRITON = 0.35
"""Likewise by Triton. Published (Shah et al. 2024, FlashAttention-3): what FlashAttention-2, of the same form, reaches
on an H100."""

PRODUCTS = 0.986
"""Products alone, as grouped ones. Published (Gale et al. 2022, MegaBlocks): of the throughput of the vendor's own
products, with blocks of 128 x 128."""

NO_PRODUCTS = 1.0
"""Anything else. Given: it waits for memory."""


def efficiency_of(has_products: bool, has_transcendentals: bool, compiler: str) -> float:
    """The share of peak of a kernel that does such things; `compiler`: as `compiler_of` says."""
    if not has_products:
        return NO_PRODUCTS
    if not has_transcendentals:
        return PRODUCTS
    return ATTENTION_BY_TRITON if compiler == "triton" else ATTENTION
