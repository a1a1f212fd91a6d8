"""What the command line prints beside its output: errors and warnings, coloured on a terminal, and reports of bugs."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from sdy_jax.base.errors import InternalError, PartitionWarning

# Colours where a person looks at the output: on a terminal, and not if NO_COLOR is set.

_CODES = {"bold": "1", "red": "1;31", "green": "32", "yellow": "33", "faint": "2"}
_ERROR = re.compile(r"(?m)^((?:[^\n]*?: )?)(error|note):")


def styled(text: str, style: str, stream: TextIO) -> str:
    """The text in a style ("bold", "red", "green", "yellow" or "faint"), if the stream shows styles."""
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m" if _shows_styles(stream) else text


def print_error(error: Exception) -> None:
    """Prints an error on standard error; one without a place of its own begins with `error: `."""
    text = str(error)
    if not _ERROR.match(text):
        text = f"error: {text}"
    if _shows_styles(sys.stderr):
        text = _ERROR.sub(_emphasized, text)
    print(text, file=sys.stderr)


@contextmanager
def printed_warnings() -> Iterator[None]:
    """What warns prints `warning: ...` on standard error, with no line of ours; warnings of others are as they were."""
    with warnings.catch_warnings():
        other = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *place: Any, **options: Any) -> None:
            if category in (UserWarning, PartitionWarning):
                print(f"{styled('warning:', 'yellow', sys.stderr)} {message}", file=sys.stderr)
            else:
                other(message, category, *place, **options)

        warnings.showwarning = show
        yield


def _emphasized(match: re.Match[str]) -> str:
    place, kind = match.groups()
    return styled(place, "bold", sys.stderr) + styled(f"{kind}:", "red" if kind == "error" else "bold", sys.stderr)


def _shows_styles(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


# Mistakes of ours, in words and in a file: no traceback reaches a user of the command line.


def described_bug(error: Exception) -> str:
    """A message about a mistake of ours, and where it is described."""
    what = str(error).removesuffix(" (this is a bug in sdy_jax)")
    kind = "" if isinstance(error, InternalError) else f"{type(error).__name__}: "
    return f"this is a bug in sdy_jax: {kind}{what}; {_kept(error)}"


def _kept(error: Exception) -> str:
    """Writes the traceback to a file and says where."""
    try:
        with tempfile.NamedTemporaryFile("w", prefix="sdy_jax-bug-", suffix=".txt", delete=False) as dump:
            traceback.print_exception(error, file=dump)
    except OSError as problem:
        return f"the traceback cannot be kept: {problem.strerror or problem}"
    return f"the traceback is in {dump.name}"
