"""What meshes, functions and the small ops of the dialect have to keep, and any op that has shardings or a rule."""

from __future__ import annotations

from typing import Any

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy

from sdy_jax.ir.calls import owning_op
from sdy_jax.representation.attributes import rule_from_attribute, shardings_from_attribute
from sdy_jax.representation.dialect_rules import RULES, fail
from sdy_jax.representation.rule import factor_symbol
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.representation.verify import verify_mesh, verify_rule, verify_sharding
from sdy_jax.verification import strict
from sdy_jax.verification.values import Scope, check_own, verify_shardings, verify_value


def check_results(op: ir.Operation, scope: Scope) -> None:
    """`sdy.sharding` of any op: one entry per result; an op without results may say a mesh alone."""
    attribute, types = op.attributes["sdy.sharding"], [r.type for r in op.results]
    key = (attribute, *types)
    if key in scope.seen:
        return
    if not types and (alone := _only_entry(attribute)):
        if alone.rank or not alone.has_no_axes:
            fail("S3", f"{op.name}, without results", f"its sharding is <{alone}>", RULES["S9"])
        verify_sharding(alone, scope.meshes, None, f"{op.name}, without results")
    else:
        verify_shardings(op, "sdy.sharding", types, "S9", scope, "result")
    scope.seen.add(key)


def _only_entry(attribute: ir.Attribute) -> TensorSharding | None:
    try:
        entries = shardings_from_attribute(attribute)
    except ValueError:
        return None
    return entries[0] if len(entries) == 1 else None


def check_rule(op: ir.Operation, scope: Scope) -> None:
    where, attribute = f"{op.name}, sharding rule", op.attributes["sdy.sharding_rule"]
    try:
        rule = rule_from_attribute(attribute)
    except ValueError:
        fail("R1", where, f"it is {attribute}")
    operands, results = ([_static_shape(v.type) for v in values] for values in (op.operands, op.results))
    verify_rule(rule, operands, results, where)
    given = sdy.OpShardingRuleAttr(attribute)
    for name in ("reduction", "need_replication", "permutation", "blocked_propagation"):
        factors = list(getattr(given, f"{name}_factors"))
        if factors != sorted(set(factors)):
            fail("R8", where, f"the {name} factors are {', '.join(map(factor_symbol, factors))}")


def _static_shape(type_: ir.Type) -> tuple[int, ...] | None:
    return tuple(type_.shape) if isinstance(type_, ir.ShapedType) and type_.has_static_shape else None


def check_mesh(op: ir.Operation, scope: Scope) -> None:
    name = ir.StringAttr(op.attributes["sym_name"]).value
    verify_mesh(scope.meshes[name], f"sdy.mesh @{name}")
    if scope.rules.strict:
        strict.check_device_count(name, scope.meshes)


def check_function(op: ir.Operation, scope: Scope) -> None:
    where = f"func.func @{ir.StringAttr(op.attributes['sym_name']).value}"
    function = ir.FunctionType(ir.TypeAttr(op.attributes["function_type"]).value)
    for name, what, types in (("arg_attrs", "argument", function.inputs), ("res_attrs", "result", function.results)):
        entries: list[Any] = list(ir.ArrayAttr(op.attributes[name])) if name in op.attributes else [()] * len(types)
        if len(entries) != len(types):
            fail("S9", where, f"attributes of {len(entries)} {what}s for {len(types)}")
        for i, (attributes, type_) in enumerate(zip(entries, types, strict=True)):
            if "sdy.sharding" in attributes:
                verify_value(attributes["sdy.sharding"], type_, scope, f"{where}, {what} {i}")


def check_barrier(op: ir.Operation, scope: Scope) -> None:
    direction = sdy.PropagationDirection(ir.IntegerAttr(op.attributes["allowed_direction"]).value)
    if direction == sdy.PropagationDirection.BOTH:
        fail("O1", op.name, "it lets BOTH directions through, so it is none")


def check_edge(op: ir.Operation, scope: Scope) -> None:
    check_own("sharding")(op, scope)
    _check_owner("O4", op)
    maker = owning_op(op.operands[0]).name
    makes_results = not isinstance(op.operands[0], ir.BlockArgument)
    if makes_results and maker.startswith("sdy.") and maker not in _COMPUTATIONS:
        fail("O4", op.name, f"its input comes from {maker}")


_COMPUTATIONS = ("sdy.manual_computation", "sdy.named_computation")


def check_function_edge(op: ir.Operation, scope: Scope) -> None:
    check_own("sharding")(op, scope)
    _check_owner("O5", op)
    maker = owning_op(op.operands[0]).name
    if maker != ("func.func" if isinstance(op.operands[0], ir.BlockArgument) else "func.call"):
        fail("O5", op.name, f"its input comes from {maker}")


def _check_owner(rule: str, op: ir.Operation) -> None:
    """The value that an edge stands for has a static shape and no other use."""
    type_ = op.results[0].type
    if not isinstance(type_, ir.ShapedType) or not type_.has_static_shape:
        fail(rule, op.name, f"the shape of {type_} is not static")
    uses = sum(1 for _ in op.operands[0].uses)
    if uses != 1:
        fail(rule, op.name, f"its input has {uses} uses")
