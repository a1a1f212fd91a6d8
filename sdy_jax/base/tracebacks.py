"""Tracebacks as users see them, without frames of ours, and what jax reports of traces."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from jax._src import config, source_info_util, traceback_util

# Tracebacks as users see them: without frames of ours, as jax leaves out its own.
#
# jax does so where a call enters it from outside, for the folders that are registered, unless
# `JAX_TRACEBACK_FILTERING` is off. Its public `register_exclusion` is for the source lines of ops, and not for
# tracebacks.
#
# * `source_info_util.is_user_filename`: of which files jax says lines, which its public registry only adds to.
# * `source_info_util._source_info_context`: where jax evaluates a jaxpr, as for derivatives, it says the lines of the
#   equation around, which its public `user_context` can replace by others, not by those of Python's stack.

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


# What jax reports of traces, and whether it may trace at all.
#
# `explain_cache_misses` and `log_compiles` are silent while a program is traced inside of a trace that was told of.
# `no_tracing` forbids traces of the user's function, which ours are not.

_explains = ContextVar("explains", default=False)
"""Whether jax is to explain the traces inside of one that was explained already."""


def explains_traces() -> bool:
    """Whether jax is to say why it traces a function again."""
    return bool(config.explain_cache_misses.value)


@contextmanager
def already_explained() -> Iterator[None]:
    """Without jax's own explanation of a trace; with those of traces inside."""
    token = _explains.set(True)
    try:
        with config.explain_cache_misses(False):
            yield
    finally:
        _explains.reset(token)


def forbids_traces() -> bool:
    """Whether jax is to raise where it traces a function again."""
    return bool(config.no_tracing.value)


def tracing_allowed() -> AbstractContextManager[Any]:
    """Lets jax trace what is no trace of the user's function under `jax.no_tracing`, too."""
    allowed: AbstractContextManager[Any] = config.no_tracing(False)
    return allowed


@contextmanager
def in_silence() -> Iterator[None]:
    """Without jax's messages about traces and compilations: those of the jitted function around this speak of it."""
    with config.explain_cache_misses(False), config.log_compiles(False):
        yield


def loudly(fun: Callable[..., Any]) -> Callable[..., Any]:
    """A function of which jax speaks as it does now, of what is traced inside."""
    explains, logs = _explains.get() or config.explain_cache_misses.value, config.log_compiles.value

    @functools.wraps(fun)
    def run(*args: Any, **kwargs: Any) -> Any:
        with config.explain_cache_misses(explains), config.log_compiles(logs):
            return fun(*args, **kwargs)

    return run
