"""Which strips of a split dimension travel between shards, and in which rounds: integers only, no arrays.

Ops that cut, shift or join along a dimension make each shard of their result from a few contiguous strips of their
operands. A result shard states its strips (`Want`), an operand how it is split (`Source`); `plan_strips` cuts the
strips where the source shards meet. What a device holds itself it copies. The rest is sent in rounds, in each of which
a device sends at most one strip and receives at most one: a `ppermute`. The rounds are an edge colouring of the
bipartite graph from senders to receivers, so there are as many as the busiest device has strips to send or to receive
(König's theorem). A round costs its longest strip: long strips are coloured first and share rounds, and strips are cut
into parts where that saves much.

Example: x of 8 elements on 4 shards (blocks of 2), shifted to the right by one, x[-1] = 0.

    shard     holds     wants of x     copies                  receives
    0         x0 x1     -- x0          x0 (offset 0) to 1      -
    1         x2 x3     x1 x2          x2 (offset 0) to 1      x1 (offset 1 of shard 0) to 0
    2         x4 x5     x3 x4          x4 (offset 0) to 1      x3 (offset 1 of shard 1) to 0
    3         x6 x7     x5 x6          x6 (offset 0) to 1      x5 (offset 1 of shard 2) to 0

    wants = ((Want(0, 0, 1, 1),), (Want(0, 1, 0, 2),), (Want(0, 3, 0, 2),), (Want(0, 5, 0, 2),))
    plan = plan_strips((Source.split(8, 4),), wants, length=2)

has one set of copies and one round of one element: `plan.wire_elements == 1`. What no want asks for (the first
element of shard 0, the padding of sources) is never read; there the result keeps its fill value.

`relayout.py` has the wants of reshards, `strips/wants.py` those of ops; `emission/redistribute.py` runs plans on
arrays.
See docs/explanation/reshards.md#strips.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise

from sdy_jax.errors import InternalError
from sdy_jax.lowering.strips.rounds import _strips, rounds_of
from sdy_jax.lowering.strips.strip_plan import Move, Source, StripPlan, Want, Wants


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


def _moves(want: Want, receiver: int, sources: Sequence[Source], sent: Counter[int]) -> Iterable[Move]:
    """The strips of which a want consists. `sent`: how much each device sends so far."""
    operand, first, start, length = want
    bounds, last = sources[operand].bounds, first + length
    if length and not bounds[0] <= first <= last <= bounds[-1]:
        raise InternalError(f"{want} lies outside of an operand that holds {bounds[0]} to {bounds[-1]}")
    if sources[operand].is_whole:
        yield from [Move(receiver, receiver, length, operand, first - bounds[0], start)] if length else []
        return
    held, position = bisect_right(bounds, first) - 1, first
    while position < last:
        stop = min(last, bounds[held + 1])
        if stop > position:
            sender = _holder(held, receiver, sources[operand].replicas, sent)
            sent[sender] += (stop - position) * (sender != receiver)
            yield Move(sender, receiver, stop - position, operand, position - bounds[held], start + position - first)
        held, position = held + 1, stop


def _holder(held: int, receiver: int, replicas: int, sent: Counter[int]) -> int:
    """The receiver, if it holds this range itself; else of its holders the one that sends least so far, of equal ones
    that at the receiver's own place among its replicas or the next one."""
    if receiver // replicas == held:
        return receiver
    holders = (held * replicas + (receiver + i) % replicas for i in range(replicas))
    return min(holders, key=lambda holder: sent[holder])


def _copies(moves: Sequence[Move]) -> list[list[Move]]:
    """Groups of at most one copy per device, each from one operand.

    Copies that most devices have alike make the first groups: those are full, and nothing masks them.
    """
    alike = Counter(_place(move) for move in moves)
    seen: dict[tuple[int, int], int] = {}
    groups: dict[tuple[int, int], list[Move]] = {}
    for move in sorted(moves, key=lambda move: -alike[_place(move)]):
        rank = seen[move.receiver, move.operand] = seen.get((move.receiver, move.operand), -1) + 1
        groups.setdefault((rank, move.operand), []).append(move)
    return [group for _, group in sorted(groups.items())]


def _place(copy: Move) -> tuple[int, int, int, int]:
    """What a copy is, whichever device makes it."""
    return copy.operand, copy.offset, copy.start, copy.length


def single(table: Sequence[int]) -> int | None:
    """The number of which a table consists, if it is one."""
    return table[0] if all(a == b for a, b in pairwise(table)) else None
