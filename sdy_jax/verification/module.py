"""The walk through a module.

What any op may carry is checked by `_ATTRIBUTES`, by the attribute's name; what an op of the dialect has to keep
besides by `_OPS`, by the op's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from jax.extend.mlir import ir

from sdy_jax.ir.extensions import load_extensions
from sdy_jax.ir.graph import module_meshes
from sdy_jax.representation.attributes import manual_axes_from_attribute
from sdy_jax.representation.collectives import KINDS
from sdy_jax.representation.dialect_rules import RuleError
from sdy_jax.verification import ops
from sdy_jax.verification.collectives import check_collective
from sdy_jax.verification.computations import check_manual_computation, check_named_computation
from sdy_jax.verification.diagnostics import explain
from sdy_jax.verification.propagation_edges import check_edge_lists, check_edges
from sdy_jax.verification.values import Check, Rules, Scope, check_own, location_text

EXTENSIONS: list[Callable[[ir.Operation, bool], None]] = []
"""The verifiers of dialects that jaxlib does not know; each takes the module, and whether annotations of what is
annotated are refused."""


def verify_module(module: ir.Operation, strict: bool = False, *, tolerant: bool = False) -> None:
    """Verifies a `builtin.module` and everything in it.

    Args:
      module: a module, with ops of any known dialect, mesh and shard among them.
      strict: whether the `DOCUMENTED_RULES` hold as well, which jaxlib does not enforce.
      tolerant: whether a mesh or shard annotation of an annotated value, where the dialects leave open what it means,
        is a reshard; else it is an error.

    Raises:
      ShardingError: the first rule of the dialect that is broken, by its name, with the op and its location; or else
        what jaxlib's verifier finds, which knows the other dialects too.
    """
    _verify(module, Rules(strict=strict), tolerant)


def verify_collectives_strictly(module: ir.Operation) -> None:
    """Verifies a partitioned module as `verify_module` does, its collectives by V1 to V5 and V10 as well.

    Raises:
      ShardingError: as `verify_module`.
    """
    _verify(module, Rules(partitioned=True))


def _verify(module: ir.Operation, rules: Rules, tolerant: bool = False) -> None:
    malformed: Exception | None = None
    try:
        _verify_module(module, frozenset(), rules)
    except (KeyError, IndexError) as error:  # an op lacks an attribute or a block: jaxlib says which
        malformed = error
    try:
        module.verify()
    except ir.MLIRError as error:
        first = error.error_diagnostics[0]
        raise RuleError(explain(first.message), location_text(first.location)) from None
    if malformed is not None:
        raise malformed
    load_extensions()
    for verify in EXTENSIONS:
        verify(module, not tolerant)


def verify_dialect(module: ir.Operation) -> None:
    """Verifies the rules of the SDY dialect alone."""
    _verify_module(module, frozenset(), Rules())


def _verify_module(module: ir.Operation, manual: frozenset[str], rules: Rules) -> None:
    _verify_regions(module, Scope(module_meshes(module), manual, rules))


def _inner_ops(op: ir.Operation) -> Iterator[ir.Operation]:
    """The ops directly inside an op."""
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation


def _verify_regions(op: ir.Operation, scope: Scope) -> None:
    for inner in _inner_ops(op):
        _located(inner, _verify_op, scope)
        if inner.name == "builtin.module":
            _verify_module(inner, scope.manual, scope.rules)
        elif inner.name == "sdy.manual_computation":
            manual = scope.manual.union(manual_axes_from_attribute(inner.attributes["manual_axes"]))
            _verify_regions(inner, replace(scope, manual=manual, seen=set()))
        else:
            _verify_regions(inner, scope)


def _located(op: ir.Operation, check: Check, scope: Scope) -> None:
    """Runs a check; an error says where the op stands."""
    try:
        check(op, scope)
    except RuleError as error:
        raise RuleError(error.message, location_text(op.location)) from None


def _verify_op(op: ir.Operation, scope: Scope) -> None:
    attributes = op.attributes
    for name, check in _ATTRIBUTES.items():
        if name in attributes:
            check(op, scope)
    if op.name in _OPS:
        _OPS[op.name](op, scope)


_ATTRIBUTES: Mapping[str, Check] = {
    "sdy.sharding": ops.check_results,
    "sdy.sharding_rule": ops.check_rule,
    "sdy.propagation_edges": check_edges,
    "sdy.block_arg_propagation_edges": check_edge_lists("sdy.block_arg_propagation_edges"),
    "sdy.result_propagation_edges": check_edge_lists("sdy.result_propagation_edges"),
}

_OPS: Mapping[str, Check] = {
    "func.func": ops.check_function,
    "sdy.mesh": ops.check_mesh,
    "sdy.sharding_constraint": check_own("sharding"),
    "sdy.reshard": check_own("sharding"),
    "sdy.data_flow_edge": ops.check_edge,
    "sdy.func_data_flow_edge": ops.check_function_edge,
    "sdy.propagation_barrier": ops.check_barrier,
    "sdy.manual_computation": check_manual_computation,
    "sdy.named_computation": check_named_computation,
    **{f"sdy.{kind}": check_collective for kind in KINDS},
}
"""Ops of the dialect with rules of their own."""
