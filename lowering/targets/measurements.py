"""Measured rates: the calibration of a machine, the profile of a step that ran, and the files that keep them."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from numpy.typing import NDArray

from sdy_jax.base.errors import SdyError
from sdy_jax.base.files import explained, write_whole
from sdy_jax.lowering.targets.rates import Link, rate, wire_bytes
from sdy_jax.runtime.devices import CollectiveTime, check_runs, collective_times, elementwise_time, product_time

# What files of measurements have in common: a version, numbers that can be measured, and how they are refused.

T = TypeVar("T")


def held_in(text: str, version: int) -> dict[str, Any]:
    """What a file of a version holds.

    Raises:
        ValueError: the text is none of a file of this version.
    """
    found = json.loads(text)
    if not isinstance(found, dict) or found.get("version") != version:
        raise ValueError(f"version {found.get('version') if isinstance(found, dict) else None!r}, not {version}")
    return found


def number_of(value: Any, what: str) -> float:
    """A number that is finite and not negative.

    Raises:
        ValueError: it is none; `what` says what it is not.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{value!r} is no {what}")
    return float(value)


def parsed(parse: Callable[[], T], what: str, fix: str) -> T:
    """What a file holds.

    Args:
        parse: reads its text.
        what: what it should be: "x.json is no calibration".
        fix: what to do where it is not.

    Raises:
        SdyError: it is not.
    """
    try:
        return parse()
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        why = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise SdyError(f"{what} of this version: {why}; to fix: {fix}") from None


# The rates of a machine as they were measured: the fit, and the file in which they are kept.

VERSION = 1
"""Of the file. A file of another version is measured anew."""

COLLECTIVE_SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 22)
PRODUCT_SIZE = 1024
MEMORY_SIZE = 1 << 25
"""What is measured. Guessed: collectives from where latency is all to where bytes are, a product that fills a device,
more memory than caches hold; smaller ones are measured in noise, larger ones take seconds on CPUs."""

MOST_ROWS, MOST_MEMORY = 1 << 13, 1 << 30
"""Up to which both are doubled on fast devices. Guessed: a GPU of twice the rates of today's takes a millisecond."""

_LONG = 20
"""How many times what any op takes is long beside it. Guessed: its errors are then a twentieth. On GPUs a
product of 1024 rows takes as long as an op of four bytes."""

_SHORTEST = 1e-9
"""Seconds that a time weighs as at least. Guessed: clocks show no less, and nothing else divides by zero."""

_LEAST = 1e-16
"""Seconds per byte or operation that no device is below: noise can make them nothing. Published (of machines in
`targets/`): the fastest takes 9e-16 for a multiplication with an addition, 1e-13 for a byte."""


@dataclass(frozen=True, slots=True)
class Probes:
    """What is measured: bytes of collectives, rows of square matrices, bytes of element-wise ops."""

    collectives: tuple[int, ...] = COLLECTIVE_SIZES
    product: int = PRODUCT_SIZE
    memory: int = MEMORY_SIZE


