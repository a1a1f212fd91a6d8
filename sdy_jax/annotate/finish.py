"""What waits for the whole module: constraints at borders, the owners of data-flow edges, shardings of collectives.

jax lowers many functions on their own and moves or calls the result, so a rule does not see what its operands are.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend.mlir import ir

from sdy_jax.annotate.collective_primitive import COLLECTIVE
from sdy_jax.annotate.constraints import BORDER, EDGE
from sdy_jax.annotate.finish_collectives import settle_collective
from sdy_jax.errors import ShardingError
from sdy_jax.ir.locations import source_line
from sdy_jax.ir.operations import (
    CALL,
    DATA_FLOW_OPS,
    callee_of,
    calls_in,
    functions,
    module_of,
    owning_op,
    pre_order,
    replace_op,
    returned_by,
    symbol,
)
from sdy_jax.ir.statements import is_derived, state
from sdy_jax.ir.stored_shardings import set_sharding, sharding_of
from sdy_jax.representation.attributes import sharding_from_attribute, shardings_from_attribute, shardings_to_attribute
from sdy_jax.representation.sdy_collectives import SdyCollective
from sdy_jax.representation.sharding import TensorSharding

_MANUAL = "sdy.manual_computation"


def finish(module: ir.Operation, stated: Sequence[tuple[SdyCollective, str, str]]) -> None:
    """Completes the annotations of a module that jax has lowered, in place.

    Args:
        module: a `builtin.module`.
        stated: the collectives in it, as `Site.collectives`.

    Raises:
        ShardingError: a `data_flow_edge` for a value that is on no edge, or on one that is stated to have another
            sharding; or a collective whose operand's sharding is not stated or does not fit.
    """
    ops = pre_order(module)
    borders = [op for op in ops if BORDER in op.attributes]
    edges = [op for op in ops if EDGE in op.attributes]
    collectives = [op for op in ops if COLLECTIVE in op.attributes]
    for op in borders:
        _settle_border(op)
    for op in edges:
        _settle_edge(op)
    for op in collectives:
        settle_collective(op, *stated[int(ir.IntegerAttr(op.attributes[COLLECTIVE]).value)])


# Borders: a constraint that a manual computation brought along becomes its in_sharding or out_sharding.


def _settle_border(constraint: ir.Operation) -> None:
    side = str(ir.StringAttr(constraint.attributes[BORDER]).value)
    del constraint.attributes[BORDER]
    found = _operand_fed(constraint) if side == "in" else _result_taken(constraint)
    if found is None:
        return
    manual, number = found
    name = f"{side}_shardings"
    shardings = list(shardings_from_attribute(manual.attributes[name]))
    sharding = sharding_from_attribute(constraint.attributes["sharding"])
    if not _refines(sharding, shardings[number]):
        return
    shardings[number] = sharding
    manual.attributes[name] = shardings_to_attribute(tuple(shardings), manual.context)
    replace_op(constraint, constraint.operands)


def _operand_fed(constraint: ir.Operation) -> tuple[ir.Operation, int] | None:
    """The manual computation whose operand is the only use of the constraint, with the operand's number."""
    uses = list(constraint.results[0].uses)
    if len(uses) != 1 or uses[0].owner.operation.name != _MANUAL:
        return None
    return uses[0].owner.operation, uses[0].operand_number


def _result_taken(constraint: ir.Operation) -> tuple[ir.Operation, int] | None:
    """The manual computation whose result has the constraint as its only use, with the result's number."""
    x = constraint.operands[0]
    if not isinstance(x, ir.OpResult) or x.owner.operation.name != _MANUAL or len(list(x.uses)) != 1:
        return None
    return x.owner.operation, x.result_number


def _refines(sharding: TensorSharding, manual: TensorSharding) -> bool:
    """`sharding` is on the same mesh and begins, in every dimension, with the axes of `manual`."""
    return sharding.mesh == manual.mesh and all(
        a[: len(b)] == b for a, b in zip(sharding.axes, manual.axes, strict=True)
    )


# Edges: import makes one of every owner, with the owner's sharding.


def _settle_edge(edge: ir.Operation) -> None:
    x = edge.operands[0]
    owner = _owner(x)
    if owner is None:
        raise ShardingError(
            f"data_flow_edge at {source_line(edge.location)}: its array is {_described(x)}; edges are what loops, "
            "branches, optimization_barrier and computations return, for all else there is sharding_constraint"
        )
    sharding = sharding_from_attribute(edge.attributes["sharding"])
    own = None if is_derived(owner) else sharding_of(owner)
    if own is not None and not _refines(sharding, own):
        raise ShardingError(
            f"data_flow_edge at {source_line(edge.location)}: its edge is to be <{sharding}>, and is stated to be "
            f"<{own}> elsewhere; all of an edge has one sharding"
        )
    set_sharding(owner, sharding)
    state(owner)
    replace_op(edge, edge.operands)


def _described(x: ir.Value) -> str:
    if isinstance(x, ir.OpResult):
        return f"a result of {owning_op(x).name}"
    return f"argument {x.arg_number} of a {owning_op(x).name}"


def _owner(x: ir.Value) -> ir.Value | None:
    """The value that has the sharding of the edge of `x`; None if `x` is on no edge."""
    op = owning_op(x)
    if isinstance(x, ir.OpResult):
        if op.name == CALL:
            return _owner(returned_by(functions(module_of(op))[callee_of(op)])[x.result_number])
        return x if op.name in DATA_FLOW_OPS else None
    if op.name == "func.func":
        calls = [call for call in calls_in(module_of(op)) if callee_of(call) == symbol(op)]
        return _owner(calls[0].operands[x.arg_number]) if len(calls) == 1 else None
    if op.name == "stablehlo.while":
        return op.results[x.arg_number]
    return x if op.name == "sdy.named_computation" else None
