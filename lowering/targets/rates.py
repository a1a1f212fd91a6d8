"""The rates of collectives over links: bytes on the wire per device, and seconds.

Ring algorithms over a group of g devices.
See docs/explanation/costs.md#bytes-on-the-wire.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from sdy_jax.errors import InternalError
from sdy_jax.lowering.targets.tiles import Copies, LastCut

_Bytes = Callable[[int, float, float], float]


def _kept(g: int) -> float:
    """The fraction of a buffer that a device sends when the buffer is divided among g devices."""
    return (g - 1) / g


TABLE: dict[str, tuple[_Bytes, int]] = {
    # kind: wire bytes per device from (group, local bytes before, local bytes after), and how often around each axis
    "all_gather": (lambda g, b_in, b_out: (g - 1.0) * b_in, 1),
    "reduce_scatter": (lambda g, b_in, b_out: _kept(g) * b_in, 1),
    "all_reduce": (lambda g, b_in, b_out: 2 * _kept(g) * b_in, 2),
    "all_to_all": (lambda g, b_in, b_out: _kept(g) * b_in, 1),
    "ragged_all_to_all": (lambda g, b_in, b_out: _kept(g) * b_in, 1),
    "collective_permute": (lambda g, b_in, b_out: b_in, 0),  # to a neighbour
    "gather_and_reduce": (lambda g, b_in, b_out: (g - 1) * b_in, 1),
    "all_slice": (lambda g, b_in, b_out: 0.0, 0),
    "replicated_to_unreduced": (lambda g, b_in, b_out: 0.0, 0),
    "sharded_to_unreduced": (lambda g, b_in, b_out: 0.0, 0),
}

_EXCHANGES = frozenset(("all_to_all", "ragged_all_to_all"))
"""The kinds by which each device sends something of its own to each other one."""

_MOVES = _EXCHANGES | {"all_gather", "collective_permute"}
"""The kinds that combine nothing."""

IN_A_BUCKET = 1 / 9
"""Latency for each second of sending in a bucket: a tenth of the time in all. Guessed: with less, buckets are larger
and hold more; with more, they are small and wait more often."""


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
    if kind in _EXCHANGES and any(link.is_torus for link in links):
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
    turns = row(kind)[1]
    return start + turns * sum([link.around for link in links]) if turns else 0.0


def wire_bytes(kind: str, group: int, bytes_in: float, bytes_out: float) -> float:
    """`CostModel.wire_bytes`, which is the same for all models."""
    return row(kind)[0](group, bytes_in, bytes_out) if group > 1 else 0.0


def row(kind: str) -> tuple[_Bytes, int]:
    """The line of the table of a kind of collective."""
    if kind not in TABLE:
        raise InternalError(f"no cost is known for collective {kind!r}; known are {', '.join(TABLE)}")
    return TABLE[kind]
