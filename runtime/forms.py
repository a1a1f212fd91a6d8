"""In which forms a compiler takes collectives, and some other ops, best."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OpForms:
    """The forms in which other ops are emitted.

    Attributes:
        in_rows: what is transformed lies with its last dimensions in memory.
        looked_up_apart: rows that are looked up by an array of indices are an array of their own.
        in_order: the largest array of a product as it lies, the others transposed: a compiler that keeps dimensions in
            the order in which they are written copies each array that is transposed.
        barriers_last: the compiler's own barrier makes an array one that is not taken for what it was before.
    """

    in_rows: bool = False
    looked_up_apart: bool = False
    in_order: bool = False
    barriers_last: bool = False


@dataclass(frozen=True, slots=True)
class Forms:
    """The forms in which collectives are emitted for a kind of devices; without any they are emitted as they are.

    Attributes:
        of_ops: those of ops that communicate nothing.
        at_once: a gather or scatter along several dimensions as one, along a new first dimension.
        apart: what an all_to_all takes is computed for itself, not once for each of its parts.
        in_lanes: what is scattered, and the product that makes it, in shapes that fill the lanes of tiles.
        in_halves: elements of 64 bits lie in two registers; reductions that are not compiled so are made of moves.
    """

    of_ops: OpForms = OpForms()
    at_once: bool = False
    apart: bool = False
    in_lanes: bool = False
    in_halves: bool = False
