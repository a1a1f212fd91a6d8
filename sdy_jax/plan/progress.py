"""Progress of long searches, in a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Tell = Callable[[str, float], None]
"""Is told what is done now, and the share of all that was done before."""

_QUIET = 2.0
"""Seconds before anything is shown."""

_WIDTH = 20
"""Columns of the bar."""


@contextmanager
def progress_of(name: str) -> Iterator[Tell]:
    """A bar for the search for a function's layouts, in one line of standard error, which is gone in the end. It is
    shown in terminals only, and if the search takes long."""
    begun, shown = time.monotonic(), False

    def tell(what: str, done: float) -> None:
        nonlocal shown
        seconds = time.monotonic() - begun
        if sys.stderr.isatty() and seconds > _QUIET:
            shown = True
            bar = ("#" * round(done * _WIDTH)).ljust(_WIDTH, ".")
            _write(f"layouts of {name} [{bar}] {seconds:.0f} s: {what}")

    try:
        yield tell
    finally:
        if shown:
            _write("")


def _write(line: str) -> None:
    sys.stderr.write(f"\r\033[K{line}")
    sys.stderr.flush()
