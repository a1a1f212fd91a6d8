"""Mistakes of ours, in words and in a file: no traceback reaches a user of the command line."""

from __future__ import annotations

import tempfile
import traceback

from sdy_jax.errors import InternalError


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
