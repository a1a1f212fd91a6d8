"""Collectives that are written as functions: what they become once the whole module is there.

jax lowers each annotation on its own and puts it where it belongs later, so that its rule does not see what states the
operand's sharding. Until then a reshard stands for the collective.
"""

from __future__ import annotations

from jax.extend.mlir import ir

from sdy_jax.annotate.collective_primitive import axes_alone
from sdy_jax.annotate.site import create
from sdy_jax.errors import ShardingError
from sdy_jax.ir.locations import source_line
from sdy_jax.ir.operations import CONSTRAINTS, module_meshes, module_of
from sdy_jax.ir.stored_shardings import mesh_of, sharding_of
from sdy_jax.representation.attributes import reduction_attributes, sharding_attributes
from sdy_jax.representation.mesh import Mesh
from sdy_jax.representation.sdy_collectives import COLLECTIVE_OPS, REDUCING, UNREDUCING, SdyCollective, sharding_after
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.representation.verify import verify_sharding
from sdy_jax.representation.verify_collectives import (
    verify_collective,
    verify_counted_once,
    verify_own_attributes,
    verify_strictly,
)


def settle_collective(stand_in: ir.Operation, collective: SdyCollective, reduction: str, place: str) -> None:
    """Puts the collective there, between the sharding that its operand is stated to have and the one that follows.

    Args:
        stand_in: the op in its place.
        collective, reduction: what it does.
        place: what errors name.

    Raises:
        ShardingError: the operand's sharding is not stated, or the collective does not fit it.
    """
    kind, x = collective.kind, stand_in.operands[0]
    place = f"{place} at {source_line(stand_in.location)}"
    found = _stated_by(x)
    if found is None:
        raise ShardingError(
            f"{place}: the sharding of its operand is not known here; to fix: give it as `sharding=`, or apply reshard "
            "or sharding_constraint to the operand right before"
        )
    operand = axes_alone(found)
    target = sharding_of(stand_in.results[0]) if kind == "collective_permute" else None
    _check_reduction(collective, reduction, operand, place)
    result = _result(stand_in, collective, operand, target, place)
    texts = collective.attributes | (reduction_attributes(kind, reduction) if kind in REDUCING else {})
    said = {name: ir.Attribute.parse(text, stand_in.context) for name, text in texts.items()}
    with stand_in.location, ir.InsertionPoint(stand_in):
        if operand != found:
            x = create("sdy.reshard", x, **sharding_attributes("sharding", operand, stand_in.context))
        said |= sharding_attributes("out_sharding", result, stand_in.context)
        stand_in.results[0].replace_all_uses_with(create(f"sdy.{kind}", x, **said))
    stand_in.erase()


_STATING = CONSTRAINTS | COLLECTIVE_OPS


def _stated_by(x: ir.Value) -> TensorSharding | None:
    """The sharding that the op states which makes a value, if it is there to state one."""
    return sharding_of(x) if isinstance(x, ir.OpResult) and x.owner.operation.name in _STATING else None


def _check_reduction(collective: SdyCollective, reduction: str, operand: TensorSharding, place: str) -> None:
    """What is reduced, or becomes unreduced along more axes, is unreduced by that very reduction."""
    found = operand.reduction
    if not operand.unreduced_axes or found == reduction or collective.kind not in REDUCING | UNREDUCING:
        return
    remedy = f'say reduction="{found}"' if collective.kind in REDUCING else "reduce it first"
    raise ShardingError(f"{place}: its operand is unreduced by {found}, not by {reduction}; to fix: {remedy}")


def _result(
    op: ir.Operation, collective: SdyCollective, operand: TensorSharding, target: TensorSharding | None, place: str
) -> TensorSharding:
    """The sharding of the result, which keeps the dialect's rules and counts nothing twice."""
    mesh = _mesh(op, operand)
    verify_own_attributes(collective, operand.rank, mesh, place)
    verify_counted_once(collective, operand, mesh, place)
    result = target if target is not None else sharding_after(collective, operand, mesh, place)
    meshes = {s.mesh: _mesh(op, s) for s in (operand, result) if isinstance(s.mesh, str)}
    verify_sharding(result, meshes, operand.rank, f"{place}, result")
    verify_collective(collective, operand, mesh, result, _mesh(op, result), place)
    verify_strictly(collective, operand, result, mesh, place)
    return result


def _mesh(op: ir.Operation, sharding: TensorSharding) -> Mesh:
    return mesh_of(module_meshes(module_of(op)), sharding)
