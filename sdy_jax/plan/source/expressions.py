"""Python text: expressions that know how tightly they bind, and the registry of printers of primitives."""

from __future__ import annotations

import ast
import enum
import inspect
import math
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sdy_jax.base.errors import UnsupportedError
from sdy_jax.plan.source.steps import CALLBACKS, LocalValue, Step, StepBlock

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


def array_code(x: np.ndarray) -> str:
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
        return array_code(value) if value.size <= LARGEST_INLINE else None
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


def spec_code(spec: jax.sharding.PartitionSpec) -> str:
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


# Contract of a printer: it is given a `PrimitiveCall` and returns the expression of what the primitive gives. It takes
# operands from its `array`, or from its `operand` where NumPy's broadcasting does the same as the primitive, each at
# most once: an operand's text may be a whole expression. The text must trace to what the primitive does, to the last
# bit. Several results are a tuple. A primitive without a printer is written as the function of lax that has its name,
# with its parameters as keywords; where that cannot be, `UnsupportedError` names the op.

Parameter = LocalValue | tuple[str, Sequence[LocalValue]]
"""A parameter of a local function, or one that is a tuple: its name and what is in it."""


@dataclass(frozen=True, slots=True)
class Function:
    """A region as a local function: what it is called, takes and returns. A sequence among the results is a tuple.

    `names` are hints for parameters, `about` is its docstring. With a list of `fields`, to be filled, its results are a
    dictionary by these names.
    """

    block: StepBlock
    hint: str
    parameters: Sequence[Parameter]
    results: Sequence[LocalValue | Sequence[LocalValue]]
    names: Mapping[LocalValue, str] = field(default_factory=dict)
    about: str = ""
    fields: list[str] | None = None


class WrittenModule(Protocol):
    """What printers may ask of the module that is being written."""

    @property
    def is_wide(self) -> bool:
        """Whether Python numbers become arrays of 64 bits, because the program has such."""
        ...

    def expression(self, value: LocalValue) -> Expr:
        """What a value is called, or made of."""
        ...

    def function(self, function: Function) -> str:
        """Defines a local function before the statement, and returns its name."""
        ...

    def constant(self, x: np.ndarray) -> str:
        """The name of an array that the module holds."""
        ...

    def text(self, x: str) -> str:
        """The name of a long text that the module holds."""
        ...

    def helper(self, name: str) -> str:
        """A function of the module's own, by its name in `HELPERS`."""
        ...

    def place(self, step: Step) -> str:
        """What an error calls a step: its op and source line."""
        ...


@dataclass(frozen=True, slots=True)
class PrimitiveCall:
    """A primitive that is to be written."""

    step: Step
    writer: WrittenModule

    @property
    def params(self) -> Any:
        return self.step.params

    @property
    def out(self) -> LocalValue:
        return self.step.outputs[0]

    @property
    def inputs(self) -> list[LocalValue]:
        return self.step.inputs

    def operand(self, number: int) -> Expr:
        """An operand, where NumPy broadcasts it to its shape and numbers take the dtype of what they meet."""
        return self.writer.expression(self.inputs[number])

    def array(self, number: int) -> Expr:
        """An operand as an array of its own shape and dtype."""
        return materialized(self.operand(number), self.inputs[number])

    def arrays(self, first: int = 0, last: int | None = None) -> str:
        """The texts of operands, joined."""
        numbers = range(len(self.inputs))[first:last]
        return ", ".join(self.array(number).text for number in numbers)

    def texts(self) -> list[str]:
        """The texts of all operands."""
        return [self.array(number).text for number in range(len(self.inputs))]

    def many(self, text: str) -> Expr:
        """An expression of a tuple of all results."""
        return Expr(text, (), groups=(len(self.step.outputs),))

    def result(self, text: str, power: int = 9) -> Expr:
        """An expression of the shape of the only result."""
        return Expr(text, self.out.shape, power)

    def refused(self, why: str) -> UnsupportedError:
        return UnsupportedError(f"{self.writer.place(self.step)} cannot be written in Python: {why}")


