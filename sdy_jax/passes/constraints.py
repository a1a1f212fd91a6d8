"""Sharding constraints: copied onto their inputs before propagation, turned into reshards after it."""

from __future__ import annotations

from dataclasses import replace

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Graph
from sdy_jax.ir.operations import (
    COMPUTATIONS,
    DATA_FLOW_OPS,
    defining_op,
    just_after,
    named,
    owning_op,
    post_order,
    rank,
    renamed,
    replace_op,
    users,
)
from sdy_jax.ir.stored_shardings import list_of, set_sharding, sharding_of, stating
from sdy_jax.op_rules.dataflow import FUNC_EDGE
from sdy_jax.passes.data_flow_edges import EDGE, edge_of
from sdy_jax.passes.propagation_edges import write_constraint_edges
from sdy_jax.passes.sharding_origins import Origins
from sdy_jax.passes.sharding_rules import write_identity_rule
from sdy_jax.representation.attributes import sharding_from_attribute, with_reduction
from sdy_jax.representation.sharding import TensorSharding

CONSTRAINT = "sdy.sharding_constraint"
_MANUAL = "sdy.manual_computation"


def apply_sharding_constraints(
    module: ir.Operation, *, debug_sharding_origins: bool = False, debug_propagation_edge_sharding: bool = False
) -> None:
    """Gives a value without a sharding that of the closed constraint, or manual computation, that uses it.

    Args:
      module: a `builtin.module`, edited in place.
      debug_sharding_origins, debug_propagation_edge_sharding: write where each axis came from.
    """
    applied: list[ir.Operation] = []
    for op in list(post_order(module)):
        if op.name == CONSTRAINT:
            sharding = _stated_by(op)
            _redirect_to_end_of_chain(op)
            if _applies(sharding, op.operands[0]) and _apply_constraint(op, sharding):
                applied.append(op)
        elif op.name == _MANUAL:
            for number, given in enumerate(list_of(op, "in_shardings")):
                operand = op.operands[number]  # read now: applying an earlier one may have redirected it
                if given is not None and _applies(given, operand):
                    _apply_manual(op, operand, given)
    if debug_propagation_edge_sharding:
        write_constraint_edges(module, applied)
    if debug_sharding_origins:
        Origins(Graph(module)).write()


def _redirect_to_end_of_chain(first: ir.Operation) -> None:
    """In a chain of constraints x -> first -> ... -> last, later users of x use `last` instead."""
    x = first.operands[0]
    source = defining_op(x)
    if (source is not None and source.name == CONSTRAINT) or current_sharding(x) is not None:
        return
    if any(user.name in (CONSTRAINT, _MANUAL) and user != first for user in users(x)):
        return
    last = _end_of_chain(first)
    if last == first or any(user.name in (CONSTRAINT, _MANUAL) for user in users(last.results[0])):
        return
    for use in list(x.uses):
        user = use.owner.operation
        if user != first and user.name != "func.return" and user.block == last.block and last.is_before_in_block(user):
            user.operands[use.operand_number] = last.results[0]


def _end_of_chain(first: ir.Operation) -> ir.Operation:
    last = first
    while True:
        following = users(last.results[0])
        if len(following) != 1 or following[0].name != CONSTRAINT:
            return last
        last = following[0]


def shardable(value: ir.Value) -> ir.Value | None:
    """The value that owns the sharding of `value`: an edge's result where there is an edge; None: nothing does."""
    op = owning_op(value)
    if isinstance(value, ir.BlockArgument):
        if op.name == "func.func":
            return value
        if op.name == "stablehlo.while":
            value = op.results[value.arg_number]
        elif op.name not in COMPUTATIONS:
            return None
    if op.name not in DATA_FLOW_OPS:
        return value
    edge = edge_of(value)
    return value if edge is None else edge.results[0]


def _owner_of(value: ir.Value) -> ir.Value:
    owner = shardable(value)
    assert owner is not None
    return owner


def current_sharding(value: ir.Value) -> TensorSharding | None:
    owner = shardable(value)
    return None if owner is None else sharding_of(owner)


def _applies(sharding: TensorSharding, x: ir.Value) -> bool:
    owner = shardable(x)
    if owner is None or not sharding.is_fully_closed or _says_something(sharding_of(owner)):
        return False
    return all(other == sharding for use in x.uses for other in _wanted(use.owner.operation, use.operand_number))


def _says_something(sharding: TensorSharding | None) -> bool:
    """Whether a sharding is more than that all dimensions are open; that of a scalar is."""
    if sharding is None:
        return False
    return sharding.rank == 0 or sharding != TensorSharding.fully_open(sharding.mesh, sharding.rank)


def _wanted(user: ir.Operation, operand: int) -> list[TensorSharding]:
    """The sharding that a constraint or a manual computation wants its operand to have."""
    if user.name == CONSTRAINT:
        return [_stated_by(user)]
    if user.name == _MANUAL:
        given = list_of(user, "in_shardings")[operand]
        return [given] if given else []
    return []


def _stated_by(constraint: ir.Operation) -> TensorSharding:
    return with_reduction(sharding_from_attribute(constraint.attributes["sharding"]), constraint.attributes)


def _belongs_to_edge(x: ir.Value) -> bool:
    owner = shardable(x)
    return owner is not None and owning_op(owner).name in (EDGE, FUNC_EDGE)


def _apply_constraint(constraint: ir.Operation, sharding: TensorSharding) -> bool:
    """Returns whether the constraint's input got the sharding; the result of an edge does not, it goes through it."""
    x = constraint.operands[0]
    if not _belongs_to_edge(x):
        set_sharding(_owner_of(x), sharding)
        write_identity_rule(constraint)
        return True
    _set_unreduced(x, sharding)
    _move_just_after(constraint, x)
    x.replace_all_uses_except(constraint.results[0], constraint)
    return False


def _move_just_after(op: ir.Operation, x: ir.Value) -> None:
    source = defining_op(x)
    if source is not None:
        op.move_after(source)
        return
    first = x.owner.operations[0].operation
    if first != op:
        op.move_before(first)


def _apply_manual(manual: ir.Operation, x: ir.Value, sharding: TensorSharding) -> None:
    if not _belongs_to_edge(x):
        set_sharding(_owner_of(x), sharding)
        return
    _set_unreduced(x, sharding)
    constrain_uses(x, sharding, manual.location)


def constrain_uses(value: ir.Value, sharding: TensorSharding, location: ir.Location) -> None:
    """Puts a sharding constraint right after a value, between it and all its users."""
    constraint = stating(CONSTRAINT, value, sharding, location, just_after(value))
    value.replace_all_uses_except(constraint.results[0], constraint)


def _set_unreduced(x: ir.Value, sharding: TensorSharding) -> None:
    owner = shardable(x)
    if owner is None or not sharding.unreduced_axes:
        return
    old = sharding_of(owner) or TensorSharding.fully_open(sharding.mesh, rank(x))
    set_sharding(owner, replace(old, unreduced_axes=sharding.unreduced_axes, reduction=sharding.reduction))


def constraints_to_reshards(module: ir.Operation) -> None:
    """Every `sdy.sharding_constraint` becomes an `sdy.reshard` with the same sharding."""
    for op in named(module, CONSTRAINT):
        replace_op(op, renamed(op, "sdy.reshard").results)
