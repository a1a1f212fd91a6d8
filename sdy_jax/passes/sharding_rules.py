"""Sharding rules written on the ops: `sdy.sharding_rule`."""

from __future__ import annotations

from collections.abc import Iterable

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Graph
from sdy_jax.ir.operations import has_static_shape, pre_order
from sdy_jax.op_rules import Compat, RuleBook
from sdy_jax.propagation.edges import identity_rule
from sdy_jax.representation.attributes import rule_from_attribute, rule_to_attribute

RULE = "sdy.sharding_rule"


def populate_op_sharding_rules(
    module: ir.Operation, *, conservative_propagation: bool = False, compat: Compat = "shardy"
) -> None:
    """Writes the rule of every op that has one and does not carry one yet.

    Args:
      module: a `builtin.module`, edited in place.
      conservative_propagation: leave out factors along which a result's shard is not one operand's shard.
      compat: `"shardy"` has the rules that Shardy has, `"sdy_jax"` also those that it does not have; see `Compat`.
    """
    write_rules(Graph(module), conservative_propagation, compat)


def write_rules(graph: Graph, conservative: bool, compat: Compat) -> None:
    """Writes the rules of a graph's ops."""
    book = RuleBook(conservative, compat)
    rules = [(op, book.rule_of(op)) for op in graph.ops if RULE not in op.attributes]
    for op, rule in rules:
        if rule is not None:
            op.mlir.attributes[RULE] = rule_to_attribute(rule, graph.context)


def write_identity_rule(op: ir.Operation) -> None:
    """Writes the rule of an op with one operand and a result like it, unless it has a rule or no static shape."""
    value = op.operands[0]
    if has_static_shape(value) and RULE not in op.attributes:
        op.attributes[RULE] = rule_to_attribute(identity_rule(tuple(value.type.shape), 1), op.context)


def drop_sharding_rules(module: ir.Operation) -> None:
    """Removes the rules from all ops, except custom ones."""
    drop_rules(pre_order(module))


def drop_rules(ops: Iterable[ir.Operation]) -> None:
    """Removes the rules from ops, except custom ones."""
    for op in ops:
        if RULE in op.attributes and not rule_from_attribute(op.attributes[RULE]).is_custom:
            del op.attributes[RULE]
