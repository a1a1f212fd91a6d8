"""The public face of the passes: programs and texts in, programs and texts out."""

from __future__ import annotations

from typing import overload

from jax.extend.mlir import ir
from jax.interpreters import mlir

from sdy_jax.annotate.program import Program
from sdy_jax.passes import registry
from sdy_jax.text.modules import parse_module
from sdy_jax.text.printer import module_text


@overload
def run(program: Program, pipeline: str) -> Program: ...
@overload
def run(program: str, pipeline: str) -> str: ...
def run(program: Program | str, pipeline: str) -> Program | str:
    """Runs named passes on a program or on the text of a module.

    Pass names and options are Shardy's: `"sdy-basic-propagate"`, `"sdy-propagation-pipeline"`,
    `"aggressive-propagate{propagation-strategy=basic}"`, `"func.func(sdy-sink-data-flow-edges),cse"`.

    Args:
      program: a program, which stays as it is, or MLIR text.
      pipeline: pass names, separated by commas, with or without `sdy-`, with options as MLIR writes them.

    Returns:
      A new program with the module after the passes, or its text.

    Raises:
      ParseError: the text is not a module, the pipeline is not one, or names a pass or option that does not exist.
      UnsupportedError: a pass that belongs to partitioning.

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
        module = program.module.clone().operation
        _run(module, pipeline)
        return program.with_module(module)
    parsed = parse_module(program, mlir.make_ir_context(), "<text>")
    _run(parsed.operation, pipeline)
    return module_text(parsed)


def _run(module: ir.Operation, pipeline: str) -> None:
    with module.context, ir.Location.unknown(module.context):
        registry.run(module, pipeline)
