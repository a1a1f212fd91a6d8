"""Notes on values and ops that could not be sharded, with their source lines."""

from __future__ import annotations

from dataclasses import dataclass

from jax.extend.mlir import ir

from sdy_jax.ir.locations import is_line, place_of, short_source


@dataclass(frozen=True, slots=True)
class Note:
    """A value or op that could not be sharded: the message, the op, source line, library line and name scope."""

    op: str
    source: str
    message: str
    library: str = ""
    scope: str = ""

    @classmethod
    def at(cls, op: str, location: ir.Location, message: str) -> Note:
        place = place_of(location)
        return cls(op, place.line, message, place.library, place.scope)

    def is_about(self, value: str) -> bool:
        """Whether it speaks of an argument by its path, or of what a source line (`model.py:42`) does."""
        return f"`{value}`" in self.message or is_line(self.source, value) or is_line(self.library, value)

    def __str__(self) -> str:
        line = f"{self.source} ({short_source(self.library)})" if self.library else self.source
        where = f"{self.op} in {self.scope}" if self.scope else self.op
        return f"{line}: {where}: {self.message}"
