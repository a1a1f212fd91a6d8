"""`sdy-jax opt`: passes on MLIR text."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from sdy_jax.commands import terminal
from sdy_jax.commands.optimize import optimize, read
from sdy_jax.text.modules import SEPARATOR, SourceError, split_modules


def run(options: argparse.Namespace) -> int:
    """Returns the exit status: 1 if a module of the file is wrong."""
    name = "<stdin>" if options.file == "-" else options.file
    text = read(options.file)

    def transform(part: str) -> str:
        return optimize(part, options.pipeline, name, options.generic, options.strict)

    if options.split_input_file:
        return _print_each(text, transform)
    print(transform(text), end="", flush=True)
    return 0


def _print_each(text: str, transform: Callable[[str], str]) -> int:
    """Prints each module of a text, or what is wrong with it. Returns 1 if something is."""
    status = 0
    for number, part in enumerate(split_modules(text)):
        if number:
            print(SEPARATOR)
        try:
            print(transform(part), end="", flush=True)
        except SourceError as error:
            status = 1
            print("// error: " + error.message.replace("\n", "\n// "), flush=True)
            terminal.print_error(error)
    return status
