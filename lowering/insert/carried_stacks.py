"""Stacks that loops carry: split by layers, they are carried split along another dimension where that sends less.

A loop that writes a layer of gradients per trip into a stack, or reads and writes layers of a state, needs every layer
on the devices that own it. Where the layer is a partial sum, or split already, or read by all devices, it must be whole
to be written to one owner, or broadcast from it. Along another dimension every device keeps its part of each layer: a
partial sum is reduce-scattered to it, and a reader gathers one layer. The stack moves before and after the loop, by an
all_to_all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from sdy_jax.ir.graph import Block, Op, Value
from sdy_jax.lowering.analysis.trip_counts import trips
from sdy_jax.lowering.strategies.registry import PARTIAL_ACCESS
from sdy_jax.op_rules.dataflow import DataFlowEdge
from sdy_jax.representation.axes import overlaps
from sdy_jax.representation.mesh import Axes, Mesh, axes_size
from sdy_jax.representation.rule import OpShardingRule
from sdy_jax.representation.sharding import DimensionSharding, TensorSharding

LOOP = "stablehlo.while"
_DEPTH = 6
"""How many ops back from a layer a partial sum is looked for. Guessed, a guard: a transposition, a conversion and a
reshape may stand between; what is farther back is reduced before it is stacked."""


@dataclass(frozen=True, slots=True)
class CarriedStacks:
    """What is known for the decision: the shardings of values, the rules of ops, and the mesh."""

    shardings: Mapping[Value, TensorSharding]
    rule_of: Callable[[Op], OpShardingRule | None]
    mesh: Mesh

    def moved(
        self, loop: Op, edge: DataFlowEdge, sharding: TensorSharding
    ) -> tuple[TensorSharding, list[Value]] | None:
        """The sharding in which a loop had better carry a stack, and the values in its body that are the stack."""
        accesses, values = _accesses(edge)
        if not accesses:
            return None
        cut = {d for op in accesses for d in _cut_dims(op)}
        split = [d for d in cut if sharding.axes[d]]
        if len(split) != 1 or sharding.unreduced_axes:
            return None
        shape, axes = edge.owner.shape or (), sharding.axes[split[0]]
        shards = axes_size(axes, self.mesh)
        dims = [d for d, n in enumerate(shape) if d not in cut and not sharding.axes[d] and not n % shards and n]
        preferred = {d for op in accesses for d in self._dims_of_layer(op, axes)}
        if not dims or not self._saves(loop, edge, accesses, axes):
            return None
        best = max(dims, key=lambda d: (d in preferred, shape[d], -d))
        new = {split[0]: DimensionSharding(()), best: DimensionSharding(axes)}
        return replace(sharding, dimensions=tuple(new.get(d, s) for d, s in enumerate(sharding.dimensions))), values

    def _saves(self, loop: Op, edge: DataFlowEdge, accesses: list[Op], axes: Axes) -> bool:
        """Whether the layers that need not be whole or broadcast outweigh the moves of the stack."""
        stack = math.prod(edge.owner.shape or ())
        saved = trips(loop) * sum(_layer_size(op) for op in accesses if self._is_scattered(op, axes))
        moves = len(edge.owner.uses) > 0, not _is_filled(edge.sources[0])
        return saved > sum(moves) * stack / axes_size(axes, self.mesh)

    def _is_scattered(self, op: Op, axes: Axes) -> bool:
        """Whether an access sends less where every device has a part of each layer: reads do, and writes of layers that
        are partial sums along the axes, or split along them."""
        if _is_read(op):
            return True
        return bool(self._dims_of_layer(op, axes)) or self._is_summed(op.operands[1], axes, _DEPTH)

    def _dims_of_layer(self, op: Op, axes: Axes) -> list[int]:
        """The dimensions along which a layer that is written is split along the axes."""
        sharding = None if _is_read(op) else self.shardings.get(op.operands[1])
        return [d for d, found in enumerate(sharding.axes) if found == axes] if sharding else []

    def _is_summed(self, value: Value, axes: Axes, depth: int) -> bool:
        op = value.defining_op
        rule = self.rule_of(op) if op is not None and depth else None
        if op is None or rule is None:
            return False
        for operand, mapping in zip(op.operands, rule.operand_mappings, strict=True):
            sharding = self.shardings.get(operand)
            found = zip(sharding.axes, mapping, strict=True) if sharding else ()
            if any(rule.reduction.intersection(factors) and _overlap(split, axes) for split, factors in found):
                return True
        return not rule.reduction and any(self._is_summed(v, axes, depth - 1) for v in op.operands)


def _accesses(edge: DataFlowEdge) -> tuple[list[Op], list[Value]]:
    """The ops that read and write parts of what a loop carries, and the values that these make of it; none if others
    use it too."""
    found, values = list[Op](), list[Value]()
    waiting = [value for value in edge.targets if isinstance(value.owner, Block)]
    while waiting:
        value = waiting.pop()
        for op, index in value.uses:
            if (op, index) in edge.slots:
                continue
            if op.name not in PARTIAL_ACCESS or index:
                return [], []
            found.append(op)
            if not _is_read(op):
                values.append(op.results[0])
                waiting.append(op.results[0])
    return found, values


def _is_read(op: Op) -> bool:
    return PARTIAL_ACCESS[op.name] == "read"


def _cut_dims(op: Op) -> Iterator[int]:
    layer = op.results[0] if _is_read(op) else op.operands[1]
    sizes = zip(op.operands[0].shape or (), layer.shape or (), strict=True)
    return (d for d, (whole, part) in enumerate(sizes) if whole != part)


def _layer_size(op: Op) -> int:
    return math.prod((op.results[0] if _is_read(op) else op.operands[1]).shape or ())


def _is_filled(value: Value) -> bool:
    """Whether the stack is made of one number, which every device has."""
    op = value.defining_op
    return op is not None and all(operand.rank == 0 for operand in op.operands)


def _overlap(some: Axes, others: Axes) -> bool:
    return any(overlaps(a, b) for a in some for b in others)
