"""MLIR's own clean-up passes, `canonicalize` and `cse`, as jaxlib has them, with Shardy's patterns as ours."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from jax.extend.mlir import ir, passmanager

from sdy_jax.ir.operations import body_of, copied
from sdy_jax.shardy.passes.collective_patterns import join_reshards, simplify_collectives

# They erase ops behind Python's back, so they work on a copy that no Python object looks into; then the copy's ops
# take the place of the module's own.


def _run(module: ir.Operation, name: str) -> None:
    copy = copied(module)
    with module.context:
        passmanager.PassManager.parse(f"builtin.module({name})").run(copy)
    block = body_of(module)
    for op in reversed([op.operation for op in block.operations]):
        op.erase()
    at_end = ir.InsertionPoint(block)
    for op in [op.operation for op in body_of(copy).operations]:
        op.detach_from_parent()
        at_end.insert(op)


_PATTERNS: dict[str, Callable[[ir.Operation], None]] = {
    "sdy-collective": simplify_collectives,
    "sdy-reshard": join_reshards,
}


def canonicalize(module: ir.Operation, *, enable_patterns: str = "") -> None:
    """MLIR's pass.

    Args:
      module: a `builtin.module`, edited in place.
      enable_patterns: only these, `sdy-collective` or `sdy-reshard`; `none`: it folds, and removes what is dead.
    """
    patterns = _PATTERNS.get(enable_patterns)
    if patterns is None:
        _run(module, f"canonicalize{{enable-patterns={enable_patterns}}}" if enable_patterns else "canonicalize")
        return
    # MLIR does all of it at once: what is dead is no user of what a pattern would replace, and what a pattern replaces
    # may be dead after that.
    _run(module, "canonicalize{enable-patterns=none}")
    patterns(module)
    _run(module, "canonicalize{enable-patterns=none}")


cse = partial(_run, name="cse")
