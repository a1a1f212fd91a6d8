"""The command line: `sdy-jax opt` runs passes on MLIR text.

jax is imported where it is needed only, so that `--help` is quick.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

_OPT = """\
Runs passes on a module and prints it. The names and options of passes are Shardy's:

  sdy-jax opt --pipeline basic-propagate,close-shardings model.mlir
  sdy-jax opt --pipeline 'sdy-aggressive-propagate{propagation-strategy=basic}' - < model.mlir

Without a pipeline the module is parsed, verified and printed. What is wrong with it is said on standard error as
FILE:LINE:COLUMN: error: MESSAGE, and the exit status is 1. Where a rule of the SDY dialect is broken, MESSAGE begins
with the rule's name.
"""

_SPLIT = """\
take the parts of the file between lines `// -----` for modules of their own, and print them likewise; where one is
wrong, `// error: MESSAGE` stands in its place, and the exit status at the end is 1
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command. Returns the exit status: 0, or 1 where the input is bad."""
    options = _parser().parse_args(arguments)
    try:
        return _opt(options.file, options.pipeline, options.split_input_file)
    except BrokenPipeError:  # who reads our output has stopped; nothing may be flushed to them at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sdy-jax", description="Shardy's tensor partitioning in Python, on JAX.")
    commands = parser.add_subparsers(dest="command", required=True)
    opt = commands.add_parser(
        "opt",
        help="apply passes to a module and print it",
        description=_OPT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    passes = "passes separated by commas, with or without the sdy- prefix, options in braces"
    opt.add_argument("--pipeline", default="", metavar="NAMES", help=passes)
    opt.add_argument("--split-input-file", action="store_true", help=_SPLIT)
    opt.add_argument("file", metavar="FILE", help="MLIR text, or - for standard input")
    return parser


def _opt(path: str, pipeline: str, split: bool) -> int:
    from sdy_jax.errors import SdyError
    from sdy_jax.opt import optimize, read

    name = "<stdin>" if path == "-" else path
    try:
        text = read(path)
        if split:
            return _print_each(text, lambda part: optimize(part, pipeline, name))
        print(optimize(text, pipeline, name), end="", flush=True)
    except SdyError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _print_each(text: str, transform: Callable[[str], str]) -> int:
    """Prints each module of a text, or what is wrong with it. Returns 1 if something is."""
    from sdy_jax.source_text import SEPARATOR, SourceError, split_modules

    status = 0
    for number, part in enumerate(split_modules(text)):
        if number:
            print(SEPARATOR)
        try:
            print(transform(part), end="", flush=True)
        except SourceError as error:
            status = 1
            print("// error: " + error.message.replace("\n", "\n// "), flush=True)
            print(error, file=sys.stderr)
    return status
