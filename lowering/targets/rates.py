"""The rates of collectives over links: bytes on the wire per device, seconds, and what devices rearrange in tiles.

Ring algorithms over a group of g devices. See docs/explanation/costs.md#bytes-on-the-wire.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from itertools import permutations
from typing import NamedTuple

from sdy_jax.base.errors import InternalError
from sdy_jax.lowering.targets.torus import Lines, cut_lines

# What devices rearrange of what they send and receive, where arrays lie in tiles.
#
# There an array lies in tiles of 8 rows of 128 elements of its last dimension, its lanes. A gather or a scatter of
# whole tiles is sent as it lies, and of an all_to_all the blocks are put side by side once. A block of fewer lanes
# fills a tile with padding, so that all of its elements change their lanes.

SUBLANES, LANES = 8, 128
"""The rows of a tile, and the elements of each, where nothing else is said. Published (XLA, "Tiled layout";
"How to Scale Your Model")."""


class Tiles(NamedTuple):
    """The rows and the lanes of a tile, in which two dimensions of an array lie; one with fewer rows has tiles of
    fewer."""

    rows: int = SUBLANES
    lanes: int = LANES

    def elements(self, shape: Sequence[int]) -> int:
        """The elements of a block in whole tiles, with those two dimensions in tiles of which it then has fewest, as
        the compiler chooses them.

        >>> [Tiles().elements(shape) for shape in ((32, 32, 64), (512, 64), (3, 128))]
        [131072, 32768, 512]
        """
        if len(shape) < 2:
            return math.prod(shape)
        if not all(shape):
            return 0
        padded = min(
            _whole(lanes, self.lanes) / lanes * _whole(rows, min(self.rows, _power(rows))) / rows
            for lanes, rows in permutations(shape, 2)
        )
        return round(math.prod(shape) * padded)


def _whole(size: int, tile: int) -> int:
    return -(-size // tile) * tile


def _power(size: int) -> int:
    """The least power of two that is no smaller."""
    return 1 << (size - 1).bit_length()


def in_lanes(shape: Sequence[int]) -> int:
    """The dimension that is in lanes: the last one, or the largest one that fills lanes where that does not.

    >>> in_lanes((8, 64, 512)), in_lanes((512, 3, 8, 64)), in_lanes((3, 5))
    (2, 0, 1)
    """
    last = len(shape) - 1
    filling = [dim for dim in range(len(shape)) if shape[dim] % LANES == 0]
    return last if not filling or last in filling else max(filling, key=shape.__getitem__)


class LastCut(NamedTuple):
    """What a collective cuts or joins along the last dimension: the size of the smaller blocks, the rank of the array,
    and whether blocks are joined."""

    block: int
    rank: int
    joins: bool = False


def last_cut(shape: Sequence[int], before: Sequence[int], after: Sequence[int]) -> LastCut | None:
    """What leads from some shard counts per dimension to others; None where the last dimension stays as it is.

    >>> last_cut((16, 512), (8, 1), (1, 8))
    LastCut(block=64, rank=2, joins=False)
    """
    if not shape or before[-1] == after[-1]:
        return None
    return LastCut(-(-shape[-1] // max(before[-1], after[-1])), len(shape), before[-1] > after[-1])


_MATRIX = 2
"""Given: the rank of a matrix."""

_SEVERAL = 4
"""The ops that rearrange narrow blocks, where it takes more than one: copies to rows of other sizes and back. Measured
(2026-11, libtpu 0.0.52): 3 to 7 microseconds beside 1.2 to 1.8 where it is one."""


class Copies(NamedTuple):
    """Seconds for each byte sent in which a device rearranges what it sends and receives.

    Attributes:
        sent: whatever is sent.
        exchanged: beside that, of an all_to_all.
        lanes: the elements of the last dimension in a tile; 0 where arrays do not lie in tiles.
        rows: beside these, of blocks that are no whole tiles, and of an all_to_all that joins the rows of a matrix.
        narrow: instead, of such blocks of an array of three dimensions, and where more are gathered.
        folded: instead, of an all_to_all of such blocks of more dimensions.
        launch: seconds of each op that rearranges blocks which are no whole tiles, however small these are.
    """

    sent: float = 0.0
    exchanged: float = 0.0
    lanes: int = 0
    rows: float = 0.0
    narrow: float = 0.0
    folded: float = 0.0
    launch: float = 0.0

    def of(self, kind: str, cut: LastCut | None) -> float:
        """Those of a kind of collective and what it cuts."""
        exchanges = kind == "all_to_all"
        rearranged = self._rearranged(kind, cut) if cut is not None and self.lanes else 0.0
        return self.sent + (self.exchanged if exchanges else 0.0) + rearranged

    def fixed(self, kind: str, cut: LastCut | None) -> float:
        """The seconds of a collective beside those for its bytes."""
        if cut is None or not self._is_narrow(cut):
            return 0.0
        return self.launch * (1 if _is_one_op(kind, cut.rank) else _SEVERAL)

    def _rearranged(self, kind: str, cut: LastCut) -> float:
        if self._is_narrow(cut):
            return self._of_narrow(kind, cut.rank)
        return self.rows if kind == "all_to_all" and cut.rank == _MATRIX and cut.joins else 0.0

    def _of_narrow(self, kind: str, rank: int) -> float:
        if _is_one_op(kind, rank):
            return self.rows
        return self.folded if kind == "all_to_all" and rank > _MATRIX + 1 else self.narrow

    def _is_narrow(self, cut: LastCut) -> bool:
        """Whether blocks are no whole tiles."""
        return self.lanes > 0 and cut.block % self.lanes > 0


def _is_one_op(kind: str, rank: int) -> bool:
    """Whether one op rearranges narrow blocks."""
    return rank <= _MATRIX or kind == "reduce_scatter"


# The rates of collectives over links: bytes on the wire per device, and seconds.
#
# Ring algorithms over a group of g devices. See docs/explanation/costs.md#bytes-on-the-wire.

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
        bandwidth: bytes per second that a device sends along it; of a torus along a ring in one of its dimensions.
        hop: seconds from one device to its neighbour.
        start: seconds before a collective along it sends anything.
        lines: of a torus, where devices reach only their neighbours, the lines along which it lies, so that an
            all_to_all passes through others; none elsewhere.
        copies: the time in which a device rearranges what it sends and receives.
        moved: the share of its bytes that a value has on the wire if it is only moved.
        far: how many neighbours on the next device is, but on a torus: more than one along a part of an axis.
        peers: to how many other devices its bandwidth leads, to each by a link of its own: in a smaller group a device
            sends as much slower. 0: all of it to any group.
        is_network: it is no link of the machine itself.
    """

    size: int
    bandwidth: float = 1.0
    hop: float = 0.0
    start: float = 0.0
    lines: Lines = ()
    copies: Copies = Copies()
    moved: float = 1.0
    far: int = 1
    peers: int = 0
    is_network: bool = False

    @property
    def speed(self) -> float:
        """Bytes per second that a device sends along it, along all of its lines at once."""
        return self.bandwidth * sum([line.speed for line in self.lines]) if self.lines else self.bandwidth

    @property
    def around(self) -> float:
        """Seconds until the farthest device is reached."""
        if self.lines:
            return self.hop * sum([line.hops for line in self.lines])
        return self.hop * (_hops(self.far * self.size) - _hops(self.far))

    @property
    def next(self) -> float:
        """Seconds until the next device is reached."""
        return self.hop * (self.lines[-1].far if self.lines else _hops(self.far + 1))

    def cut(self, sizes: Sequence[int]) -> tuple[Link, ...]:
        """Its parts of these sizes, major to minor. Going around all of them takes as long as going around the whole.

        >>> [link.around for link in Link(64, hop=1.0).cut([8, 2, 4])]
        [6.0, 4.0, 3.0]
        """
        strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
        parts = zip(sizes, strides, cut_lines(self.lines, sizes), strict=True)
        return tuple([self._replace(size=n, far=self.far * far, lines=lines) for n, far, lines in parts])


