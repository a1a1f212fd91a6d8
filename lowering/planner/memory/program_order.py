"""The order in which compilers run a program's ops: late products, all_reduces that run as one, shared buffers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sdy_jax.ir.attributes import reduction_from_attributes
from sdy_jax.ir.collectives import BUCKET, REDUCING_OPS
from sdy_jax.ir.graph import Block, Op, Value
from sdy_jax.ir.operations import COMPUTATIONS
from sdy_jax.lowering.planner.facts.fusion import fuses, is_product
from sdy_jax.lowering.planner.memory.buffers import LocalBytes
from sdy_jax.shardy.propagation.data_flow import is_data_flow

# Which all_reduces of a partitioned program run as one where a compiler merges them, whatever their buckets.
#
# It makes one of those over the same devices of which none waits for another, when the last operand is there:
#
#     a = all_reduce(f)          f lives until g is there
#     h = all_reduce(g)          both run here

ALL_REDUCE = "sdy.all_reduce"

_MOST_BYTES, _MOST_OPERANDS = 120 * 2**20, 256
"""What is one all_reduce at most. Published (the options of XLA in libtpu 0.0.52)."""


def run_together(block: Block, bytes_of: Callable[[Value], float]) -> Mapping[Op, Op]:
    """The all_reduces of a block, each with the last of those that are one with it."""
    found: dict[Op, Op] = {}
    for group in _groups(block, bytes_of):
        found.update(dict.fromkeys(group.ops, group.ops[-1]))
    return found


@dataclass(slots=True)
class _Group:
    """All_reduces that run as one; `bit` says that a value waits for them."""

    bit: int
    room: float = _MOST_BYTES
    ops: list[Op] = field(default_factory=list)

    def may_have(self, waits: int, size: float) -> bool:
        return not waits & self.bit and size <= self.room and len(self.ops) < _MOST_OPERANDS


def _groups(block: Block, bytes_of: Callable[[Value], float]) -> list[_Group]:
    """The groups of a block. Each value has the bits of all groups that it waits for."""
    waits, latest, groups = defaultdict[Value, int](int), dict[object, _Group](), list[_Group]()
    for op in block.ops:
        before = 0
        for value in _taken(op):
            before |= waits[value]
        if op.name == ALL_REDUCE:
            key, size = _kind(op), bytes_of(op.operands[0])
            group = latest.get(key)
            if group is None or not group.may_have(before, size):
                group = latest[key] = _Group(1 << len(groups))
                groups.append(group)
            group.ops.append(op)
            group.room -= size
            before |= group.bit
        if before:
            waits.update(dict.fromkeys(op.results, before))
    return groups


def _kind(op: Op) -> object:
    """What those have in common that may run as one."""
    return str(op.attribute("reduction_axes")), op.results[0].dtype, reduction_from_attributes(op.attributes)


def _taken(op: Op) -> Iterator[Value]:
    """What an op takes, or those in its regions."""
    for inner in op.walk():
        yield from inner.operands


# Products that run later than in the program, where a compiler looks for work beside collectives.
#
# One whose result another product takes, or is computed of, runs just before that. Gradients of weights, which no
# product takes, run at any time from then on until the end: a third of what they are computed of counts until then.

SHARE = 1 / 3
"""Measured (2026-11, XLA of jax 0.10 for H100): of what MLPs' gradients are computed of, 0.44 to 0.81 was live at the
end of the backward pass, in Llama-3-8B with 32 and 8 unrolled layers, and all of it in loops over layers. With 0 the
estimate for the former is 0.76 of the compiler's figure, with a third 0.96, with a half 1.16."""


def unawaited(ops: Iterable[Op]) -> dict[Op, None]:
    """The products, in order, of which no other one takes what is computed of their results element by element, moved
    or reduced."""
    return dict.fromkeys(op for op in ops if is_product(op) and not any(map(is_product, _users_of(op))))


def operands_until_end(products: Iterable[Op]) -> dict[Value, Op]:
    """What products read, each with the last op of the block that they are in."""
    return {
        value: op.block.terminator
        for op in products
        if op.block is not None
        for value in op.operands
        if value.defining_op is not None
    }


