"""Modules of a program that were made when its source had other lines, with those that it has now."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property

from jax.extend.mlir import ir

from sdy_jax.ir.locations import place_of
from sdy_jax.ir.operations import pre_order
from sdy_jax.plan.border.planned_with import location_of_return
from sdy_jax.plan.cache.entry import BrokenEntry


class Relocation:
    """From the locations of ops in modules to those of the same ops in others.

    Args:
        pairs: modules before and now, whose ops are the same.
        sources: the lines before and now at which shardings of arguments and results are given.
        context: of all these modules.

    Raises:
        BrokenEntry: they have other ops.
    """

    def __init__(
        self, pairs: Iterable[tuple[ir.Operation, ir.Operation]], sources: tuple[str, str], context: ir.Context
    ):
        before, now = (location_of_return(source, context) for source in sources)
        self._both = [(old.location, new.location) for pair in pairs for old, new in _ops(*pair)]
        self._both += [(before, now)] if before is not None and now is not None else []
        self._now, self._sources = {old.attr: new for old, new in self._both}, dict([sources])

    def of(self, location: ir.Location) -> ir.Location:
        """Where an op is now that was at a location."""
        return self._now.get(location.attr, location)

    def move(self, module: ir.Operation) -> None:
        """Writes the locations of now into a module."""
        for op in pre_order(module):
            op.location = self.of(op.location)

    def line(self, before: str) -> str:
        """The line that a line of the source is now."""
        return self._sources.get(before) or self._lines.get(before, before)

    @cached_property
    def _lines(self) -> Mapping[str, str]:
        """From lines of the source to those of now."""
        return {place_of(old).line: place_of(new).line for old, new in self._both}


def _ops(before: ir.Operation, now: ir.Operation) -> Iterator[tuple[ir.Operation, ir.Operation]]:
    both = pre_order(before), pre_order(now)
    if [op.name for op in both[0]] != [op.name for op in both[1]]:
        raise BrokenEntry("it is of a program of other ops")
    yield from zip(*both, strict=True)
