"""Any other primitive: the function of lax that has its name, with its parameters as keywords."""

from __future__ import annotations

import inspect

from jax import lax

from sdy_jax.python_source.expressions import Expr
from sdy_jax.python_source.literals import dtype_text, param_text, shape_text
from sdy_jax.python_source.printers.registry import Call, printer
from sdy_jax.python_source.steps import CALLBACKS

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
