"""Constants whose elements are in the resources of a file."""

from __future__ import annotations

import re

from jax.extend.mlir import ir

from sdy_jax.base.errors import UnsupportedError
from sdy_jax.ir.locations import source_line
from sdy_jax.ir.operations import named

_RESOURCE = re.compile(r"dense_resource<(?P<name>.*?)> : (?P<type>.*)", re.DOTALL)
_SECTION = "dialect_resources:"
_BLOB = re.compile(r'(?P<name>"[^"]*"|[\w.$-]+): "0x[0-9A-Fa-f]{8}(?P<elements>[0-9A-Fa-f]*)"')
"""A resource: its name, four bytes that say how it is aligned, and those of its elements."""


def settle_constants(module: ir.Operation) -> None:
    """Puts the elements of constants that are resources of a file into the constants: XLA reads no others.

    Constants whose resource is not there, such as `dense_resource<__elided__>`, stay: a program is planned without.

    Args:
        module: the outermost module, with which its resources are printed.

    Raises:
        UnsupportedError: a resource has not the elements of the constant's type.
    """
    constants = [op for op in named(module, "stablehlo.constant", "sdy.constant") if not _is_dense(op)]
    blobs = _blobs(module) if constants else {}
    for op in constants:
        found = _RESOURCE.fullmatch(str(op.attributes["value"]))
        if found is None or found["name"] not in blobs:
            continue
        try:
            elements = f'dense<"0x{blobs[found["name"]]}"> : {found["type"]}'
            op.attributes["value"] = ir.Attribute.parse(elements, module.context)
        except ir.MLIRError:
            raise UnsupportedError(
                f"{source_line(op.location)}: dense_resource<{found['name']}> has not the elements of a {found['type']}"
            ) from None


def _is_dense(constant: ir.Operation) -> bool:
    try:
        value = constant.attributes["value"].maybe_downcast()
    except TypeError:  # jaxlib has no class for those of complex numbers
        return True
    return isinstance(value, ir.DenseElementsAttr)


def _blobs(module: ir.Operation) -> dict[str, str]:
    """The resources of a module by their names, as the digits of their elements' bytes."""
    _, is_there, section = module.get_asm().rpartition(_SECTION)
    return {match["name"]: match["elements"] for match in _BLOB.finditer(section)} if is_there else {}
