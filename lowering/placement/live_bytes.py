"""The bytes that a device holds while it runs a partitioned program: an estimate from live ranges.

Compilers fuse: what is computed element by element, or only moved, exists as a buffer only where something that is
not fused reads it, or where several kernels read what is dear to compute. An op in a fusion reads its operands when the
fusion runs, so these live until then. Every other value has a buffer on each device, of its local shape, from its op to
the last op that reads it; a result may take over the buffer of an operand of its size that nothing reads later.

    h = dot(x, w)           h is live from here ...
    g = tanh(h)             (fused: no buffer)
    y = dot(g, v)           not fused: g has a buffer
    d = multiply(h, h)      (fused)
    z = subtract(c, d)      ... to here

Ops run in program order but for two kinds, which a compiler moves for the sake of memory: results of the program that
are computed element by element are computed as soon as their operands are there (updated weights do not wait for the
last gradient), and what only reads values that are live anyway is computed just before its first use.

A loop's carried values have one buffer each, updated in place where an op can do that; values from outside that its
body reads live until its end. While a bucket of collectives runs, there are copies of what its members take and make,
side by side. A branch's values end with it, so that the largest branch counts.

Beside `memory_analysis()` of training steps (2026-11): 38 of 44 within a factor of 1.5 for CPUs, where convolutions and
reductions over batches keep copies (resnet 0.45) and temporaries may lie in the memory of later results (mlp 1.7, data
parallel steps with AdamW up to 4); with arguments and results 11 of 13 steps with AdamW within it (0.60 to 1.27). Of
eight pairs of plans of a program of which one took a fifth more it was known which in seven: in a graph network the
choice of what lies in VMEM outweighed the rest.

For slices of v5e what counts is what the compiler takes where there is no more than that: with memory to spare it packs
loosely, and says up to 2.1 times as much. Of 24 training steps, beside temporaries where the device had about what was
estimated (`xla_tpu_max_hbm_size_mib`): 0.73 to 1.34, one 1.56; 18 within 0.9 to 1.2. Weights that a loop takes rounded,
and what convolutions rearrange, are missing (an LSTM 0.73, resnet 0.76). Programs themselves take 6 to 8 MiB beside.
See docs/explanation/memory.md#what-a-device-holds.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from jax.extend.mlir import ir

from sdy_jax.ir.extensions import load_extensions
from sdy_jax.ir.graph import Block, Graph, Op, Value
from sdy_jax.ir.operations import COMPUTATIONS
from sdy_jax.lowering.placement.donated import in_donated_memory
from sdy_jax.lowering.placement.fusion import UPDATES, can_fuse, fuses, is_constant, readers
from sdy_jax.lowering.placement.local_bytes import LocalBytes
from sdy_jax.lowering.placement.together import run_together
from sdy_jax.lowering.strategies.registry import is_forwarding
from sdy_jax.lowering.targets.compiler import Compiler
from sdy_jax.lowering.targets.target import Target
from sdy_jax.op_rules.dataflow import is_data_flow
from sdy_jax.op_rules.elementwise_table import ELEMENTWISE
from sdy_jax.op_rules.registry import names
from sdy_jax.representation.sdy_collectives import BUCKET, PACKED, PREFETCHED, REDUCING_OPS

_LOOP, _BARRIER = "stablehlo.while", "stablehlo.optimization_barrier"
_DEAR = frozenset(
    names(
        "stablehlo",
        "atan2 cbrt cosine divide exponential exponential_minus_one log log_plus_one logistic power remainder rsqrt "
        "sine sqrt tan tanh",
    )
)
"""Element-wise ops that compilers compute once, for several kernels that read them."""

_STEP = 2.0**-10
"""Given: less than the time between two ops of the program order, which is 1; what is moved runs this much before or
after another op. A power of two, so that sums of it are exact."""


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


def _live_ranges(graph: Graph, sizes: LocalBytes, target: Target) -> _LiveRanges:
    load_extensions()
    return _LiveRanges(graph, sizes, target.compiler)


def _peak(graph: Graph, sizes: LocalBytes, ranges: _LiveRanges) -> Peak:
    live, most = _most_live(ranges.buffers)
    found = sorted((LiveValue(b.value, b.bytes) for b in live), key=lambda one: -one.bytes)
    arguments, results = (sum(map(sizes.of, values)) for values in (graph.arguments, graph.outputs))
    at = tuple(zip(*ranges.held_at(), strict=True))
    shared = sum([sizes.of(result) for result, _ in ranges.in_donated_memory])
    return Peak(most, arguments, results, tuple(found), at, shared)


class HeldBuffer(NamedTuple):
    """A temporary on one device: its value, its bytes, and the first and last op while which it is live, by their place
    in `Peak.at`, or in a group of ops."""

    value: Value
    bytes: float
    first: int
    last: int


def live_at(count: int, held: Iterable[HeldBuffer]) -> list[float]:
    """The bytes that are live while each of so many ops runs."""
    changes = [0.0] * (count + 1)
    for _, size, first, last in held:
        changes[first] += size
        changes[last + 1] -= size
    return list(accumulate(changes[:-1]))


# Live ranges.


@dataclass(slots=True)
class _Buffer:
    """The memory of a value, from when to when it is live, both included; `counts`: it is a temporary."""

    value: Value
    bytes: float
    start: float
    end: float
    counts: bool
    takes_over: bool
    is_taken: bool = False


class _LiveRanges:
    """The buffers of a program."""

    def __init__(self, graph: Graph, sizes: LocalBytes, compiler: Compiler):
        self._sizes, self._compiler, self._fusion = sizes, compiler, compiler.fusion
        self._order: list[Op] = []
        self._position: dict[Op, float] = {}
        self._end: dict[Op, float] = {}
        self._loop: dict[Block, Op | None] = {}
        self._inlined: dict[Block, Block] = {}
        """The block in which a computation's body runs, which is a part of the program around it."""
        self._same: dict[Value, Value] = {}
        """The value whose buffer another one is."""
        self._first: dict[Value, float] = {}
        self._last: dict[Value, float] = {}
        self._buckets: dict[Op, tuple[Op, Op]] = {}
        """The first and the last of the collectives with which one runs."""
        self._carried: dict[Value, Value] = {}
        """Per value that a loop's body returns, the argument whose buffer it is to end up in."""
        self.buffers: list[_Buffer] = []

        main, self._arguments = graph.main.blocks[0], frozenset(graph.arguments)
        self._together: dict[Op, Op] = {}
        """All_reduces, each with the last of those that run as one with it."""

        self._number(main, None)
        self._returned = set(map(self._root, main.terminator.operands))
        self.in_donated_memory = in_donated_memory(graph)
        self._donated = {self._root(result): given for result, given in self.in_donated_memory}
        self._late = self._reduced_late(main) if compiler.order.reduces_late else {}
        self._early = self._computed_early(main)
        for op in reversed(self._order):
            self._visit(op)
        self._hold_prefetched()
        if compiler.collectives.joins_major:
            self._hold_gathered()

    def _hold_gathered(self) -> None:
        """What is gathered along another dimension than the first, for a loop, is there as it was gathered until the
        loop reads its transpose; an argument of which a loop gathers layers so, as its transpose, for all its loops."""
        turned: dict[Value, list[Op]] = {}
        for op in self._order:
            if op.name != "sdy.all_gather" or not self._grows_inside(op):
                continue
            value, stack = op.results[0], self._layers_of(op)
            if stack is not None:
                turned.setdefault(stack, []).append(self._loops_around(op)[-1])
            elif any(self._is_in_loop(user, op) for user, _ in value.uses):
                until = self._first.get(value, self._position[op])
                self.buffers.append(_Buffer(value, self._sizes.of(value), self._position[op], until, True, False))
        for stack, loops in turned.items():
            first, last = self._position[loops[0]], self._end[loops[-1]]
            self.buffers.append(_Buffer(stack, self._sizes.of(stack), first, last, True, False))

    def _grows_inside(self, op: Op) -> bool:
        """Whether blocks are joined along another dimension than the first that has a size."""
        found, given = map(self._sizes.shape, (op.results[0], op.operands[0]))
        sized = [n != before for n, before in zip(found, given, strict=True) if n > 1]
        return any(sized[1:])

    def _layers_of(self, op: Op) -> Value | None:
        """The argument of the program of which an op in a loop takes a part, as it is or computed from it."""
        value = self._root(op.operands[0])
        while (made := value.defining_op) is not None and fuses(made) and made.operands:
            value = self._root(made.operands[0])
        return value if value in self._arguments and self._loops_around(op) else None

    def _loops_around(self, op: Op) -> list[Op]:
        """The loops that an op is in, from inside."""
        found, loop = list[Op](), self._loop[op.block] if op.block is not None else None
        while loop is not None:
            found.append(loop)
            loop = self._loop[loop.block] if loop.block is not None else None
        return found

    def _is_in_loop(self, user: Op, op: Op) -> bool:
        """Whether a user is a loop that an op is not in, or is in one."""
        return is_data_flow(user) or self._inlined_block(user) is not self._inlined_block(op)

    def _hold_prefetched(self) -> None:
        """What is fetched one trip ahead of a loop is there twice."""
        for op in self._order:
            loop = self._loop[op.block] if PREFETCHED in op.mlir.attributes and op.block is not None else None
            if loop is not None:
                size = self._sizes.of(op.results[0])
                self.buffers.append(_Buffer(op.results[0], size, self._position[loop], self._end[loop], True, False))

    def held_at(self) -> tuple[list[ir.Operation], list[float]]:
        """All ops, and the bytes of temporaries that are live at each."""
        return [op.mlir for op in self._order], live_at(len(self._order), self.held())

    def held(self) -> Iterator[HeldBuffer]:
        """The temporaries, after it is known which are taken over."""
        end = len(self._order) - 1
        for buffer in self.buffers:
            if buffer.counts:
                first = min(max(round(buffer.start), 0), end)
                last = max(min(round(buffer.end), end) - buffer.is_taken, first)
                yield HeldBuffer(buffer.value, buffer.bytes, first, last)

    # Order.

    def _number(self, block: Block, loop: Op | None) -> None:
        self._number_buckets(block)
        if self._compiler.collectives.merges:
            self._together.update(run_together(block, self._sizes.of))
        parent = block.parent
        self._loop[block] = loop
        self._inlined[block] = self._inlined[parent.block] if parent.name in COMPUTATIONS and parent.block else block
        for op in block.ops:
            self._position[op] = float(len(self._order))
            self._order.append(op)
            if is_data_flow(op):
                self._number_regions(op, loop)
            self._end[op] = float(len(self._order) - 1)

    def _number_buckets(self, block: Block) -> None:
        """Notes where buckets of collectives begin and end."""
        buckets: dict[int, list[Op]] = {}
        for op in block.ops:
            if op.name.startswith("sdy.") and op.attribute(BUCKET) is not None:
                buckets.setdefault(op.int(BUCKET), []).append(op)
        for ops in buckets.values():
            self._buckets.update(dict.fromkeys(ops, (ops[0], ops[-1])))

    def _number_regions(self, op: Op, loop: Op | None) -> None:
        if op.name == _LOOP:
            self._join_unchanged(op)
        if op.name in COMPUTATIONS:
            self._join(op.blocks[0].arguments, op.operands)
        for block in op.blocks:
            self._number(block, op if op.name == _LOOP else loop)
        if op.name in COMPUTATIONS:
            self._join(op.results, op.blocks[0].terminator.operands)
        if op.name == _BARRIER:
            self._join(op.results, op.operands)

    def _join_unchanged(self, loop: Op) -> None:
        """What a loop carries unchanged is what it was before the loop."""
        condition, body = loop.blocks
        for i, returned in enumerate(body.terminator.operands):
            if returned in (body.arguments[i], loop.operands[i]):
                self._join((condition.arguments[i], body.arguments[i], loop.results[i]), (loop.operands[i],) * 3)

    def _join(self, values: Sequence[Value], sources: Sequence[Value]) -> None:
        self._same.update(zip(values, map(self._root, sources), strict=True))

    def _root(self, value: Value) -> Value:
        return self._same.get(value, value)

    def _made(self, value: Value) -> float:
        """When a value is made; an argument of the program before its first op."""
        if isinstance(value.owner, Op):
            return self._position[value.owner]
        return self._position.get(value.owner.parent, -1.0) + _STEP

    def _computed_early(self, main: Block) -> dict[Op, float]:
        """The results that are computed as soon as their operands are there, with the time."""
        ready: dict[Value, float] = {}
        early: dict[Op, float] = {}
        for op in main.ops[:-1]:
            time = self._late.get(op, self._end[self._together.get(op, op)])
            if fuses(op):
                time = max((ready.get(self._root(v), -1.0) for v in op.operands), default=-1.0)
                if op.results[0] in self._returned:
                    early[op] = time + _STEP
            ready.update(dict.fromkeys(op.results, time))
        return early

    def _reduced_late(self, main: Block) -> dict[Op, float]:
        """The reductions that run when their results are needed, with the time: by ops that are not element-wise, or at
        the end."""
        needed: dict[Op, float] = {}
        late: dict[Op, float] = {}
        for op in reversed(main.ops):
            users = [user.ancestor_in(main) for value in op.results for user, _ in value.uses]
            first = min([needed[user] for user in users], default=self._position[op])
            needed[op] = first if fuses(op) else self._position[op]
            if op.name in REDUCING_OPS:
                needed[op] = late[op] = first - _STEP
        return late

    # Reads, from the end of the program.

    def _visit(self, op: Op) -> None:
        if op.name == _LOOP:
            self._visit_loop(op)
        elif op.name in COMPUTATIONS or op.name == _BARRIER:
            return
        elif is_data_flow(op):
            self._read(op, op.operands, self._position[op])
            self._make(op, self._end[op], takes_over=True)
        elif op.block is not None and op is op.block.terminator:
            self._visit_terminator(op)
        elif self._is_fused(op) and not self._is_kept(op):
            result = op.results[0]
            for time in (self._first.get(result), self._last.get(result)):
                if time is not None:
                    self._read(op, op.operands, time)
        else:
            time = self._time(op)
            self._make(op, time, op.name in ELEMENTWISE or op.name in UPDATES or op in self._together)
            self._read(op, op.operands, time)
            if op in self._buckets and PACKED in op.attributes:
                self._pack(op)

    def _visit_terminator(self, op: Op) -> None:
        parent = op.parent
        if parent is None or parent.name in COMPUTATIONS:
            return
        if parent.name == _LOOP and op.block is parent.blocks[1]:
            pairs = zip(op.operands, op.block.arguments, strict=True)
            changed = [(returned, argument) for returned, argument in pairs if argument not in self._same]
            self._carried.update((self._root(returned), argument) for returned, argument in changed)
            self._read(op, [returned for returned, _ in changed], self._position[op])
        else:
            self._read(op, op.operands, self._position[op])

    def _visit_loop(self, loop: Op) -> None:
        changed = [i for i, result in enumerate(loop.results) if result not in self._same]
        start = self._position[loop]
        self._read(loop, [loop.operands[i] for i in changed], start)
        for i in changed:
            is_apart = self._is_apart(loop, i)
            self._add(loop.results[i], start, self._end[loop], takes_over=True, is_apart=is_apart)

    def _is_apart(self, loop: Op, index: int) -> bool:
        """Whether a loop's result is to lie in the memory of a donated argument that is not free when the loop starts:
        that is not what the loop changes in its place, and is read later."""
        given = self._donated.get(loop.results[index])
        if given is None:
            return False
        start, last = self._position[loop], self._last.get(self._root(given), -1.0)
        return last > start if self._root(loop.operands[index]) is self._root(given) else last >= start

    def _read(self, op: Op, values: Sequence[Value], time: float) -> None:
        """An op reads values; a loop reads what comes from outside in every iteration, so until its end."""
        for value in map(self._root, values):
            made, first, last = self._made(value), time, time
            for loop in self._loops_around(op):
                if made > self._position[loop]:
                    break
                first, last = min(first, self._position[loop]), max(last, self._end[loop])
            self._first[value] = min(first, self._first.get(value, first))
            self._last[value] = max(last, self._last.get(value, last))

    def _is_kept(self, op: Op) -> bool:
        """Whether several kernels read what would be dear to compute in each; not where a compiler does so, as that
        reads less."""
        if op.name not in _DEAR or not self._is_read_twice(op.results[0]):
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
        if not can_fuse(op, self._fusion) or op.results[0] in self._returned:
            return False
        block = self._inlined_block(op)
        return all(self._inlined_block(user) is block for user, _ in readers(op.results[0]))

    def _inlined_block(self, op: Op) -> Block | None:
        return self._inlined[op.block] if op.block is not None else None

    def _time(self, op: Op) -> float:
        """When an op that is not fused runs."""
        time = self._early.get(op, self._late.get(op, self._position[self._together.get(op, op)]))
        if op in self._buckets or op in self._together or op in self._late:
            return time
        firsts = [self._first[v] for v in op.results if v in self._first]
        if op in self._early or not firsts or not (fuses(op) or is_forwarding(op)):
            return time
        first = min(firsts) - _STEP
        return max(time, first) if all(self._lives(v, op, first) for v in map(self._root, op.operands)) else time

    def _lives(self, value: Value, op: Op, time: float) -> bool:
        """Whether a value is live at a time whether the op reads it then or not."""
        if isinstance(value.owner, Block) or self._last.get(value, -1.0) >= time:
            return True
        loop = self._loop[op.block] if op.block is not None else None
        return loop is not None and self._made(value) <= self._position[loop]

    # Buffers.

    def _make(self, op: Op, time: float, takes_over: bool) -> None:
        if is_constant(op):
            return
        for result in op.results:
            self._add(result, time, time, takes_over)

    def _pack(self, op: Op) -> None:
        """While a bucket runs, the blocks of its members lie side by side, before and after it."""
        first, last = (self._position[end] for end in self._buckets[op])
        for value in (op.operands[0], op.results[0]):
            self.buffers.append(_Buffer(value, self._sizes.of(value), first, last, True, False))

    def _add(self, value: Value, start: float, end: float, takes_over: bool, is_apart: bool = False) -> None:
        """Adds the buffer of a value; `is_apart`: it is a result whose place in the memory of a donated argument is not
        free yet."""
        argument = self._carried.get(value)
        if argument is not None and takes_over and self._last.get(argument, -1.0) <= start:
            return
        end = max(end, self._last.get(value, end))
        counts = is_apart or value not in self._returned
        self.buffers.append(_Buffer(value, self._sizes.of(value), start, end, counts, takes_over))


