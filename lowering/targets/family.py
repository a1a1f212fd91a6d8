"""What devices of one kind have in common: published machines, what their compiler does, how arrays are stored."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from sdy_jax.lowering.targets.rates import Copies, Tiles
from sdy_jax.lowering.targets.torus import Torus
from sdy_jax.runtime.meshes import Forms

# Machines: what is published of one device, its rates, its links and its memory.

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
        peaks: operations per second of products of other types, by name, as published: of dense operands.
    """

    flops: float
    memory: float
    capacity: float
    launch: float
    product_launch: float
    allocated: float = 1.0
    peaks: Mapping[str, float] = field(default_factory=dict, hash=False)

    def peak(self, dtype: str) -> float:
        """That of an element type, as MLIR writes it; that of bfloat16 where nothing is published of it."""
        name = next((peak for start, peak in _PEAKS.items() if dtype.startswith(start)), "")
        return self.peaks.get(name, self.flops)


_PEAKS = {"f8": "float8", "f4": "float4", "i8": "int8", "ui8": "int8"}
"""The peaks of element types, by what their names begin with."""


@dataclass(frozen=True, slots=True)
class Network:
    """The data-centre network: bytes per second that a device sends over it, and seconds per hop."""

    bandwidth: float
    latency: float


@dataclass(frozen=True, slots=True)
class Links:
    """What joins devices.

    Attributes:
        bandwidth: bytes per second that a device sends along one mesh axis over the machine's own links, along one
            dimension where these are a torus.
        latency: seconds per hop over these.
        start: seconds before a collective sends anything.
        network: what is beyond these links.
        torus: they lead to neighbours only, along its dimensions; None where they lead everywhere.
        joins_hosts: they join devices of all processes, as far as no device says otherwise; else those of one process.
        name: what they are called.
        joins: how many devices they join at most: those of a server, a rack or a pod; 0 where that is not known.
        peers: how many other devices they lead to, to each by a link of its own that has as much of the bandwidth; 0
            where a switch, or a torus, lets a device send all of it to any group.
        host: bytes per second that a device sends to the memory of its host, or takes from there; 0 where sources say
            nothing, or differ.
    """

    bandwidth: float
    latency: float
    start: float
    network: Network
    torus: Torus | None = None
    joins_hosts: bool = False
    name: str = ""
    joins: int = 0
    peers: int = 0
    host: float = 0.0


@dataclass(frozen=True, slots=True)
class Machine:
    """A kind of device.

    Attributes:
        kind: the pattern of what it calls itself (`jax.Device.device_kind`), in small letters.
        chip: one device.
        links: what joins several.
        also: other names that people have for it.
    """

    kind: str
    chip: Chip
    links: Links
    also: tuple[str, ...] = ()

    def is_of(self, device_kind: str) -> bool:
        """Whether a device of a kind is one."""
        return re.fullmatch(self.kind, device_kind.lower().strip()) is not None

    def memory_of(self, device_kind: str = "") -> float:
        """The bytes of its memory that programs can have. A device of a kind with several sizes says its own, and so
        does a part of one: the least that it says."""
        said = re.findall(r"\b(\d+) ?gb\b", device_kind.lower())
        return self.chip.allocated * (min(map(int, said)) * GIB if said else self.chip.capacity)


# What a compiler does to a program that decides what a device holds, sends and waits for.
#
# Each attribute is a question that planning asks. Without an answer a compiler does the plain thing.


@dataclass(frozen=True, slots=True)
class Fusion:
    """What is computed as it is read, and makes no buffer.

    Attributes:
        into_products: products and convolutions compute their operands as they read them, instead of reading them from
            memory.
        dear_again: what is dear to compute, and read by several kernels, is computed in each where that reads less.
        rows: rows of up to so many elements are read once for what is computed of them and of their sums, which is not
            written over them.
    """

    into_products: bool = False
    dear_again: bool = False
    rows: int = 0


@dataclass(frozen=True, slots=True)
class Order:
    """In which order ops run for which nobody waits.

    Attributes:
        runs_early: an op runs as soon as its operands are there, not when it is needed.
        runs_late: an op runs no sooner than its result is needed.
        reduces_late: so do reductions, beside which the compiler looks for work: what they reduce is there until then.
        multiplies_late: so do products that other products need; those that none needs run at any time.
        keeps_whole: all of a value is kept until a part of it is taken, instead of that part being computed.
    """

    runs_early: bool = False
    runs_late: bool = False
    reduces_late: bool = False
    multiplies_late: bool = False
    keeps_whole: bool = False


