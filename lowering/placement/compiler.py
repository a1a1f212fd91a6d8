"""What compilers do that decides which arrays a device holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Compiler:
    """What a kind of device's compiler does.

    Attributes:
        products_fuse: products and convolutions compute their operands as they read them, as on TPUs, instead of
            reading them from memory. There they round them, too, arrays lie in tiles, and independent all_reduces run
            as one.
        copies_gathered: collectives join blocks along the major dimension only, as on GPUs: what is gathered along
            another one is transposed before a loop reads it.
    """

    products_fuse: bool = False
    copies_gathered: bool = False
