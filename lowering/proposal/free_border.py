"""Arguments and results of a program whose layouts are left to the planner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from sdy_jax.representation.sharding import TensorSharding


@dataclass(frozen=True, slots=True)
class FreeBorder:
    """Which arguments and results of the main function may have any layout.

    Attributes:
        arguments, results: their numbers.
        carried: arguments that come back as results, such as the weights of a training step: the layout in which they
            go in is that in which they come out.
    """

    arguments: frozenset[int] = frozenset()
    results: frozenset[int] = frozenset()
    carried: Mapping[int, int] = field(default_factory=dict)


class FreeEnd(NamedTuple):
    """The node of an argument, of a result, or of both."""

    node: int
    argument: int | None
    result: int | None


@dataclass(frozen=True, slots=True)
class BorderLayouts:
    """The layouts that the planner chose for arguments and results, by number."""

    arguments: Mapping[int, TensorSharding] = field(default_factory=dict)
    results: Mapping[int, TensorSharding] = field(default_factory=dict)
