"""The cost model: what a collective costs, in bytes on the wire and in time, and what a device's own work takes.

With the default model (no latency, bandwidth 1) time equals wire bytes. See docs/explanation/costs.md#bytes-or-seconds.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from sdy_jax.base.errors import SdyError, ShardingError, did_you_mean, listed, with_article
from sdy_jax.base.jax_calls import api_boundary, api_class
from sdy_jax.ir.jax_shardings import AnyMesh, mesh_from_jax
from sdy_jax.ir.meshes import AxisRef, Mesh, axes_size
from sdy_jax.lowering.targets.axis_rates import PerAxis, learned_fields, major_parts, numbers_of, of_axis, part_name
from sdy_jax.lowering.targets.axis_rates import cut as cut_at
from sdy_jax.lowering.targets.family import FLOP
from sdy_jax.lowering.targets.measurements import Calibration, Probes, Profiled, calibrated, default_path, profile_of
from sdy_jax.lowering.targets.rates import TABLE, Copies, LastCut, Link, Rate, rate, speed, wire_bytes
from sdy_jax.lowering.targets.target import (
    Hosts,
    family_of,
    family_of_machine,
    family_of_platform,
    machine_called,
    machine_of,
    machines,
    no_machine,
)
from sdy_jax.lowering.targets.torus import SCATTERED_AT_ONCE, Lines, Torus, cut_lines, lines_of_axes
from sdy_jax.runtime.devices import LineParts, device_kind, network_axes, platform_of


class DeviceTimes(NamedTuple):
    """How long work takes a device's units, and its memory; both at once, so it takes the longer of the two."""

    units: float = 0.0
    memory: float = 0.0

    def times(self, share: float) -> DeviceTimes:
        """Those of a part of it, or of several executions."""
        return DeviceTimes(share * self.units, share * self.memory)

    def and_(self, other: DeviceTimes) -> DeviceTimes:
        """Those of both."""
        return DeviceTimes(self.units + other.units, self.memory + other.memory)


# What a cost model takes of a machine: its published rates, or what was measured, as fields of a `CostModel`.


def published_fields(hosts: Hosts, axes: tuple[str, ...], slow: Mapping[str, float]) -> dict[str, Any]:
    """The rates of a machine that are published, on a mesh of these axes, of which some are slow."""
    name, family = hosts.machine, family_of_machine(hosts.machine)
    chip, links = machines()[name].chip, machines()[name].links
    return {
        "latency": dict.fromkeys(axes, links.latency) | dict.fromkeys(slow, links.network.latency),
        "peers": dict.fromkeys(axes, links.peers) | dict.fromkeys(slow, 0) if links.peers else 0,
        "flop": 2 / chip.flops,
        "bandwidth": dict.fromkeys(axes, links.bandwidth) | dict(slow),
        "start": links.start,
        "memory": 1 / chip.memory,
        "launch": chip.launch,
        "product_launch": chip.product_launch,
        "copies": family.arrays.copies(1 / chip.memory, chip.launch),
        "combines": tuple(family.compiler.collectives.combines),
        "torus": tuple(axis for axis in axes if links.torus and axis not in slow),
        "rounds": family.arrays.moved,
        "network": tuple(slow),
        "machine": name,
        "origin": f"{hosts}, by its published rates",
    }


def _check_slow(slow: Mapping[str, float], names: tuple[str, ...], sizes: Mapping[str, int]) -> None:
    """
    Raises:
        SdyError: rates are given of an axis that is not among the names, or of a part that an axis has not.
    """
    for name in slow:
        ((axis, part),) = (major_parts([name]) or {name: 1}).items()
        if axis not in names:
            near = did_you_mean(axis, names)
            known = listed(map(repr, names))
            raise SdyError(f"of_machine: bandwidth has {name!r}, which is no axis; {near}expected some of {known}")
        if sizes.get(axis, part) % part:
            raise SdyError(
                f"of_machine: bandwidth has {name!r}, and the axis {axis!r} of {sizes[axis]} devices has no part of "
                f"{part}; expected a size that divides it"
            )