# The peak.


def _most_live(buffers: Sequence[_Buffer]) -> tuple[list[_Buffer], float]:
    """The buffers that are live when most bytes are, and these bytes."""
    _take_over(buffers)
    live, now, most, at = list[tuple[float, bool, int]](), 0.0, 0.0, -math.inf
    counted = [b for b in sorted(buffers, key=lambda b: b.start) if b.counts]
    for number, buffer in enumerate(counted):
        while live and (live[0][0] < buffer.start or (live[0][0] == buffer.start and not live[0][1])):
            now -= counted[heapq.heappop(live)[2]].bytes
        now += buffer.bytes
        heapq.heappush(live, (buffer.end, not buffer.is_taken, number))
        if now > most:
            most, at = now, buffer.start
    return [b for b in counted if b.start <= at and (b.end > at or (b.end == at and not b.is_taken))], most


def _take_over(buffers: Sequence[_Buffer]) -> None:
    """Marks the buffers that another value takes over at their end."""
    dying: dict[tuple[float, float], list[_Buffer]] = {}
    for buffer in buffers:
        if buffer.counts:
            dying.setdefault((buffer.end, buffer.bytes), []).append(buffer)
    for buffer in buffers:
        given = dying.get((buffer.start, buffer.bytes), []) if buffer.takes_over else []
        old = next((b for b in given if b.start < buffer.start and not b.is_taken), None)
        if old is not None:
            old.is_taken = True