@dataclass(frozen=True, slots=True)
class AxisRates:
    """Of a mesh axis: bytes per second, seconds per hop, as if a collective went along all devices in one direction,
    and seconds per collective."""

    size: int
    bandwidth: float
    latency: float
    start: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured of a mesh, in seconds per operation, byte of memory, and op."""

    device_kind: str
    axes: Mapping[str, AxisRates]
    flop: float
    memory: float
    launch: float

    @classmethod
    def measured(cls, mesh: jax.sharding.Mesh, sizes: Probes, product_launch: float = 0.0) -> Calibration:
        """Measures a mesh; takes some seconds, on slow machines a minute. `product_launch`: the seconds that a product
        takes beside its work, where that is known to be more than for any op.

        Raises:
            SdyError: the devices are only described.
        """
        check_runs(mesh)
        axes = fitted(mesh.shape, list(collective_times(mesh, sizes.collectives)))
        dtype = np.dtype(np.float32) if mesh.devices.flat[0].platform == "cpu" else jnp.dtype(jnp.bfloat16)
        launch = elementwise_time(mesh, 4)
        beside = max(launch, product_launch)
        rows, seconds = _long_enough(lambda n: product_time(mesh, n, dtype), sizes.product, MOST_ROWS, beside)
        flop = max(seconds - beside, 0.0) / rows**3
        size, seconds = _long_enough(lambda n: elementwise_time(mesh, n), sizes.memory, MOST_MEMORY, launch)
        memory = max(seconds - launch, 0.0) / (2 * size)
        return cls(mesh.devices.flat[0].device_kind, axes, max(flop, _LEAST), max(memory, _LEAST), launch)

    def text(self) -> str:
        """The file's."""
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def of_text(cls, text: str) -> Calibration:
        """
        Raises:
            ValueError: the text is none of a file of this version.
        """
        found = held_in(text, VERSION)
        axes = {name: AxisRates(int(of["size"]), *map(_rate_of, _of(of))) for name, of in found["axes"].items()}
        return cls(str(found["device_kind"]), axes, *(_rate_of(found[name]) for name in ("flop", "memory", "launch")))

    def numbers(self) -> list[float]:
        """All rates, those of the axes in their order."""
        return [self.flop, self.memory, self.launch, *(n for axis in self.axes.values() for n in _of(asdict(axis)))]

    def with_numbers(self, numbers: Sequence[float]) -> Calibration:
        """The same axes with other rates, in the order of `numbers`."""
        flop, memory, launch, *rest = numbers
        axes = {
            name: AxisRates(axis.size, *rest[3 * i : 3 * i + 3]) for i, (name, axis) in enumerate(self.axes.items())
        }
        return Calibration(self.device_kind, axes, flop, memory, launch)


def _long_enough(seconds_of: Callable[[int], float], size: int, most: int, launch: float) -> tuple[int, float]:
    """A size, doubled until what is measured takes long beside what any op takes, and its seconds."""
    while (seconds := seconds_of(size)) < _LONG * launch and 2 * size <= most:
        size *= 2
    return size, seconds


def _of(axis: Mapping[str, Any]) -> tuple[Any, ...]:
    return axis["bandwidth"], axis["latency"], axis["start"]


def _rate_of(value: Any) -> float:
    return number_of(value, "rate")


def fitted(sizes: Mapping[str, int], times: Iterable[CollectiveTime]) -> dict[str, AxisRates]:
    """The rates of each axis, by least squares of relative errors, none of them negative.

    Axes of one device, along which nothing is sent, are as fast as the fastest.
    """
    of_axis: dict[str, list[CollectiveTime]] = {}
    for time in times:
        of_axis.setdefault(time.axis, []).append(time)
    found = {name: _fitted(sizes[name], of_axis[name]) for name in sizes if name in of_axis}
    fastest = max([axis.bandwidth for axis in found.values()], default=1 / _LEAST)
    return {name: found.get(name, AxisRates(count, fastest, 0.0, 0.0)) for name, count in sizes.items()}


def _fitted(count: int, times: Sequence[CollectiveTime]) -> AxisRates:
    """Seconds of start, of a hop and of a byte, whose sums are nearest to the times."""
    of_hop = Link(count, hop=1.0)
    rows = [
        (1.0, rate(time.kind, [of_hop]).fixed, wire_bytes(time.kind, count, time.bytes, time.bytes)) for time in times
    ]
    weights = np.array([1 / max(time.seconds, _SHORTEST) for time in times])
    matrix = np.array(rows) * weights[:, None]
    scale = np.abs(matrix).max(axis=0)
    start, hop, byte = _least_squares(matrix / scale)
    return AxisRates(
        count, float(scale[2] / max(byte, _LEAST * scale[2])), float(hop / scale[1]), float(start / scale[0])
    )


