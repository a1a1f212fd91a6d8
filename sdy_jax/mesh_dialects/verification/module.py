"""The walk through a module, and the table of rules that the op declarations name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from jax.extend.mlir import ir

from sdy_jax.errors import ShardingError
from sdy_jax.ir.operations import module_meshes, module_of
from sdy_jax.ir.validity import RuleError
from sdy_jax.mesh_dialects.meshes import device_meshes
from sdy_jax.mesh_dialects.semantics.checks import check_axes
from sdy_jax.mesh_dialects.verification import op_rules
from sdy_jax.mesh_dialects.verification.op_rules import MeshScope, Rule, check_annotations, check_locality, check_pairs
from sdy_jax.mesh_dialects.view import DialectOp, dialect_ops, fail, is_dialect_op

RULES: Mapping[str, Rule] = {
    "tensors": op_rules.tensors,
    "rank 1": op_rules.rank_one,
    "same rank": op_rules.same_rank,
    "same element type": op_rules.same_element_type,
    "same shape": op_rules.same_shape,
    "same type": op_rules.same_type,
    "redivided": op_rules.redivided,
    "reduction": op_rules.reduction,
    "coordinates of root": op_rules.coordinates_of("root"),
    "coordinates of source": op_rules.coordinates_of("source"),
    "coordinates of destination": op_rules.coordinates_of("destination"),
    "shift axis": op_rules.shift_axis,
    "halos": op_rules.halos,
    "mesh": op_rules.mesh,
    "indices of axes": op_rules.indices_of_axes,
    "neighbors": op_rules.neighbors,
    "sharding": op_rules.sharding,
    "shard": op_rules.shard,
    "known sharding": op_rules.known_sharding,
    "shape of a shard": op_rules.shape_of_a_shard,
}
"""The rules that `ops.OPS` names."""


def verify_ops(module: ir.Operation, strict: bool = True) -> None:
    """Verifies the mesh and shard ops of a module; what they need of devices is checked when they run.

    Args:
      module: a `builtin.module`.
      strict: shards of shards are refused that say something else; else each reshards what the one before it made.

    Raises:
      RuleError: the first rule that is broken, with the op and its location.
    """
    if not module.context.allow_unregistered_dialects:
        return
    for inside, ops in _by_module(module).items():
        _verify(inside, ops, strict)


def _by_module(module: ir.Operation) -> dict[ir.Operation, list[DialectOp]]:
    """The ops of the dialects by the module that they are in: symbols are known there, and nowhere else."""
    found: dict[ir.Operation, list[DialectOp]] = defaultdict(list)
    for op in dialect_ops(module):
        found[module_of(op.operation)].append(op)
    return found


def _verify(module: ir.Operation, ops: list[DialectOp], strict: bool) -> None:
    scope = MeshScope(device_meshes(module), module_meshes(module), _symbols(module, ops))
    for op in ops:
        _check(op, scope)
    _check_ends(ops)
    check_annotations([op for op in ops if op.name == "shard"], scope, strict)
    for block in _blocks(ops):
        check_pairs(block)
    check_locality(ops)


def _check_ends(ops: list[DialectOp]) -> None:
    """A block ends with a terminator. None of these ops is one; jaxlib takes for one what it does not know."""
    inner = (op.operation for op in ops if op.operation.parent is not None)
    for block in dict.fromkeys(op.block for op in inner if op.parent.name != "builtin.module"):
        last = block.operations[len(block.operations) - 1].operation
        if is_dialect_op(last):
            fail(last, "it is the last op of its block, which has to end with a terminator, such as `return`")


def _check(op: DialectOp, scope: MeshScope) -> None:
    try:
        if "mesh" in op.values:
            check_axes(scope.mesh(op), op.values.get("mesh_axes", ()))
        for rule in op.declaration.rules:
            RULES[rule](op, scope)
    except RuleError:
        raise
    except ShardingError as error:  # from a check that Python has too
        op.fail(str(error))


def _symbols(module: ir.Operation, ops: list[DialectOp]) -> dict[str, ir.Operation]:
    """What each symbol of a module names. A mesh may have the name of an SDY mesh: it is the same one then."""
    found: dict[str, ir.Operation] = {}
    for op in module.regions[0].blocks[0].operations:
        if "sym_name" in op.attributes and op.operation.name != "sdy.mesh" and not is_dialect_op(op.operation):
            found[ir.StringAttr(op.attributes["sym_name"]).value] = op.operation
    for op in ops:
        if op.name == "mesh":
            found.setdefault(op["sym_name"], op.operation)
    return found


def _blocks(ops: list[DialectOp]) -> Iterator[list[DialectOp]]:
    """The sends and receives of each block."""
    found: dict[ir.Block, list[DialectOp]] = defaultdict(list)
    for op in ops:
        if op.name in ("send", "recv"):
            found[op.operation.block].append(op)
    yield from found.values()
