"""What the collectives and the work of a step took when it ran: the file that `Analysis.save` writes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from sdy_jax.files.whole import explained, write_whole
from sdy_jax.lowering.targets.measured_files import held_in, number_of, parsed

VERSION = 1
"""Of the file."""


@dataclass(frozen=True, slots=True)
class MeasuredSends:
    """The collectives of one kind along the same axes in a call.

    Attributes:
        kind, axes: as in SDY; axes as texts, major to minor.
        times: their executions.
        wire_bytes: what a device sends in all of them.
        seconds: what they took.
    """

    kind: str
    axes: tuple[str, ...]
    times: int
    wire_bytes: float
    seconds: float


@dataclass(frozen=True, slots=True)
class StepProfile:
    """What was measured of a step.

    Attributes:
        device_kind: of the devices.
        axes: the mesh's, with their sizes.
        sends: of its collectives that ran by themselves.
        work: the seconds of a device's own work.
        estimated_work: the same by the cost model of its plan, in its unit.
        flop, memory: what that model took an operation, and a byte of memory, to cost.
        name: of the step, or its file.
    """

    device_kind: str
    axes: Mapping[str, int]
    sends: tuple[MeasuredSends, ...]
    work: float
    estimated_work: float
    flop: float
    memory: float
    name: str = ""

    @property
    def profile(self) -> StepProfile:
        """Itself."""
        return self

    def text(self) -> str:
        """The file's."""
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def of_text(cls, text: str, name: str) -> StepProfile:
        """
        Raises:
            ValueError: the text is none of a file of this version.
        """
        found = held_in(text, VERSION)
        axes = {str(axis): int(size) for axis, size in found["axes"].items()}
        work, estimated, flop, memory = (_number(found[key]) for key in ("work", "estimated_work", "flop", "memory"))
        sends = tuple(map(_sends, found["sends"]))
        return cls(str(found["device_kind"]), axes, sends, work, estimated, flop, memory, name)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file as a whole or not at all.

        Raises:
            SdyError: it cannot be written.
        """
        with explained(f"the profile cannot be written to {path}", "give another path"):
            write_whole(Path(path), self.text())


class Profiled(Protocol):
    """What has the profile of a step, as `Analysis` has."""

    @property
    def profile(self) -> StepProfile: ...


def profile_of(given: Profiled | str | os.PathLike[str]) -> StepProfile:
    """The profile that is given, or read from a file.

    Raises:
        SdyError: the file cannot be read, or is none of a profile.
    """
    if not isinstance(given, (str, os.PathLike)):
        return given.profile
    with explained(f"the profile in {given} cannot be read", "give the path of a file that Analysis.save wrote"):
        text = Path(given).read_text(encoding="utf-8", errors="replace")
    return parsed(
        lambda: StepProfile.of_text(text, os.path.basename(given)),
        f"{given} is no profile",
        "write it again, by plan.analyze(...).save(path)",
    )


def _sends(found: Mapping[str, Any]) -> MeasuredSends:
    numbers = _number(found["wire_bytes"]), _number(found["seconds"])
    return MeasuredSends(str(found["kind"]), tuple(map(str, found["axes"])), int(found["times"]), *numbers)


def _number(value: Any) -> float:
    return number_of(value, "measurement")
