"""In which forms a compiler takes collectives best."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Forms:
    """The forms in which collectives are emitted for a kind of devices; without any they are emitted as they are.

    Attributes:
        at_once: a gather or scatter along several dimensions as one, along a new first dimension.
        apart: what an all_to_all takes is computed for itself, not once for each of its parts.
        in_lanes: what is scattered, and the product that makes it, in shapes that fill the lanes of tiles.
        in_rows: what is transformed lies with its last dimensions in memory.
        looked_up_apart: rows that are looked up by an array of indices are an array of their own.
        in_halves: elements of 64 bits lie in two registers; reductions that are not compiled so are made of moves.
        barriers_last: the compiler's own barrier makes an array one that is not taken for what it was before.
    """

    at_once: bool = False
    apart: bool = False
    in_lanes: bool = False
    in_rows: bool = False
    looked_up_apart: bool = False
    in_halves: bool = False
    barriers_last: bool = False
