"""`sdy-jax opt`: passes on MLIR text."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from jax.extend.mlir import ir

from sdy_jax.base.errors import InternalError, ParseError, SdyError
from sdy_jax.calls.load import contents
from sdy_jax.cli import terminal
from sdy_jax.cli.terminal import described_bug
from sdy_jax.ir.text.modules import (
    SEPARATOR,
    SourceError,
    check_device_ids,
    error_at,
    new_context,
    parse_module,
    split_modules,
)
from sdy_jax.ir.text.translation import module_text
from sdy_jax.ir.verification import verify_module
from sdy_jax.shardy.passes.data_flow_edges import check_given_edges
from sdy_jax.shardy.passes.pipelines import parse, run_pipeline

# From MLIR text through passes to MLIR text: what `sdy-jax opt` does to one module.


def read(path: str) -> str:
    """The text of a file, or of standard input for `-`.

    Raises:
      SourceError: there is no such file, or it holds no text.
    """
    data, file = contents(path)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        found = f"byte {data[error.start]:#04x} at offset {error.start}"
        raise SourceError(f"this is no UTF-8 text: {found}", file) from None


def optimize(text: str, pipeline: str, file: str, generic: bool = False, strict: bool = False) -> str:
    """Parses a module, runs passes on it, and prints it; both modules are verified.

    Args:
      text: the module.
      pipeline: the passes, as `passes.parse` takes them.
      file: the name for errors.
      generic: print all ops in the generic form, as tools read it that know the mesh and shard dialects.
      strict: check the given module for the documented rules, too, that jaxlib does not enforce.

    Raises:
      SourceError: the module is wrong, or a pass rejects it.
      ParseError: the pipeline is wrong.
    """
    try:
        with new_context() as context, ir.Location.unknown(context):
            module = parse_module(text, context, file)
            if strict:
                check_device_ids(text, file)
            passes = parse(pipeline)
            tolerant = any(("strict", False) in each.options for each in passes)
            verify_module(module.operation, strict, tolerant=tolerant)
            run_pipeline(module.operation, passes)
            _verify_result(module.operation, text, file)
            return module_text(module, generic)
    except SourceError:
        raise
    except ParseError as error:
        raise ParseError(f"error: {error}") from None
    except InternalError as error:
        raise SourceError(described_bug(error), file) from error
    except SdyError as error:
        raise error_at(error, getattr(error, "location", None), text, file) from error
    except Exception as error:
        raise SourceError(described_bug(error), file) from error


def _verify_result(module: ir.Operation, text: str, file: str) -> None:
    """Verifies what passes have made. Where it is wrong and the given module breaks a documented rule, that is said."""
    try:
        verify_module(module)
    except SdyError as error:
        given = parse_module(text, module.context, file).operation
        check_given_edges(given)
        verify_module(given, strict=True)
        raise InternalError(f"the passes have made a module that is wrong: {error}") from error


# `sdy-jax opt`: passes on MLIR text.


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
