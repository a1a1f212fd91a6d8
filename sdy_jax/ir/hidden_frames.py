"""Source lines in plans and profiles are the user's: frames of this package do not count, as those of jax do not."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType

from jax.extend import source_info_util

from sdy_jax.jax_internals.tracebacks import BOUNDARY

PACKAGE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
"""The folder of this package. Its wings are links in it, and modules are imported through them."""

source_info_util.register_exclusion(PACKAGE)


_caller: ContextVar[str] = ContextVar("caller", default="")


@contextmanager
def called_from(place: str) -> Iterator[None]:
    """Inside, `caller_line` names this place: the caller is no line of Python."""
    token = _caller.set(place)
    try:
        yield
    finally:
        _caller.reset(token)


def caller_line() -> str:
    """`file:line` of the innermost frame outside of this package."""
    if _caller.get():
        return _caller.get()
    frame, _ = _user_frame("sdy_jax")
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def users_stack_level() -> int:
    """The `stacklevel`, for a warning by the caller, of the innermost frame outside of this package and jax."""
    return _user_frame("sdy_jax", "jax")[1]


def raising_line(error: BaseException) -> str:
    """`file:line` of the innermost frame outside of this package and jax in which an error was raised; empty if there
    is none."""
    found, traceback = "", error.__traceback__
    while traceback is not None:
        if not _is_of(traceback.tb_frame, ("sdy_jax", "jax")):
            found = f"{traceback.tb_frame.f_code.co_filename}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return found


def _is_of(frame: FrameType, packages: Sequence[str]) -> bool:
    module: str = frame.f_globals.get("__name__", "")
    return module == BOUNDARY or module.split(".")[0] in packages


def _user_frame(*packages: str) -> tuple[FrameType, int]:
    """The innermost frame outside of some packages, and its `stacklevel` for the caller's caller."""
    frame, level = sys._getframe(2), 1
    while frame.f_back is not None and _is_of(frame, packages):
        frame, level = frame.f_back, level + 1
    return frame, level
