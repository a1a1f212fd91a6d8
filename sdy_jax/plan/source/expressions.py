"""Python text: expressions that know how tightly they bind, numbers and dtypes that give the same value, and its
format.
"""

from __future__ import annotations

import ast
import enum
import math
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Python expressions as text that knows how tightly it binds, and which shape it has.

COMPARE, OR, XOR, AND, SHIFT, ADD, MUL, UNARY, POWER, ATOM = range(10)
"""How tightly operators bind, loosest first."""


@dataclass(frozen=True, slots=True)
class Expr:
    """An expression.

    Attributes:
        text: the Python text.
        shape: the shape of what it evaluates to; NumPy broadcasts it to that of the value it stands for.
        power: how tightly its outermost operator binds.
        is_number: it is a Python number, which takes the dtype of what it meets.
        groups: it is a tuple of so many results, or several tuples; empty where it is one array.
        fields: it is a dictionary of results, by these names.
    """

    text: str
    shape: tuple[int, ...]
    power: int = ATOM
    is_number: bool = False
    groups: tuple[int, ...] = ()
    fields: tuple[str, ...] = ()

    def within(self, power: int) -> str:
        """The text as an operand of an operator that binds with this power."""
        return self.text if self.power >= power else f"({self.text})"

    @property
    def atom(self) -> str:
        """The text as what an attribute or an index follows."""
        return f"({self.text})" if self.power < ATOM or self.is_number else self.text


def infix(left: Expr, operator: str, right: Expr, power: int) -> str:
    """The text of a binary operator, which groups from the left; comparisons do not chain."""
    first = left.within(power + 1 if power == COMPARE else power)
    return f"{first} {operator} {right.within(power + 1)}"


def tuple_text(items: Sequence[str]) -> str:
    """`(a, b)`, `(a,)`."""
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


def without_parentheses(text: str) -> str:
    """`a > 0` of `(a > 0)`; other texts as they are."""
    if not text.startswith("("):
        return text
    try:
        ast.parse(text[1:-1], mode="eval")
    except SyntaxError:
        return text
    return text[1:-1]


def target_text(names: list[str], groups: tuple[int, ...]) -> str:
    """What an expression is assigned to: `a`, `a, b`, `(a,)`, `(a, b), (c,)`."""
    if not groups:
        return names[0]
    if len(groups) == 1:
        return tuple_text(names) if len(names) == 1 else ", ".join(names)
    rest = iter(names)
    return ", ".join(tuple_text([next(rest) for _ in range(count)]) if count else "_" for count in groups)


# Numbers, dtypes and parameters of primitives as Python text that gives the same value.

LARGEST_INLINE = 12
"""Arrays of more elements are constants of the module. Chosen: what fits a line."""


def dtype_text(dtype: Any) -> str:
    """`jnp.float32`."""
    name = np.dtype(dtype).name
    return f"jnp.{name}_" if name == "bool" else f"jnp.{name}"


def number_text(x: np.ndarray) -> str | None:
    """A scalar as a Python number that becomes it again where it meets an array of its dtype; None if none does."""
    dtype, value = x.dtype, x[()]
    if dtype == np.bool_:
        return str(bool(value))
    if jnp.issubdtype(dtype, jnp.integer):
        return str(int(value)) if -(2**31) <= int(value) < 2**31 else None
    if jnp.issubdtype(dtype, jnp.floating):
        return _float_text(x)
    if jnp.issubdtype(dtype, jnp.complexfloating) and np.isfinite(value) and not _has_negative_zero(complex(value)):
        return repr(complex(value))
    return None


def _has_negative_zero(value: complex) -> bool:
    return any(part == 0 and math.copysign(1, part) < 0 for part in (value.real, value.imag))


def _float_text(x: np.ndarray) -> str:
    value = float(x)
    if math.isnan(value):
        return "jnp.nan"
    if math.isinf(value):
        return "jnp.inf" if value > 0 else "-jnp.inf"
    short = str(x[()])
    return short if _is_number(short) and np.array(float(short)).astype(x.dtype) == x else repr(value)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return "." in text or "e" in text


def typed_text(x: np.ndarray) -> str:
    """A scalar of a dtype: `np.float32(0.5)`, `jnp.bfloat16(0.5)`."""
    number = number_text(x)
    if number is None:
        number = repr(x[()].item())
        number = number.replace("inf", "np.inf").replace("nan", "np.nan") if x.dtype.kind == "c" else number
    return scalar_text(number, x.dtype)


