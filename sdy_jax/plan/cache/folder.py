"""Where plans are kept that were made before."""

from __future__ import annotations

import os
from pathlib import Path

import jax

from sdy_jax.errors import SdyError
from sdy_jax.files.folders import SharedFolder
from sdy_jax.representation.type_text import bytes_of_text

FOLDER = "SDY_JAX_CACHE_DIR"
LIMIT = "SDY_JAX_CACHE_SIZE"

_DEFAULT_LIMIT = 1 << 30
"""Bytes. Chosen: an entry of an 8B model with 32 unrolled layers takes a few MiB, so hundreds of such have room."""

SUFFIXES = (PLAN, MODULE) = (".plan", ".module")
"""Of the files there: plans, and the programs that were emitted for them."""

_BESIDE = "sdy_jax_plans"


def cache_folder() -> SharedFolder | None:
    """The folder that `SDY_JAX_CACHE_DIR` names, else one in that of jax's compilation cache, where that is on and on a
    file system; None where plans are not kept, as where the variable is empty, or 0.

    Raises:
        SdyError: `SDY_JAX_CACHE_SIZE` is no size.
    """
    stated = os.environ.get(FOLDER)
    if stated is None:
        is_on: bool = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
        of_jax: str | None = jax.config.jax_compilation_cache_dir if is_on else None  # type: ignore[attr-defined]
        if not of_jax or "://" in of_jax:
            return None
        return SharedFolder(Path(of_jax) / _BESIDE, SUFFIXES, _limit())
    return SharedFolder(Path(stated).expanduser(), SUFFIXES, _limit()) if stated not in ("", "0") else None


def _limit() -> int:
    text = os.environ.get(LIMIT)
    found = bytes_of_text(text) if text else float(_DEFAULT_LIMIT)
    if found is None:
        raise SdyError(f"{LIMIT}={text}; expected the bytes that plans may take in the cache, such as 512MiB")
    return int(found)
