"""Verifying a module: guards before jaxlib's verifier, its verdict by the rule's name, and what it does not check."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from jax.extend.mlir import ir

from sdy_jax.ir.extensions import load_extensions
from sdy_jax.ir.operations import module_meshes
from sdy_jax.representation.dialect_rules import RuleError
from sdy_jax.representation.mesh import Mesh
from sdy_jax.verification.collective_ops import check_all_reduce, check_strictly
from sdy_jax.verification.diagnostics import explain
from sdy_jax.verification.guards import check_before_jaxlib
from sdy_jax.verification.strict import check_documented
from sdy_jax.verification.values import Meshes, location_text

EXTENSIONS: list[Callable[[ir.Operation, bool], None]] = []
"""The verifiers of dialects that jaxlib does not know; each takes the module, and whether annotations of what is
annotated are refused."""

Check = Callable[[ir.Operation, Meshes], None]
"""A check of one op, given the meshes of its module."""


def verify_module(module: ir.Operation, strict: bool = False, *, tolerant: bool = False) -> None:
    """Verifies a `builtin.module` and everything in it.

    Args:
      module: a module, with ops of any known dialect, mesh and shard among them.
      strict: whether the `DOCUMENTED_RULES` hold as well, which jaxlib does not enforce.
      tolerant: whether a mesh or shard annotation of an annotated value, where the dialects leave open what it means,
        is a reshard; else it is an error.

    Raises:
      ShardingError: a rule of the dialect that is broken, by its name, with the op and its location; or else what
        jaxlib's verifier finds, which knows the other dialects too.
    """
    _verify(module, check_all_reduce, *([check_documented] if strict else []))
    _verify_extensions(module, not tolerant)


def verify_collectives_strictly(module: ir.Operation) -> None:
    """Verifies a partitioned module as `verify_module` does, its collectives by V1 to V5 and V10 as well.

    Raises:
      ShardingError: as `verify_module`.
    """
    _verify(module, check_all_reduce, check_strictly)
    _verify_extensions(module, True)


def _verify(module: ir.Operation, *checks: Check) -> None:
    """The guards, jaxlib's verifier, and further checks of what it has found right."""
    malformed: Exception | None = None
    try:
        _check_all(module, check_before_jaxlib)
    except (KeyError, IndexError) as error:  # an op lacks an attribute or a block: jaxlib says which
        malformed = error
    try:
        module.verify()
    except ir.MLIRError as error:
        first = error.error_diagnostics[0]
        raise RuleError(explain(first.message), location_text(first.location)) from None
    if malformed is not None:
        raise malformed
    for check in checks:
        _check_all(module, check)


def _verify_extensions(module: ir.Operation, strict: bool) -> None:
    load_extensions()
    for verify in EXTENSIONS:
        verify(module, strict)


def _check_all(module: ir.Operation, check: Check) -> None:
    """Runs a check on every op; an error says where the op stands."""
    for op, meshes in _walk(module, module_meshes(module)):
        try:
            check(op, meshes)
        except RuleError as error:
            raise RuleError(error.message, location_text(op.location)) from None


def _walk(op: ir.Operation, meshes: Mapping[str, Mesh]) -> Iterator[tuple[ir.Operation, Meshes]]:
    """All ops inside an op, in pre-order, with the meshes of the module that each is in."""
    for region in op.regions:
        for block in region.blocks:
            for inner in (view.operation for view in block.operations):
                yield inner, meshes
                yield from _walk(inner, module_meshes(inner) if inner.name == "builtin.module" else meshes)
