"""What devices of one kind have in common: the contract of a module for an accelerator."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from sdy_jax.lowering.targets.compiler import Compiler
from sdy_jax.lowering.targets.machine import Machine
from sdy_jax.lowering.targets.tiles import Copies, Tiles
from sdy_jax.runtime.forms import Forms

FLOP = 1e-3
"""The bytes that are worth to be sent to save an operation, where costs are bytes. Published (of accelerators: 400
TFLOP/s beside 450 GB/s): with more, bytes are sent to save work; with none, equal bytes would repeat it."""

_FLOAT32 = 4
"""Given: bytes of an element."""


def _no_copies(memory: float, launch: float) -> Copies:
    return Copies()


@dataclass(frozen=True, slots=True)
class Arrays:
    """How arrays lie in a device's memory.

    Attributes:
        tiles: those in which they lie; None where they lie densely.
        rounded: the bytes that an element of a float32 array has that products of open precision take; 0 where they
            round nothing. What nothing else reads is kept, and sent, so.
        copies: what a device rearranges of what it sends and receives, where its memory takes so many seconds for a
            byte, and an op so many beside.
    """

    tiles: Tiles | None = None
    rounded: int = 0
    copies: Callable[[float, float], Copies] = _no_copies

    @property
    def rounds(self) -> bool:
        """Whether products round their operands."""
        return self.rounded > 0

    @property
    def moved(self) -> float:
        """The share of its bytes that a float32 value has that is moved for products alone."""
        return self.rounded / _FLOAT32 if self.rounds else 1.0

    def bytes(self, shape: Sequence[int], itemsize: float, is_rounded: bool = False) -> float:
        """The bytes of a block. `is_rounded`: products alone take it.

        >>> Arrays(Tiles(), rounded=2).bytes((512, 64), 4, is_rounded=True)
        65536
        """
        elements = math.prod(shape) if self.tiles is None else self.tiles.elements(shape)
        return elements * (self.rounded if is_rounded and self.rounds else itemsize)


@dataclass(frozen=True, slots=True)
class Family:
    """A family of devices.

    Attributes:
        name: the platform, as jax names it.
        machines: those of which rates are published, by name.
        compiler: what their compiler does.
        arrays: how arrays lie in their memory.
        forms: in which forms their compiler takes collectives best.
        flop: the bytes that are worth to be sent to save an operation, where costs are bytes.
        usual: the machine that is meant where only the family is said; none for one whose rates are not published.
    """

    name: str
    machines: Mapping[str, Machine] = field(default_factory=dict, hash=False)
    compiler: Compiler = field(default_factory=Compiler)
    arrays: Arrays = Arrays()
    forms: Forms = field(default_factory=Forms)
    flop: float = FLOP
    usual: str = ""
