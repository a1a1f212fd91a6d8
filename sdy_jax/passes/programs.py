"""Running lists of passes: on modules, on programs, and from text to text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from typing import overload

from jax.extend.mlir import ir

from sdy_jax.annotate.program import Program
from sdy_jax.errors import ParseError, UnsupportedError
from sdy_jax.ir.context import new_context
from sdy_jax.ir.extensions import load_extensions
from sdy_jax.ir.locations import source_line
from sdy_jax.ir.operations import copied, functions, op_names
from sdy_jax.jax_internals.tracebacks import api_boundary
from sdy_jax.passes.pipeline_text import WrittenPass, error_at, written_passes
from sdy_jax.passes.pipelines import PIPELINES
from sdy_jax.passes.registry import FLAG, PASSES, AllowedValues, Pass, as_keywords, checked, full_name, options_of
from sdy_jax.text.modules import parse_module
from sdy_jax.text.printer import module_text

Pipeline = str | Iterable[Pass]
"""Passes, or the text of a pipeline."""

After = Callable[[Pass, ir.Operation], None]
"""What is called after each pass, with the pass and the module; it may look at the module, print or verify it."""


@api_boundary
def parse(pipeline: str) -> tuple[Pass, ...]:
    """The passes of a textual pipeline; one that names a pipeline has the passes of that.

    Args:
      pipeline: `"name,name{option=value ...},..."`, as MLIR writes it; empty for no pass at all. Anchors, as in
        `func.func(name)`, are left out.

    Raises:
      ParseError: a pass or option that is not known, or text that is not a pipeline, with its column.

    Example:
      >>> parse("func.func(sink-data-flow-edges),aggressive-propagate{propagation-strategy=basic}")
      (Pass('sdy-sink-data-flow-edges'), Pass('sdy-aggressive-propagate', propagation_strategy='basic'))
    """
    return tuple(found for written in written_passes(pipeline) for found in _meant(written, pipeline))


def _meant(written: WrittenPass, pipeline: str) -> Iterator[Pass]:
    load_extensions()
    try:
        name = full_name(written.name, {**PASSES, **PIPELINES})
        function = PASSES.get(name) or PIPELINES[name]
        known = options_of(function)
        given = {option: _value(text, known.get(option)) for option, text in written.options.items()}
        keywords = as_keywords(checked(name, function, given).items())
    except ParseError as error:
        raise error_at(pipeline, written.position, str(error)) from None
    yield from PIPELINES[name](**keywords) if name in PIPELINES else (Pass(name, **keywords),)


def _value(text: str, allowed: AllowedValues) -> bool | str:
    """The value that an option's text stands for; a flag that is only named is on."""
    return {"true": True, "": True, "false": False}.get(text, text) if allowed == FLAG else text


def run_pipeline(module: ir.Operation, pipeline: Pipeline, after: After | None = None) -> None:
    """Runs passes on a `builtin.module`, in place.

    Args:
      module: the operation of the module, not the module object.
      pipeline: passes, or text as for `parse`.
      after: called after each pass.

    Raises:
      ParseError: as `parse`; nothing has run then.
      UnsupportedError: a function that is declared only.
    """
    passes = parse(pipeline) if isinstance(pipeline, str) else tuple(pipeline)
    if any(each.name.startswith("sdy-") for each in passes):
        _check_bodies(module)
    present: Set[str] = frozenset()
    for each in passes:
        if each.seeks:
            present = present or op_names(module)
        if not each.seeks or not present.isdisjoint(each.seeks):
            each(module)
            present = frozenset()
        if after is not None:
            after(each, module)


def _check_bodies(module: ir.Operation) -> None:
    """Raises an error for functions without a body: what they do with their arguments is not known."""
    for name, function in functions(module).items():
        if not len(function.regions[0].blocks):
            raise UnsupportedError(
                f"function @{name} is declared without a body, at {source_line(function.location)}; "
                "to fix: define it, or call what it does by stablehlo.custom_call"
            )


@overload
def run(program: Program, pipeline: Pipeline, after: After | None = None) -> Program: ...
@overload
def run(program: str, pipeline: Pipeline, after: After | None = None) -> str: ...
@api_boundary
def run(program: Program | str, pipeline: Pipeline, after: After | None = None) -> Program | str:
    """Runs passes on a program or on the text of a module.

    Pass names and options are Shardy's: `"sdy-basic-propagate"`, `"sdy-propagation-pipeline"`,
    `"aggressive-propagate{propagation-strategy=basic}"`, `"func.func(sdy-sink-data-flow-edges),cse"`.

    Args:
      program: a program, which stays as it is, or MLIR text.
      pipeline: passes, such as `[Pass("basic-propagate", keep_sharding_rules=True), Pass("cse")]`, or their names,
        separated by commas, with or without `sdy-`, with options as MLIR writes them.
      after: called after each pass with the pass and the module as it is then, an `ir.Operation`: to verify it
        (`lambda _, module: module.verify()`), print it, or take the time.

    Returns:
      A new program with the module after the passes, or its text.

    Raises:
      ParseError: the text is not a module, the pipeline is not one, or names a pass or option that does not exist.
      UnsupportedError: a pass meets what it cannot handle.

    Example:
      >>> text = '''
      ... sdy.mesh @mesh = <["x"=2]>
      ... func.func @main(%a: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}) -> tensor<8xf32> {
      ...   %b = stablehlo.tanh %a : tensor<8xf32>
      ...   return %b : tensor<8xf32>
      ... }'''
      >>> print(run(text, "basic-propagate,close-shardings").splitlines()[3].split(" {")[1])
      sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{"x"}]>]>} : tensor<8xf32>
    """
    if isinstance(program, Program):
        module = copied(program.module)
        run_pipeline(module, pipeline, after)
        return program.with_module(module)
    parsed = parse_module(program, new_context(), "<text>")
    run_pipeline(parsed.operation, pipeline, after)
    return module_text(parsed)