def scalar_text(number: str, dtype: np.dtype) -> str:
    """A scalar of a dtype by its number."""
    module = "np" if dtype.isbuiltin == 1 else "jnp"
    return f"{module}.{'bool_' if dtype == np.bool_ else dtype.name}({number})"


def elements_text(x: np.ndarray) -> str:
    """The elements of a small array, as nested lists."""
    if x.ndim == 0:
        number = number_text(x)
        return typed_text(x) if number is None else number.replace("jnp.", "np.")
    return f"[{', '.join(map(elements_text, x))}]"


def array_text(x: np.ndarray) -> str:
    """A small array: `np.array([1, 2], np.int32)`."""
    dtype = dtype_text(x.dtype)
    is_numpy = x.dtype.isbuiltin == 1
    return (
        f"{'np' if is_numpy else 'jnp'}.array({elements_text(x)}, {dtype.replace('jnp', 'np') if is_numpy else dtype})"
    )


def shape_text(shape: Sequence[int]) -> str:
    return tuple_text([str(n) for n in shape])


def param_text(value: Any) -> str | None:
    """A parameter of a primitive as it is given to its function; None for what has no text."""
    if value is None or isinstance(value, (bool, str)):
        return repr(value)
    if isinstance(value, enum.Enum):
        return _enum_text(value)
    if isinstance(value, (int, float, np.integer, np.floating)):
        return repr(value.item() if isinstance(value, np.generic) else value)
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        return dtype_text(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _record_text(value)
    if isinstance(value, (tuple, list)):
        items = [param_text(item) for item in value]
        return None if None in items else tuple_text(items)  # type: ignore[arg-type]
    if isinstance(value, np.ndarray):
        return array_text(value) if value.size <= LARGEST_INLINE else None
    return _record_text(value) if type(value).__module__.startswith("jax.") and _fields(value) else None


def _enum_text(value: enum.Enum) -> str | None:
    return f"lax.{type(value).__name__}.{value.name}" if hasattr(lax, type(value).__name__) else None


def _fields(value: Any) -> Mapping[str, Any]:
    if hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    return {name: getattr(value, name) for name in getattr(type(value), "__dataclass_fields__", {})}


def _record_text(value: Any) -> str | None:
    """Dimension numbers, by their fields; those that are empty are left out where the class has them so."""
    name = type(value).__name__
    if not hasattr(lax, name):
        return None
    texts = {field: param_text(x) for field, x in _fields(value).items()}
    if None in texts.values():
        return None
    return f"lax.{name}({', '.join(f'{field}={text}' for field, text in texts.items() if _is_needed(field, text))})"


def _is_needed(field: str, text: str | None) -> bool:
    return not (text == "()" and "batching" in field)


def spec_text(spec: jax.sharding.PartitionSpec) -> str:
    """`P("data", None, ("x", "y"))`, without trailing Nones."""
    entries = list(spec)
    while entries and entries[-1] is None:
        entries.pop()
    return f"P({', '.join(names_text(entry) for entry in entries)})"


def names_text(names: Any) -> str:
    """A mesh axis, or several: `"x"`, `("x", "y")`."""
    if names is None:
        return "None"
    if isinstance(names, str):
        return f'"{names}"'
    names = tuple(names)
    return names_text(names[0]) if len(names) == 1 else tuple_text([f'"{name}"' for name in names])


# Python text as ruff formats it, where ruff is installed.

TEXT_LENGTH = 110
"""Columns of text that is indented below. Chosen: a line less two indentations."""

LINE_LENGTH = 120
"""Columns of a line of Python. Chosen: as of this library."""


def formatted(text: str) -> str:
    """The text in ruff's format, as it is where there is no ruff."""
    ruff = _ruff()
    if ruff is None:
        return text
    command = [ruff, "format", "--isolated", f"--line-length={LINE_LENGTH}", "--stdin-filename=program.py", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else text


def _ruff() -> str | None:
    """The binary beside the running Python, or that on the path."""
    beside = Path(sysconfig.get_path("scripts"), "ruff")
    return str(beside) if beside.exists() else shutil.which("ruff")
