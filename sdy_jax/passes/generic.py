"""MLIR's own clean-up passes, `canonicalize` and `cse`, as jaxlib has them.

They erase ops behind Python's back, so they work on a copy that no Python object looks into; then the copy's ops take
the place of the module's own.
"""

from __future__ import annotations

from functools import partial

from jax.extend.mlir import ir, passmanager

from sdy_jax.ir.operations import body_of, copied


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


def canonicalize(module: ir.Operation, *, enable_patterns: str = "") -> None:
    """MLIR's pass. With `none` for its patterns it only folds, and removes what is dead."""
    _run(module, f"canonicalize{{enable-patterns={enable_patterns}}}" if enable_patterns else "canonicalize")


cse = partial(_run, name="cse")
