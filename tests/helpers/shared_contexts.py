"""One MLIR context for all that jax lowers to be compiled, in place of one each, which takes a twentieth of the tests'
time to make and to forget. Programs that sdy_jax traces to plan keep theirs: a plan that mixed contexts would be found.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

from jax._src.interpreters import mlir

from sdy_jax.base import jax_tracing

_TRACED = jax_tracing.trace_and_lower.__code__
_new_context = mlir.make_ir_context
_shared: list[Any] = []


def share_contexts() -> None:
    """From now on jax lowers in the shared context what it compiles on the main thread."""
    mlir.make_ir_context = _context


def forget_context() -> None:
    """What comes next is lowered in a context that knows nothing of what came before, as constants of programs."""
    _shared.clear()


def _context() -> Any:
    if threading.current_thread() is not threading.main_thread() or _is_planned():
        return _new_context()
    if not _shared:
        _shared.append(_new_context())
    return _shared[0]


def _is_planned() -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not _TRACED:
        frame = frame.f_back
    return frame is not None