def _users_of(op: Op) -> Iterator[Op]:
    """The ops that take an op's results, or what is computed of these so."""
    waiting, seen = list(op.results), set[Op]()
    while waiting:
        for user, _ in waiting.pop().uses:
            if user in seen:
                continue
            seen.add(user)
            yield user
            if fuses(user) or user.name in REDUCING_OPS:
                waiting += user.results


# The order in which a program's ops are numbered, which values share a buffer, and which collectives run together.

LOOP, BARRIER = "stablehlo.while", "stablehlo.optimization_barrier"

STEP = 2.0**-10
"""Given: less than the time between two ops of the program order, which is 1; what is moved runs this much before or
after another op. A power of two, so that sums of it are exact."""


class ProgramOrder:
    """The ops of a program in order, those of regions inside of the op that they belong to.

    Attributes:
        ops: all ops.
        position, end: per op, its place and that of the last op inside of it.
        loop: per block, the innermost loop around it.
        inlined: the block in which a computation's body runs, which is a part of the program around it.
        same: the value whose buffer another one is.
        buckets: the first and the last of the collectives with which one runs.
        together: all_reduces, each with the last of those that run as one with it, where compilers merge them.
    """

    def __init__(self, main: Block, sizes: LocalBytes, merges: bool):
        self._sizes, self._merges = sizes, merges
        self.ops: list[Op] = []
        self.position: dict[Op, float] = {}
        self.end: dict[Op, float] = {}
        self.loop: dict[Block, Op | None] = {}
        self.inlined: dict[Block, Block] = {}
        self.same: dict[Value, Value] = {}
        self.buckets: dict[Op, tuple[Op, Op]] = {}
        self.together: dict[Op, Op] = {}
        self._number(main, None)

    def loops_around(self, op: Op) -> list[Op]:
        """The loops that an op is in, from inside."""
        found, loop = list[Op](), self.loop[op.block] if op.block is not None else None
        while loop is not None:
            found.append(loop)
            loop = self.loop[loop.block] if loop.block is not None else None
        return found

    def _number(self, block: Block, loop: Op | None) -> None:
        self._number_buckets(block)
        if self._merges:
            self.together.update(run_together(block, self._sizes.of))
        parent = block.parent
        self.loop[block] = loop
        self.inlined[block] = self.inlined[parent.block] if parent.name in COMPUTATIONS and parent.block else block
        for op in block.ops:
            self.position[op] = float(len(self.ops))
            self.ops.append(op)
            if is_data_flow(op):
                self._number_regions(op, loop)
            self.end[op] = float(len(self.ops) - 1)

    def _number_buckets(self, block: Block) -> None:
        """Notes where buckets of collectives begin and end."""
        buckets: dict[int, list[Op]] = {}
        for op in block.ops:
            if op.name.startswith("sdy.") and op.attribute(BUCKET) is not None:
                buckets.setdefault(op.int(BUCKET), []).append(op)
        for ops in buckets.values():
            self.buckets.update(dict.fromkeys(ops, (ops[0], ops[-1])))

    def _number_regions(self, op: Op, loop: Op | None) -> None:
        if op.name == LOOP:
            self._join_unchanged(op)
        if op.name in COMPUTATIONS:
            self._join(op.blocks[0].arguments, op.operands)
        for block in op.blocks:
            self._number(block, op if op.name == LOOP else loop)
        if op.name in COMPUTATIONS:
            self._join(op.results, op.blocks[0].terminator.operands)
        if op.name == BARRIER:
            self._join(op.results, op.operands)

    def _join_unchanged(self, loop: Op) -> None:
        """What a loop carries unchanged is what it was before the loop."""
        condition, body = loop.blocks
        for i, returned in enumerate(body.terminator.operands):
            if returned in (body.arguments[i], loop.operands[i]):
                self._join((condition.arguments[i], body.arguments[i], loop.results[i]), (loop.operands[i],) * 3)

    def _join(self, values: Sequence[Value], sources: Sequence[Value]) -> None:
        self.same.update(zip(values, map(self.root, sources), strict=True))

    def root(self, value: Value) -> Value:
        return self.same.get(value, value)

    def made(self, value: Value) -> float:
        """When a value is made; an argument of the program before its first op."""
        if isinstance(value.owner, Op):
            return self.position[value.owner]
        return self.position.get(value.owner.parent, -1.0) + STEP

    def inlined_block(self, op: Op) -> Block | None:
        return self.inlined[op.block] if op.block is not None else None
