"""What a collective costs: bytes on the wire per device, and time; and what a device's own work does.

Ring algorithms over a group of g devices. With the default model (no latency, bandwidth 1) time equals wire bytes.
Source: spec of the planner, section 15.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

import jax

from sdy_jax.errors import InternalError, SdyError
from sdy_jax.lowering.reshard.machines import MACHINES, Machine, machine_name
from sdy_jax.lowering.reshard.major_parts import cut as cut_at
from sdy_jax.lowering.reshard.major_parts import major_parts, part_name
from sdy_jax.lowering.reshard.tiles import Copies, LastCut
from sdy_jax.representation.mesh import AxisRef, Mesh, axes_size
from sdy_jax.representation.named import AnyMesh
from sdy_jax.runtime.devices import device_kind, network_axes, platform_of

_Bytes = Callable[[int, float, float], float]


def _kept(g: int) -> float:
    """The fraction of a buffer that a device sends when the buffer is divided among g devices."""
    return (g - 1) / g


_TABLE: dict[str, tuple[_Bytes, int]] = {
    # kind: wire bytes per device from (group, local bytes before, local bytes after), and how often around each axis
    "all_gather": (lambda g, b_in, b_out: (g - 1.0) * b_in, 1),
    "reduce_scatter": (lambda g, b_in, b_out: _kept(g) * b_in, 1),
    "all_reduce": (lambda g, b_in, b_out: 2 * _kept(g) * b_in, 2),
    "all_to_all": (lambda g, b_in, b_out: _kept(g) * b_in, 1),
    "collective_permute": (lambda g, b_in, b_out: b_in, 0),  # to a neighbour
    "gather_and_reduce": (lambda g, b_in, b_out: (g - 1) * b_in, 1),
    "all_slice": (lambda g, b_in, b_out: 0.0, 0),
    "replicated_to_unreduced": (lambda g, b_in, b_out: 0.0, 0),
    "sharded_to_unreduced": (lambda g, b_in, b_out: 0.0, 0),
}

_MOVES = frozenset(("all_gather", "all_to_all", "collective_permute"))
"""The kinds that combine nothing."""

IN_A_BUCKET = 1 / 9
"""Latency for each second of sending in a bucket: a tenth of the time in all."""


class Link(NamedTuple):
    """A mesh axis, or a part of one, as collectives see it.

    Attributes:
        size: the devices along it.
        bandwidth: bytes per second that a device sends along it.
        hop: seconds from one device to the next.
        start: seconds before a collective along it sends anything.
        is_torus: its devices reach only their neighbours, as a ring in both directions, so that an all_to_all passes
            through others, and everything comes halfway round.
        copies: the time in which a device rearranges what it sends and receives.
        moved: the share of its bytes that a value has on the wire if it is only moved.
    """

    size: int
    bandwidth: float = 1.0
    hop: float = 0.0
    start: float = 0.0
    is_torus: bool = False
    copies: Copies = Copies()
    moved: float = 1.0

    @property
    def around(self) -> float:
        """Seconds until the farthest device is reached."""
        return self.hop * (self.size - 1) / (2 if self.is_torus else 1)

    def cut(self, sizes: Sequence[int]) -> tuple[Link, ...]:
        """Its parts of these sizes, major to minor. Going around all of them takes as long as going around the whole.

        >>> [link.hop for link in Link(8, hop=1.0).cut([2, 4])]
        [4.0, 1.0]
        """
        strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
        return tuple([self._replace(size=n, hop=self.hop * far) for n, far in zip(sizes, strides, strict=True)])


class Rate(NamedTuple):
    """The time of collectives of one kind over one group: seconds whatever is sent, and per byte that a device sends.

    `is_shared`: collectives are combined, so that a small one has its share of what a full bucket waits.
    """

    fixed: float
    per_byte: float
    is_shared: bool = False

    def time(self, wire: float) -> float:
        """The time of one collective in which each device sends `wire` bytes; nothing where that is none."""
        sending = wire * self.per_byte
        if not wire or not self.fixed:
            return sending
        return sending + (min(self.fixed, IN_A_BUCKET * sending) if self.is_shared else self.fixed)

    def together(self, wires: Sequence[float]) -> float:
        """The time of several collectives in which each device sends so many bytes, in as few buckets as these fill."""
        sending = sum(wires) * self.per_byte
        apart = self.fixed * sum(wire > 0 for wire in wires)
        return sending + (min(apart, max(self.fixed, IN_A_BUCKET * sending)) if self.is_shared else apart)

    @property
    def bucket(self) -> float:
        """The bytes at which latency is a tenth of the time."""
        return self.fixed / self.per_byte / IN_A_BUCKET


def rate(kind: str, links: Sequence[Link], combines: Collection[str] = (), cut: LastCut | None = None) -> Rate:
    """The rate of a kind of collective over links; `combines` as in a cost model, `cut`: of the last dimension.

    Hops add up along each link; the slowest one decides about bytes. Through a ring of g devices the blocks of an
    all_to_all pass g/4 links on average in either direction.
    """
    links = [link for link in links if link.size > 1]
    if not links:
        return Rate(0.0, 0.0)
    per_byte = 1 / min([link.bandwidth for link in links])
    if kind == "all_to_all" and any(link.is_torus for link in links):
        group = math.prod([link.size for link in links])
        turned = [link.size / 4 / _kept(group) / link.bandwidth for link in links if link.is_torus]
        per_byte = max(per_byte, *turned)
    per_byte += max([link.copies.of(kind, cut) for link in links])
    if kind in _MOVES:
        per_byte *= max([link.moved for link in links])
    fixed = _fixed(kind, links) + max([link.copies.fixed(kind, cut) for link in links])
    return Rate(fixed, per_byte, kind in combines)


def _fixed(kind: str, links: Sequence[Link]) -> float:
    start = max([link.start for link in links])
    if kind == "collective_permute":
        return start + min([link.hop for link in links])
    turns = _row(kind)[1]
    return start + turns * sum([link.around for link in links]) if turns else 0.0


# A guess. With the value of accelerators the example's step on 2 x 4 virtual devices moved 0.96 of jit's bytes in 1.05
# of its time, with this one 1.00 of the bytes in 1.01 of the time (2026-11, medians of 10 pairs on two cores).
_CPU_FLOP = 0.1

_ON_TPUS = 0.5
"""The share of its bytes that a float32 value has there that is rounded to bfloat16."""

PerAxis = float | Mapping[str, float] | tuple[tuple[str, float], ...]
"""One number for every mesh axis, or one by axis name."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """What communication and work cost: seconds per hop and per operation, bytes per second per mesh axis.

    With bandwidth 1 the unit of time is a byte on the wire. The default `flop` is that of accelerators (400 TFLOP/s
    beside 450 GB/s); it decides between moving data and computing the same thing on several devices.

    Products and convolutions never repeat work on several devices that the axes of their operands and results share
    out, and do no more per device in a plan for the whole program (`layouts="global"`) than op by op. Where memory has
    no price, other ops may repeat two hundredths of what all do. With `repeat_work` all may, where that costs less.

    `bandwidth` may be given as a mapping from axis name; axes that it does not name have bandwidth 1. It is kept as
    sorted pairs, so that models are hashable. With `CostModel()` every time is a number of bytes. The major part of an
    axis may have rates of its own, under the name `data:(1)2`: two slices, of which the axis has devices.

    Attributes:
        latency: seconds per hop from device to device, of all axes or by axis name.
        flop: seconds per operation of a device; a multiplication with an addition is one.
        bandwidth: bytes per second that a device sends, by axis name.
        repeat_work: whether products and convolutions may be repeated, and other ops without bound.
        start: seconds that every collective takes beside, of all axes or by axis name.
        memory: seconds per byte that a device reads from its memory or writes to it. Ops take that long at least; what
            compilers fuse is not read or written.
        launch: seconds that every op takes beside that is not fused into another one. It is a part of estimated times;
            no choice depends on it, as every plan has these ops.
        product_launch: likewise of products and convolutions.
        copies: seconds per byte sent in which devices rearrange what they send and receive, whatever it is, or by that;
            on TPUs, beside it, those of the ops that rearrange blocks which are no whole tiles.
        combines: the kinds of collectives of which small ones are combined to buckets, by the compiler if not here, so
            that each has a share of their latency. What waits for a product, and a product for it, has no others to run
            with, so the planner charges it all of its latency.
        torus: the axes along which devices reach only their neighbours.
        rounds: the share of its bytes that a float32 value has on the wire where it is moved for products alone: half
            on TPUs, whose compiler rounds it to bfloat16 before. Partial sums are sent as they are.
        moved: the share of its bytes that any value has there: `rounds` in the model of such values, `of_rounded`.
        origin: where the numbers are from, in words.

    >>> CostModel().wire_bytes("all_gather", 4, 256, 1024)
    768.0
    """

    latency: PerAxis = 0.0
    flop: float = 1e-3
    bandwidth: Mapping[str, float] | tuple[tuple[str, float], ...] = ()
    repeat_work: bool = False
    start: PerAxis = 0.0
    memory: float = 0.0
    launch: float = 0.0
    product_launch: float = 0.0
    copies: float | Copies = 0.0
    combines: tuple[str, ...] = ()
    torus: tuple[str, ...] = ()
    rounds: float = 1.0
    moved: float = 1.0
    origin: str = field(default="", compare=False)
    is_default: bool = field(init=False, repr=False, compare=False, default=True)
    """Time is the number of bytes."""

    def __post_init__(self) -> None:
        for name in ("latency", "bandwidth", "start"):
            given = getattr(self, name)
            if not isinstance(given, (int, float)):
                object.__setattr__(self, name, tuple(sorted(dict(given).items())))
        object.__setattr__(self, "torus", tuple(sorted(self.torus)))
        if not isinstance(self.copies, Copies):
            object.__setattr__(self, "copies", Copies(self.copies))
        object.__setattr__(self, "combines", tuple(sorted(set(self.combines))))
        is_free = not any([*_numbers(self.latency), *_numbers(self.start), *self._copies])
        rates = {self.moved, *_numbers(self.bandwidth)}
        object.__setattr__(self, "is_default", is_free and not self.torus and rates <= {1.0})

    @classmethod
    def of_platform(cls, platform: str) -> CostModel:
        """Bytes, for devices of a platform: on virtual CPU devices replicated work competes for the same cores, and
        TPUs round what products read."""
        return cls(flop=_CPU_FLOP) if platform == "cpu" else cls(rounds=_ON_TPUS if platform == "tpu" else 1.0)

    @classmethod
    def of_mesh(cls, mesh: AnyMesh) -> CostModel:
        """The default for a mesh: the model of its devices' machine, in seconds, where that is in `MACHINES`. Axes, or
        major parts of them, along which devices are of several slices, or of several processes, run over the network.

        >>> CostModel.of_mesh(jax.make_mesh((1,), ("x",), devices=jax.devices("cpu")[:1])).unit
        'bytes'
        """
        platform, name = platform_of(mesh), machine_name(device_kind(mesh))
        if platform == "cpu":
            return cls.of_platform(platform)
        if name is None:
            return replace(
                cls.of_platform(platform), origin=f"the rates of {device_kind(mesh)!r} devices are not known"
            )
        over_network = (part_name(axis, size) if size else axis for axis, size in network_axes(mesh).items())
        slow = dict.fromkeys(over_network, MACHINES[name].network)
        return cls.of_machine(name, mesh.axis_names, slow)

    @classmethod
    def of_machine(cls, name: str, axes: Iterable[str], bandwidth: Mapping[str, float] | None = None) -> CostModel:
        """The model of a machine in `MACHINES`, in seconds.

        Args:
            name: one of the names in `MACHINES`.
            axes: the mesh's axis names.
            bandwidth: bytes per second of axes, or major parts such as `data:(1)2`, that do not run over the machine's
                own links (a data-centre network).

        Raises:
            SdyError: the machine is not in the table.

        >>> CostModel.of_machine("h100", ["data", "model"], {"data": 25e9}).bandwidth_of("data")
        25000000000.0
        """
        if name not in MACHINES:
            raise SdyError(
                f"no machine is called {name!r}; known are {', '.join(MACHINES)}. Or give CostModel your own"
            )
        machine, slow, axes = MACHINES[name], dict(bandwidth or {}), tuple(axes)
        return cls(
            dict.fromkeys(axes, machine.latency) | dict.fromkeys(slow, machine.network_latency),
            2 / machine.flops,
            dict.fromkeys(axes, machine.bandwidth) | slow,
            start=machine.start,
            memory=1 / machine.memory,
            launch=machine.launch,
            product_launch=machine.product_launch,
            copies=_copies_of(machine),
            combines=machine.combines,
            torus=tuple(axis for axis in axes if machine.is_torus and axis not in slow),
            rounds=_ON_TPUS if machine.is_torus else 1.0,
            origin=f"{name}, by its published rates",
        )

    @classmethod
    def calibrate(
        cls, mesh: jax.sharding.Mesh, *, path: str | os.PathLike[str] | None = None, again: bool = False
    ) -> CostModel:
        """The model of the machine at hand, in seconds, from a file or measured: collectives of several sizes along
        each axis, a product and element-wise ops. That takes some seconds, on slow machines a minute, in which nothing
        else should run.

        Args:
            mesh: whose devices are measured, all at once.
            path: the file, which is written where there is none; default: one by kind of devices and axes in
                `$SDY_JAX_CACHE`, or in the user's directory for caches.
            again: measure, whatever is in the file.

        Raises:
            SdyError: the devices are only described, or the file is none of this mesh, or cannot be read or written.

        Example:
            costs = sdy.CostModel.calibrate(mesh)
            step = sdy.partition(step, mesh=mesh, in_shardings=P("data"), costs=costs)
        """
        from sdy_jax.lowering.reshard.calibration import Sizes, calibrated  # which makes models

        return calibrated(mesh, path, again, Sizes())

    @property
    def unit(self) -> str:
        """The unit of all times: "seconds" where bandwidths are given, else "bytes"."""
        return "seconds" if any(value != 1.0 for value in _numbers(self.bandwidth)) else "bytes"

    def wire_bytes(self, kind: str, group: int, bytes_in: float, bytes_out: float) -> float:
        """Bytes that each device sends, from the local bytes before and after a collective over `group` devices.

        `collective_permute` is charged in full: do not ask for one that moves nothing.
        """
        return wire_bytes(kind, group, bytes_in, bytes_out)

    def time(self, kind: str, axes: Iterable[AxisRef], mesh: Mesh, bytes_in: float, bytes_out: float) -> float:
        """The time of a collective over `axes`: latency per hop, and its bytes over the slowest of the axes."""
        axes = tuple(axes)
        wire = wire_bytes(kind, axes_size(axes, mesh), bytes_in, bytes_out)
        return wire if self.is_default else self.rate(kind, axes, mesh).time(wire)

    def sending_time(
        self, kind: str, axes: Iterable[AxisRef], mesh: Mesh, wire: float, cut: LastCut | None = None
    ) -> float:
        """The time of one collective over `axes` in which each device sends `wire` bytes, with none that it runs
        together with. Devices that are permuted may send them along any axis. `cut`: of the last dimension."""
        return self.sending_times(kind, axes, mesh, [wire], cut)

    def sending_times(
        self, kind: str, axes: Iterable[AxisRef], mesh: Mesh, wires: Sequence[float], cut: LastCut | None = None
    ) -> float:
        """As `sending_time`, of several collectives that may run together."""
        if self.is_default or not any(wires):
            return sum(wires)
        axes = tuple(axes) or tuple([AxisRef(axis.name) for axis in mesh.axes])
        return self.rate(kind if kind in _TABLE else "collective_permute", axes, mesh, cut).together(wires)

    def work_time(self, operations: float, touched: float) -> float:
        """The time of a device's own work.

        Args:
            operations: how many it performs.
            touched: the bytes that it reads from its memory and writes to it.
        """
        computing = self.flop * operations
        return max(computing, self.memory * touched) if self.memory else computing

    def bucket_bytes(self, kind: str, axes: Iterable[AxisRef], mesh: Mesh) -> float:
        """The size at which latency is a tenth of a collective's time, in bytes that each device sends.

        Smaller collectives of one kind and group are worth combining, up to this size; larger ones gain little. Without
        latency it is 0: nothing is gained by combining.

        >>> CostModel(latency=1e-6, bandwidth={"x": 90e9}).bucket_bytes("all_gather", [AxisRef("x")], Mesh.of(x=4))
        2430000.0
        """
        found = self.rate(kind, tuple(axes), mesh)
        return float(round(found.bucket)) if found.fixed else 0.0

    def rate(self, kind: str, axes: tuple[AxisRef, ...], mesh: Mesh, cut: LastCut | None = None) -> Rate:
        """The rate of a kind of collective over axes."""
        return _rate(self, kind, axes, mesh, cut)

    def link(self, axis: AxisRef, mesh: Mesh) -> Link:
        """An axis, or a part of one, as collectives see it; all of it lies in a major part with rates, or none."""
        name, size, end = axis.name, axis.size(mesh), axis.next_pre_size(mesh)
        major = self.major_parts.get(name, 1)
        whole, rates = (major, part_name(name, major)) if end <= major else (mesh.sizes[name], name)
        latency, start = _of(self.latency, rates, _of(self.latency, name)), _of(self.start, name)
        hop = whole // end * latency
        return Link(size, self.bandwidth_of(rates), hop, start, rates in self.torus, self._copies, self.moved)

    @property
    def of_rounded(self) -> CostModel:
        """The model of values that are moved for products alone."""
        return self if self.rounds == self.moved else _of_rounded(self)

    @property
    def major_parts(self) -> Mapping[str, int]:
        """The sizes of the major parts of axes that have rates of their own."""
        return _major_parts(self.bandwidth) if isinstance(self.bandwidth, tuple) else {}

    @property
    def lanes(self) -> int:
        """The elements of a last dimension in a tile; 0 where it does not matter how arrays lie."""
        return self._copies.lanes

    @property
    def _copies(self) -> Copies:
        return self.copies if isinstance(self.copies, Copies) else Copies(self.copies)

    def bandwidth_of(self, axis: str) -> float:
        """Bytes per second along a mesh axis."""
        return _of(self.bandwidth, axis, 1.0) if self.bandwidth else 1.0

    def slow_axes(self, mesh: Mesh) -> frozenset[str]:
        """The axes of a mesh along which devices send much less than along its fastest one, as between slices."""
        rates = {axis.name: self.bandwidth_of(axis.name) for axis in mesh.axes if axis.size > 1}
        return frozenset(name for name, rate in rates.items() if _SLOW * rate < max(rates.values()))


_SLOW = 4
"""How many times as fast the fastest axis has to be: the networks in `MACHINES` take 9 to 29 times as long as links."""


def _copies_of(machine: Machine) -> Copies:
    return Copies.in_tiles(1 / machine.memory, machine.launch) if machine.is_torus else Copies(2 / machine.memory)


def _of(given: PerAxis, axis: str, default: float = 0.0) -> float:
    return given if isinstance(given, (int, float)) else dict(given).get(axis, default)


def _numbers(given: PerAxis) -> Sequence[float]:
    return [given] if isinstance(given, (int, float)) else list(dict(given).values())


@lru_cache(maxsize=1 << 12)
def _rate(model: CostModel, kind: str, axes: tuple[AxisRef, ...], mesh: Mesh, cut: LastCut | None) -> Rate:
    parts = [part for axis in axes for part in cut_at(axis, mesh, model.major_parts)]
    return rate(kind, [model.link(part, mesh) for part in parts], model.combines, cut)


@lru_cache(maxsize=64)
def _of_rounded(model: CostModel) -> CostModel:
    return replace(model, moved=model.rounds)


@lru_cache(maxsize=64)
def _major_parts(bandwidth: tuple[tuple[str, float], ...]) -> Mapping[str, int]:
    return major_parts(name for name, _ in bandwidth)


def wire_bytes(kind: str, group: int, bytes_in: float, bytes_out: float) -> float:
    """`CostModel.wire_bytes`, which is the same for all models."""
    return _row(kind)[0](group, bytes_in, bytes_out) if group > 1 else 0.0


def _row(kind: str) -> tuple[_Bytes, int]:
    if kind not in _TABLE:
        raise InternalError(f"no cost is known for collective {kind!r}; known are {', '.join(_TABLE)}")
    return _TABLE[kind]


def same_cost(a: float, b: float) -> bool:
    """Equal up to the rounding of sums."""
    return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)
