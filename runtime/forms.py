"""In which forms a compiler takes collectives and products best."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Forms:
    """The forms in which collectives and products are emitted for a kind of devices; without any they are as they are.

    Attributes:
        at_once: a gather or scatter along several dimensions as one, along a new first dimension.
        apart: what an all_to_all takes is computed for itself, not once for each of its parts.
        in_lanes: what is scattered, and the product that makes it, in shapes that fill the lanes of tiles.
        in_order: the largest array of a product as it lies, the others transposed: a compiler that keeps dimensions in
            the order in which they are written copies each array that is transposed.
    """

    at_once: bool = False
    apart: bool = False
    in_lanes: bool = False
    in_order: bool = False
