"""Evaluation of jax functions while a program is traced."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import jax

T = TypeVar("T")


def apart(compute: Callable[[], T]) -> T:
    """The result of `compute`, run with no current trace, mesh or MLIR context, and with 64-bit types.

    What is computed while a program is emitted must not depend on the context of the call. Under the mesh of
    `jax.set_mesh` or of a `shard_map`, jax takes eager values for values on all its devices, and cannot compute with
    them there; `jax.ensure_compile_time_eval` leaves that mesh in place, and does not evaluate primitives that are
    jitted to be evaluated. jax keeps all of these by thread, so a thread of its own is free of them.
    """

    def run() -> T:
        with jax.enable_x64(True):
            return compute()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()
