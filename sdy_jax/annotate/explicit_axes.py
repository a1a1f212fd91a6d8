"""Explicit axes: the types of arguments and results on them, and which shardings in a lowered module the user wrote."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive  # type: ignore[attr-defined, unused-ignore]
from jax.extend.mlir import ir
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from sdy_jax.annotate.arguments import AUTO, Leaf
from sdy_jax.annotate.jaxprs import Rewriting
from sdy_jax.annotate.site import Site, emission
from sdy_jax.annotate.specs import PARTITION, padded, resolve
from sdy_jax.errors import ShardingError
from sdy_jax.ir.graph import WRITTEN, derive
from sdy_jax.ir.jax_shardings import AnyMesh, explicit_axes, own_type, sharding_in, sharding_of_type, typed, typed_part
from sdy_jax.ir.meshes import Mesh
from sdy_jax.ir.operations import (
    CALL,
    callee_of,
    defining_op,
    functions,
    module_of,
    named,
    pre_order,
    replace_op,
    returned_by,
)
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.ir.stored_shardings import set_sharding, sharding_of

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


def on_mesh(value: jax.ShapeDtypeStruct, mesh: AnyMesh) -> jax.ShapeDtypeStruct:
    """A type that shows the mesh, as those of arrays on Auto axes do."""
    return typed(value, NamedSharding(mesh.abstract_mesh, PartitionSpec(*(None,) * len(value.shape))))


def as_seen(value: jax.ShapeDtypeStruct, leaf: Leaf, mesh: AnyMesh, shown: AnyMesh | None) -> jax.ShapeDtypeStruct:
    """The type of an argument on Auto axes as the function sees it: on the mesh that all types are `shown` on, else on
    that which its own type shows."""
    shown = leaf.shown if shown is None else shown
    return in_memory(value if shown is None or value.sharding else on_mesh(value, shown), leaf, mesh)


def in_memory(value: jax.ShapeDtypeStruct, leaf: Leaf, mesh: AnyMesh) -> jax.ShapeDtypeStruct:
    """The type of an argument that shows the memory in which it is."""
    if not leaf.is_on_host:
        return value
    return typed(value, (value.sharding or on_mesh(value, mesh).sharding).with_memory_kind("pinned_host"))


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
    if not eqn.outvars or not explicit_axes(_mesh(eqn.outvars[0].aval)):
        return False
    if eqn.primitive.name == "reshard":
        return True
    is_given = any(isinstance(eqn.params.get(name), jax.sharding.Sharding) for name in _OPTIONAL)
    return is_given and "transpose" not in str(eqn.source_info.name_stack)


def _mesh(aval: Any) -> AnyMesh:
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