@dataclass(frozen=True, slots=True)
class Collectives:
    """What becomes of collectives.

    Attributes:
        starts: the kinds that it starts before other work, and waits for after it.
        pipelines: of these, those that a loop's next trip hides where it only stores their results in a stack.
        combines: the kinds of which it runs small ones that follow each other as one, without copies.
        buckets: the kinds of which small ones run as one unasked; those that it does not combine, as one of a stack of
            their operands, where these have one shape.
        merges: independent all_reduces run as one, whatever their buckets.
        joins_major: blocks are joined along the major dimension only: what is gathered along another one is transposed
            before a loop reads it, and a whole stack of which a loop gathers layers so.
        along_lines: a reduce-scatter runs along one dimension of a torus; of others become all_reduces.
        units: the share of a device's units of work that send, where no engines do.
    """

    starts: frozenset[str] = frozenset()
    pipelines: frozenset[str] = frozenset()
    combines: frozenset[str] = frozenset(("all_reduce",))
    buckets: frozenset[str] = frozenset(("all_reduce",))
    merges: bool = False
    joins_major: bool = False
    along_lines: bool = False
    units: float = 0.0


@dataclass(frozen=True, slots=True)
class Compiler:
    """What a kind of device's compiler does."""

    fusion: Fusion = Fusion()
    order: Order = Order()
    collectives: Collectives = Collectives()


# What devices of one kind have in common: the contract of a module for an accelerator.

FLOP = 1e-3
"""The bytes that are worth to be sent to save an operation, where costs are bytes. Published (of accelerators: 400
TFLOP/s beside 450 GB/s): with more, bytes are sent to save work; with none, equal bytes would repeat it."""

_FLOAT32 = 4
"""Given: bytes of an element."""


def _no_copies(memory: float, launch: float) -> Copies:
    return Copies()


@dataclass(frozen=True, slots=True)
class Arrays:
    """How arrays lie in a device's memory.

    Attributes:
        tiles: those in which they lie; None where they lie densely.
        rounded: the bytes that an element of a float32 array has that products of open precision take; 0 where they
            round nothing. What nothing else reads is kept, and sent, so.
        copies: what a device rearranges of what it sends and receives, where its memory takes so many seconds for a
            byte, and an op so many beside.
    """

    tiles: Tiles | None = None
    rounded: int = 0
    copies: Callable[[float, float], Copies] = _no_copies

    @property
    def rounds(self) -> bool:
        """Whether products round their operands."""
        return self.rounded > 0

    @property
    def moved(self) -> float:
        """The share of its bytes that a float32 value has that is moved for products alone."""
        return self.rounded / _FLOAT32 if self.rounds else 1.0

    def bytes(self, shape: Sequence[int], itemsize: float, is_rounded: bool = False) -> float:
        """The bytes of a block. `is_rounded`: products alone take it.

        >>> Arrays(Tiles(), rounded=2).bytes((512, 64), 4, is_rounded=True)
        65536
        """
        elements = math.prod(shape) if self.tiles is None else self.tiles.elements(shape)
        return elements * (self.rounded if is_rounded and self.rounds else itemsize)


def _one_rate(chip: Chip, dtype: str, precision: str) -> float:
    return chip.flops


def _one_pace(count: int) -> float:
    return 1.0


@dataclass(frozen=True, slots=True)
class Family:
    """A family of devices.

    Attributes:
        name: the platform, as jax names it.
        machines: those of which rates are published, by name.
        compiler: what their compiler does.
        arrays: how arrays lie in their memory.
        forms: in which forms their compiler takes collectives best.
        flop: the bytes that are worth to be sent to save an operation, where costs are bytes.
        usual: the machine that is meant where only the family is said; none for one whose rates are not published.
        products: operations per second of products whose operands have an element type, as MLIR writes it, at a
            precision, as `jax.lax.Precision` calls it; of types of which nothing is published that of bfloat16.
        batches: how long a convolution of so many batches takes beside one of many, of as many operations.
    """

    name: str
    machines: Mapping[str, Machine] = field(default_factory=dict, hash=False)
    compiler: Compiler = field(default_factory=Compiler)
    arrays: Arrays = Arrays()
    forms: Forms = field(default_factory=Forms)
    flop: float = FLOP
    usual: str = ""
    products: Callable[[Chip, str, str], float] = _one_rate
    batches: Callable[[int], float] = _one_pace
