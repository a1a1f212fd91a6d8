"""The origin of an op as the user knows it: jax's name of the primitive, the source line, the function."""

from __future__ import annotations

from dataclasses import dataclass

from sdy_jax.ir.graph import Op
from sdy_jax.ir.locations import place_of, short_source


@dataclass(frozen=True, slots=True)
class SourceSite:
    """An op's name and place in the source.

    `name` is jax's name of the primitive where the location has one, else MLIR's name of the op; `line` is
    `file.py:12`, or MLIR's location where there is no file; `library` is the line of the library that made the op for
    that line, as flax does; both it and `function` may be empty.
    """

    op: str
    name: str
    line: str
    function: str = ""
    backward: bool = False
    library: str = ""

    def __str__(self) -> str:
        line = f"{self.line} ({self.library})" if self.library else self.line
        where = f"{line} in {self.function}" if self.function else line
        return f"{self.name} at {where}{' (backward pass)' if self.backward else ''}"


def site_of(op: Op) -> SourceSite:
    """Reads an op's location."""
    place = place_of(op.mlir.location)
    line, library = short_source(place.line), short_source(place.library)
    return SourceSite(op.name, place.primitive or op.name, line, place.function, place.backward, library)