def materialized(expr: Expr, value: LocalValue) -> Expr:
    """The expression as an array of the value's shape and dtype."""
    if value.is_scalar_literal and value.constant is not None:
        return Expr(typed_text(value.constant), ())
    if expr.is_number:
        return Expr(_filled(expr, value), value.shape)
    if expr.shape == value.shape:
        return expr
    missing = len(value.shape) - len(expr.shape)
    if expr.shape == value.shape[missing:] and set(value.shape[:missing]) == {1}:
        return Expr(f"{expr.atom}[{', '.join(['None'] * missing)}]", value.shape)
    return Expr(f"jnp.broadcast_to({expr.text}, {shape_text(value.shape)})", value.shape)


def typed_number(number: Expr, dtype: Any) -> Expr:
    """A number as a scalar of a dtype: `np.float32(0.5)`."""
    return Expr(scalar_text(number.text, np.dtype(dtype)), ())


def _filled(number: Expr, value: LocalValue) -> str:
    filled = {"0.0": "zeros", "0": "zeros", "False": "zeros", "1.0": "ones", "1": "ones", "True": "ones"}.get(
        number.text
    )
    shape, dtype = shape_text(value.shape), dtype_text(value.dtype)
    return f"jnp.{filled}({shape}, {dtype})" if filled else f"jnp.full({shape}, {number.text}, {dtype})"


Printer = Callable[[PrimitiveCall], Expr]
PRINTERS: dict[str, Printer] = {}


def printer(*names: str) -> Callable[[Printer], Printer]:
    """Registers how primitives are written."""

    def register(function: Printer) -> Printer:
        PRINTERS.update(dict.fromkeys(names, function))
        return function

    return register


# Any other primitive: the function of lax that has its name, with its parameters as keywords.

_NOT_SAID = frozenset({"accuracy", "out_sharding", "sharding", "jaxpr"})
"""Parameters that say nothing where they are None."""

_LINALG = frozenset({"cholesky", "eigh", "qr", "svd", "lu", "triangular_solve", "householder_product", "eig", "schur"})


def by_name(call: PrimitiveCall) -> Expr:
    """The call of lax's function."""
    name = call.step.primitive.replace("-", "_")
    module = "lax.linalg" if name in _LINALG else "lax"
    function = getattr(lax.linalg if name in _LINALG else lax, name, None)
    if function is None or call.step.blocks:
        raise call.refused(f"jax has no function for the primitive {name}")
    known = inspect.signature(function).parameters
    texts = []
    for parameter, value in call.params.items():
        if value is None and parameter in _NOT_SAID:
            continue
        text = param_text(value)
        if parameter not in known or text is None:
            raise call.refused(f"lax.{name} does not take {parameter}={value}")
        texts.append(f"{parameter}={text}")
    text = f"{module}.{name}({', '.join([call.arrays(), *texts])})"
    return call.result(text) if len(call.step.outputs) == 1 else call.many(text)


@printer("fft")
def _fourier(call: PrimitiveCall) -> Expr:
    kind = call.params["fft_type"]
    return call.result(
        f"lax.fft({call.array(0).text}, lax.FftType.{kind.name}, {shape_text(call.params['fft_lengths'])})"
    )


@printer("rng_bit_generator")
def _random_bits(call: PrimitiveCall) -> Expr:
    p = call.params
    return call.many(
        f"lax.rng_bit_generator({call.array(0).text}, {shape_text(p['shape'])}, {dtype_text(p['dtype'])}, "
        f"lax.RandomAlgorithm.{p['algorithm'].name})"
    )


@printer(*CALLBACKS)
def _callback(call: PrimitiveCall) -> Expr:
    raise call.refused(
        "it calls a Python function back, which a module without your code does not have; to fix: plan the function "
        "without the callback"
    )
