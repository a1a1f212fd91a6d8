"""Ops of a partitioned program that become one manual computation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from jax.extend.mlir import ir

from sdy_jax.errors import UnsupportedError
from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.ir.operations import manual_axes, pre_order
from sdy_jax.lowering.emission.emit import local_function_of_ops, used_axes, value_shardings
from sdy_jax.lowering.strategies.registry import strategies_of
from sdy_jax.op_rules import RuleBook
from sdy_jax.partitioning.local import lowered_on_blocks
from sdy_jax.representation.mesh import Mesh
from sdy_jax.representation.sdy_collectives import COLLECTIVE_OPS
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.runtime.mesh import RefinedMesh

_SENDING = frozenset(
    f"stablehlo.{name}"
    for name in (
        "all_gather",
        "all_reduce",
        "all_to_all",
        "collective_broadcast",
        "collective_permute",
        "reduce_scatter",
    )
)


class Unit(NamedTuple):
    """Ops that become one manual computation: what it takes, and what it makes."""

    ops: tuple[Op, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


class PartitionedMain:
    """The main function of a partitioned module, as it is read before anything is changed."""

    def __init__(self, module: ir.Operation, base: str):
        self.graph, self.base = Graph(module), base
        self.mesh: Mesh = self.graph.meshes[base]
        self.refined = RefinedMesh.of(self.mesh, used_axes(self.graph))
        self.rules, self._shardings = RuleBook(overrides=False), value_shardings(self.graph)

    def sharding(self, value: Value) -> TensorSharding:
        return self._shardings.get(value) or TensorSharding.replicated(self.base, value.rank)

    def blocks(self, value: Value) -> tuple[int, ...]:
        """The shape of all blocks of a value together."""
        sharding, shape = self.sharding(value), value.shape or ()
        counts = sharding.shard_counts(self.mesh)
        return tuple(n * g for n, g in zip(sharding.local_shape(shape, self.mesh), counts, strict=True))

    def is_padded(self, op: Op) -> bool:
        """Whether an op, or one inside of it, takes or makes a value with padding."""
        return not manual_axes(op) and any(
            value in self._shardings and self.blocks(value) != value.shape
            for inner in op.walk()
            for value in (*inner.operands, *inner.results)
        )

    def sends(self, op: Op) -> bool:
        """Whether devices exchange anything while they compute an op, a partial result's reduction aside."""
        rule = None if op.name in COLLECTIVE_OPS or manual_axes(op) else self.rules.rule_of(op)
        if rule is None or not any(strategy.may_send for strategy in strategies_of(op, rule)):
            return False
        unit = self._unit_of([op])
        return any(inner.name in _SENDING for inner in pre_order(self.lowered(unit).operation))

    def lowered(self, unit: Unit) -> ir.Module:
        """The unit's blocks as a function of blocks."""
        function = local_function_of_ops(self.graph, self.refined, *unit)
        given = [(value, self.sharding(value)) for value in unit.inputs]
        return lowered_on_blocks(function, given, self.refined, self.graph.module.context)

    def units(self, is_chosen: Callable[[PartitionedMain, Op], bool], required: bool) -> Iterator[Unit]:
        taken = set[Op]()
        for op in self.graph.main.blocks[0].ops[:-1]:
            if op in taken or manual_axes(op) or not is_chosen(self, op):
                continue
            unit = self._unit(op)
            if self._is_expressible(unit):
                taken.update(unit.ops)
                yield unit
            elif required:
                raise UnsupportedError(f"{op.source}: {op.name} cannot be padded: it passes an unreduced value on")

    def _unit(self, op: Op) -> Unit:
        """An op with the ops after it that pass on what it makes, up to the collective that reduces it."""
        ops = [op]
        while self._is_partial(ops[-1]) and (reducing := _only_user(ops[-1])) is not None:
            ops.append(reducing)
        return self._unit_of(ops)

    def _unit_of(self, ops: Sequence[Op]) -> Unit:
        inside = [each for one in ops for each in one.walk()]
        own = {v for each in inside for v in each.results}
        own |= {v for each in inside for block in each.blocks for v in block.arguments}
        taken = dict.fromkeys(v for each in inside for v in each.operands if v not in own)
        known = set(inside)
        made = [v for one in ops for v in one.results if one is ops[-1] or any(u not in known for u, _ in v.uses)]
        return Unit(tuple(ops), tuple(taken), tuple(made))

    def _is_partial(self, op: Op) -> bool:
        return any(self.sharding(v).unreduced_axes for v in op.results)

    def _is_expressible(self, unit: Unit) -> bool:
        """Whether its border can be stated at a manual computation."""
        values = (*unit.inputs, *unit.outputs)
        return bool(unit.outputs) and all(
            v.shape is not None and self.sharding(v).mesh == self.base and not self.sharding(v).unreduced_axes
            for v in values
        )


def _only_user(op: Op) -> Op | None:
    """The op that alone takes the only result of an op, in the same block, and makes something of it."""
    if len(op.results) != 1 or len(op.results[0].uses) != 1:
        return None
    user = op.results[0].uses[0][0]
    return user if user.results and user.block is op.block else None
