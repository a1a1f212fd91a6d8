"""The order in which a program's ops are numbered, which values share a buffer, and which collectives run together."""

from __future__ import annotations

from collections.abc import Sequence

from sdy_jax.ir.graph import Block, Op, Value
from sdy_jax.ir.operations import COMPUTATIONS
from sdy_jax.lowering.analysis.local_bytes import LocalBytes
from sdy_jax.lowering.memory.all_reduce_groups import run_together
from sdy_jax.op_rules.dataflow import is_data_flow
from sdy_jax.representation.sdy_collectives import BUCKET

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
