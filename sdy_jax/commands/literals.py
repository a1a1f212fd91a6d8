"""Shardings and types as one writes them in Python, from the command line: literals, without running any code."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from sdy_jax.annotate.automatic import AUTO
from sdy_jax.commands import UsageError
from sdy_jax.representation.mesh import Mesh
from sdy_jax.representation.type_text import long_dtype_name

_EMPTY = re.compile(r"\b(\w+)\[\s*\]")


def parse_mesh(text: str) -> Mesh:
    """`data=2,model=4`."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (piece.strip() for piece in part.partition("="))
        if not name or not size.isdecimal() or int(size) < 1 or name in sizes:
            raise UsageError(
                f"--mesh {text}: got {part.strip()!r}; expected different names with sizes, data=2,model=4"
            )
        sizes[name] = int(size)
    return Mesh.of(**sizes)


def parse_shardings(text: str, option: str) -> Any:
    """`P('data'), {'w': P(None, 'model')}, None, AUTO`."""
    return _parsed(text, option, _sharding, "P('data', None), None, AUTO, a string, or a tuple, list or dict of them")


def parse_types(text: str, option: str) -> tuple[Any, ...]:
    """`f32[64,128], {'w': bf16[128]}`: one entry per argument; numbers and strings stand for themselves."""
    text = _EMPTY.sub(r"\1[()]", text)
    found = _parsed(text, option, _type, "f32[64,128], i32[], a number, or a tuple, list or dict of them")
    return found if isinstance(found, tuple) else (found,)


def _parsed(text: str, option: str, leaf: Callable[[ast.expr], Any], expected: str) -> Any:
    try:
        body = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UsageError(f"{option} {text}: {getattr(error, 'msg', error)}; expected {expected}") from None
    try:
        return _evaluated(body, leaf)
    except _Unknown as unknown:
        found = ast.unparse(unknown.node)
        raise UsageError(f"{option} {text}: {unknown.reason or 'got'} {found}; expected {expected}") from None


class _Unknown(Exception):
    def __init__(self, node: ast.expr, reason: str = ""):
        self.node, self.reason = node, reason


def _evaluated(node: ast.expr, leaf: Callable[[ast.expr], Any]) -> Any:
    if isinstance(node, ast.Tuple):
        return tuple(_evaluated(n, leaf) for n in node.elts)
    if isinstance(node, ast.List):
        return [_evaluated(n, leaf) for n in node.elts]
    if isinstance(node, ast.Dict):
        if any(key is None for key in node.keys):
            raise _Unknown(node)
        return {_constant(k): _evaluated(v, leaf) for k, v in zip(node.keys, node.values, strict=True) if k is not None}
    return leaf(node)


def _constant(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise _Unknown(node) from None


def _sharding(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id == "AUTO":
        return AUTO
    if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, str)):
        return node.value
    if isinstance(node, ast.Call) and _is_spec(node.func) and not node.keywords:
        return PartitionSpec(*map(_entry, node.args))
    raise _Unknown(node)


def _is_spec(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("P", "PartitionSpec")


def _entry(node: ast.expr) -> Any:
    if isinstance(node, ast.Attribute) and _is_spec(node.value) and node.attr == "UNCONSTRAINED":
        return PartitionSpec.UNCONSTRAINED
    value = _constant(node)
    names = value if isinstance(value, tuple) else (value,)
    if value is not None and not all(isinstance(name, str) for name in names):
        raise _Unknown(node, "no mesh axis:")
    return value


def _type(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if not isinstance(node, ast.Subscript) or not isinstance(node.value, ast.Name):
        raise _Unknown(node)
    dims = _constant(node.slice)
    shape = dims if isinstance(dims, tuple) else (dims,)
    if not all(isinstance(n, int) and n >= 0 for n in shape):
        raise _Unknown(node, "no sizes in")
    return jax.ShapeDtypeStruct(shape, _dtype(node.value))


def _dtype(node: ast.Name) -> Any:
    try:
        return jnp.dtype(long_dtype_name(node.id))
    except TypeError:
        raise _Unknown(node, "no element type:") from None
