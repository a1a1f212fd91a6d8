"""What jax reports of traces, and whether it may trace at all.

`explain_cache_misses` and `log_compiles` are silent while a program is traced inside of a trace that was told of.
`no_tracing` forbids traces of the user's function, which ours are not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

from jax._src import config

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
