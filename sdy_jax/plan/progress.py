"""What planning is doing: a bar in a terminal where it takes long, and lines of the logger `sdy_jax.plan`."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Protocol

_BAR = 20
"""Columns of the bar. Chosen: beside the text of what is done."""

LOG = logging.getLogger("sdy_jax.plan")
"""Tells of each plan (INFO) and of each of its stages (DEBUG)."""

_QUIET = 2.0
"""Seconds before a bar is shown. Chosen: most plans are made by then."""


class Tell(Protocol):
    """Is told what is done now, and the share of all that was done before; None: not known."""

    def __call__(self, what: str, done: float | None = None) -> None: ...


class _Told(threading.local):
    """What this thread's outermost planning tells: plans that are made for it have no bar of their own."""

    tell: Tell | None = None


_told = _Told()


@contextmanager
def progress_of(name: str) -> Iterator[Tell]:
    """What planning a function tells of its progress. In a terminal a bar, if it takes long, which is gone in the end;
    it is drawn by `rich`, and without that there is none."""
    begun, outer = time.monotonic(), _told.tell

    def logged(what: str, done: float | None = None) -> None:
        LOG.debug("%s, after %.2f s: %s", name, time.monotonic() - begun, what)

    if outer is not None:
        yield logged
        return
    with _bar(name) as shown:

        def tell(what: str, done: float | None = None) -> None:
            logged(what)
            shown(what, done)

        _told.tell = tell
        try:
            yield tell
        finally:
            _told.tell = None


@contextmanager
def _bar(name: str) -> Iterator[Tell]:
    if not sys.stderr.isatty() or find_spec("rich") is None:
        yield lambda what, done=None: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn(f"planning {name}", markup=False), BarColumn(_BAR), TimeElapsedColumn()
    bar = Progress(
        *columns, TextColumn("{task.description}", markup=False), console=Console(stderr=True), transient=True
    )
    task = bar.add_task("", total=None)
    later = threading.Timer(_QUIET, bar.start)
    later.daemon = True
    later.start()
    try:
        yield lambda what, done=None: bar.update(
            task, description=what, completed=done, total=None if done is None else 1.0
        )
    finally:
        later.cancel()
        later.join()
        bar.stop()
