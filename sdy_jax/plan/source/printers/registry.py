"""The registry of printers: primitive -> Python text; a primitive without one is the function of lax that has its
name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from jax import lax

from sdy_jax.errors import UnsupportedError
from sdy_jax.plan.source.expressions import Expr, dtype_text, param_text, scalar_text, shape_text, typed_text
from sdy_jax.plan.source.steps import CALLBACKS, Block, Step, Value

# Contract of a printer: it is given a `Call` and returns the expression of what the primitive gives. It takes
# operands from `Call.array`, or from `Call.operand` where NumPy's broadcasting does the same as the primitive, each
# at most once: an operand's text may be a whole expression. The text must trace to what the primitive does, to the
# last bit. Several results are a tuple. A primitive without a printer is written as the function of lax that has its
# name, with its parameters as keywords; where that cannot be, `UnsupportedError` names the op.

Parameter = Value | tuple[str, Sequence[Value]]
"""A parameter of a local function, or one that is a tuple: its name and what is in it."""


@dataclass(frozen=True, slots=True)
class Function:
    """A region as a local function: what it is called, takes and returns. A sequence among the results is a tuple.

    `names` are hints for parameters, `about` is its docstring. With a list of `fields`, to be filled, its results are a
    dictionary by these names.
    """

    block: Block
    hint: str
    parameters: Sequence[Parameter]
    results: Sequence[Value | Sequence[Value]]
    names: Mapping[Value, str] = field(default_factory=dict)
    about: str = ""
    fields: list[str] | None = None


class Writer(Protocol):
    """What printers may ask of the module that is being written."""

    @property
    def is_wide(self) -> bool:
        """Whether Python numbers become arrays of 64 bits, because the program has such."""
        ...

    def expression(self, value: Value) -> Expr:
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
class Call:
    """A primitive that is to be written."""

    step: Step
    writer: Writer

    @property
    def params(self) -> Any:
        return self.step.params

    @property
    def out(self) -> Value:
        return self.step.outputs[0]

    @property
    def inputs(self) -> list[Value]:
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


def materialized(expr: Expr, value: Value) -> Expr:
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


def _filled(number: Expr, value: Value) -> str:
    filled = {"0.0": "zeros", "0": "zeros", "False": "zeros", "1.0": "ones", "1": "ones", "True": "ones"}.get(
        number.text
    )
    shape, dtype = shape_text(value.shape), dtype_text(value.dtype)
    return f"jnp.{filled}({shape}, {dtype})" if filled else f"jnp.full({shape}, {number.text}, {dtype})"


Printer = Callable[[Call], Expr]
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


def by_name(call: Call) -> Expr:
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
def _fourier(call: Call) -> Expr:
    kind = call.params["fft_type"]
    return call.result(
        f"lax.fft({call.array(0).text}, lax.FftType.{kind.name}, {shape_text(call.params['fft_lengths'])})"
    )


@printer("rng_bit_generator")
def _random_bits(call: Call) -> Expr:
    p = call.params
    return call.many(
        f"lax.rng_bit_generator({call.array(0).text}, {shape_text(p['shape'])}, {dtype_text(p['dtype'])}, "
        f"lax.RandomAlgorithm.{p['algorithm'].name})"
    )


@printer(*CALLBACKS)
def _callback(call: Call) -> Expr:
    raise call.refused(
        "it calls a Python function back, which a module without your code does not have; to fix: plan the function "
        "without the callback"
    )
