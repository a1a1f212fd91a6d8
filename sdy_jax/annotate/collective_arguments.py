"""The axes that calls of collectives list, as the collectives that they mean."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from sdy_jax.errors import ParseError, ShardingError
from sdy_jax.representation.axis_text import parse_axis
from sdy_jax.representation.mesh import Axes, AxisRef, quoted
from sdy_jax.representation.sdy_collectives import SdyCollective

AxisNameLists = Sequence[Sequence[str | AxisRef]]


def per_dimension(kind: str, lists: AxisNameLists) -> SdyCollective:
    return SdyCollective(kind, tuple(_axes(axes, kind) for axes in listed(lists, kind, '[["a"], []]')))


def flat(kind: str, axes: Sequence[str | AxisRef]) -> SdyCollective:
    return SdyCollective(kind, _axes(axes, kind))


def move(given: Any) -> tuple[Axes, int, int]:
    """A parameter of an all_to_all."""
    try:
        axes, source, target = given[0], operator.index(given[1]), operator.index(given[2])
    except (TypeError, LookupError):
        example = '(["a"], 0, 1): axes, and the dimensions from and to which they move'
        raise ShardingError(f"all_to_all: got {given!r} for a parameter, expected one such as {example}") from None
    return _axes(axes, "all_to_all"), source, target


def _axes(axes: Sequence[str | AxisRef], place: str) -> Axes:
    return tuple(_axis(axis, place) for axis in listed(axes, place, '["a"]'))


def listed(given: Any, place: str, example: str) -> Iterable[Any]:
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise ShardingError(f"{place}: got {given!r}, expected a list such as {example}")
    return given


def _axis(given: Any, place: str) -> AxisRef:
    """A name, or a part of an axis as `name:(pre)size`."""
    if isinstance(given, AxisRef):
        return given
    if not isinstance(given, str):
        raise ShardingError(f"{place}: got {given!r} for an axis, expected its name")
    name, part, digit = given.rpartition(":(")
    try:
        return parse_axis(f"{quoted(name)}:({digit}") if part else AxisRef(given)
    except ParseError:
        raise ShardingError(
            f'{place}: got {given!r} for an axis, expected a name, or a part such as "a:(1)2"'
        ) from None
