"""What waits for the whole module: constraints at borders, the owners of data-flow edges, shardings of collectives.

jax lowers many functions on their own and moves or calls the result, so a rule does not see what its operands are.
"""

from __future__ import annotations

from typing import Any

from jax.extend.mlir import ir

from sdy_jax.annotate.constraints import BORDER, EDGE
from sdy_jax.annotate.finish_collectives import is_unfinished, settle_collective
from sdy_jax.errors import ShardingError
from sdy_jax.ir.locations import source_line
from sdy_jax.ir.operations import CALL, callee_of, calls_in, module_of, owning_op, pre_order
from sdy_jax.representation.attributes import (
    sharding_from_attribute,
    shardings_from_attribute,
    shardings_to_attribute,
)
from sdy_jax.representation.sharding import TensorSharding

_MANUAL = "sdy.manual_computation"

# The owners of edges, with the attribute that keeps the shardings of edges at results, and at block arguments.

_OF_RESULTS = {
    "stablehlo.while": "sdy.sharding",
    "stablehlo.case": "sdy.sharding",
    "stablehlo.if": "sdy.sharding",
    "stablehlo.optimization_barrier": "sdy.sharding",
    "sdy.named_computation": "out_shardings",
    _MANUAL: "out_shardings",
}
_OF_ARGUMENTS = {"stablehlo.while": "sdy.sharding", "sdy.named_computation": "in_shardings"}


def finish(module: ir.Operation) -> None:
    """Completes the annotations of a module that jax has lowered, in place.

    Raises:
        ShardingError: a `data_flow_edge` for a value that is on no edge, or on one that is stated to have another
            sharding; or a collective whose operand's sharding is not stated or does not fit.
    """
    ops = pre_order(module)
    borders = [op for op in ops if BORDER in op.attributes]
    edges = [op for op in ops if EDGE in op.attributes]
    collectives = [op for op in ops if is_unfinished(op)]
    for op in borders:
        _settle_border(op)
    for op in edges:
        _settle_edge(op)
    for op in collectives:
        settle_collective(op)


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
    constraint.results[0].replace_all_uses_with(constraint.operands[0])
    constraint.erase()


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
    op, name, number = owner
    own = _shardings(op, name, sharding.mesh)[number]
    if not _refines(sharding, own):
        raise ShardingError(
            f"data_flow_edge at {source_line(edge.location)}: its edge is to be <{sharding}>, and is stated to be "
            f"<{own}> elsewhere; all of an edge has one sharding"
        )
    _write(op, name, number, sharding)
    edge.results[0].replace_all_uses_with(x)
    edge.erase()


def _described(x: ir.Value) -> str:
    if isinstance(x, ir.OpResult):
        return f"a result of {owning_op(x).name}"
    return f"argument {x.arg_number} of a {owning_op(x).name}"


def _owner(x: ir.Value) -> tuple[ir.Operation, str, int] | None:
    """The op that the edge of `x` belongs to, with the attribute and the place in it where the edge's sharding is kept;
    None if `x` is on no edge."""
    op = owning_op(x)
    if isinstance(x, ir.OpResult):
        number = x.result_number
        if op.name == CALL:
            return _owner(_returned(op, number))
        return (op, _OF_RESULTS[op.name], number) if op.name in _OF_RESULTS else None
    number = x.arg_number
    if op.name == "func.func":
        name = ir.StringAttr(op.attributes["sym_name"]).value
        calls = [call for call in calls_in(module_of(op)) if callee_of(call) == name]
        return _owner(calls[0].operands[number]) if len(calls) == 1 else None
    return (op, _OF_ARGUMENTS[op.name], number) if op.name in _OF_ARGUMENTS else None


def _returned(call: ir.Operation, number: int) -> ir.Value:
    """What the called function returns as result `number`."""
    function = ir.SymbolTable(module_of(call))[callee_of(call)].operation
    block = function.regions[0].blocks[0]
    return block.operations[len(block.operations) - 1].operands[number]


def _write(op: ir.Operation, name: str, number: int, sharding: TensorSharding) -> None:
    shardings = _shardings(op, name, sharding.mesh)
    shardings[number] = sharding
    op.attributes[name] = shardings_to_attribute(tuple(shardings), op.context)


def _shardings(op: ir.Operation, name: str, mesh: Any) -> list[TensorSharding]:
    if name in op.attributes:
        return list(shardings_from_attribute(op.attributes[name]))
    values = op.operands if name == "in_shardings" else op.results
    return [TensorSharding.fully_open(mesh, _rank(value.type)) for value in values]


def _rank(type_: ir.Type) -> int:
    return ir.RankedTensorType(type_).rank if isinstance(type_, ir.RankedTensorType) else 0
