"""The live ranges of a program's buffers, and the bytes that a device holds at its peak."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jax.extend.mlir import ir

from sdy_jax.base.extensions import load_extensions
from sdy_jax.ir.collectives import PACKED, PREFETCHED, REDUCING_OPS
from sdy_jax.ir.graph import Block, Graph, Op, Value
from sdy_jax.ir.operations import COMPUTATIONS
from sdy_jax.lowering.ops.registry import is_forwarding
from sdy_jax.lowering.planner.facts.fusion import (
    DEAR,
    UPDATES,
    can_fuse,
    fuses,
    is_constant,
    is_product,
    is_sum,
    readers,
)
from sdy_jax.lowering.planner.memory.buffers import (
    BARRIER,
    LOOP,
    SHARE,
    STEP,
    Buffer,
    HeldBuffer,
    LocalBytes,
    ProgramOrder,
    in_donated_memory,
    live_at,
    most_live,
    operands_until_end,
    unawaited,
)
from sdy_jax.lowering.targets.family import Compiler
from sdy_jax.lowering.targets.target import Target
from sdy_jax.shardy.propagation.data_flow import is_data_flow
from sdy_jax.shardy.rules.elementwise import ELEMENTWISE

# Normalized values: computed element by element of values and of sums or maxima of these along the last dimension.
#
#     s = dot(q, k)
#     m = reduce max(s)
#     p = exponential(s - broadcast(m))       one kernel has a row of s, its maximum, and that row of p
#
# A kernel that has read a whole row before it writes that of the result does not write it over what it reads.

Shape = Callable[[Value], tuple[int, ...]]


def is_normalized(op: Op, is_fused: Callable[[Op], bool], shape: Shape, longest: int) -> bool:
    """Whether an op's result, which is written to memory, is computed of rows in memory and of their sums.

    Args:
        op: an element-wise op.
        is_fused: whether an op is computed as its result is read.
        shape: the shapes on one device.
        longest: the elements of a row that a kernel has at once, at most.
    """
    count = math.prod(shape(op.results[0]))
    waiting, seen = [(value, False) for value in op.operands], set[tuple[Value, bool]]()
    read = set[tuple[Value, bool]]()
    while waiting:
        value, is_summed = waiting.pop()
        if (value, is_summed) in seen:
            continue
        seen.add((value, is_summed))
        made = value.defining_op
        if made is not None and is_fused(made):
            waiting += [(operand, is_summed) for operand in made.operands]
        elif made is not None and _is_of_rows(made, shape, longest):
            waiting.append((made.operands[0], True))
        elif math.prod(shape(value)) == count:
            read.add((value, is_summed))
    return any((value, not is_summed) in read for value, is_summed in read)


def _is_of_rows(op: Op, shape: Shape, longest: int) -> bool:
    """Whether an op sums rows that are not too long, or takes their maxima."""
    if not is_sum(op):
        return False
    rows = shape(op.operands[0])
    return op.ints("dimensions") == (len(rows) - 1,) and rows[-1] <= longest


# The live ranges of a program's buffers.
#
# Ops run in program order but for two kinds, which a compiler moves for the sake of memory: results of the program
# that are computed element by element are computed as soon as their operands are there (updated weights do not wait
# for the last gradient), and what only reads values that are live anyway is computed just before its first use.


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
            if op.name in UPDATES:
                self._update_in_place(op, time)
            self._read(op, op.operands, time)
            if op in self._order.buckets and PACKED in op.attributes:
                self._pack(op)

    def _update_in_place(self, op: Op, time: float) -> None:
        """What an op updates to a result of the program is in the result's memory before, too, where it is an update
        itself and nothing reads it later: of a donated table, whose rows are updated twice, there is no copy."""
        result, updated = map(self._order.root, (op.results[0], op.operands[0]))
        made = updated.defining_op
        if result not in self._returned or made is None or made.name not in UPDATES or made.block is not op.block:
            return
        if self._last.get(updated, -1.0) <= time:
            self._returned.add(updated)
            if result in self._donated:
                self._donated[updated] = self._donated[result]

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
            given = self._donated.get(result) if op.name in UPDATES else None
            is_apart = given is not None and self._last.get(self._order.root(given), -1.0) > time
            self._add(result, time, time, takes_over, is_apart)

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


# The bytes that a device holds while it runs a partitioned program: an estimate from live ranges.
#
# Compilers fuse: what is computed element by element, or only moved, exists as a buffer only where something that is
# not fused reads it, or where several kernels read what is dear to compute. An op in a fusion reads its operands when
# the fusion runs, so these live until then. Every other value has a buffer on each device, of its local shape, from
# its op to the last op that reads it; a result may take over the buffer of an operand of its size that nothing reads
# later.
#
#     h = dot(x, w)           h is live from here ...
#     g = tanh(h)             (fused: no buffer)
#     y = dot(g, v)           not fused: g has a buffer
#     d = multiply(h, h)      (fused)
#     z = subtract(c, d)      ... to here
#
# Ops run in program order but for two kinds, which a compiler moves for the sake of memory: results of the program
# that are computed element by element are computed as soon as their operands are there (updated weights do not wait
# for the last gradient), and what only reads values that are live anyway is computed just before its first use.
#
# A loop's carried values have one buffer each, updated in place where an op can do that; values from outside that its
# body reads live until its end. While a bucket of collectives runs, there are copies of what its members take and
# make, side by side. A branch's values end with it, so that the largest branch counts.
#
# Beside `memory_analysis()` of training steps (2026-11): 38 of 44 within a factor of 1.5 for CPUs, where convolutions
# and reductions over batches keep copies (resnet 0.45) and temporaries may lie in the memory of later results (mlp
# 1.7, data parallel steps with AdamW up to 4); with arguments and results 11 of 13 steps with AdamW within it (0.60
# to 1.27). Of eight pairs of plans of a program of which one took a fifth more it was known which in seven: in a
# graph network the choice of what lies in VMEM outweighed the rest.
#
# For slices of v5e what counts is what the compiler takes where there is no more than that: with memory to spare it
# packs loosely, and says up to 2.1 times as much. Of 24 training steps, beside temporaries where the device had about
# what was estimated (`xla_tpu_max_hbm_size_mib`): 0.73 to 1.34, one 1.56; 18 within 0.9 to 1.2. Weights that a loop
# takes rounded, and what convolutions rearrange, are missing (an LSTM 0.73, resnet 0.76). Programs themselves take 6
# to 8 MiB beside. See docs/explanation/memory.md#what-a-device-holds.


class LiveValue(NamedTuple):
    """A value and the bytes of its buffer on one device."""

    value: Value
    bytes: float

    @property
    def source(self) -> str:
        """The line of the op that makes the value."""
        op = self.value.defining_op
        return op.source if op is not None else ""


@dataclass(frozen=True, slots=True)
class Peak:
    """What a device holds at most.

    Attributes:
        bytes: temporaries at the peak: buffers of values made inside of the program that are not its results.
        arguments, results: bytes of the program's arguments and results.
        shared: bytes of results that lie in the memory of donated arguments.
        live: the temporaries at the peak, largest first.
    """

    bytes: float
    arguments: float
    results: float
    live: tuple[LiveValue, ...]
    at: tuple[tuple[ir.Operation, float], ...] = ()
    """The ops of the program in order, with the bytes of temporaries that are live while each runs, about."""

    shared: float = 0.0

    @property
    def border(self) -> float:
        """Bytes of arguments and results together."""
        return self.arguments + self.results - self.shared

    @property
    def total(self) -> float:
        """Bytes of arguments, results and temporaries together."""
        return self.border + self.bytes


def peak_of(graph: Graph, target: Target = Target()) -> Peak:  # noqa: B008 - immutable
    """What a device holds at most while it runs a partitioned program.

    Args:
        graph: the program, whose values have global shapes and shardings.
        target: the devices.
    """
    sizes = LocalBytes(graph, target.arrays)
    return _peak(graph, sizes, _live_ranges(graph, sizes, target))


def peak_and_buffers(graph: Graph, target: Target = Target()) -> tuple[Peak, list[HeldBuffer]]:  # noqa: B008
    """As `peak_of`, with all temporaries that a device holds while the program runs."""
    sizes = LocalBytes(graph, target.arrays)
    ranges = _live_ranges(graph, sizes, target)
    return _peak(graph, sizes, ranges), list(ranges.held())


def _live_ranges(graph: Graph, sizes: LocalBytes, target: Target) -> LiveRanges:
    load_extensions()
    return LiveRanges(graph, sizes, target.compiler)


def _peak(graph: Graph, sizes: LocalBytes, ranges: LiveRanges) -> Peak:
    live, most = most_live(ranges.buffers)
    found = sorted((LiveValue(b.value, b.bytes) for b in live), key=lambda one: -one.bytes)
    arguments, results = (sum(map(sizes.of, values)) for values in (graph.arguments, graph.outputs))
    at = tuple(zip(*ranges.held_at(), strict=True))
    shared = sum([sizes.of(result) for result, _ in ranges.in_donated_memory])
    return Peak(most, arguments, results, tuple(found), at, shared)
