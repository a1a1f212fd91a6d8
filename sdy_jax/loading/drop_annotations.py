"""Taking everything out of a module that says how it is to be sharded."""

from __future__ import annotations

from jax.extend.mlir import ir

from sdy_jax.errors import ShardingError
from sdy_jax.ir.locations import source_line
from sdy_jax.ir.operations import post_order, replace_op
from sdy_jax.passes.meshes import drop_shardings_and_meshes
from sdy_jax.representation.sdy_collectives import COLLECTIVE_OPS
from sdy_jax.shard.passes.mesh_annotations import drop_mesh_annotations

_FORWARDING = frozenset(
    (
        "sdy.sharding_constraint",
        "sdy.reshard",
        "sdy.propagation_barrier",
        "sdy.data_flow_edge",
        *COLLECTIVE_OPS,
    )
)
"""Ops whose result is their operand, sharded otherwise."""


def drop_annotations(module: ir.Operation) -> None:
    """Removes shardings, meshes and what the sdy dialect says about them; what the module computes stays the same.

    Raises:
      ShardingError: a manual computation is left, which is made for its mesh.
    """
    drop_mesh_annotations(module)
    for op in post_order(module):
        if op.name in _FORWARDING:
            replace_op(op, op.operands)
        elif op.name == "sdy.sharding_group":
            op.erase()
        elif op.name == "sdy.named_computation":
            _drop(op, "in_shardings", "out_shardings")
        elif op.name == "sdy.manual_computation":
            raise ShardingError(
                f"the sdy.manual_computation at {source_line(op.location)} computes on the blocks of its mesh; its "
                "shardings cannot be dropped"
            )
        else:
            _drop(op, "sdy.sharding_rule")
    drop_shardings_and_meshes(module)


def _drop(op: ir.Operation, *names: str) -> None:
    for name in names:
        if name in op.attributes:
            del op.attributes[name]
