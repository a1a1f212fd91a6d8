"""Strips of a split dimension that travel between shards, and the rounds that send them: integers, no arrays."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from sdy_jax.base.errors import InternalError

# Plans of strips as data: how operands are split, what result shards want, what is copied and what is sent.


@dataclass(frozen=True, slots=True)
class Source:
    """How an operand is split: shard `u` holds elements `bounds[u]` to `bounds[u + 1]`, the first one at local index 0.

    `block` is the length of the local array, whose rest is padding. An operand with a single range is whole on every
    device, and nothing of it is sent. Where the ranges are fewer than the devices, `replicas` devices in a row hold the
    same one.
    """

    bounds: tuple[int, ...]
    block: int
    replicas: int = 1

    @classmethod
    def split(cls, size: int, shards: int, block: int | None = None) -> Source:
        """Blocks of `block` elements, as many as are needed for `size`, the others empty; None for equal blocks."""
        block = block_length(size, shards) if block is None else block
        if block * shards < size:
            raise InternalError(f"{shards} blocks of {block} elements cannot hold {size}")
        return cls(tuple(min(u * block, size) for u in range(shards + 1)), block)

    @classmethod
    def whole(cls, size: int) -> Source:
        """Every device holds all elements."""
        return cls((0, size), size)

    @property
    def is_whole(self) -> bool:
        return len(self.bounds) == 2


class Want(NamedTuple):
    """A strip that a result shard is made of: `length` elements of an operand from global index `source` on, which it
    keeps from local index `start` on."""

    operand: int
    source: int
    start: int
    length: int


Wants = tuple[tuple[Want, ...], ...]
"""Per result shard, its strips; they do not overlap in the result."""


@dataclass(frozen=True, slots=True)
class Strips:
    """At most one strip per sender and per receiver, which move together.

    `length` is that of the longest, which all devices cut and send; `pairs` are (sender, receiver), equal ones for
    copies. By sender: `operands`, the operand from which it cuts, and `offsets`, where. By receiver: `starts`, where it
    keeps the strip, and `lengths`, of how many elements (0 for a device that receives none). Entries of devices that
    take no part are those of one that does, so that a table of equal numbers is recognised as a constant.
    """

    length: int
    pairs: tuple[tuple[int, int], ...]
    operands: tuple[int, ...]
    offsets: tuple[int, ...]
    starts: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def is_full(self) -> bool:
        """Whether every device receives `length` elements."""
        return min(self.lengths) == self.length


@dataclass(frozen=True, slots=True)
class StripPlan:
    """What makes the result's local blocks of `length` elements: `copies` within a device, and `rounds` on the wire."""

    length: int
    copies: tuple[Strips, ...]
    rounds: tuple[Strips, ...]

    @property
    def wire_elements(self) -> int:
        """What a device sends, in elements along the dimension. An all_gather sends (shards - 1) blocks."""
        return sum(strips.length for strips in self.rounds)


