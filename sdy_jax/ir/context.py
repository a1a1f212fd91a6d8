"""Where modules that sdy_jax reads live."""

from __future__ import annotations

from jax.extend.mlir import ir
from jax.interpreters import mlir


def new_context() -> ir.Context:
    """A context that knows the dialects of JAX's programs, in which MLIR runs on the caller's thread alone.

    JAX's contexts share a pool of threads. Those of a process that was forked have none, so that MLIR waits forever
    for the functions of a module to be verified; and a thread of the pool that reports a mistake may wait for Python's
    lock, which is held by who waits for it (jaxlib 0.10).
    """
    context = mlir.make_ir_context()
    context.enable_multithreading(False)
    return context
