"""Writing a module to a file in the midst of a pipeline."""

from __future__ import annotations

import os
from pathlib import Path

from jax.extend.mlir import ir

from sdy_jax.files.whole import explained, write_whole
from sdy_jax.text.printer import module_text


def save_module(module: ir.Operation, *, directory: str = "", name: str = "module") -> None:
    """Writes the module to `directory/name.mlir`; without a directory, nothing is written.

    Raises:
        SdyError: it cannot be written.
    """
    if not directory:
        return
    path = Path(directory, f"{name}.mlir")
    with explained(f"sdy-save-module: {path} cannot be written", "name a directory that can be"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_module(module, path)


def write_module(module: ir.Operation, path: str | os.PathLike[str]) -> None:
    """Writes a module's text.

    Raises:
        OSError: it cannot be written.
    """
    write_whole(path, module_text(module))
