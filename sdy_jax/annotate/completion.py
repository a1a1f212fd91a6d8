"""A lowered module completed: types on Explicit axes, constraints at borders, the owners of data-flow edges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive  # type: ignore[attr-defined, unused-ignore]
from jax.extend.mlir import ir
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from sdy_jax.annotate.arguments import AUTO, Leaf
from sdy_jax.annotate.collectives import COLLECTIVE, axes_alone
from sdy_jax.annotate.constraints import BORDER, EDGE
from sdy_jax.annotate.jaxprs import Rewriting
from sdy_jax.annotate.site import Site, create, emission
from sdy_jax.annotate.specs import PARTITION, padded, resolve
from sdy_jax.base.errors import ShardingError
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
from sdy_jax.ir.graph import WRITTEN, derive, is_derived, state
from sdy_jax.ir.jax_shardings import AnyMesh, explicit_axes, own_type, sharding_in, sharding_of_type, typed, typed_part
from sdy_jax.ir.locations import source_line
from sdy_jax.ir.meshes import Mesh
from sdy_jax.ir.operations import (
    CALL,
    CONSTRAINTS,
    DATA_FLOW_OPS,
    callee_of,
    calls_in,
    defining_op,
    functions,
    module_meshes,
    module_of,
    named,
    owning_op,
    pre_order,
    replace_op,
    returned_by,
    symbol,
)
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.ir.stored_shardings import mesh_of, set_sharding, sharding_of
from sdy_jax.ir.validity import verify_sharding

# Types of arguments and results on Explicit axes: as the function sees them, and as they are stated.


def argument_type(leaf: Leaf, mesh: Mesh, jax_mesh: AnyMesh) -> jax.ShapeDtypeStruct:
    """The type of an argument as the function sees it.

    Raises:
        ShardingError: it is unreduced, and stated to be reduced.
    """
    value: jax.ShapeDtypeStruct = leaf.value
    if leaf.unreduced:
        _check_terms(leaf, resolve(leaf, len(value.shape), mesh, PARTITION, "in_shardings", jax_mesh))
    if not explicit_axes(jax_mesh):
        return value
    type_ = _stated_type(leaf, "in_shardings", mesh, jax_mesh) if leaf.is_moved else leaf.type
    return value if type_ is None else typed(value, type_)


def type_on_mesh(value: jax.ShapeDtypeStruct, mesh: AnyMesh) -> jax.ShapeDtypeStruct:
    """A type that shows the mesh, as those of arrays on Auto axes do."""
    return typed(value, NamedSharding(mesh.abstract_mesh, PartitionSpec(*(None,) * len(value.shape))))


def as_seen(value: jax.ShapeDtypeStruct, leaf: Leaf, mesh: AnyMesh, shown: AnyMesh | None) -> jax.ShapeDtypeStruct:
    """The type of an argument on Auto axes as the function sees it: on the mesh that all types are `shown` on, else on
    that which its own type shows."""
    shown = leaf.shown if shown is None else shown
    return in_memory(value if shown is None or value.sharding else type_on_mesh(value, shown), leaf, mesh)


def in_memory(value: jax.ShapeDtypeStruct, leaf: Leaf, mesh: AnyMesh) -> jax.ShapeDtypeStruct:
    """The type of an argument that shows the memory in which it is."""
    if not leaf.is_on_host:
        return value
    return typed(value, (value.sharding or type_on_mesh(value, mesh).sharding).with_memory_kind("pinned_host"))


def in_stated_type(leaf: Leaf, mesh: Mesh, jax_mesh: AnyMesh) -> Any:
    """A result that has a type, in the one that is stated for it."""
    own = own_type(jax.typeof(leaf.value), jax_mesh)
    type_ = None if own is None else _stated_type(leaf, "out_shardings", mesh, jax_mesh)
    return leaf.value if type_ is None or type_ == own else jax.sharding.reshard(leaf.value, type_)


def with_type(info: Any, aval: Any) -> jax.ShapeDtypeStruct:
    """jax's record of a result, with the sharding in the type that it was traced with."""
    return typed(info, sharding_in(aval))


def type_of_result(leaf: Leaf, type_: ir.Type, mesh_name: str, jax_mesh: AnyMesh) -> TensorSharding | None:
    """The sharding in the type of a result, unless the planner chooses it."""
    own = own_type(leaf.value, jax_mesh)
    if leaf.spec is AUTO or own is None:
        return None
    return padded(sharding_of_type(own, len(leaf.value.shape), mesh_name), ir.RankedTensorType(type_).rank)


def _stated_type(leaf: Leaf, where: str, mesh: Mesh, jax_mesh: AnyMesh) -> NamedSharding | None:
    """What types can say of a specification; None where nothing is stated."""
    shape = jnp.shape(leaf.value)
    sharding = resolve(leaf, len(shape), mesh, PARTITION, where, jax_mesh)
    return None if sharding is None else typed_part(sharding, shape, jax_mesh)


