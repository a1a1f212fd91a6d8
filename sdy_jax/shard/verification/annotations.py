"""The rules about how annotations of one value meet each other and the ops of its function."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jax.extend.mlir import ir

from sdy_jax.representation.dialect_rules import RuleError
from sdy_jax.shard.pairs import pair_up
from sdy_jax.shard.stated_shardings import defining, stated_sharding
from sdy_jax.shard.verification.scope import MeshScope
from sdy_jax.shard.view import DialectOp, function_around
from sdy_jax.text.mesh_ops import own_name
from sdy_jax.verification.values import location_text

CHAINS = {
    (False, False): "{value} is already sharded at {place}; use annotate_for_users to reshard for its users",
    (True, True): "{value} is already annotated for its users at {place}; annotate the value itself a second time for"
    " other users",
    (True, False): "{value} is annotated for its users at {place} and cannot be given another sharding after that",
}
"""What is wrong with a shard of a shard's result; each of the two is for users of its result, or not."""

TWICE = "{value} has two different shardings, here and at {place}"
"""What is wrong with two shards of one value, neither of them for users."""


def check_annotations(shards: Sequence[DialectOp], scope: MeshScope, strict: bool) -> None:
    """A value has one sharding, and any number of others for its users.

    Args:
      shards: the shard ops of a module.
      strict: shards of shards that are of the same sort are refused; else each takes up the one before.

    Raises:
      RuleError: two shardings meet that are not the same.
    """
    plain: dict[ir.Value, DialectOp] = {}
    for op in shards:
        for_users, value = op["annotate_for_users"], op["src"]
        before = defining(value, "shard")
        if before is not None:
            sort = (before["annotate_for_users"], for_users)
            tolerated = not strict and sort[0] == sort[1]
            if sort in CHAINS and not tolerated and _differ(before, op, scope):
                op.fail(CHAINS[sort].format(value=value.get_name(), place=_place(before)), value)
        if for_users:
            continue
        first = plain.setdefault(value, op)
        if _differ(first, op, scope):
            op.fail(TWICE.format(value=value.get_name(), place=_place(first)), value)


def _differ(one: DialectOp, other: DialectOp, scope: MeshScope) -> bool:
    stated = [stated_sharding(op["sharding"]) for op in (one, other)]
    if stated[0] is None or stated[1] is None:
        return bool(one["sharding"] != other["sharding"])
    mesh = scope.meshes.get((stated[0].dialect, stated[0].mesh))
    return mesh is None or not stated[0].means_the_same(stated[1], mesh)


def _place(op: DialectOp) -> str:
    """Where an op is, as the start of an error says it."""
    return (location_text(op.operation.location) or "an unknown place").replace('"', "")


def check_pairs(block: Iterable[DialectOp]) -> None:
    """Each send of a block has its recv, and each recv its send.

    Raises:
      RuleError: for the first op of the block, in its order, that is in no pair.
    """
    _, alone = pair_up(block)
    for op in alone:
        if op.name == "recv":
            op.fail("this recv has no earlier matching send")
        same = f"same {op.noun}, {own_name(op.dialect, 'mesh_axes')} and type, later in the block"
        op.fail(f"this send has no matching recv ({same})")


def check_locality(ops: Iterable[DialectOp]) -> None:
    """A function is about whole tensors, which it annotates, or about local arrays, which it communicates.

    Raises:
      RuleError: for an op that communicates in an annotated function, outside of manual computations.
    """
    found = [(function, op) for op in ops if (function := function_around(op.operation)) is not None]
    annotated = {function: op.operation.name for function, op in found if op.name == "shard"}
    for function, op in found:
        if op.declaration.communicates and function in annotated:
            name = ir.StringAttr(function.attributes["sym_name"]).value
            raise RuleError(
                f"{op.operation.name} works on per-device arrays, but @{name} is annotated with {annotated[function]}; "
                "put it in sdy.manual_computation",
                location_text(op.operation.location),
            )
