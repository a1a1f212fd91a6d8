"""The order of a block's ops, as buckets of collectives are formed in it."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence

from sdy_jax.ir.graph import Block, Op
from sdy_jax.lowering.schedule.bucket_members import BucketCandidates, BucketMember, BucketSize
from sdy_jax.representation.mesh import Mesh

_SMALL = 1 / 64
"""The share of a bucket's bytes up to which a member is small, and an op that goes with members. Small members have
buckets of their own: a fusion that reads a small part of a bucket, such as a bias, keeps all of it in memory until it
runs. Measured (2026-11, `scripts/bench_bytes`, eight CPU devices): GPT's step with FSDP weights took 1.29 of its memory
without, 1.10 with it."""


_Neighbours = Mapping[Op, Sequence[Op]]
"""Per op, the ops of its block that make what it takes, or that take what it makes."""


class BlockOrder:
    """The ops of a block in an order that changes as buckets are formed."""

    def __init__(
        self, block: Block, candidates: BucketCandidates, size: BucketSize, mesh: Mesh, room: Mapping[Op, float]
    ):
        self._block, self._size, self._mesh, self._room = block, size, mesh, dict(room)
        self._waiting: dict[object, list[BucketMember]] = {}
        self._members = set[Op]()
        self._awaited: dict[Op, set[Op]] = {}
        """Per member that was asked for, the members for which it waits."""
        for member in candidates.of(block):
            if size.gains(member, mesh):
                is_small = size.packs(member.record) and member.held <= _SMALL * size.held
                alike = (member.key, member.grows, is_small)
                self._waiting.setdefault(alike, []).append(member)
                self._members.add(member.op)
        self._order = list(block.ops)
        self._is_barrier = {op: candidates.is_barrier(op) for op in block.ops}
        self._moves = {op: candidates.moves(op, _SMALL * size.held) for op in block.ops}
        self._makers = {op: list(dict.fromkeys(self._makers_of(op))) for op in block.ops}
        self._users = {op: list(dict.fromkeys(self._users_of(op))) for op in block.ops}
        self._number()

    def _users_of(self, op: Op) -> Iterator[Op]:
        """The ops of the block that use an op's results, or hold an op that does."""
        for result in op.results:
            for user, _ in result.uses:
                while user.block is not self._block:
                    assert user.parent is not None
                    user = user.parent
                yield user

    def buckets(self) -> list[list[BucketMember]]:
        """Forms the block's buckets, and orders the module's ops accordingly."""
        found = []
        for waiting in self._waiting.values():
            in_order = False
            while len(waiting) > 1:
                if not in_order:
                    waiting.sort(key=self._rank)
                bucket, place = self._filled(waiting)
                in_order = len(bucket) == 1
                if not in_order:
                    self._place(bucket, place)
                    found.append(bucket)
                for member in bucket:
                    waiting.remove(member)
        if found:
            self._reorder()
        return found

    # Positions.

    def _number(self) -> None:
        """Numbers the ops. After which op each can run at the earliest, and before which at the latest, is found for
        those that are asked for: of thousands a bucket concerns a few."""
        self._position = {op: n for n, op in enumerate(self._order)}
        self._barriers = [n for n, op in enumerate(self._order) if self._is_barrier[op]]
        self._earliest, self._latest = dict[Op, int](), dict[Op, int]()

    def _low(self, op: Op) -> int:
        """The last op that has to run before an op."""
        before = bisect_left(self._barriers, self._position[op]) - 1
        self._settle(self._makers, op, self._earliest, self._low)
        made = (self._earliest.get(maker, self._position[maker]) for maker in self._makers[op])
        return max(self._barriers[before] if before >= 0 else -1, *made, -1)

    def _high(self, op: Op) -> int:
        """The first op that has to run after an op."""
        after = self._barriers[bisect_right(self._barriers, self._position[op])]
        self._settle(self._users, op, self._latest, self._high)
        return min(after, *(self._latest.get(user, self._position[user]) for user in self._users[op]), after)

    def _settle(self, around: _Neighbours, op: Op, known: dict[Op, int], bound: Callable[[Op], int]) -> None:
        """Finds the bounds of those next to an op that move, those next to them first."""
        waiting = [other for other in around[op] if self._moves[other] and other not in known]
        while waiting:
            op = waiting[-1]
            before = [other for other in around[op] if self._moves[other] and other not in known]
            if before:
                waiting += before
            else:
                known.setdefault(op, bound(op))
                waiting.pop()

    def _makers_of(self, op: Op) -> Iterator[Op]:
        """The ops of the block that make what an op takes."""
        return (v.owner for v in op.operands if isinstance(v.owner, Op) and v.owner.block is self._block)

    def _rank(self, member: BucketMember) -> tuple[int, int]:
        """The order in which members are taken: as they can run last where they make more of less, else first."""
        place = self._high(member.op) if member.grows else self._low(member.op)
        return place, self._position[member.op]

    # Buckets.

    def _filled(self, waiting: Sequence[BucketMember]) -> tuple[list[BucketMember], int]:
        """The first of those that wait, and all that can run with it; and before which op they are to run."""
        first, *others = waiting
        bucket, low, high = [first], self._low(first.op), self._high(first.op)
        for member in others:
            sent = sum(each.record.wire_bytes for each in (*bucket, member))
            held = sum(each.held for each in (*bucket, member))
            if sent > self._size.sends(first.record, self._mesh) or held > self._size.held:
                break
            lower, higher = max(low, self._low(member.op)), min(high, self._high(member.op))
            if lower < higher and self._is_independent(member, bucket):
                place = higher if first.grows else lower + 1
                if self._has_room(held, place, (*bucket, member)):
                    bucket.append(member)
                    low, high = lower, higher
        return bucket, high if first.grows else low + 1

    def _has_room(self, held: float, place: int, bucket: Sequence[BucketMember]) -> bool:
        """Whether there is room for a bucket from when it runs to when its last member would have run, or from when its
        first member would have run."""
        return all(self._room.get(op, math.inf) >= held for op in self._spanned(place, bucket))

    def _spanned(self, place: int, bucket: Sequence[BucketMember]) -> list[Op]:
        ends = [place, *(self._position[member.op] for member in bucket)]
        return self._order[min(ends) : max(ends) + 1]

    def _is_independent(self, member: BucketMember, bucket: Sequence[BucketMember]) -> bool:
        awaited = self._awaited_by(member.op)
        return not any(m.op in awaited or member.op in self._awaited_by(m.op) for m in bucket)

    def _awaited_by(self, op: Op) -> set[Op]:
        """The members that a member takes something from through ops that move with it. No order changes that, and it
        is asked for each pair: without a memory it took half of the time of planning 12 layers for TPUs (2026-11)."""
        if op not in self._awaited:
            self._awaited[op] = self._closure(op, self._makers) & self._members
        return self._awaited[op]

    def _closure(self, op: Op, around: _Neighbours) -> set[Op]:
        """The ops before or after an op through others that move with it, the first ones that do not included."""
        found, waiting = set[Op](), [op]
        while waiting:
            new = [other for other in around[waiting.pop()] if other not in found]
            found.update(new)
            waiting += [other for other in new if self._moves[other]]
        return found

    def _place(self, bucket: Sequence[BucketMember], place: int) -> None:
        """Moves a bucket right before the op at a place, with what has to run before and after it."""
        members = [member.op for member in bucket]
        makers = set().union(*(self._closure(op, self._makers) for op in members))
        users = set().union(*(self._closure(op, self._users) for op in members))
        before, after = self._order[:place], self._order[place:]
        early = [op for op in after if op in makers and op not in members]
        late = [op for op in before if op in users and op not in members]
        gone = {*members, *early, *late}
        held = sum(member.held for member in bucket)
        self._room.update({op: self._room.get(op, math.inf) - held for op in self._spanned(place, bucket)})
        kept = ([op for op in part if op not in gone] for part in (before, after))
        self._order = [*next(kept), *early, *members, *late, *next(kept)]
        self._number()

    def _reorder(self) -> None:
        """Gives the module's block the order of this one."""
        *ops, terminator = self._order
        for op in ops:
            op.mlir.move_before(terminator.mlir)
