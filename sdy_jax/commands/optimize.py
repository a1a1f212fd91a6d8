"""From MLIR text through passes to MLIR text: what `sdy-jax opt` does to one module."""

from __future__ import annotations

from jax.extend.mlir import ir

from sdy_jax.commands.bug_report import described_bug
from sdy_jax.errors import InternalError, ParseError, SdyError
from sdy_jax.ir.context import new_context
from sdy_jax.loading.artifacts import contents
from sdy_jax.passes.data_flow_edges import check_given_edges
from sdy_jax.passes.programs import parse, run_pipeline
from sdy_jax.text.modules import SourceError, check_device_ids, error_at, parse_module
from sdy_jax.text.printer import module_text
from sdy_jax.verification import verify_module


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
