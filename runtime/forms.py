"""In which forms a compiler takes collectives, and some other ops, best."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Forms:
    """The forms in which programs are emitted for a kind of devices; without any all is emitted as it is.

    Attributes:
        at_once: a gather or scatter along several dimensions as one, along a new first dimension.
        apart: what an all_to_all takes is computed for itself, not once for each of its parts.
        in_lanes: what is scattered, and the product that makes it, in shapes that fill the lanes of tiles.
        in_halves: elements of 64 bits lie in two registers; reductions that are not compiled so are made of moves.
        in_rows: what is transformed lies with its last dimensions in memory.
        looked_up_apart: rows that are looked up by an array of indices are an array of their own.
        in_order: the largest array of a product as it lies, the others transposed: a compiler that keeps dimensions in
            the order in which they are written copies each array that is transposed.
        barriers_last: the compiler's own barrier makes an array one that is not taken for what it was before.
    """

    at_once: bool = False
    apart: bool = False
    in_lanes: bool = False
    in_halves: bool = False
    in_rows: bool = False
    looked_up_apart: bool = False
    in_order: bool = False
    barriers_last: bool = False