def _check_terms(leaf: Leaf, sharding: TensorSharding | None) -> None:
    """The sharding of an array that is unreduced by its type: unreduced along the same axes, by the same kind."""
    stated = sharding.unreduced_axes if sharding else ()
    is_said = {axis for axis in stated if axis.sub_axis is None and axis.name in leaf.unreduced}
    if len(is_said) < max(len(stated), len(leaf.unreduced)) or (sharding and sharding.reduction != leaf.reduction):
        raise ShardingError(
            f"`{leaf.path}` holds terms of a {leaf.reduction} along {', '.join(sorted(leaf.unreduced))}, in_shardings "
            f"says <{sharding}>; to fix: say so there as well, or reduce the array first, by jax.reshard"
        )


# Shardings on Explicit axes in a lowered module: those that the user wrote, and those that JAX's rules derived.
#
# jax lowers an op whose result has a type with a sharding to the op and a constraint. Where the user stated the
# sharding, by `reshard`, `out_sharding=` or `with_sharding_constraint`, the constraint stays. Else the sharding is
# written on the op's result, as propagation would write it.

_CONSTRAINT = "sdy.sharding_constraint"
_MARK = "sdy.written"
_EMPTY_MESH = jax.sharding.AbstractMesh((), ())
_OPTIONAL = ("out_sharding", "sharding")
"""The parameters of equations that hold what the user stated, or None."""

written_p = Primitive("sdy_written")
"""Says of its operands that the constraints which make them are the user's."""
written_p.multiple_results = True
written_p.def_abstract_eval(lambda *_: [])
mlir.register_lowering(written_p, lambda ctx, *_: [])


def marked(traced: Any) -> Any:
    """A closed jaxpr in which a `written_p` follows each equation whose sharding is stated."""
    return Rewriting(_with_mark).of(traced)


def _with_mark(eqn: Any) -> list[Any]:
    if not _is_stated(eqn):
        return [eqn]
    return [eqn, eqn.replace(primitive=written_p, invars=eqn.outvars, outvars=[], params={}, effects=set())]


def _is_stated(eqn: Any) -> bool:
    """Whether the user wrote the sharding of an equation's result. Those of products in a transposed function are the
    types of what was differentiated."""
    if eqn.primitive.name == "sharding_constraint":
        return True
    if not eqn.outvars or not explicit_axes(_mesh_of_type(eqn.outvars[0].aval)):
        return False
    if eqn.primitive.name == "reshard":
        return True
    is_given = any(isinstance(eqn.params.get(name), jax.sharding.Sharding) for name in _OPTIONAL)
    return is_given and "transpose" not in str(eqn.source_info.name_stack)


def _mesh_of_type(aval: Any) -> AnyMesh:
    sharding = getattr(aval, "sharding", None)
    return sharding.mesh if isinstance(sharding, jax.sharding.NamedSharding) else _EMPTY_MESH


@emission(written_p)
def _emit_mark(site: Site, ctx: mlir.LoweringRuleContext, *xs: ir.Value) -> list[Any]:
    attributes = {"call_target_name": ir.StringAttr.get(_MARK), "has_side_effect": ir.BoolAttr.get(True)}
    for x in xs:
        ir.Operation.create("stablehlo.custom_call", results=[], operands=[x], attributes=attributes)
    return []


def settle_types(module: ir.Operation) -> None:
    """Leaves the constraints that are marked, and writes the others on the results that they constrain."""
    for mark in [op for op in pre_order(module) if _is_mark(op)]:
        op = _constraint_of(mark.operands[0])
        if op is not None:
            op.attributes[WRITTEN] = ir.UnitAttr.get()
        mark.erase()
    for op in named(module, _CONSTRAINT):
        if WRITTEN in op.attributes:
            del op.attributes[WRITTEN]
        else:
            _settle(op)


def _is_mark(op: ir.Operation) -> bool:
    return op.name == "stablehlo.custom_call" and str(op.attributes["call_target_name"]) == f'"{_MARK}"'


def _constraint_of(x: ir.Value) -> ir.Operation | None:
    """The constraint that makes a value, in the function that jax calls for it where it does."""
    op = defining_op(x)
    if op is not None and op.name == CALL:
        return _constraint_of(returned_by(functions(module_of(op))[callee_of(op)])[x.result_number])
    return op if op is not None and op.name == _CONSTRAINT else None


def _settle(constraint: ir.Operation) -> None:
    x, sharding = constraint.operands[0], sharding_of(constraint.results[0])
    op = defining_op(x)
    is_made = op is not None and op.name not in (_CONSTRAINT, CALL)
    if op is not None and is_made and sharding is not None and sharding.rank and _says_nothing(sharding_of(x)):
        set_sharding(x, sharding)
        derive(x)
    replace_op(constraint, constraint.operands)


def _says_nothing(sharding: TensorSharding | None) -> bool:
    """Whether a result has no sharding, or the open one that it gets with that of another result of its op."""
    return sharding is None or sharding == TensorSharding.fully_open(sharding.mesh, sharding.rank)


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
