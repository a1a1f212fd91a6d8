"""Files that are written as a whole or not at all, and folders of such files that several processes share."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from sdy_jax.base.errors import SdyError, nearest

# Writing files so that there is the old one or the new one at any time, whatever fails meanwhile.
#
# A file is written under another name in the same folder and renamed when it is complete. A full disk, an error, an
# interrupt or another process that writes the same file leaves no mixture; a process that is killed may leave the
# unfinished file, hidden and named `.NAME.*.new`. What a machine that loses its power has written is not promised.

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


def refusal(error: OSError | ValueError, path: str | os.PathLike[str]) -> str:
    """Why the system does not give a file, in words; of one that is not there, with the file beside it that was meant
    most likely."""
    said = getattr(error, "strerror", None) or str(error)
    if not isinstance(error, FileNotFoundError):
        return said
    folder, name = os.path.split(os.fspath(path))
    if not os.path.isdir(folder or os.curdir):
        return f"{said}; there is no folder {folder}"
    others = {os.path.splitext(other)[0]: other for other in sorted(os.listdir(folder or os.curdir))}
    if near := nearest(os.path.splitext(name)[0], others):
        return f"{said}; did you mean {os.path.join(folder, others[near])}?"
    return f"{said} in {os.path.realpath(folder)}"


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


# Folders of files that several processes share: written as a whole, and the least recently used ones go.

_ABANDONED = 3600.0
"""Seconds after which an unfinished file is taken for that of a process that was killed. Guessed: entries are written
in less than a second; with much less, those of slow disks would go while they are written."""


_UNFINISHED = re.compile(r"\..+\.[0-9a-f]{16}\.new")
"""Given: as `whole_file` names what it has not finished."""


class Size(NamedTuple):
    """How many files there are, and their bytes."""

    files: int
    bytes: int


class SharedFolder:
    """A folder of files with some suffixes, which are parts of their names.

    Args:
        path: of the folder, which is made when something is written.
        suffixes: of the files; others are left alone.
        limit: the bytes from which on those go that were not used for longest.
    """

    def __init__(self, path: Path, suffixes: tuple[str, ...], limit: int):
        self.path, self._suffixes, self.limit = path, suffixes, limit

    def read(self, name: str) -> bytes | None:
        """What is in a file, which counts as used; None where there is none that can be read."""
        path = self._of(name)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        with suppress(OSError):
            os.utime(path)
        return data

    def write(self, name: str, data: bytes) -> None:
        """Writes a file, and lets others go.

        Raises:
            OSError: it cannot be written.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with whole_file(self._of(name)) as file:
            file.write(data)
        self._trim()

    def remove(self, name: str) -> None:
        """Removes a file, if it is there."""
        with suppress(OSError):
            self._of(name).unlink()

    def clear(self) -> Size:
        """Removes all files, and those that were never finished; says what is gone."""
        found = self.size
        for path in [*self._files(), *self._unfinished()]:
            with suppress(OSError):
                path.unlink()
        return found

    @property
    def size(self) -> Size:
        """What is there."""
        sizes = [status.st_size for _, status in self._known()]
        return Size(len(sizes), sum(sizes))

    def _of(self, name: str) -> Path:
        return self.path / name

    def _files(self) -> Iterator[Path]:
        with suppress(OSError):
            yield from sorted(path for path in self.path.iterdir() if path.name.endswith(self._suffixes))

    def _unfinished(self) -> Iterator[Path]:
        with suppress(OSError):
            yield from [path for path in self.path.iterdir() if _UNFINISHED.fullmatch(path.name)]

    def _known(self) -> Iterator[tuple[Path, os.stat_result]]:
        for path in self._files():
            with suppress(OSError):  # another process removed it
                yield path, path.stat()

    def _trim(self) -> None:
        found = sorted(self._known(), key=lambda known: (-known[1].st_mtime_ns, known[0]))
        total = 0
        for number, (path, status) in enumerate(found):
            total += status.st_size
            if total > self.limit and number:  # the newest stays, however large
                with suppress(OSError):
                    path.unlink()
        for path in self._unfinished():
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > _ABANDONED:
                    path.unlink()