def _least_squares(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """The factors, none negative, by which the columns sum up to rows nearest to 1: of every choice of columns that are
    not left out."""
    found = []
    for chosen in product((True, False), repeat=matrix.shape[1]):
        factors = np.zeros(matrix.shape[1])
        factors[list(chosen)] = np.linalg.lstsq(matrix[:, chosen], np.ones(len(matrix)))[0]
        if (factors >= 0).all():
            found.append(factors)
    return min(found, key=lambda factors: float(np.square(matrix @ factors - 1).sum()))


# --- files --------------------------------------------------------------------------------------------------------


def default_path(mesh: jax.sharding.Mesh) -> Path:
    """Where the calibration of a mesh is kept, by its kind of devices, processes, and axes.

    In `$SDY_JAX_CACHE`, else in the user's directory for caches: `$XDG_CACHE_HOME` or `~/.cache`, on macOS
    `~/Library/Caches`, on Windows `%LOCALAPPDATA%`.
    """
    axes = "_".join(f"{name}{size}" for name, size in mesh.shape.items())
    name = f"{mesh.devices.flat[0].device_kind}_{jax.process_count()}p_{axes}"
    return _directory() / (re.sub(r"[^\w.+-]+", "-", name) + ".json")


def _directory() -> Path:
    own = os.environ.get("SDY_JAX_CACHE")
    if own:
        return Path(own)
    home = Path.home()
    if sys.platform == "darwin":
        base = home / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    return base / "sdy_jax"


def calibrated(
    mesh: jax.sharding.Mesh, file: Path, again: bool, sizes: Probes, product_launch: float = 0.0
) -> Calibration:
    """What a file says of a mesh, or what is measured and written to it; as `CostModel.calibrate`."""
    known = None if again else _agreed(mesh, read(file, mesh))
    if known is None:
        known = _agreed(mesh, Calibration.measured(mesh, sizes, product_launch))
        assert known is not None, "it was measured in all processes"
        _write(file, known)
    return known


def read(file: Path, mesh: jax.sharding.Mesh) -> Calibration | None:
    """What a file says; None where there is none.

    Raises:
        SdyError: it cannot be read, or is of another mesh.
    """
    if (text := _text_of(file)) is None:
        return None
    found = parsed(lambda: Calibration.of_text(text), f"{file} is no calibration", "measure again, by again=True")
    wanted = mesh.devices.flat[0].device_kind, dict(mesh.shape)
    given = found.device_kind, {name: axis.size for name, axis in found.axes.items()}
    if given != wanted:
        raise SdyError(
            f"{file} is of {given[0]!r} devices with axes {given[1]}, the mesh has {wanted[0]!r} devices with axes "
            f"{wanted[1]}; to fix: give another path, or measure again, by again=True"
        )
    return found


def _text_of(file: Path) -> str | None:
    with explained(f"the calibration in {file} cannot be read", "give another path"), suppress(FileNotFoundError):
        return file.read_text(encoding="utf-8", errors="replace")
    return None


def _agreed(mesh: jax.sharding.Mesh, found: Calibration | None) -> Calibration | None:
    """What the first process has: plans must be equal in all."""
    if jax.process_count() == 1:
        return found
    kind = mesh.devices.flat[0].device_kind
    blank = Calibration(
        kind, {name: AxisRates(size, 0.0, 0.0, 0.0) for name, size in mesh.shape.items()}, 0.0, 0.0, 0.0
    )
    numbers = np.array([float(found is not None), *(found or blank).numbers()])
    is_there, *agreed = multihost_utils.broadcast_one_to_all(numbers).tolist()
    return blank.with_numbers(agreed) if is_there else None


def _write(file: Path, found: Calibration) -> None:
    """Writes the file as a whole or not at all.

    Raises:
        SdyError: it cannot be written.
    """
    if jax.process_index():
        return
    with explained(f"the calibration in {file} cannot be written", "give another path"):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, found.text())


# What the collectives and the work of a step took when it ran: the file that `Analysis.save` writes.

PROFILE_VERSION = 1
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
        return json.dumps({"version": PROFILE_VERSION, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def of_text(cls, text: str, name: str) -> StepProfile:
        """
        Raises:
            ValueError: the text is none of a file of this version.
        """
        found = held_in(text, PROFILE_VERSION)
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
