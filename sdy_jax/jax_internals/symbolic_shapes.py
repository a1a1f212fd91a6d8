"""Modules of symbolic shapes with the sizes that they are called with.

* `refine_polymorphic_shapes`: jax gives a module its sizes only right before it compiles.
"""

from __future__ import annotations

import re

from jax._src.interpreters.mlir import refine_polymorphic_shapes
from jax.extend.mlir import ir

from sdy_jax.errors import SdyError


def refined(module: ir.Module) -> ir.Module:
    """A module whose main has arguments of static shape, with all other shapes made static; in a context of its own.

    Raises:
        ValueError: they cannot be; its cause says why.
    """
    return refine_polymorphic_shapes(module)


_REFUSED = re.compile(r"error: (?:loc\(callsite\(\"shape_assertion\".*?\)\): )?([^\n]*?)(?:  Using the following|\n|$)")


def with_called_sizes(module: ir.Module) -> ir.Module:
    """The module with the sizes that it is called with.

    Raises:
        SdyError: they break a rule of an exported function.
    """
    try:
        return refined(module)
    except ValueError as error:
        said = _REFUSED.search(str(error.__cause__))
        if said is None:
            raise
        raise SdyError(f"sizes do not fit the symbolic ones of an exported function: {said[1]}") from None


def has_symbolic_parts(module: ir.Module) -> bool:
    """A function that was exported for several sizes or platforms is called."""
    functions = (op.operation for op in module.body.operations if op.operation.name == "func.func")
    return any(
        "?" in str(f.attributes["function_type"]) or _GLOBAL in str(f.attributes.get("arg_attrs")) for f in functions
    )


_GLOBAL = "jax.global_constant"
"""Marks the arguments that stand for sizes and for the platform."""
