"""Writing files so that there is the old one or the new one at any time, whatever fails meanwhile.

A file is written under another name in the same folder and renamed when it is complete. A full disk, an error, an
interrupt or another process that writes the same file leaves no mixture; a process that is killed may leave the
unfinished file, hidden and named `.NAME.*.new`. What a machine that loses its power has written is not promised.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from sdy_jax.errors import SdyError

_SHOWN = 32
"""Characters of a file's name in that of its unfinished one. Chosen: most names, and few enough for any file system."""


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Writes a text in UTF-8, as `whole_file`."""
    with whole_file(path) as file:
        file.write(text.encode())


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write to, which replaces the one at `path` when the block ends without an error.

    Where `path` is a link, the file that it leads to is replaced. A device or a pipe is written to as it is.

    Raises:
        OSError: it cannot be written; it names `path`.
    """
    try:
        with _opened(path) as file:
            yield file
    except OSError as error:
        raise OSError(error.errno or errno.EIO, error.strerror or str(error), os.fspath(path)) from None


@contextmanager
def explained(problem: str, fix: str) -> Iterator[None]:
    """Says of files that cannot be written or read what they are, and what to do.

    Raises:
        SdyError: the system refused; "`problem`: why; to fix: `fix`".
    """
    try:
        yield
    except OSError as error:
        raise SdyError(f"{problem}: {error.strerror or error}; to fix: {fix}") from None


def _opened(path: str | os.PathLike[str]) -> AbstractContextManager[BinaryIO]:
    try:
        target = Path(os.path.realpath(path))
    except ValueError as error:  # a name that no file can have
        raise OSError(errno.EINVAL, str(error)) from None
    return open(path, "wb") if _is_special(path) else _replacing(target)


def _is_special(path: str | os.PathLike[str]) -> bool:
    """Whether it is there and no regular file. `/dev/stdout` may lead to one, which whoever opened it goes on with."""
    is_stream = os.path.abspath(path).startswith(("/dev/std", "/dev/fd/", "/proc/"))
    return is_stream or (os.path.exists(path) and not os.path.isfile(path))


@contextmanager
def _replacing(target: Path) -> Iterator[BinaryIO]:
    new = target.with_name(f".{target.name[:_SHOWN]}.{secrets.token_hex(8)}.new")
    try:
        with open(new, "xb") as file:
            yield file
        with suppress(OSError):  # there is none yet
            shutil.copymode(target, new)
        os.replace(new, target)
    except BaseException:
        with suppress(OSError):
            new.unlink()
        raise
