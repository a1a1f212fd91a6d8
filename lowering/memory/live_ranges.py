"""The live ranges of a program's buffers.

Ops run in program order but for two kinds, which a compiler moves for the sake of memory: results of the program that
are computed element by element are computed as soon as their operands are there (updated weights do not wait for the
last gradient), and what only reads values that are live anyway is computed just before its first use.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Block, Graph, Op, Value
from sdy_jax.ir.operations import COMPUTATIONS
from sdy_jax.lowering.analysis.fusion import DEAR, UPDATES, can_fuse, fuses, is_constant, is_product, readers
from sdy_jax.lowering.analysis.local_bytes import LocalBytes
from sdy_jax.lowering.memory.buffers import Buffer, HeldBuffer, live_at
from sdy_jax.lowering.memory.donation import in_donated_memory
from sdy_jax.lowering.memory.late_products import SHARE, operands_until_end, unawaited
from sdy_jax.lowering.memory.normalized import is_normalized
from sdy_jax.lowering.memory.program_order import BARRIER, LOOP, STEP, ProgramOrder
from sdy_jax.lowering.strategies.registry import is_forwarding
from sdy_jax.lowering.targets.compiler import Compiler
from sdy_jax.op_rules.dataflow import is_data_flow
from sdy_jax.op_rules.elementwise_table import ELEMENTWISE
from sdy_jax.representation.sdy_collectives import PACKED, PREFETCHED, REDUCING_OPS


class LiveRanges:
    """The buffers of a program."""

    def __init__(self, graph: Graph, sizes: LocalBytes, compiler: Compiler):
        self._sizes, self._compiler, self._fusion = sizes, compiler, compiler.fusion
        self._first: dict[Value, float] = {}
        self._last: dict[Value, float] = {}
        self._carried: dict[Value, Value] = {}
        """Per value that a loop's body returns, the argument whose buffer it is to end up in."""
        self._fused: dict[Op, bool] = {}
        self.buffers: list[Buffer] = []

        main, self._arguments = graph.main.blocks[0], frozenset(graph.arguments)
        self._order = order = ProgramOrder(main, sizes, compiler.collectives.merges)
        self._returned = set(map(order.root, main.terminator.operands))
        self.in_donated_memory = in_donated_memory(graph)
        self._donated = {order.root(result): given for result, given in self.in_donated_memory}
        self._late = self._reduced_late(main) if compiler.order.reduces_late else {}
        self._unawaited = unawaited(order.ops) if compiler.order.multiplies_late else {}
        self._early = self._computed_early(main)
        for op in reversed(order.ops):
            self._visit(op)
        self._hold_prefetched()
        if compiler.collectives.joins_major:
            self._hold_gathered()
        self._hold_for_late_products()

    def _hold_gathered(self) -> None:
        """What is gathered along another dimension than the first, for loops, is there as it was gathered until the
        last of them begins: all take its transpose, but for a first trip. An argument of which a loop gathers layers
        so is there as its transpose, for all its loops."""
        turned: dict[Value, list[Op]] = {}
        for op in self._order.ops:
            if op.name != "sdy.all_gather" or not self._grows_inside(op):
                continue
            value, stack = op.results[0], self._layers_of(op)
            if stack is not None:
                turned.setdefault(stack, []).append(self._order.loops_around(op)[-1])
            elif loops := [user.ancestor_in(op.block) for user, _ in value.uses if self._is_in_loop(user, op)]:
                first, until = self._order.position[op], max(map(self._order.position.__getitem__, loops))
                self.buffers.append(Buffer(value, self._sizes.of(value), first, until, True, False))
        for stack, loops in turned.items():
            first, last = self._order.position[loops[0]], self._order.end[loops[-1]]
            self.buffers.append(Buffer(stack, self._sizes.of(stack), first, last, True, False))

    def _hold_for_late_products(self) -> None:
        """What products read that run at any time until the end of their block."""
        for value, terminator in operands_until_end(self._unawaited).items():
            last, end = self._last[self._order.root(value)], self._order.position[terminator]
            if last < end:
                self.buffers.append(Buffer(value, SHARE * self._sizes.of(value), last + STEP, end, True, False))

    def _grows_inside(self, op: Op) -> bool:
        """Whether blocks are joined along another dimension than the first that has a size."""
        found, given = map(self._sizes.shape, (op.results[0], op.operands[0]))
        sized = [n != before for n, before in zip(found, given, strict=True) if n > 1]
        return any(sized[1:])

    def _layers_of(self, op: Op) -> Value | None:
        """The argument of the program of which an op in a loop takes a part, as it is or computed from it."""
        value = self._order.root(op.operands[0])
        while (made := value.defining_op) is not None and fuses(made) and made.operands:
            value = self._order.root(made.operands[0])
        return value if value in self._arguments and self._order.loops_around(op) else None

    def _is_in_loop(self, user: Op, op: Op) -> bool:
        """Whether a user is a loop that an op is not in, or is in one."""
        return is_data_flow(user) or self._order.inlined_block(user) is not self._order.inlined_block(op)

    def _hold_prefetched(self) -> None:
        """What is fetched one trip ahead of a loop is there twice."""
        for op in self._order.ops:
            loop = self._order.loop[op.block] if PREFETCHED in op.mlir.attributes and op.block is not None else None
            if loop is not None:
                size = self._sizes.of(op.results[0])
                self.buffers.append(
                    Buffer(op.results[0], size, self._order.position[loop], self._order.end[loop], True, False)
                )

    def held_at(self) -> tuple[list[ir.Operation], list[float]]:
        """All ops, and the bytes of temporaries that are live at each."""
        return [op.mlir for op in self._order.ops], live_at(len(self._order.ops), self.held())

    def held(self) -> Iterator[HeldBuffer]:
        """The temporaries, after it is known which are taken over."""
        end = len(self._order.ops) - 1
        for buffer in self.buffers:
            if buffer.counts:
                first = min(max(round(buffer.start), 0), end)
                last = max(min(round(buffer.end), end) - buffer.is_taken, first)
                yield HeldBuffer(buffer.value, buffer.bytes, first, last)

    def _computed_early(self, main: Block) -> dict[Op, float]:
        """The results that are computed as soon as their operands are there, with the time."""
        ready: dict[Value, float] = {}
        early: dict[Op, float] = {}
        for op in main.ops[:-1]:
            time = self._late.get(op, self._order.end[self._order.together.get(op, op)])
            if fuses(op):
                time = max((ready.get(self._order.root(v), -1.0) for v in op.operands), default=-1.0)
                if op.results[0] in self._returned:
                    early[op] = time + STEP
            ready.update(dict.fromkeys(op.results, time))
        return early

    def _reduced_late(self, main: Block) -> dict[Op, float]:
        """The reductions that run when their results are needed, with the time: by ops that are not element-wise, or at
        the end."""
        needed: dict[Op, float] = {}
        late: dict[Op, float] = {}
        for op in reversed(main.ops):
            users = [user.ancestor_in(main) for value in op.results for user, _ in value.uses]
            first = min([needed[user] for user in users], default=self._order.position[op])
            needed[op] = first if fuses(op) else self._order.position[op]
            if op.name in REDUCING_OPS:
                needed[op] = late[op] = first - STEP
        return late

    # Reads, from the end of the program.

    def _visit(self, op: Op) -> None:
        if op.name == LOOP:
            self._visit_loop(op)
        elif op.name in COMPUTATIONS or op.name == BARRIER:
            return
        elif is_data_flow(op):
            self._read(op, op.operands, self._order.position[op])
            self._make(op, self._order.end[op], takes_over=True)
        elif op.block is not None and op is op.block.terminator:
            self._visit_terminator(op)
        elif self._is_fused(op) and not self._is_kept(op):
            result = op.results[0]
            for time in (self._first.get(result), self._last.get(result)):
                if time is not None:
                    self._read(op, op.operands, time)
        else:
            time = self._time(op)
            self._make(op, time, self._may_take_over(op))
            self._read(op, op.operands, time)
            if op in self._order.buckets and PACKED in op.attributes:
                self._pack(op)

    def _may_take_over(self, op: Op) -> bool:
        """Whether an op may write its result over what it reads."""
        if op.name in UPDATES or op in self._order.together:
            return True
        rows = self._fusion.rows
        return op.name in ELEMENTWISE and not (rows and is_normalized(op, self._is_fused, self._sizes.shape, rows))

    def _visit_terminator(self, op: Op) -> None:
        parent = op.parent
        if parent is None or parent.name in COMPUTATIONS:
            return
        if parent.name == LOOP and op.block is parent.blocks[1]:
            pairs = zip(op.operands, op.block.arguments, strict=True)
            changed = [(returned, argument) for returned, argument in pairs if argument not in self._order.same]
            self._carried.update((self._order.root(returned), argument) for returned, argument in changed)
            self._read(op, [returned for returned, _ in changed], self._order.position[op])
        else:
            self._read(op, op.operands, self._order.position[op])

    def _visit_loop(self, loop: Op) -> None:
        changed = [i for i, result in enumerate(loop.results) if result not in self._order.same]
        start = self._order.position[loop]
        self._read(loop, [loop.operands[i] for i in changed], start)
        for i in changed:
            is_apart = self._is_apart(loop, i)
            self._add(loop.results[i], start, self._order.end[loop], takes_over=True, is_apart=is_apart)

    def _is_apart(self, loop: Op, index: int) -> bool:
        """Whether a loop's result is to lie in the memory of a donated argument that is not free when the loop starts:
        that is not what the loop changes in its place, and is read later."""
        given = self._donated.get(loop.results[index])
        if given is None:
            return False
        start, last = self._order.position[loop], self._last.get(self._order.root(given), -1.0)
        return last > start if self._order.root(loop.operands[index]) is self._order.root(given) else last >= start

    def _read(self, op: Op, values: Sequence[Value], time: float) -> None:
        """An op reads values; a loop reads what comes from outside in every iteration, so until its end."""
        for value in map(self._order.root, values):
            made, first, last = self._order.made(value), time, time
            for loop in self._order.loops_around(op):
                if made > self._order.position[loop]:
                    break
                first, last = min(first, self._order.position[loop]), max(last, self._order.end[loop])
            self._first[value] = min(first, self._first.get(value, first))
            self._last[value] = max(last, self._last.get(value, last))

    def _is_kept(self, op: Op) -> bool:
        """Whether several kernels read what would be dear to compute in each; not where a compiler does so, as that
        reads less."""
        if op.name not in DEAR or not self._is_read_twice(op.results[0]):
            return False
        read = map(self._sizes.of, self._read_for(op))
        return not self._fusion.dear_again or self._sizes.of(op.results[0]) <= sum(read)

    def _read_for(self, op: Op) -> list[Value]:
        """The values of an op's shape, or of another one of as many elements, that it is computed of in memory."""
        waiting, found, count = list(op.operands), dict[Value, None](), math.prod(op.results[0].shape or ())
        seen = set(waiting)
        while waiting:
            value = waiting.pop()
            made = value.defining_op
            if math.prod(value.shape or ()) != count:
                continue
            if made is None or not self._is_fused(made):
                found[value] = None
                continue
            waiting += [operand for operand in made.operands if operand not in seen]
            seen.update(made.operands)
        return list(found)

    def _is_read_twice(self, value: Value) -> bool:
        """Whether what reads a value runs at several times: kernels of their own."""
        first = self._first.get(value)
        return first is not None and first + 1 < self._last[value]

    def _is_fused(self, op: Op) -> bool:
        if op not in self._fused:
            self._fused[op] = self._can_be_fused(op)
        return self._fused[op]

    def _can_be_fused(self, op: Op) -> bool:
        if not can_fuse(op, self._fusion) or op.results[0] in self._returned:
            return False
        block = self._order.inlined_block(op)
        return all(self._order.inlined_block(user) is block for user, _ in readers(op.results[0]))

    def _time(self, op: Op) -> float:
        """When an op that is not fused runs."""
        time = self._early.get(op, self._late.get(op, self._order.position[self._order.together.get(op, op)]))
        if op in self._order.buckets or op in self._order.together or op in self._late:
            return time
        firsts = [self._first[v] for v in op.results if v in self._first]
        if self._compiler.order.multiplies_late and firsts and is_product(op) and op not in self._unawaited:
            return max(time, min(firsts) - STEP)
        if op in self._early or not firsts or not (fuses(op) or is_forwarding(op)):
            return time
        first = min(firsts) - STEP
        return max(time, first) if all(self._lives(v, op, first) for v in map(self._order.root, op.operands)) else time

    def _lives(self, value: Value, op: Op, time: float) -> bool:
        """Whether a value is live at a time whether the op reads it then or not."""
        if isinstance(value.owner, Block) or self._last.get(value, -1.0) >= time:
            return True
        loop = self._order.loop[op.block] if op.block is not None else None
        return loop is not None and self._order.made(value) <= self._order.position[loop]

    # Buffers.

    def _make(self, op: Op, time: float, takes_over: bool) -> None:
        if is_constant(op):
            return
        for result in op.results:
            self._add(result, time, time, takes_over)

    def _pack(self, op: Op) -> None:
        """While a bucket runs, the blocks of its members lie side by side, before and after it."""
        first, last = (self._order.position[end] for end in self._order.buckets[op])
        for value in (op.operands[0], op.results[0]):
            self.buffers.append(Buffer(value, self._sizes.of(value), first, last, True, False))

    def _add(self, value: Value, start: float, end: float, takes_over: bool, is_apart: bool = False) -> None:
        """Adds the buffer of a value; `is_apart`: it is a result whose place in the memory of a donated argument is not
        free yet."""
        argument = self._carried.get(value)
        if argument is not None and takes_over and self._last.get(argument, -1.0) <= start:
            return
        end = max(end, self._last.get(value, end))
        counts = is_apart or value not in self._returned
        self.buffers.append(Buffer(value, self._sizes.of(value), start, end, counts, takes_over))
