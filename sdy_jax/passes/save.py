"""Writing a module to a file in the midst of a pipeline."""

from __future__ import annotations

from pathlib import Path

from jax.extend.mlir import ir

from sdy_jax.text.printer import module_text


def save_module(module: ir.Operation, *, directory: str = "", name: str = "module") -> None:
    """Writes the module to `directory/name.mlir`; without a directory, nothing is written."""
    if not directory:
        return
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.mlir").write_text(module_text(module), encoding="utf-8")
