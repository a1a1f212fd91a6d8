"""A process that an error ends says so to the others, which would else wait for it until their timeout."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from types import TracebackType
from typing import Any

import jax

from sdy_jax.jax_internals.processes import distributed_client
from sdy_jax.processes.rendezvous import tell_failure

_MOST = 400
"""Characters of an error in a message. Chosen: for a reader."""


@cache
def tell_of_failures() -> None:
    """From now on this process tells the others of an error that ends it."""
    sys.excepthook = _telling(sys.excepthook)


def _telling(hook: Callable[..., Any]) -> Callable[..., Any]:
    def tell(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        client = distributed_client()
        if client is not None:
            with suppress(RuntimeError):  # where the service is gone, nobody waits
                tell_failure(client, jax.process_index(), _line(f"{kind.__name__}: {error}"))
        hook(kind, error, traceback)

    return tell


def _line(text: str) -> str:
    return text.partition("\n")[0][:_MOST]
