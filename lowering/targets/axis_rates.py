"""Rates by mesh axis and by major part of an axis: as users state them, and as the profile of a step shows them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import jax
import numpy as np
from jax.experimental import multihost_utils

from sdy_jax.base.errors import SdyError
from sdy_jax.ir.jax_shardings import bytes_text, flops_text
from sdy_jax.ir.meshes import AxisRef, Mesh
from sdy_jax.ir.parsers import parse_axis
from sdy_jax.lowering.targets.measurements import MeasuredSends, StepProfile

# Numbers that are the same for all mesh axes, or given by axis.

PerAxis = float | Mapping[str, float] | tuple[tuple[str, float], ...]
"""One number for every mesh axis, or one by axis name."""


def of_axis(given: PerAxis, axis: str, default: float = 0.0) -> float:
    return given if isinstance(given, (int, float)) else dict(given).get(axis, default)


def numbers_of(given: PerAxis) -> Sequence[float]:
    return [given] if isinstance(given, (int, float)) else list(dict(given).values())


# Major parts of mesh axes that have rates of their own.
#
# An axis `data` of 16 over two slices of 8 devices reaches the other slice over the network, and the 8 over the links
# of a slice. Mappings from axes to rates say so by `data:(1)2`, SDY's name of that part, beside `data`, which stands
# for the rest. Collectives along the whole axis may then be cut there: a reduce-scatter within the slices, an
# all-reduce between them, an all-gather within.

_PART = re.compile(r"(?P<name>.*):\(1\)(?P<size>\d+)")


def part_name(axis: str, size: int) -> str:
    """What mappings call a major part.

    >>> part_name("data", 2)
    'data:(1)2'
    """
    return f"{axis}:(1){size}"


def major_parts(names: Iterable[str]) -> dict[str, int]:
    """The sizes of the parts among the names of axes and parts.

    >>> major_parts(["model", "data", "data:(1)2"])
    {'data': 2}
    """
    found = (_PART.fullmatch(name) for name in names)
    return {match["name"]: int(match["size"]) for match in found if match}


def with_cuts(edges: Mapping[str, set[int]], parts: Mapping[str, int]) -> dict[str, set[int]]:
    """The positions at which axes are cut, with those behind major parts, as far as digits of the axes allow."""

    def cuts(name: str, own: set[int]) -> set[int]:
        at = parts.get(name, 1)
        return own | {at} if min(own) < at < max(own) and all(e % at == 0 or at % e == 0 for e in own) else own

    return {name: cuts(name, own) for name, own in edges.items()}


def cut(axis: AxisRef, mesh: Mesh, parts: Mapping[str, int]) -> list[AxisRef]:
    """An axis, or a part of one, as what lies in its major part and what does not."""
    if axis.name not in parts:
        return [axis]
    edges = with_cuts({axis.name: {axis.pre_size, axis.next_pre_size(mesh)}}, parts)[axis.name]
    return [AxisRef.canonical(axis.name, low, high // low, mesh) for low, high in pairwise(sorted(edges))]


# The rates of a cost model as the user's own steps show them.

_LEAST = 1 / 64
"""The share of a call below which what is left of it for work is none. Guessed: it is the difference of what was
measured with a profiler and without one, which is noise."""


class Model(Protocol):
    """A cost model, as it is asked here; `CostModel` says what these are."""

    @property
    def latency(self) -> PerAxis: ...
    @property
    def bandwidth(self) -> PerAxis: ...
    @property
    def start(self) -> PerAxis: ...
    @property
    def flop(self) -> float: ...
    @property
    def memory(self) -> float: ...
    @property
    def unit(self) -> str: ...
    def bandwidth_of(self, axis: str) -> float: ...
    def sending_time(self, kind: str, axes: Sequence[AxisRef], mesh: Mesh, wire: float) -> float: ...


@dataclass(frozen=True, slots=True)
class _Learned:
    """How many times as long as by a model collectives took along each axis, of those that were seen; and work, 0 where
    it was not seen. Of a model of bytes: the seconds of each."""

    axes: Mapping[str, float]
    work: float


def learned_fields(model: Model, profile: StepProfile, mesh: Mesh, device_kind: str) -> dict[str, Any]:
    """The rates that a step showed, in the place of a model's.

    An axis is as much slower as all collectives took longer that run along it alone, or at its rate since it is the
    slowest of theirs; work likewise. What the step does not show stays: in a model of bytes, at the rate of the rest.

    Raises:
        SdyError: the profile is of another mesh, or shows nothing.
    """
    _check(profile, mesh, device_kind)
    found = _agreed(_Learned(_per_axis(model, profile, mesh), _work(profile)), mesh)
    if not found.axes and not found.work:
        raise SdyError(
            f"calibrate: the profile {profile.name} shows nothing: no collective that runs by itself, and no work; to "
            "fix: analyze a step that sends more"
        )
    return _scaled(model, found, profile, mesh)


def _check(profile: StepProfile, mesh: Mesh, device_kind: str) -> None:
    wanted, given = (device_kind, dict(mesh.sizes)), (profile.device_kind, dict(profile.axes))
    if given != wanted:
        raise SdyError(
            f"calibrate: the profile {profile.name} is of {given[0]!r} devices with axes {given[1]}, the mesh has "
            f"{wanted[0]!r} devices with axes {wanted[1]}; to fix: analyze a step on this mesh"
        )


def _per_axis(model: Model, profile: StepProfile, mesh: Mesh) -> dict[str, float]:
    """Of collectives along several equally fast axes only those count that no other shows."""
    own, shared = defaultdict[str, list[tuple[float, float]]](list), defaultdict[str, list[tuple[float, float]]](list)
    for sends in profile.sends:
        axes = [parse_axis(axis) for axis in sends.axes]
        estimated = _estimated(model, sends, axes, mesh)
        slowest = list(_slowest(model, axes, mesh))
        if estimated and sends.seconds:
            for name in slowest:
                (own if len(slowest) == 1 else shared)[name].append((sends.seconds, estimated))
    return {name: _ratio(rows) for name, rows in (shared | own).items()}


def _ratio(rows: list[tuple[float, float]]) -> float:
    measured, estimated = map(sum, zip(*rows, strict=True))
    return float(measured / estimated)


def _estimated(model: Model, sends: MeasuredSends, axes: list[AxisRef], mesh: Mesh) -> float:
    if not sends.times:
        return 0.0
    return sends.times * model.sending_time(sends.kind, axes, mesh, sends.wire_bytes / sends.times)


def _slowest(model: Model, axes: list[AxisRef], mesh: Mesh) -> Iterator[str]:
    rates = {axis.name: model.bandwidth_of(axis.name) for axis in axes if axis.size(mesh) > 1}
    return (name for name, rate in rates.items() if rate == min(rates.values()))


def _work(profile: StepProfile) -> float:
    sent = sum(sends.seconds for sends in profile.sends)
    is_seen = profile.estimated_work and profile.work > _LEAST * (profile.work + sent)
    return profile.work / profile.estimated_work if is_seen else 0.0


def _agreed(found: _Learned, mesh: Mesh) -> _Learned:
    """What the first process has: plans must be equal in all."""
    if jax.process_count() == 1:
        return found
    numbers = np.array([found.work, *(found.axes.get(name, 0.0) for name in mesh.axis_names)])
    work, *axes = multihost_utils.broadcast_one_to_all(numbers).tolist()
    return _Learned({name: value for name, value in zip(mesh.axis_names, axes, strict=True) if value}, work)


def _scaled(model: Model, found: _Learned, profile: StepProfile, mesh: Mesh) -> dict[str, Any]:
    is_time = model.unit == "seconds"
    rest = 1.0 if is_time else float(np.median([*found.axes.values()] or [found.work]))
    factors = {name: found.axes.get(name, rest) for name in mesh.axis_names}
    work = (profile.flop * found.work, profile.memory * found.work) if found.work else (model.flop * rest, model.memory)
    bandwidth = {name: rate / factor for name, rate, factor in _per_name(model.bandwidth, 1.0, factors)}
    changes = _factor_texts(found) if is_time else _rate_texts(found, bandwidth, work[0])
    return {
        "bandwidth": bandwidth,
        "latency": {name: seconds * factor for name, seconds, factor in _per_name(model.latency, 0.0, factors)},
        "start": {name: seconds * factor for name, seconds, factor in _per_name(model.start, 0.0, factors)},
        "flop": work[0],
        "memory": work[1],
        "origin": f"learned from {profile.name}: {', '.join(changes)}",
    }


def _per_name(given: PerAxis, default: float, factors: Mapping[str, float]) -> Iterator[tuple[str, float, float]]:
    """Axes and major parts of axes with what is given for each, and the factors of the axes."""
    numbers = dict.fromkeys(factors, given) if isinstance(given, (int, float)) else dict(given)
    for name in {**dict.fromkeys(factors, 0.0), **numbers}:
        axis = next(iter(major_parts([name])), name)
        yield name, numbers.get(name, default), factors[axis]


def _factor_texts(found: _Learned) -> Iterator[str]:
    for axis, factor in found.axes.items():
        yield f"collectives along {axis} take {factor:.2g} times as long"
    if found.work:
        yield f"work {found.work:.2g} times"


def _rate_texts(found: _Learned, bandwidth: Mapping[str, float], flop: float) -> Iterator[str]:
    yield from (f"{bytes_text(bandwidth[axis])}/s along {axis}" for axis in found.axes)
    if found.work:
        yield f"{flops_text(2 / flop)}/s"
