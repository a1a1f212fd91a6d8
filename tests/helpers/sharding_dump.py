"""A module's shardings as text, for tests: every function's arguments, results, and ops in pre-order."""

from __future__ import annotations

from collections.abc import Iterator

import jax.interpreters.mlir
from jax.extend.mlir import ir, passmanager

MESH = 'sdy.mesh @mesh = <["a"=2, "b"=2, "c"=4]>\n'
_TERMINATORS = ("func.return", "stablehlo.return", "sdy.return")


def parse(text: str, context: ir.Context | None = None) -> ir.Module:
    context = context or jax.interpreters.mlir.make_ir_context()
    with context, ir.Location.unknown(context):
        return ir.Module.parse(text if "sdy.mesh @mesh" in text else MESH + text)


def run_oracle(module: ir.Module, passes: str, verify: bool = True) -> None:
    with module.context:
        manager = passmanager.PassManager.parse(f"builtin.module({passes})")
        manager.enable_verifier(verify)
        manager.run(module.operation)


def plain_text(module: ir.Module) -> str:
    """The text without what is only kept on the way: rules that ops have anyway, meshes in the form of stablehlo."""
    module.operation.walk(_strip)
    return str(module.operation.get_asm(assume_verified=True))  # some passes leave shardings that the verifier rejects


def _strip(op: ir.Operation) -> ir.WalkResult:
    attributes = op.attributes
    if "sdy.sharding_rule" in attributes and not str(attributes["sdy.sharding_rule"]).endswith("custom>"):
        del attributes["sdy.sharding_rule"]
    if op.name == "sdy.mesh" and "stablehlo.mesh" in attributes:
        del attributes["stablehlo.mesh"]
    return ir.WalkResult.ADVANCE


def dump(module: ir.Module) -> str:
    lines: list[str] = []
    for op in module.body.operations:
        if op.operation.name == "func.func":
            lines += _function(op.operation)
    return "\n".join(lines)


def _function(op: ir.Operation) -> Iterator[str]:
    yield f"@{ir.StringAttr(op.attributes['sym_name']).value}"
    block = op.regions[0].blocks[0]
    count = len(list(block.operations)[-1].operands)
    for kind, name, number in (("arg", "arg_attrs", len(block.arguments)), ("result", "res_attrs", count)):
        given = list(ir.ArrayAttr(op.attributes[name])) if name in op.attributes else [None] * number
        for i, attributes in enumerate(given):
            found = {a.name: a.attr for a in ir.DictAttr(attributes)} if attributes is not None else {}
            yield f"  {kind} {i} : {_text(found.get('sdy.sharding'))}"
    yield from _block(block, 1)


def _block(block: ir.Block, depth: int) -> Iterator[str]:
    for op in block.operations:
        op = op.operation
        if op.name in _TERMINATORS:
            continue
        callee = f" {op.attributes['callee']}" if op.name == "func.call" else ""
        yield "  " * depth + f"{op.name}{callee} : {_op_text(op)}"
        for region in op.regions:
            for inner in region.blocks:
                yield from _block(inner, depth + 1)


def _op_text(op: ir.Operation) -> str:
    found = op.attributes
    if op.name in ("sdy.manual_computation", "sdy.named_computation"):
        return " ".join(f"{n}={_list(found[n])}" for n in ("in_shardings", "out_shardings") if n in found)
    if op.name.startswith("sdy.") and "sharding" in found:
        return _text(found["sharding"])
    return _list(found["sdy.sharding"])[2:-2] if "sdy.sharding" in found else "(none)"


def _list(attribute: ir.Attribute) -> str:
    return str(attribute).removeprefix("#sdy.sharding_per_value")


def _text(attribute: ir.Attribute | None) -> str:
    return "(none)" if attribute is None else str(attribute).removeprefix("#sdy.sharding")
