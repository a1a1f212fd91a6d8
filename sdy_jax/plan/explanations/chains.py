"""The answer of `plan.why`: chains of links, from the axis of a value back to its annotation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sdy_jax.lowering.interface.notes import Note
from sdy_jax.lowering.interface.outcomes import InParts, NotHeld
from sdy_jax.plan.explanations.layout_reason import LayoutReason
from sdy_jax.representation.type_text import bytes_text, count_text, type_text


@dataclass(frozen=True, slots=True)
class Link:
    """One step on the way from an axis back to its annotation.

    Attributes:
        kind: "propagation", "type" (derived by JAX's rules, on Explicit axes), "group", "export", "annotation", or
            "unknown" where the way cannot be followed.
        axis, dim, value, type: where the axis was before this step: the value, as the user would call it, its type,
            and its dimension.
        text: the step in words.
        op, line, function: MLIR's name of the op, its source line and function; empty where there is none.
        level, priority: the op priority and the user priority at which the axis spread; None where it did not.
    """

    kind: str
    axis: str
    dim: int
    value: str
    type: str
    text: str
    op: str = ""
    line: str = ""
    function: str = ""
    level: int | None = None
    priority: int | None = None

    def __str__(self) -> str:
        return f"<- {self.text}"


@dataclass(frozen=True, slots=True)
class Chain:
    """The links of one axis of one dimension of a value, the annotation last."""

    value: str
    type: str
    axis: str
    dim: int
    links: tuple[Link, ...]

    def __str__(self) -> str:
        return "\n".join([f"axis '{self.axis}' on dim {self.dim}", *(f"  {link}" for link in self.links)])


@dataclass(frozen=True)
class Why:
    """The answer of `plan.why`: iterating over it gives all links; printing it, the chains per value.

    `types` has the values asked for, with their types; `chains` one chain per axis of each. `instead` says which of
    them have another layout than propagation gave them, and what that saves and costs. `notes` are the plan's on these
    values, or on the line asked for: which ops gather them, and what that sends. `again`: those of them that are
    computed again, so that they need not be held between a forward and a backward pass; `blocked`: those that are
    computed part by part.
    """

    types: tuple[tuple[str, str], ...]
    chains: tuple[Chain, ...]
    instead: tuple[LayoutReason, ...] = ()
    notes: tuple[Note, ...] = ()
    again: tuple[NotHeld, ...] = ()
    blocked: tuple[InParts, ...] = ()

    def __iter__(self) -> Iterator[Link]:
        return (link for chain in self.chains for link in chain.links)

    def __str__(self) -> str:
        texts = [*(self._value(value, type_) for value, type_ in self.types), *map(str, self.instead)]
        return "\n\n".join([*texts, *_computed_again(self.again), *map(_in_parts, self.blocked), *map(str, self.notes)])

    def _value(self, value: str, type_: str) -> str:
        chains = [chain for chain in self.chains if (chain.value, chain.type) == (value, type_)]
        if not chains:
            return f"{value}  {type_}\n  no axis splits it; `why_not` says what keeps an axis away"
        return "\n".join([f"{value}  {type_}", *(_indented(str(chain)) for chain in chains)])


def _computed_again(values: Sequence[NotHeld]) -> Iterator[str]:
    """What is not held, those of one type together."""
    sizes: dict[str, list[float]] = {}
    for value in values:
        sizes.setdefault(type_text(value.dtype, value.shape, None), []).append(value.bytes)
    for type_, found in sizes.items():
        count, less = count_text(len(found)), bytes_text(sum(found))
        yield f"{type_}{count}: not held for the backward pass, but computed again; {less} less on a device"


def _in_parts(value: InParts) -> str:
    held, type_ = bytes_text(value.bytes), type_text(value.dtype, value.shape, None)
    return (
        f"{type_}: computed in a loop over {value.parts} parts of dimension {value.dim}, with what is connected "
        f"with it; all parts would take {held} on a device"
    )


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
