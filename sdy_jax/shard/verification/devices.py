"""The rules about meshes, devices and their neighbours."""

from __future__ import annotations

from sdy_jax.shard.semantics import checks
from sdy_jax.shard.verification.scope import MeshScope, Rule, first_operand, shape_of
from sdy_jax.shard.view import DialectOp


def mesh(op: DialectOp, scope: MeshScope) -> None:
    """A mesh: at the top of its module, with axes, under a name that nothing else has."""
    symbol, parent = op["sym_name"], op.operation.parent
    if parent is not None and parent.operation.name != "builtin.module":
        op.fail(f"a {op.noun} stands at the top of a module, not in {parent.operation.name}")
    if not op["shape"]:
        op.fail(f"a {op.noun} needs at least one axis")
    for axis, size in enumerate(op["shape"]):
        if size is not None and size < 0:
            op.fail(f"axis {axis} has size {size}")
    if scope.symbols.get(symbol) != op.operation:
        op.fail(f"@{symbol} is already defined")
    scope.meshes[op.dialect, symbol].check_declared(scope.declared.get(symbol))


def indices_of_axes(op: DialectOp, scope: MeshScope) -> None:
    """One result per listed axis; no list means all axes."""
    on, axes = scope.mesh(op), op["axes"]
    checks.check_axes(on, axes, "axes")
    expected, given = len(axes) or on.rank, len(op.operation.results)
    if given != expected:
        op.fail(f"{given} results, expected {expected}")


def neighbors(op: DialectOp, scope: MeshScope) -> None:
    checks.check_neighbors(scope.mesh(op), op["split_axes"], op["device"])


def coordinates_of(name: str) -> Rule:
    """The rule for an attribute that names a device in each group by its coordinates along the group's axes."""

    def rule(op: DialectOp, scope: MeshScope) -> None:
        if op[name] is not None:
            checks.check_device(scope.mesh(op), op.axes, op[name], name)

    return rule


def shift_axis(op: DialectOp, scope: MeshScope) -> None:
    checks.check_shift_axis(scope.mesh(op), op.axes, op["shift_axis"])


def halos(op: DialectOp, scope: MeshScope) -> None:
    """The halos of `update_halo`: two per split dimension, each no larger than what it is a copy of."""
    shape = shape_of(op, first_operand(op), 1)
    checks.check_halos(scope.mesh(op), shape, op["split_axes"], op["static_halo_sizes"])
