"""What goes wrong while a program is planned or run, in words: no traceback reaches the user."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from sdy_jax.commands import UsageError
from sdy_jax.commands.bug_report import described_bug
from sdy_jax.errors import InternalError, SdyError
from sdy_jax.ir.hidden_frames import PACKAGE
from sdy_jax.representation.dialect_rules import RuleError
from sdy_jax.text.modules import SourceError
from sdy_jax.text.positions import Position

_JAX = re.compile(r"[/\\]jax(lib)?[/\\]")


@contextmanager
def explained(file: str) -> Iterator[None]:
    """Errors get the file before them, where they do not begin with a line of it; what is our mistake is called so.

    Args:
      file: the file, or `module:function`.

    Raises:
      SourceError: in place of every other error.
    """
    try:
        yield
    except (BrokenPipeError, SourceError, UsageError):
        raise
    except InternalError as error:
        raise SourceError(described_bug(error), file) from error
    except RuleError as error:
        position = _position(error, file)
        raise SourceError(error.message if position else str(error), file, position) from error
    except SdyError as error:
        place, _, rest = str(error).partition(": ")
        inside = place.startswith(f"{file}:") and rest
        raise SourceError(rest if inside else str(error), place if inside else file) from error
    except SyntaxError as error:
        position = Position(error.lineno or 1, error.offset or 1)
        raise SourceError(f"{type(error).__name__}: {error.msg}", error.filename or file, position) from error
    except Exception as error:
        raise SourceError(_described(error), file) from error


def _position(error: RuleError, file: str) -> Position | None:
    """The place in the file that an error is about, if its location has one."""
    match = re.search(rf'"{re.escape(file)}":(\d+):(\d+)', error.location or "")
    return Position(int(match[1]), int(match[2])) if match else None


def _described(error: Exception) -> str:
    """What the user's code raised, with its line; or else a bug of ours."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _JAX.search(frame.filename)]
    if frames[-1].filename.startswith(PACKAGE):
        return described_bug(error)
    return f"{type(error).__name__}: {error} ({frames[-1].filename}:{frames[-1].lineno})"
