"""What a collective costs: bytes on the wire per device, and time.

Ring algorithms over a group of g devices. With the default model (no latency, bandwidth 1) time equals wire bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from sdy_jax.errors import InternalError, SdyError
from sdy_jax.representation.mesh import AxisRef, Mesh, axes_size

_Bytes = Callable[[int, float, float], float]
_Hops = Callable[[int], int]


def _kept(g: int) -> float:
    """The fraction of a buffer that a device sends when the buffer is divided among g devices."""
    return (g - 1) / g


_TABLE: dict[str, tuple[_Bytes, _Hops]] = {
    # kind: wire bytes per device from (group, local bytes before, local bytes after), hops from the group
    "all_gather": (lambda g, b_in, b_out: (g - 1.0) * b_in, lambda g: g - 1),
    "reduce_scatter": (lambda g, b_in, b_out: _kept(g) * b_in, lambda g: g - 1),
    "all_reduce": (lambda g, b_in, b_out: 2 * _kept(g) * b_in, lambda g: 2 * (g - 1)),
    "all_to_all": (lambda g, b_in, b_out: _kept(g) * b_in, lambda g: g - 1),
    "collective_permute": (lambda g, b_in, b_out: b_in, lambda g: 1),
    "gather_and_reduce": (lambda g, b_in, b_out: (g - 1) * b_in, lambda g: g - 1),
    "all_slice": (lambda g, b_in, b_out: 0.0, lambda g: 0),
    "replicated_to_unreduced": (lambda g, b_in, b_out: 0.0, lambda g: 0),
    "sharded_to_unreduced": (lambda g, b_in, b_out: 0.0, lambda g: 0),
}


@dataclass(frozen=True, slots=True)
class Machine:
    """Peak rates of one device: floating-point operations per second (bfloat16), bytes per second that it sends along
    one mesh axis, and seconds per hop."""

    flops: float
    bandwidth: float
    latency: float


MACHINES: Mapping[str, Machine] = {
    # TPUs: a mesh axis is a ring of the torus, with two links of a chip
    "tpu v4": Machine(275e12, 90e9, 1e-6),
    "tpu v5e": Machine(197e12, 90e9, 1e-6),
    "tpu v5p": Machine(459e12, 180e9, 1e-6),
    "tpu v6e": Machine(918e12, 180e9, 1e-6),
    # GPUs: NVLink within one server, one direction
    "a100": Machine(312e12, 300e9, 3e-6),
    "h100": Machine(989e12, 450e9, 3e-6),
    "h200": Machine(989e12, 450e9, 3e-6),
    "b200": Machine(2250e12, 900e9, 3e-6),
}
"""Published peaks, rounded; latencies are orders of magnitude. For anything finer give `CostModel` your own."""


# A guess. With the value of accelerators the example's step on 2 x 4 virtual devices moved 0.96 of jit's bytes in 1.05
# of its time, with this one 1.00 of the bytes in 1.01 of the time (2026-11, medians of 10 pairs on two cores).
_CPU_FLOP = 0.1


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds per hop, seconds per floating-point operation, and bytes per second per mesh axis.

    With bandwidth 1 the unit of time is a byte on the wire. The default `flop` is that of accelerators (400 TFLOP/s
    beside 450 GB/s); it decides between moving data and computing the same thing on several devices.

    Products and convolutions never repeat work on several devices that the axes of their operands and results share
    out, and do no more per device in a plan for the whole program (`layouts="global"`) than op by op. With
    `repeat_work` they may, where that costs less.

    `bandwidth` may be given as a mapping from axis name; axes that it does not name have bandwidth 1. It is kept as
    sorted pairs, so that models are hashable. With `CostModel()` every time is a number of bytes.

    >>> CostModel().wire_bytes("all_gather", 4, 256, 1024)
    768.0
    """

    latency: float = 0.0
    flop: float = 1e-3
    bandwidth: Mapping[str, float] | tuple[tuple[str, float], ...] = ()
    repeat_work: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "bandwidth", tuple(sorted(dict(self.bandwidth).items())))

    @classmethod
    def of_platform(cls, platform: str) -> CostModel:
        """The default for devices of a platform: on virtual CPU devices replicated work competes for the same cores."""
        return cls(flop=_CPU_FLOP) if platform == "cpu" else cls()

    @classmethod
    def of_machine(cls, name: str, axes: Iterable[str], bandwidth: Mapping[str, float] | None = None) -> CostModel:
        """The model of a machine in `MACHINES`, in seconds.

        Args:
            name: one of the names in `MACHINES`.
            axes: the mesh's axis names.
            bandwidth: bytes per second of axes that do not run over the machine's own links (a data-centre network).

        Raises:
            SdyError: the machine is not in the table.

        >>> CostModel.of_machine("h100", ["data", "model"], {"data": 25e9}).bandwidth_of("data")
        25000000000.0
        """
        if name not in MACHINES:
            raise SdyError(
                f"no machine is called {name!r}; known are {', '.join(MACHINES)}. Or give CostModel your own"
            )
        machine = MACHINES[name]
        return cls(machine.latency, 1 / machine.flops, dict.fromkeys(axes, machine.bandwidth) | dict(bandwidth or {}))

    def wire_bytes(self, kind: str, group: int, bytes_in: float, bytes_out: float) -> float:
        """Bytes that each device sends, from the local bytes before and after a collective over `group` devices.

        `collective_permute` is charged in full: do not ask for one that moves nothing.
        """
        return wire_bytes(kind, group, bytes_in, bytes_out)

    def time(self, kind: str, axes: Iterable[AxisRef], mesh: Mesh, bytes_in: float, bytes_out: float) -> float:
        """The time of a collective over `axes`: latency per hop, and its bytes over the slowest of the axes."""
        axes = tuple(axes)
        slowest = min((self.bandwidth_of(axis.name) for axis in axes), default=1.0)
        return self.group_time(kind, axes_size(axes, mesh), slowest, bytes_in, bytes_out)

    def group_time(self, kind: str, group: int, bandwidth: float, bytes_in: float, bytes_out: float) -> float:
        """`time` where the group's size and bandwidth are known."""
        hops = self.latency * _row(kind)[1](group) if self.latency and group > 1 else 0.0
        return hops + self.wire_bytes(kind, group, bytes_in, bytes_out) / bandwidth

    def sending_time(self, kind: str, axes: Iterable[AxisRef], mesh: Mesh, wire: float) -> float:
        """The time of a collective over `axes` in which each device sends `wire` bytes. Devices that are permuted may
        send them along any axis."""
        if not wire:
            return 0.0
        axes = tuple(axes) or tuple([AxisRef(axis.name) for axis in mesh.axes])
        group = axes_size(axes, mesh)
        hops = self.latency * _row(kind)[1](group) if self.latency and group > 1 and kind in _TABLE else 0.0
        return hops + wire / min((self.bandwidth_of(axis.name) for axis in axes), default=1.0)

    def bucket_bytes(self, kind: str, axes: Iterable[AxisRef], mesh: Mesh) -> float:
        """The size at which latency is a tenth of a collective's time, in bytes that each device sends.

        Smaller collectives of one kind and group are worth combining, up to this size; larger ones gain little. Without
        latency it is 0: nothing is gained by combining.

        >>> CostModel(latency=1e-6, bandwidth={"x": 90e9}).bucket_bytes("all_gather", [AxisRef("x")], Mesh.of(x=4))
        2430000.0
        """
        axes = tuple(axes)
        slowest = min((self.bandwidth_of(axis.name) for axis in axes), default=1.0)
        return 9 * self.group_time(kind, axes_size(axes, mesh), slowest, 0.0, 0.0) * slowest

    def bandwidth_of(self, axis: str) -> float:
        """Bytes per second along a mesh axis."""
        return dict(self.bandwidth).get(axis, 1.0) if self.bandwidth else 1.0

    @property
    def is_default(self) -> bool:
        """Time is the number of bytes."""
        return not self.latency and all(value == 1.0 for value in dict(self.bandwidth).values())


def wire_bytes(kind: str, group: int, bytes_in: float, bytes_out: float) -> float:
    """`CostModel.wire_bytes`, which is the same for all models."""
    return _row(kind)[0](group, bytes_in, bytes_out) if group > 1 else 0.0


def _row(kind: str) -> tuple[_Bytes, _Hops]:
    if kind not in _TABLE:
        raise InternalError(f"no cost is known for collective {kind!r}; known are {', '.join(_TABLE)}")
    return _TABLE[kind]


def same_cost(a: float, b: float) -> bool:
    """Equal up to the rounding of sums."""
    return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)
