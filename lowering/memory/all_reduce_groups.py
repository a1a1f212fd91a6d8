"""Which all_reduces of a partitioned program run as one where a compiler merges them, whatever their buckets.

It makes one of those over the same devices of which none waits for another, when the last operand is there:

    a = all_reduce(f)          f lives until g is there
    h = all_reduce(g)          both run here
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from sdy_jax.ir.graph import Block, Op, Value
from sdy_jax.representation.attributes import reduction_from_attributes

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
