"""What declares an op of the `mesh` and `shard` dialects: its text, its parts, and what it must keep.

A format has these elements, separated by spaces:

* `$name`: an attribute or operand, spelled as its kind says (`kinds.KINDS`); a unit attribute is its bare name;
* `type($name)`: the type of an operand or result; `types(results)`: all results' types, between commas;
  `functional-type`: the types of all operands and results;
* `( ... )?`: elements that may be left out, recognized by the first, a word;
* `attr-dict`: further attributes in braces; anything else stands for itself.

A list of indices may hold values: `$root` with `dynamic="root_dynamic"` takes them for that group of operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

T = TypeVar("T")
SEGMENTS = "operandSegmentSizes"
REQUIRED: Any = type("Required", (), {"__repr__": lambda self: "REQUIRED"})()


@dataclass(frozen=True, slots=True)
class Attribute:
    """An attribute: its kind in `kinds.KINDS`, its value where absent, and the operands that fill its gaps."""

    name: str
    kind: str
    default: Any = REQUIRED
    dynamic: str | None = None


@dataclass(frozen=True, slots=True)
class Operand:
    """A group of operands. `type` is what forms without a functional type leave out: `result` is the result's type."""

    name: str
    type: str = "result"
    variadic: bool = False


@dataclass(frozen=True, slots=True)
class Declaration:
    """An op: its text, its parts, and what it must keep.

    `results` is their number, None where it varies, and `result` their type: `tensor`, `index` or `sharding`. `rules`
    are names in the table of the verifier, in the order in which they are checked. Attributes in `unprinted` are read
    from the pretty form but never printed in it.
    """

    dialect: str
    name: str
    format: str
    operands: tuple[Operand, ...] = ()
    attributes: tuple[Attribute, ...] = ()
    results: int | None = 1
    result: str = "tensor"
    pure: bool = True
    communicates: bool = False
    rules: tuple[str, ...] = ()
    unprinted: tuple[str, ...] = ()

    @property
    def full_name(self) -> str:
        """As in text: `mesh.all_gather`."""
        return f"{self.dialect}.{self.name}"

    @property
    def segmented(self) -> bool:
        """Whether `operandSegmentSizes` says where a group of operands ends."""
        return sum(operand.variadic for operand in self.operands) > 1

    @property
    def own(self) -> frozenset[str]:
        """The names of the attributes that belong to the op."""
        names = {attribute.name for attribute in self.attributes}
        return frozenset(names | {SEGMENTS} if self.segmented else names)

    def groups(self, operands: Sequence[T], segments: Sequence[int] | None) -> dict[str, Sequence[T]] | None:
        """The operands of each group; None if there are not as many as the op takes. Only some need `segments`."""
        rest = len(operands) - sum(not operand.variadic for operand in self.operands)
        sizes = (segments or ()) if self.segmented else [rest if o.variadic else 1 for o in self.operands]
        fits = len(sizes) == len(self.operands) and sum(sizes) == len(operands) and min(sizes, default=0) >= 0
        if not fits or not all(o.variadic or size == 1 for o, size in zip(self.operands, sizes, strict=True)):
            return None
        ends = accumulate(sizes)
        return {o.name: operands[end - n : end] for o, n, end in zip(self.operands, sizes, ends, strict=True)}
