"""Functions that a module brings along, where jax has none."""

from __future__ import annotations

import re
from collections.abc import Collection

from sdy_jax.python_source.formatting import TEXT_LENGTH

_STABLEHLO = '''
stablehlo_p = Primitive("stablehlo")
stablehlo_p.multiple_results = True
stablehlo_p.def_abstract_eval(lambda *_, text, types: [jax.core.ShapedArray(s, jnp.dtype(d)) for s, d in types])


def _lowered(ctx, *operands, text, types):
    """Puts a module beside the one that jax makes, and calls its function."""
    context = ctx.module_context
    module = ir.Module.parse(text, context.context)
    made = ir.FunctionType(ir.TypeAttr(module.body.operations[0].attributes["function_type"]).value).results
    name = mlir.merge_mlir_modules(context.module, "stablehlo_op", module, context.symbol_table)
    return list(func.CallOp(list(made), ir.FlatSymbolRefAttr.get(name), list(operands)).results)


mlir.register_lowering(stablehlo_p, _lowered)


def stablehlo(text, types, *operands):
    """Runs an op that lax has no function for, as it stands in StableHLO; `types` are shapes and dtypes of results."""
    return stablehlo_p.bind(*operands, text=text, types=types)
'''

HELPERS = {
    "stablehlo": (
        ("from jax.extend.core import Primitive", "from jax.extend.mlir import ir"),
        ("from jax.extend.mlir.dialects import func", "from jax.interpreters import mlir"),
        _STABLEHLO,
    )
}
"""Per name: what it imports, and its text."""


def helper_imports(names: Collection[str]) -> list[str]:
    return sorted(line for name in names for lines in HELPERS[name][:-1] for line in lines)


_LAPACK = "\n\njax.jit(lax.linalg.cholesky).lower(jnp.eye(1))  # jax loads LAPACK when it first lowers such an op"


def helper_text(names: Collection[str], mlir: Collection[str]) -> str:
    """The functions, and what some ops of StableHLO that they run need."""
    text = "\n\n".join(HELPERS[name][-1].strip("\n") for name in sorted(names))
    return text + _LAPACK if any("lapack_" in each for each in mlir) else text


_WORD = re.compile(r'(?:"[^"]*"|[^\s"])+')


def wrapped(mlir: str) -> str:
    """MLIR's text in lines that are no longer than those of a module, but for what has no spaces."""
    return "\n".join(line if len(line) <= TEXT_LENGTH else _wrapped_line(line) for line in mlir.strip().splitlines())


def _wrapped_line(line: str) -> str:
    indent = " " * (len(line) - len(line.lstrip()))
    lines = [indent]
    for word in _WORD.findall(line):
        if len(lines[-1]) + len(word) > TEXT_LENGTH:
            lines.append(f"{indent}    ")
        lines[-1] += f"{'' if lines[-1].isspace() or not lines[-1] else ' '}{word}"
    return "\n".join(lines)
