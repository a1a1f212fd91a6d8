"""Tracebacks as users see them: without frames of ours, as jax leaves out its own.

jax does so where a call enters it from outside, for the folders that are registered, unless `JAX_TRACEBACK_FILTERING`
is off. Its public `register_exclusion` is for the source lines of ops, and not for tracebacks.

* `source_info_util.is_user_filename`: of which files jax says lines, which its public registry only adds to.
* `source_info_util._source_info_context`: where jax evaluates a jaxpr, as for derivatives, it says the lines of the
  equation around, which its public `user_context` can replace by others, not by those of Python's stack.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

from jax._src import config, source_info_util, traceback_util

F = TypeVar("F", bound=Callable[..., Any])

traceback_util.register_exclusion(os.path.join(os.path.dirname(os.path.dirname(__file__)), ""))

BOUNDARY = traceback_util.__name__
"""The module of the frame that `api_boundary` puts before a function: it is nobody's line."""


def api_boundary(fun: F) -> F:
    """For functions that users call: what they raise shows the user's frames, and none of ours or jax's below."""
    bounded: F = traceback_util.api_boundary(fun)
    return bounded


def unfiltered() -> AbstractContextManager[Any]:
    """Inside, tracebacks are whole: for reports of our own mistakes."""
    whole: AbstractContextManager[Any] = config.traceback_filtering("off")
    return whole


def is_user_file(file: str) -> bool:
    """Whether jax gives lines of this file as those of ops: none of its own, of the standard library, or of ours."""
    found: bool = source_info_util.is_user_filename(file)
    return found


@contextmanager
def lines_of_the_stack() -> Iterator[None]:
    """Inside, the lines that jax says of ops are those of Python's stack, as they are where nothing is evaluated."""
    context = source_info_util._source_info_context
    before = context.context
    context.context = source_info_util.SourceInfo(None, before.name_stack)
    try:
        yield
    finally:
        context.context = before