def _hops(size: int) -> float:
    """How many devices on the farthest of so many is: along a ring, or up a tree and down again, as go NCCL's double
    binary trees (2.4) and its PAT (2.23) where there are many."""
    return min(size - 1.0, 2 * math.log2(size) + 1)


class Rate(NamedTuple):
    """The time of collectives of one kind over one group: seconds whatever is sent, and per byte that a device sends.

    `is_shared`: collectives are combined, so that a small one has its share of what a full bucket waits.
    """

    fixed: float
    per_byte: float
    is_shared: bool = False

    def time(self, wire: float) -> float:
        """The time of one collective in which each device sends `wire` bytes; nothing where that is none."""
        if not self.is_shared:
            return self.alone(wire)
        sending = wire * self.per_byte
        return sending + min(self.fixed, IN_A_BUCKET * sending)

    def alone(self, wire: float) -> float:
        """The time of one that is combined with no other."""
        return wire * self.per_byte + self.fixed if wire else 0.0

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

    Hops add up along each link. In an all_to_all that line of a torus decides on which most passes.
    """
    links = [link for link in links if link.size > 1]
    if not links:
        return Rate(0.0, 0.0)
    per_byte = 1 / speed(kind, links)
    if kind in _EXCHANGES:
        group = math.prod([link.size for link in links])
        turned = [line.turn / _kept(group) / link.bandwidth for link in links for line in link.lines]
        per_byte = max([per_byte, *turned])
    per_byte += max([link.copies.of(kind, cut) for link in links])
    if kind in _MOVES:
        per_byte *= max([link.moved for link in links])
    fixed = _fixed(kind, links) + max([link.copies.fixed(kind, cut) for link in links])
    return Rate(fixed, per_byte, kind in combines)


def speed(kind: str, links: Sequence[Link]) -> float:
    """Bytes per second that a device sends in a kind of collective over links.

    The slowest one decides. Over a network and a machine's own links, libraries send over the network only what has to
    go there, each device its part, and the rest over the others: NCCL's rings use the network of each device
    (nccl-tests 290: 46 to 48 of 50 GB/s each), and between slices of TPUs XLA sends what was scattered within them
    (2026-11, libtpu 0.0.52). Where each pair has its own link, g devices use g-1 of each other's, and a permute one.

    >>> server, network = Link(8, 450e9), Link(8, 50e9, is_network=True)
    >>> [round(speed(kind, [network, server]) / 1e9) for kind in ("all_gather", "all_to_all", "collective_permute")]
    [238, 55, 50]
    """
    links = [link for link in links if link.size > 1]
    direct = math.prod([link.size for link in links if link.peers])

    def slowest(among: Sequence[Link]) -> float:
        return min([link.speed * _reached(kind, link.peers, direct) for link in among], default=math.inf)

    outside, inside = ([link for link in links if link.is_network == over] for over in (True, False))
    if kind == "collective_permute" or not (outside and inside):
        return slowest(links)
    group, hosts = (math.prod([link.size for link in among]) for among in (links, outside))
    across = (group - group // hosts if kind in _EXCHANGES else hosts - 1) / (group - 1)
    return 1 / (across / slowest(outside) + (1 - across) / slowest(inside))


def _reached(kind: str, peers: int, group: int) -> float:
    """The share of a device's links that lead into a group."""
    if not peers:
        return 1.0
    return min(1 if kind == "collective_permute" else group - 1, peers) / peers


def _fixed(kind: str, links: Sequence[Link]) -> float:
    start = max([link.start for link in links])
    if kind == "collective_permute":
        return start + min([link.next for link in links])
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
