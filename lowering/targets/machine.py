"""Machines: what is published of one device, its rates, its links and its memory."""

from __future__ import annotations

import re
from dataclasses import dataclass

GIB = 2.0**30
"""Given: bytes."""


@dataclass(frozen=True, slots=True)
class Chip:
    """Peak rates of one device, and its memory.

    Attributes:
        flops: floating-point operations per second (bfloat16; a multiplication and an addition are two).
        memory: bytes per second of its memory.
        capacity: the bytes of that; of several sizes of one kind, those of the smallest.
        launch: seconds between two ops.
        product_launch: seconds that a product or convolution takes beside its work.
        allocated: the share of its memory that programs can have.
    """

    flops: float
    memory: float
    capacity: float
    launch: float
    product_launch: float
    allocated: float = 1.0


@dataclass(frozen=True, slots=True)
class Network:
    """The data-centre network: bytes per second that a device sends over it, and seconds per hop."""

    bandwidth: float
    latency: float


@dataclass(frozen=True, slots=True)
class Links:
    """What joins devices.

    Attributes:
        bandwidth: bytes per second that a device sends along one mesh axis over the machine's own links.
        latency: seconds per hop over these.
        start: seconds before a collective sends anything.
        network: what is beyond these links.
        is_torus: they lead to neighbours only.
        joins_hosts: they join devices of all processes, as far as no device says otherwise; else those of one process.
    """

    bandwidth: float
    latency: float
    start: float
    network: Network
    is_torus: bool = False
    joins_hosts: bool = False


@dataclass(frozen=True, slots=True)
class Machine:
    """A kind of device. `kind`: the pattern of what it calls itself (`jax.Device.device_kind`), in small letters."""

    kind: str
    chip: Chip
    links: Links

    def is_of(self, device_kind: str) -> bool:
        """Whether a device of a kind is one."""
        return re.fullmatch(self.kind, device_kind.lower().strip()) is not None

    def memory_of(self, device_kind: str = "") -> float:
        """The bytes of its memory that programs can have. A device of a kind with several sizes says its own, and so
        does a part of one: the least that it says."""
        said = re.findall(r"\b(\d+) ?gb\b", device_kind.lower())
        return self.chip.allocated * (min(map(int, said)) * GIB if said else self.chip.capacity)
