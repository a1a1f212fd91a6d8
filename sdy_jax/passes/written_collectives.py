"""Collectives that a text holds: the shardings that they take and make, stated where nothing can change them."""

from __future__ import annotations

from dataclasses import replace

from jax.extend.mlir import ir

from sdy_jax.ir.operations import named
from sdy_jax.ir.stored_shardings import sharding_of, stating
from sdy_jax.passes.constraints import current_sharding
from sdy_jax.representation.attributes import sharding_attributes
from sdy_jax.representation.sdy_collectives import COLLECTIVE_OPS, REDUCING_OPS
from sdy_jax.representation.sharding import TensorSharding


def settle_written_collectives(module: ir.Operation) -> None:
    """Puts a reshard to the operand's sharding before each collective whose operand might be sharded otherwise: an
    argument of a function, for which a caller may choose, or a value with open dimensions. What a collective states is
    closed.

    Args:
      module: a `builtin.module` whose collectives verify, edited in place.
    """
    for op in named(module, *COLLECTIVE_OPS):
        operand, result = current_sharding(op.operands[0]), sharding_of(op.results[0])
        if operand is not None and _may_change(op.operands[0], operand, op.name):
            reshard = stating("sdy.reshard", op.operands[0], _closed(operand), op.location, ir.InsertionPoint(op))
            op.operands[0] = reshard.results[0]
        if result is not None and result != _closed(result):
            for name, attribute in sharding_attributes("out_sharding", _closed(result), op.context).items():
                op.attributes[name] = attribute


def _may_change(value: ir.Value, sharding: TensorSharding, user: str) -> bool:
    if isinstance(value, ir.BlockArgument) and value.owner.owner.operation.name == "func.func":
        return True
    # Between an op and the reduction of its terms, which it does not state to be terms, nothing may come.
    is_reduced = user in REDUCING_OPS and not sharding.unreduced_axes
    return sharding != _closed(sharding) and not is_reduced


def _closed(sharding: TensorSharding) -> TensorSharding:
    closed = TensorSharding.closed(sharding.mesh, sharding.axes, sharding.unreduced_axes, sharding.reduction)
    return replace(closed, replicated_axes=sharding.replicated_axes)
