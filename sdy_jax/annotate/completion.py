"""What waits for the whole module: constraints at borders, the owners of data-flow edges, shardings of collectives."""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend.mlir import ir

from sdy_jax.annotate.collectives import COLLECTIVE, axes_alone
from sdy_jax.annotate.constraints import BORDER, EDGE
from sdy_jax.annotate.site import create
from sdy_jax.errors import ShardingError
from sdy_jax.ir.attributes import (
    reduction_attributes,
    sharding_attributes,
    sharding_from_attribute,
    shardings_from_attribute,
    shardings_to_attribute,
)
from sdy_jax.ir.collectives import (
    COLLECTIVE_OPS,
    REDUCING,
    UNREDUCING,
    SdyCollective,
    sharding_after,
    verify_collective,
    verify_counted_once,
    verify_own_attributes,
    verify_strictly,
)
from sdy_jax.ir.graph import is_derived, state
from sdy_jax.ir.locations import source_line
from sdy_jax.ir.meshes import Mesh
from sdy_jax.ir.operations import (
    CALL,
    CONSTRAINTS,
    DATA_FLOW_OPS,
    callee_of,
    calls_in,
    functions,
    module_meshes,
    module_of,
    owning_op,
    pre_order,
    replace_op,
    returned_by,
    symbol,
)
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.ir.stored_shardings import mesh_of, set_sharding, sharding_of
from sdy_jax.ir.validity import verify_sharding

# Collectives that are written as functions: what they become once the whole module is there.
#
# jax lowers each annotation on its own and puts it where it belongs later, so that its rule does not see what states
# the operand's sharding. Until then a reshard stands for the collective.


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


# What waits for the whole module: constraints at borders, the owners of data-flow edges, shardings of collectives.
#
# jax lowers many functions on their own and moves or calls the result, so a rule does not see what its operands are.

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
