"""Folders of files that several processes share: written as a whole, and the least recently used ones go."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from sdy_jax.files.whole import whole_file

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