def _check_mesh(mesh: Any, function: str) -> None:
    if not isinstance(mesh, jax.sharding.AbstractMesh) and not hasattr(mesh, "devices"):
        raise SdyError(
            f"{function} got {with_article(type(mesh))}; expected a mesh of jax with devices, as "
            "jax.make_mesh(shape, names) makes it"
        )


def measured_fields(
    found: Calibration, mesh: AnyMesh, machine: str, torus: tuple[str, ...], network: tuple[str, ...]
) -> dict[str, Any]:
    """The rates that were measured on a mesh; `torus`: the axes along which devices reach only their neighbours;
    `network`: those, and parts of axes, that run over a network."""
    family = family_of(mesh)
    over_network = axes_over_network(mesh, machine) if torus else {}
    torus = tuple(axis for axis in torus if axis not in over_network)
    copies = family.arrays.copies(found.memory, found.launch)
    laid = dict.fromkeys(found.axes, (1.0, 1.0))
    laid |= _laid({name: axis.size for name, axis in found.axes.items() if axis.size > 1 and name in torus}, machine)
    return {
        "latency": {name: axis.latency / laid[name][0] for name, axis in found.axes.items()},
        "flop": found.flop,
        "bandwidth": {name: axis.bandwidth / laid[name][1] for name, axis in found.axes.items()},
        "start": {name: axis.start for name, axis in found.axes.items()},
        "memory": found.memory,
        "launch": found.launch,
        "copies": copies._replace(sent=0.0),  # those of all kinds are a part of what was measured
        "combines": tuple(family.compiler.collectives.combines),
        "torus": torus,
        "network": tuple([axis for axis in network if axis in found.axes]),  # no parts: axes were measured whole
        "peers": 0,  # an axis was measured as long as it is
    }


def _laid(sizes: Mapping[str, int], machine: str) -> dict[str, tuple[float, float]]:
    """How far it is around each axis of a torus, and how fast a device sends along it, beside an axis along which all
    devices follow each other, in one direction."""
    lines = lines_of_axes(tuple(sizes.values()), _torus_of(machine))
    links = {name: Link(size, hop=1.0, lines=own) for (name, size), own in zip(sizes.items(), lines, strict=True)}
    return {name: (link.around / Link(link.size, hop=1.0).around, link.speed) for name, link in links.items()}


def _torus_of(machine: str) -> Torus | None:
    """That of a machine; None where there is none, or no machine: each axis of a torus is then a ring."""
    return machines()[machine].links.torus if machine else None


def axes_over_network(mesh: AnyMesh, machine: str) -> dict[str, int]:
    """The axes of a mesh along which devices are of several slices, or hosts, with the sizes of major parts."""
    return network_axes(mesh, joins_hosts=machines()[machine].links.joins_hosts)


# What a collective costs: bytes on the wire per device, and time; and what a device's own work does.
#
# With the default model (no latency, bandwidth 1) time equals wire bytes. See
# docs/explanation/costs.md#bytes-or-seconds.


