"""Shardings on Explicit axes in a lowered module: those that the user wrote, and those that JAX's rules derived.

jax lowers an op whose result has a type with a sharding to the op and a constraint. Where the user stated the sharding,
by `reshard`, `out_sharding=` or `with_sharding_constraint`, the constraint stays. Else the sharding is written on the
op's result, as propagation would write it.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import Primitive  # type: ignore[attr-defined, unused-ignore]
from jax.extend.mlir import ir
from jax.interpreters import mlir

from sdy_jax.annotate.rewriting import Rewriting
from sdy_jax.annotate.site import Site, emission
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
from sdy_jax.ir.statements import WRITTEN, derive
from sdy_jax.ir.stored_shardings import set_sharding, sharding_of
from sdy_jax.representation.named import AnyMesh
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.representation.types import explicit_axes

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
