"""Sharding rules of ours beside those of jaxlib."""

from __future__ import annotations

from jax.extend.mlir import ir, passmanager
from jax.interpreters import mlir
from random_programs.tensors import Case

from sdy_jax.ir.attributes import rule_from_attribute
from sdy_jax.ir.graph import Graph
from sdy_jax.shardy.rules import RuleBook


def function_of(case: Case, number: int) -> str:
    args = ", ".join(f"%a{i}: {t}" for i, t in enumerate(case.operands))
    text = case.text([f"%a{i}" for i in range(len(case.operands))], "%r")
    return f"func.func @f{number}({args}) {{\n  {text}\n  return\n}}\n"


def parse(text: str) -> ir.Module:
    with mlir.make_ir_context():
        return ir.Module.parse(text)


def oracle(module: ir.Module, conservative: bool) -> None:
    option = "{conservative-propagation=true}" if conservative else ""
    with module.context:
        pipeline = f"builtin.module(func.func(sdy-populate-op-sharding-rules{option}))"
        passmanager.PassManager.parse(pipeline).run(module.operation)


def rules_of(text: str, conservative: bool = False) -> list[tuple[str, str, str]]:
    """Per op of a module: its text, our rule and the oracle's, as texts, which outlive the modules."""
    module, theirs = parse(text), parse(text)
    oracle(theirs, conservative)
    book, graph = RuleBook(conservative, compat="shardy"), Graph(module.operation)
    found = []
    for op, other in zip(graph.ops, Graph(theirs.operation).ops, strict=True):
        attribute = other.attributes.get("sdy.sharding_rule")
        expected = str(rule_from_attribute(attribute)) if attribute else "none"
        found.append((str(op.mlir), str(book.rule_of(op) or "none"), expected))
    return found


def assert_same_rules(text: str, conservative: bool) -> None:
    for op, ours, theirs in rules_of(text, conservative):
        assert ours == theirs, op


def our_rule(text: str, name: str, **options: object) -> str:
    """The rule of the last op with this name in a module."""
    module = parse(text)
    book = RuleBook(**options)  # type: ignore[arg-type]
    op = [op for op in Graph(module.operation).ops if op.name == name][-1]
    return str(book.rule_of(op) or "none")
