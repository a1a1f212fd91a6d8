"""Places of ops as plain data: lines with their text."""

from __future__ import annotations

import linecache
from functools import cache
from itertools import takewhile

from jax.extend.mlir import ir

from sdy_jax.ir.locations import place_of, short_source, user_frames
from sdy_jax.plan.record.border import RecordedFrame, RecordedPlace


class Places:
    """The places of a function's ops. Frames around the function itself, of who calls it, are left out.

    Args:
        name: of the function.
    """

    def __init__(self, name: str):
        self._name = name.partition(" (")[0].rpartition(".")[2]
        self._known: dict[ir.Attribute, RecordedPlace] = {}
        self._frame = cache(frame_of)

    def of(self, location: ir.Location) -> RecordedPlace:
        """The place that a location says."""
        known = self._known.get(location.attr)  # hashed by its address; to print it takes ten times as long
        if known is None:
            known = self._known[location.attr] = self._read(location)
        return known

    def _read(self, location: ir.Location) -> RecordedPlace:
        place = place_of(location)
        inner, *callers = self._inside(user_frames(location)) or [self._frame(place.line)]
        library = short_source(place.library) if place.library else ""
        said = place.scope, place.primitive, place.backward, tuple(callers)
        return RecordedPlace(inner.line, inner.text, inner.function, library, *said)

    def _inside(self, frames: tuple[tuple[str, str], ...]) -> list[RecordedFrame]:
        own = [number for number, (_, function) in enumerate(frames) if function == self._name]
        if own:
            return [self._frame(*frame) for frame in frames[: own[-1] + 1]]
        inner = takewhile(lambda frame: frame[1] != "<module>", frames[1:])
        return [self._frame(*frame) for frame in (*frames[:1], *inner)]


def frame_of(line: str, function: str = "") -> RecordedFrame:
    """A line with its text, as far as the file is there."""
    file, _, number = line.rpartition(":")
    text = linecache.getline(file, int(number)).strip() if file and number.isdecimal() else ""
    return RecordedFrame(short_source(line), text, function)