@api_class
@dataclass(frozen=True, slots=True)
class CostModel:
    """What communication and work cost: seconds per hop and per operation, bytes per second per mesh axis.

    With bandwidth 1 the unit of time is a byte on the wire. The default `flop` is that of accelerators (400 TFLOP/s
    beside 450 GB/s); it decides between moving data and computing the same thing on several devices.

    Where memory has a price, time is what a plan takes in all, and any op may repeat on several devices what these
    could share out, where that takes less than sending. Where it has none, products and convolutions never do, and do
    no more per device in a plan for the whole program (`layouts="global"`) than op by op; other ops may repeat two
    hundredths of what all do. With `repeat_work` all may, where that costs less.

    `bandwidth` is a number, or a mapping from axis name, which has all axes of the mesh that a plan is for (and perhaps
    others). It is kept as sorted pairs, so that models are hashable. With `CostModel()` every time is a number of
    bytes. The major part of an axis may have rates of its own, under the name `data:(1)2`: two slices, of which the
    axis has devices.

    Attributes:
        latency: seconds per hop from device to device, of all axes or by axis name.
        flop: seconds per operation of a device; a multiplication with an addition is one.
        bandwidth: bytes per second that a device sends, by axis name; of a torus, along a ring in one dimension.
        repeat_work: whether products and convolutions may be repeated, and other ops without bound, though memory has
            no price.
        start: seconds that every collective takes beside, of all axes or by axis name.
        memory: seconds per byte that a device reads from its memory or writes to it. Ops take that long at least; what
            compilers fuse is not read or written.
        launch: seconds that every op takes beside that is not fused into another one. It is a part of estimated times;
            no choice depends on it, as every plan has these ops.
        product_launch: likewise of products and convolutions.
        copies: seconds per byte sent in which devices rearrange what they send and receive, whatever it is, or by that;
            where arrays lie in tiles, beside it, those of the ops that rearrange blocks which are no whole tiles.
        combines: the kinds of collectives of which small ones are combined to buckets, by the compiler if not here, so
            that each has a share of their latency. What waits for a product, and a product for it, has no others to run
            with, so the planner charges it all of its latency.
        torus: the axes along which devices reach only their neighbours: each by itself, or of a machine as
            `jax.make_mesh` lays them along the dimensions of its slices.
        network: the axes, or major parts of axes, that run over a network beside the machine's own links: collectives
            along both send over the network only what has to go there.
        peers: to how many other devices the bandwidth of axes leads, to each by a link of its own, so that in smaller
            groups a device sends as much slower; of all axes or by axis name. 0: through a switch, or along a torus.
        rounds: the share of its bytes that a float32 value has on the wire where it is moved for products alone,
            where a compiler rounds it before. Partial sums are sent as they are.
        moved: the share of its bytes that any value has there: `rounds` in the model of such values, `of_rounded`.
        machine: the name of the machine whose rates these are, for which plans are then; empty where they are of none,
            and plans are for the devices of the mesh.
        origin: where the numbers are from, in words.

    Example:
        >>> CostModel().wire_bytes("all_gather", 4, 256, 1024)
        768.0

    See also:
        `partition`: its `costs`.
    """

    latency: PerAxis = 0.0
    flop: float = FLOP
    bandwidth: Mapping[str, float] | tuple[tuple[str, float], ...] = ()
    repeat_work: bool = False
    start: PerAxis = 0.0
    memory: float = 0.0
    launch: float = 0.0
    product_launch: float = 0.0
    copies: float | Copies = 0.0
    combines: tuple[str, ...] = ()
    torus: tuple[str, ...] = ()
    network: tuple[str, ...] = ()
    peers: PerAxis = 0
    rounds: float = 1.0
    moved: float = 1.0
    machine: str = ""
    origin: str = field(default="", compare=False)
    is_default: bool = field(init=False, repr=False, compare=False, default=True)
    """Time is the number of bytes."""

    def __post_init__(self) -> None:
        for name in _PER_AXIS:
            object.__setattr__(self, name, _per_axis(getattr(self, name), name))
        for name in _NUMBERS:
            _check_number(getattr(self, name), name)
        if self.machine and machine_called(self.machine) is None:
            raise SdyError(f"CostModel: machine={self.machine!r}: {no_machine(self.machine)}")
        object.__setattr__(self, "torus", tuple(sorted(self.torus)))
        object.__setattr__(self, "network", tuple(sorted(self.network)))
        self._check_names("torus")
        self._check_names("network")
        if not isinstance(self.copies, Copies):
            object.__setattr__(self, "copies", Copies(self.copies))
        object.__setattr__(self, "combines", tuple(sorted(set(self.combines))))
        is_free = not any([*numbers_of(self.latency), *numbers_of(self.start), *self._copies])
        rates = {self.moved, *numbers_of(self.bandwidth)}
        object.__setattr__(self, "is_default", is_free and not self.torus and rates <= {1.0})

    def _check_names(self, name: str) -> None:
        known = [axis for axis, _ in self.bandwidth] if isinstance(self.bandwidth, tuple) else []
        unknown = [axis for axis in getattr(self, name) if known and axis not in known]
        if unknown:
            near, has = did_you_mean(unknown[0], known), listed(map(repr, known))
            raise SdyError(f"CostModel: {name} has {unknown[0]!r}, and bandwidth has not; {near}expected some of {has}")

    @property
    def may_repeat(self) -> bool:
        """Whether work may be repeated on several devices where that costs less than sending: what it takes is known,
        or the user says so."""
        return self.repeat_work or self.memory > 0

    @classmethod
    def of_platform(cls, platform: str) -> CostModel:
        """Bytes, for devices of a platform: what an operation is worth there, and what is rounded before it is moved.
        They say of no machine how its memory is, or its compiler: plans are for the devices of the mesh."""
        family = family_of_platform(platform)
        return cls(flop=family.flop, rounds=family.arrays.moved)

    @classmethod
    @api_boundary
    def of_mesh(cls, mesh: AnyMesh) -> CostModel:
        """The default for a mesh: the model of its devices' machine, in seconds, where that is published. Axes, or
        major parts of them, along which devices are of several slices, or of several processes, run over the network.

        >>> CostModel.of_mesh(jax.make_mesh((1,), ("x",), devices=jax.devices("cpu")[:1])).unit
        'bytes'
        """
        _check_mesh(mesh, "of_mesh")
        name = machine_of(mesh)
        if name:
            links = machines()[name].links
            slow = (part_name(axis, size) if size else axis for axis, size in axes_over_network(mesh, name).items())
            return cls.of_machine(name, mesh.axis_names, dict.fromkeys(slow, links.network.bandwidth))
        family, platform = family_of(mesh), platform_of(mesh)
        is_known = family.name == platform and not family.machines  # nothing is published of any
        origin = "" if is_known else f"the rates of {device_kind(mesh)!r} devices are not known"
        return replace(cls.of_platform(platform), origin=origin)

    @classmethod
    @api_boundary
    def of_machine(
        cls, name: str, axes: Iterable[str] | AnyMesh | Mesh, bandwidth: Mapping[str, float] | None = None
    ) -> CostModel:
        """The model of a machine whose rates are published, in seconds. A plan with it is for this machine, also on
        virtual devices: by its memory, and by what its compiler does.

        Args:
            name: that of the machine: "tpu v5e", "h100"; also "v5e", "TPU-v5e". Its own links join all devices, however
                many. With hosts, as in "h100 x8" or "4 x h100 x8", they join those of a host, and the network of the
                usual host of these the rest: the mesh's devices fill one host after the other, in its order. They are
                listed in docs/reference/machines.md.
            axes: the mesh, or its axis names.
            bandwidth: bytes per second of axes, or major parts such as `data:(1)2`, that do not run over the machine's
                own links (a data-centre network).

        Raises:
            SdyError: no machine is called so, or it has other hosts, or the mesh other devices; or `bandwidth`
                names no axis.

        >>> CostModel.of_machine("h100", ["data", "model"], {"data": 25e9}).bandwidth_of("data")
        25000000000.0
        >>> CostModel.of_machine("4 x h100 x8", Mesh.of(data=4, model=8)).bandwidth
        (('data', 50000000000.0), ('model', 450000000000.0))
        """
        hosts, mesh = Hosts.of(name), None
        if isinstance(axes, (AnyMesh, Mesh)):
            mesh = axes if isinstance(axes, Mesh) else mesh_from_jax(axes)
            axes = axes.axis_names
        if not isinstance(axes, Iterable):
            raise SdyError(f"of_machine: axes={axes!r}; expected a mesh, or the names of its axes")
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        _check_slow(bandwidth or {}, names, mesh.sizes if mesh else {})
        return cls(**published_fields(hosts, names, _network(hosts, mesh) | dict(bandwidth or {})))

    @classmethod
    @api_boundary
    def calibrate(
        cls,
        mesh: jax.sharding.Mesh,
        *,
        path: str | os.PathLike[str] | None = None,
        again: bool = False,
        from_plan: Profiled | str | os.PathLike[str] | None = None,
    ) -> CostModel:
        """The model of the machine at hand, in seconds, from a file or measured: collectives of several sizes along
        each axis, a product and element-wise ops. That takes some seconds, on slow machines a minute, in which nothing
        else should run. What is measured replaces published rates; all else that is known of the machine stays.

        Args:
            mesh: whose devices are measured, all at once.
            path: the file, which is written where there is none; default: one by kind of devices and axes in
                `$SDY_JAX_CACHE`, or in the user's directory for caches.
            again: measure, whatever is in the file.
            from_plan: what `plan.analyze` found of a step on this mesh, or the file that it was saved to. Nothing is
                measured then: the model is that of `CostModel.of_mesh`, or of `path` where that is given, with
                collectives and work as much slower or faster as they were in the step. Plans say by how much.

        Raises:
            SdyError: the devices are only described, or a file is none of this mesh, or cannot be read or written.

        Example:
            costs = sdy.CostModel.calibrate(mesh)
            step = sdy.partition(step, mesh=mesh, in_shardings=P("data"), costs=costs)

            step.plan(state, batch).analyze(state, batch).save("step.profile.json")
            costs = sdy.CostModel.calibrate(mesh, from_plan="step.profile.json")
        """
        _check_mesh(mesh, "calibrate")
        if from_plan is not None:
            model = cls.of_mesh(mesh) if path is None else cls.calibrate(mesh, path=path, again=again)
            return replace(
                model, **learned_fields(model, profile_of(from_plan), mesh_from_jax(mesh), device_kind(mesh))
            )
        file, model = default_path(mesh) if path is None else Path(path), cls.of_mesh(mesh)
        found = calibrated(mesh, file, again, Probes(), model.product_launch)
        return model.with_rates(found, mesh, f"measured, {file}")

    def with_rates(self, found: Calibration, mesh: AnyMesh, origin: str) -> CostModel:
        """The model of a mesh with rates that were measured there in the place of its own, and nothing else."""
        return replace(self, **measured_fields(found, mesh, self.machine, self.torus, self.network), origin=origin)

    def check_axes(self, mesh: Mesh, where: str = "the mesh") -> None:
        """Whether rates that are given by axis are known of a mesh's axes; `where` is what has it, for the message.

        Raises:
            ShardingError: there is no bandwidth of one of them, or a latency of an axis that it has not.
        """
        axes = [axis.name for axis in mesh.axes if axis.size > 1]
        for name in _PER_AXIS:
            given = getattr(self, name)
            if isinstance(given, (int, float)) or not given:
                continue
            known = [axis for axis, _ in given]
            missing = [axis for axis in axes if axis not in known]
            if missing and (name == "bandwidth" or not set(known) <= {*mesh.sizes}):
                machine, has = repr(self.machine) if self.machine else "name", listed(map(repr, known))
                raise ShardingError(
                    f"costs= has no {name} for the axis {missing[0]!r} of {where}, {mesh}, but of {has}; to fix: give "
                    f"that of all its axes, as CostModel.of_machine({machine}, mesh) does, or leave costs out"
                )

    @property
    def unit(self) -> str:
        """The unit of all times: "seconds" where bandwidths are given, else "bytes"."""
        return "seconds" if any(value != 1.0 for value in numbers_of(self.bandwidth)) else "bytes"

    def wire_bytes(self, kind: str, group: int, bytes_in: float, bytes_out: float) -> float:
        """Bytes that each device sends, from the local bytes before and after a collective over `group` devices.

        `collective_permute` is charged in full: do not ask for one that moves nothing.
        """
        return wire_bytes(kind, group, bytes_in, bytes_out)

    def time(self, kind: str, axes: Iterable[AxisRef], mesh: Mesh, bytes_in: float, bytes_out: float) -> float:
        """The time of a collective over `axes`: latency per hop, and its bytes at the rate of the slowest of the axes;
        of a network at its own rate those that have to go there."""
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
        return self._sending_rate(kind, axes, mesh, cut).together(wires)

    def bytes_time(
        self, kind: str, axes: Iterable[AxisRef], mesh: Mesh, wire: float, cut: LastCut | None = None
    ) -> float:
        """Of `sending_time` that in which bytes are sent."""
        return self._sending_rate(kind, axes, mesh, cut).per_byte * wire

    def speed(self, kind: str, axes: Iterable[AxisRef], mesh: Mesh) -> float:
        """Bytes per second that a device sends in a collective, over axes as in `sending_time`."""
        kind, axes = _as_sent(kind, axes, mesh)
        return speed(kind, self.links(axes, mesh))

    def _sending_rate(self, kind: str, axes: Iterable[AxisRef], mesh: Mesh, cut: LastCut | None) -> Rate:
        return self.rate(*_as_sent(kind, axes, mesh), mesh, cut)

    def work_time(self, operations: float, touched: float) -> float:
        """The time of a device's own work.

        Args:
            operations: how many it performs.
            touched: the bytes that it reads from its memory and writes to it.
        """
        return max(self.demands(operations, touched))

    def demands(self, operations: float, touched: float) -> DeviceTimes:
        """What that takes of the device."""
        return DeviceTimes(self.flop * operations, self.memory * touched)

    def pace(self, dtype: str, precision: str = "DEFAULT") -> float:
        """How long an operation of a product takes beside `flop`, where rates are published: what machines do with
        other element types than bfloat16, and with precisions, is known of them.

        Args:
            dtype: the element type of its operands, as MLIR writes it: `f32`, `f8E4M3FN`.
            precision: as `jax.lax.Precision` calls it.

        >>> CostModel.of_machine("a100", ["data"]).pace("f32"), CostModel.of_machine("a100", ["data"]).pace("i8")
        (2.0, 0.5)
        """
        if not self._has_published_work:
            return 1.0
        chip = machines()[self.machine].chip
        return chip.flops / family_of_machine(self.machine).products(chip, dtype, precision)

    def pace_of_batches(self, count: int | None) -> float:
        """How long an operation of a convolution takes beside `flop` that has so many batches on a device; 1 for other
        ops, which have none.

        >>> v5e = CostModel.of_machine("v5e", ["data"])
        >>> v5e.pace_of_batches(1), v5e.pace_of_batches(8), v5e.pace_of_batches(None)
        (2.5, 1.0, 1.0)
        """
        if count is None or not self._has_published_work:
            return 1.0
        return family_of_machine(self.machine).batches(count)

    @property
    def _has_published_work(self) -> bool:
        """Whether operations take what is published of a machine."""
        known = machines().get(self.machine)
        return known is not None and self.flop == 2 / known.chip.flops

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
        latency, start = of_axis(self.latency, rates, of_axis(self.latency, name)), of_axis(self.start, name)
        lines = _lines_of(self, mesh).get(rates, ())
        if lines and size * major < whole:
            lines = cut_lines(lines, [axis.pre_size // major, size, whole // end])[1]
        known = (self.bandwidth_of(rates), latency, start, lines, self._copies, self.moved)
        peers = int(of_axis(self.peers, rates))
        return Link(size, *known, far=whole // end, peers=peers, is_network=rates in self.network)

    def links(self, axes: Iterable[AxisRef], mesh: Mesh) -> list[Link]:
        """Axes, or parts of them, as collectives see them, cut behind major parts with rates of their own."""
        return [self.link(part, mesh) for axis in axes for part in cut_at(axis, mesh, self.major_parts)]

    def lines(self, mesh: Mesh) -> tuple[tuple[str, LineParts], ...]:
        """As `Target.lines`: how axes lie on the torus of a machine whose chips have no places; none of few chips."""
        if _torus_of(self.machine) is None or mesh.size <= SCATTERED_AT_ONCE:
            return ()
        found = _lines_of(self, mesh).items()
        return tuple(
            [(axis, tuple([(line.size, line.dimension, line.far) for line in lines])) for axis, lines in found]
        )

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
        return of_axis(self.bandwidth, axis, 1.0) if self.bandwidth else 1.0

    def slow_axes(self, mesh: Mesh) -> frozenset[str]:
        """The axes of a mesh along which devices send much less than along its fastest one, as between slices."""
        rates = {axis.name: self.bandwidth_of(axis.name) for axis in mesh.axes if axis.size > 1}
        return frozenset(name for name, rate in rates.items() if _SLOW * rate < max(rates.values()))


def _as_sent(kind: str, axes: Iterable[AxisRef], mesh: Mesh) -> tuple[str, tuple[AxisRef, ...]]:
    """The kind whose rates a collective has, and the axes along which it is sent."""
    axes = tuple(axes) or tuple([AxisRef(axis.name) for axis in mesh.axes])
    return kind if kind in TABLE else "collective_permute", axes


_PER_AXIS = ("bandwidth", "latency", "start", "peers")
_NUMBERS = ("flop", "memory", "launch", "product_launch", "rounds", "moved")


def _per_axis(given: Any, name: str) -> PerAxis:
    """A rate of all axes, or by axis name as sorted pairs.

    Raises:
        SdyError: it is neither.
    """
    if isinstance(given, (int, float)):
        _check_number(given, name)
        return given
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise SdyError(f"CostModel: {name}={given!r}; expected a number, or a dict from axis name to number")
    rates = dict(given)
    for axis, number in rates.items():
        _check_number(number, f"{name}[{axis!r}]", least="positive" if name == "bandwidth" else "")
    return tuple(sorted(rates.items()))


def _check_number(given: Any, name: str, least: str = "") -> None:
    is_number = isinstance(given, (int, float, np.number)) and not isinstance(given, bool)
    if not is_number or not (given > 0 if least else given >= 0):
        raise SdyError(f"CostModel: {name}={given!r}; expected a {least or 'non-negative'} number in seconds and bytes")


def _network(hosts: Hosts, mesh: Mesh | None) -> dict[str, float]:
    """The rates of the axes, and major parts of axes, that run over the network of some hosts."""
    if mesh is None and hosts.count > 1:
        raise SdyError(
            f"which axes run over the hosts of '{hosts}' is for the mesh to say; to fix: give it for its axes"
        )
    over = hosts.network_axes(mesh.sizes, mesh.device_ids) if mesh else {}
    rate = machines()[hosts.machine].links.network.bandwidth
    return {part_name(axis, size) if size else axis: rate for axis, size in over.items()}


_SLOW = 4
"""How many times as fast the fastest axis has to be. Published (of machines in `targets/`): networks take 9 to 29 times
as long as links. Anything between 2 and 9 tells the two apart."""


@lru_cache(maxsize=1 << 8)
def _lines_of(model: CostModel, mesh: Mesh) -> Mapping[str, Lines]:
    """How the axes of the torus lie on it, major parts with rates of their own left out."""
    sizes = {name: size // model.major_parts.get(name, 1) for name, size in mesh.sizes.items() if name in model.torus}
    return dict(zip(sizes, lines_of_axes(tuple(sizes.values()), _torus_of(model.machine)), strict=True))


@lru_cache(maxsize=1 << 12)
def _rate(model: CostModel, kind: str, axes: tuple[AxisRef, ...], mesh: Mesh, cut: LastCut | None) -> Rate:
    return rate(kind, model.links(axes, mesh), model.combines, cut)


@lru_cache(maxsize=64)
def _of_rounded(model: CostModel) -> CostModel:
    return replace(model, moved=model.rounds)


@lru_cache(maxsize=64)
def _major_parts(bandwidth: tuple[tuple[str, float], ...]) -> Mapping[str, int]:
    return major_parts(name for name, _ in bandwidth)