def block_length(size: int, shards: int) -> int:
    return -(-size // shards)


class StripMove(NamedTuple):
    """A strip that one shard holds and one wants."""

    sender: int
    receiver: int
    length: int
    operand: int
    offset: int
    start: int


# The rounds in which strips are sent: an edge colouring of the bipartite graph from senders to receivers.
#
# A round costs its longest strip: long strips are coloured first and share rounds, and strips are cut into parts
# where that saves much.

_PARTS = (2, 3, 4)
_ROUND = 0.05
"""What a further round must save at least, as a fraction of the bytes, and the `_PARTS` of a strip that are tried.
Guessed: a message costs its start, too; with 0, strips are sent in many small rounds."""


def rounds_of(moves: Sequence[StripMove]) -> list[list[StripMove]]:
    """One strip per device and round. Where rounds are much longer than what the busiest device sends, because some
    strips grow from shard to shard while others shrink, strips are cut into parts: more rounds, fewer bytes.

    Example: strips of 1, 2, 3 to the right neighbour and 3, 2, 1 to the next one are two rounds of 3, though a device
    sends 4. In parts of 2 they are three rounds of 2, 2 and 1.
    """
    best = _coloured(moves)
    busiest = _busiest(moves)
    for parts in _PARTS:
        if _wire(best) * (1 - _ROUND) <= busiest:
            break
        best = min(best, _coloured(_cut(moves, parts)), key=lambda rounds: _wire(rounds) * (1 + _ROUND * len(rounds)))
    return best


def _coloured(moves: Sequence[StripMove]) -> list[list[StripMove]]:
    # Among equals, moves over the same distance stay together: neighbours on one side become one round.
    ordered = sorted(moves, key=lambda move: (-move.length, move.receiver - move.sender, move.receiver, move.start))
    groups: dict[int, list[StripMove]] = {}
    for move, colour in zip(ordered, edge_colours([(m.sender, m.receiver) for m in ordered]), strict=True):
        groups.setdefault(colour, []).append(move)
    return [group for _, group in sorted(groups.items())]


def _wire(rounds: Sequence[Sequence[StripMove]]) -> int:
    return sum(max(move.length for move in moves) for moves in rounds)


def _busiest(moves: Iterable[StripMove]) -> int:
    """The most elements that one device sends, or receives."""
    sent, received = Counter[int](), Counter[int]()
    for move in moves:
        sent[move.sender] += move.length
        received[move.receiver] += move.length
    return max([*sent.values(), *received.values()], default=0)


def _cut(moves: Sequence[StripMove], parts: int) -> list[StripMove]:
    limit = block_length(max(move.length for move in moves), parts)
    return [
        move._replace(length=min(limit, move.length - i), offset=move.offset + i, start=move.start + i)
        for move in moves
        for i in range(0, move.length, limit)
    ]


def _strips(moves: Sequence[StripMove], shards: int) -> Strips:
    first = moves[0]
    operands, offsets, starts, lengths = ([n] * shards for n in (first.operand, first.offset, first.start, 0))
    for move in moves:
        operands[move.sender], offsets[move.sender] = move.operand, move.offset
        starts[move.receiver], lengths[move.receiver] = move.start, move.length
    pairs = tuple(sorted((move.sender, move.receiver) for move in moves))
    return Strips(max(lengths), pairs, tuple(operands), tuple(offsets), tuple(starts), tuple(lengths))


def edge_colours(edges: Sequence[tuple[int, int]]) -> list[int]:
    """Colours of the edges of a bipartite multigraph, as few as its largest degree; no two at a node are equal.

    Edges take in turn the lowest colour that is free at both ends. Where there is none, two colours are exchanged along
    a path: `a` is free at the sender and `b` at the receiver; the path of edges with `a`, `b`, `a`, ... from the
    receiver ends before it could reach the sender, and after the exchange `a` is free at the receiver too.
    """
    nodes = [(("sender", u), ("receiver", t)) for u, t in edges]
    at: dict[tuple[str, int], dict[int, int]] = {node: {} for ends in nodes for node in ends}
    used = dict.fromkeys(at, 0)  # the colours at a node as bits
    colours = [0] * len(edges)

    def paint(edge: int, colour: int) -> None:
        colours[edge] = colour
        for node in nodes[edge]:
            at[node][colour] = edge
            used[node] |= 1 << colour

    def path(node: tuple[str, int], colour: int, other: int) -> list[int]:
        found = []
        while (edge := at[node].get(colour)) is not None:
            found.append(edge)
            node = nodes[edge][1] if nodes[edge][0] == node else nodes[edge][0]
            colour, other = other, colour
        return found

    def exchange(edges_on_path: Sequence[int], colour: int, other: int) -> None:
        for edge in edges_on_path:
            for node in nodes[edge]:
                del at[node][colours[edge]]
                used[node] &= ~(1 << colours[edge])
        for edge in edges_on_path:
            paint(edge, other if colours[edge] == colour else colour)

    degree = max(Counter(node for ends in nodes for node in ends).values(), default=0)
    for edge, (sender, receiver) in enumerate(nodes):
        colour = _lowest_free(used[sender] | used[receiver])
        if colour >= degree:
            colour, other = _lowest_free(used[sender]), _lowest_free(used[receiver])
            exchange(path(receiver, colour, other), colour, other)
        paint(edge, colour)
    return colours


def _lowest_free(used: int) -> int:
    return (~used & (used + 1)).bit_length() - 1


# Which strips of a split dimension travel between shards, and in which rounds: integers only, no arrays.
#
# Ops that cut, shift or join along a dimension make each shard of their result from a few contiguous strips of their
# operands. A result shard states its strips (`Want`), an operand how it is split (`Source`); `plan_strips` cuts the
# strips where the source shards meet. What a device holds itself it copies. The rest is sent in rounds, in each of
# which a device sends at most one strip and receives at most one: a `ppermute`. The rounds are an edge colouring of
# the bipartite graph from senders to receivers, so there are as many as the busiest device has strips to send or to
# receive (König's theorem). A round costs its longest strip: long strips are coloured first and share rounds, and
# strips are cut into parts where that saves much.
#
# Example: x of 8 elements on 4 shards (blocks of 2), shifted to the right by one, x[-1] = 0.
#
#     shard     holds     wants of x     copies                  receives
#     0         x0 x1     -- x0          x0 (offset 0) to 1      -
#     1         x2 x3     x1 x2          x2 (offset 0) to 1      x1 (offset 1 of shard 0) to 0
#     2         x4 x5     x3 x4          x4 (offset 0) to 1      x3 (offset 1 of shard 1) to 0
#     3         x6 x7     x5 x6          x6 (offset 0) to 1      x5 (offset 1 of shard 2) to 0
#
#     wants = ((Want(0, 0, 1, 1),), (Want(0, 1, 0, 2),), (Want(0, 3, 0, 2),), (Want(0, 5, 0, 2),))
#     plan = plan_strips((Source.split(8, 4),), wants, length=2)
#
# has one set of copies and one round of one element: `plan.wire_elements == 1`. What no want asks for (the first
# element of shard 0, the padding of sources) is never read; there the result keeps its fill value.
#
# `relayouts.py` has the wants of reshards, `reshard/strip_reads.py` those of ops; `ops/shards.py`
# runs plans on arrays. See docs/explanation/reshards.md#strips.


@lru_cache(maxsize=4096)
def plan_strips(sources: tuple[Source, ...], wants: Wants, length: int) -> StripPlan:
    """The copies and rounds that make result blocks of `length` elements, one per entry of `wants`.

    Raises:
        InternalError: a want lies outside of its operand or of the result's block.
    """
    sent = Counter[int]()
    moves = [m for shard, strips in enumerate(wants) for want in strips for m in _moves(want, shard, sources, sent)]
    outside = [want for strips in wants for want in strips if want.start < 0 or want.start + want.length > length]
    if outside:
        raise InternalError(f"{outside[0]} lies outside of a block of {length} elements")
    shards = len(wants)
    copies = _copies([move for move in moves if move.sender == move.receiver])
    rounds = rounds_of([move for move in moves if move.sender != move.receiver])
    return StripPlan(length, *(tuple(_strips(group, shards) for group in groups) for groups in (copies, rounds)))


def _moves(want: Want, receiver: int, sources: Sequence[Source], sent: Counter[int]) -> Iterable[StripMove]:
    """The strips of which a want consists. `sent`: how much each device sends so far."""
    operand, first, start, length = want
    bounds, last = sources[operand].bounds, first + length
    if length and not bounds[0] <= first <= last <= bounds[-1]:
        raise InternalError(f"{want} lies outside of an operand that holds {bounds[0]} to {bounds[-1]}")
    if sources[operand].is_whole:
        yield from [StripMove(receiver, receiver, length, operand, first - bounds[0], start)] if length else []
        return
    held, position = bisect_right(bounds, first) - 1, first
    while position < last:
        stop = min(last, bounds[held + 1])
        if stop > position:
            sender = _holder(held, receiver, sources[operand].replicas, sent)
            sent[sender] += (stop - position) * (sender != receiver)
            yield StripMove(
                sender, receiver, stop - position, operand, position - bounds[held], start + position - first
            )
        held, position = held + 1, stop


def _holder(held: int, receiver: int, replicas: int, sent: Counter[int]) -> int:
    """The receiver, if it holds this range itself; else of its holders the one that sends least so far, of equal ones
    that at the receiver's own place among its replicas or the next one."""
    if receiver // replicas == held:
        return receiver
    holders = (held * replicas + (receiver + i) % replicas for i in range(replicas))
    return min(holders, key=lambda holder: sent[holder])


def _copies(moves: Sequence[StripMove]) -> list[list[StripMove]]:
    """Groups of at most one copy per device, each from one operand.

    Copies that most devices have alike make the first groups: those are full, and nothing masks them.
    """
    alike = Counter(_place(move) for move in moves)
    seen: dict[tuple[int, int], int] = {}
    groups: dict[tuple[int, int], list[StripMove]] = {}
    for move in sorted(moves, key=lambda move: -alike[_place(move)]):
        rank = seen[move.receiver, move.operand] = seen.get((move.receiver, move.operand), -1) + 1
        groups.setdefault((rank, move.operand), []).append(move)
    return [group for _, group in sorted(groups.items())]


def _place(copy: StripMove) -> tuple[int, int, int, int]:
    """What a copy is, whichever device makes it."""
    return copy.operand, copy.offset, copy.start, copy.length


def single(table: Sequence[int]) -> int | None:
    """The number of which a table consists, if it is one."""
    return table[0] if all(a == b for a, b in pairwise(table)) else None
