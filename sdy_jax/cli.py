"""The command line: `sdy-jax opt` runs passes on MLIR text."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command. Returns the exit status: 0, or 1 where the input is bad."""
    parser = argparse.ArgumentParser(prog="sdy-jax", description="Shardy's tensor partitioning in Python, on JAX.")
    commands = parser.add_subparsers(dest="command", required=True)
    opt = commands.add_parser("opt", help="apply passes to a module and print it")
    opt.add_argument("--pipeline", default="", help="pass names, comma-separated, with or without the sdy- prefix")
    opt.add_argument("file", help="MLIR text, or - for standard input")
    options = parser.parse_args(arguments)
    return _opt(options.file, options.pipeline)


def _opt(path: str, pipeline: str) -> int:
    from jax.extend.mlir import ir
    from jax.interpreters import mlir

    from sdy_jax.errors import SdyError
    from sdy_jax.passes.registry import run

    try:
        text = sys.stdin.read() if path == "-" else _read(path)
        with mlir.make_ir_context() as context:
            module = ir.Module.parse(text, context)
            run(module.operation, pipeline)
            print(module)
    except (SdyError, OSError, ir.MLIRError) as error:
        print(f"{path}: error: {error}", file=sys.stderr)
        return 1
    return 0


def _read(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()
