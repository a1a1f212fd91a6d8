"""Source lines in plans and profiles are the user's: frames of this package do not count, as those of jax do not."""

from __future__ import annotations

import os
from collections.abc import Iterable

from jax.extend import source_info_util


def hide(directories: Iterable[str]) -> None:
    """Leaves the files in these directories out of the source lines that jax gives to ops."""
    for directory in directories:
        source_info_util.register_exclusion(os.path.join(directory, ""))
