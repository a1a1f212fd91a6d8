"""Mistakes of ours, in words and in a file: no traceback reaches a user of the command line."""

from __future__ import annotations

import tempfile
import traceback

from sdy_jax.errors import InternalError


def described_bug(error: Exception) -> str:
    """A message about a mistake of ours, and where it is described."""
    with tempfile.NamedTemporaryFile("w", prefix="sdy_jax-bug-", suffix=".txt", delete=False) as dump:
        traceback.print_exception(error, file=dump)
    what = str(error).removesuffix(" (this is a bug in sdy_jax)")
    kind = "" if isinstance(error, InternalError) else f"{type(error).__name__}: "
    return f"this is a bug in sdy_jax: {kind}{what}; the traceback is in {dump.name}"
