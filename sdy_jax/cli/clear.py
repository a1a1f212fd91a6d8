"""`sdy-jax clear`: removes the plans that are kept, and the programs beside them."""

from __future__ import annotations

import argparse

from sdy_jax.base.errors import SdyError
from sdy_jax.ir.jax_shardings import bytes_text
from sdy_jax.plan.digests import FOLDER, cache_folder


def run(options: argparse.Namespace) -> int:
    """Removes them, and prints how many there were.

    Raises:
        SdyError: none are kept anywhere.
    """
    folder = cache_folder()
    if folder is None:
        raise SdyError(f"no plans are kept; to fix: name their folder, {FOLDER}=DIR in the environment")
    files, size = folder.clear()
    print(f"{folder.path}: {files} file{'' if files == 1 else 's'} removed, {bytes_text(size)}")
    return 0
