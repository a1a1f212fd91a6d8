"""Which ops are dead: propagation passes them by, and the passes erase them."""

from __future__ import annotations

from sdy_jax.ir.graph import Op, Value

_EFFECTS = frozenset(
    {
        "builtin.module",
        "func.func",
        "func.call",
        "func.return",
        "mesh.recv",
        "mesh.send",
        "scf.yield",
        "sdy.return",
        "stablehlo.return",
        "sdy.mesh",
        "sdy.sharding_constraint",
        "sdy.data_flow_edge",
        "sdy.func_data_flow_edge",
        "sdy.sharding_group",
        "sdy.all_gather",
        "sdy.all_reduce",
        "sdy.all_slice",
        "sdy.all_to_all",
        "sdy.collective_permute",
        "sdy.reduce_scatter",
        "sdy.replicated_to_unreduced",
        "sdy.sharded_to_unreduced",
        "shard.recv",
        "shard.send",
        "stablehlo.all_gather",
        "stablehlo.all_reduce",
        "stablehlo.all_to_all",
        "stablehlo.collective_broadcast",
        "stablehlo.collective_permute",
        "stablehlo.reduce_scatter",
        "stablehlo.infeed",
        "stablehlo.outfeed",
        "stablehlo.send",
        "stablehlo.recv",
        "stablehlo.rng",
    }
)
"""Ops that stay even where nothing uses their results."""


def is_removable(op: Op) -> bool:
    """Whether an op has no effect besides its results, so that it may be erased when these are unused."""
    if op.name in _EFFECTS or (op.name == "stablehlo.custom_call" and op.flag("has_side_effect")):
        return False
    return all(is_removable(inner) for block in op.blocks for inner in block.ops[:-1])


class Liveness:
    """The ops that are left of a graph, while dead ones are taken out."""

    def __init__(self) -> None:
        self.dead: dict[Op, None] = {}
        """Dead ops, users before what they use, and what is in a region before the op that has it."""
        self._lost: dict[Value, int] = {}
        self._removable: dict[Op, bool] = {}

    def uses(self, value: Value) -> int:
        """The number of uses of a value by live ops."""
        return len(value.uses) - self._lost.get(value, 0) if self._lost else len(value.uses)

    def is_dead(self, op: Op) -> bool:
        """Whether no live op uses a result of the op, and it may be erased."""
        for result in op.results:
            if self.uses(result):
                return False
        if op not in self._removable:
            self._removable[op] = is_removable(op)
        return self._removable[op]

    def erase(self, op: Op) -> list[Op]:
        """Erases a dead op. Returns the producers of operands that few or no other ops use, to visit again."""
        again: list[Op] = []
        self._erase(op, again)
        return again

    def _erase(self, op: Op, again: list[Op]) -> None:
        for block in op.blocks:
            for inner in reversed(block.ops):
                if inner not in self.dead:
                    self._erase(inner, again)
        for value in op.operands:
            if value.defining_op and self._has_few_other_users(value, op):
                again.append(value.defining_op)
            self._lost[value] = self._lost.get(value, 0) + 1
        self.dead[op] = None

    def _has_few_other_users(self, value: Value, op: Op) -> bool:
        return len({user for user, _ in value.uses if user is not op and user not in self.dead}) <= 1
