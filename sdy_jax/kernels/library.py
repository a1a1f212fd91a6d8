"""Kernels that functions of `custom_partitioning` wrap: of libraries, for which JAX has primitives, a line of a table
each, and the user's own.

The sharding rules of such functions may say little of their operands, and say nothing of what they compute.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn

from sdy_jax.ir.stated_work import StatedWork
from sdy_jax.jax_internals.pallas import compiler_of
from sdy_jax.kernels import cudnn_attention
from sdy_jax.kernels.efficiency import PRODUCTS
from sdy_jax.kernels.library_kernel import IN_8_BITS, LibraryKernel, bytes_of, equations_of, shape_of
from sdy_jax.kernels.work import work_of_call


def library_kernel(jaxpr: Jaxpr) -> LibraryKernel | None:
    """What is known of the one kernel that a function wraps, whose operands and results are those of the function; None
    where it is none of the table's, or more is around it."""
    equation = _wrapped(jaxpr, _TABLE)
    return _TABLE[equation.primitive.name](equation) if equation is not None else None


def pallas_work(jaxpr: Jaxpr, platform: str) -> StatedWork | None:
    """The work of the one `pallas_call` that a function wraps likewise, compiled for a platform; None where it does
    not."""
    equation = _wrapped(jaxpr, ("pallas_call",))
    if equation is None:
        return None
    return work_of_call(equation.params, compiler_of(equation.params["compiler_params"], platform))


def _wrapped(jaxpr: Jaxpr, names: Collection[str]) -> JaxprEqn | None:
    found = [equation for equation in equations_of(jaxpr) if equation.primitive.name in names]
    return found[0] if len(found) == 1 and _has_tensors_of(jaxpr, found[0]) else None


def _has_tensors_of(jaxpr: Jaxpr, equation: JaxprEqn) -> bool:
    sides = (jaxpr.invars, equation.invars), (jaxpr.outvars, equation.outvars)
    return all([_type(v) for v in own] == [_type(v) for v in others] for own, others in sides)


def _type(variable: Any) -> tuple[Any, ...]:
    return shape_of(variable), variable.aval.dtype


def _scaled_product(equation: JaxprEqn) -> LibraryKernel:
    """Of batches of matrices in narrow numbers with a scale per block, along the last dimension of both."""
    (batch, rows, contracted), (_, columns, _) = (shape_of(variable) for variable in equation.invars[:2])
    flops, efficiency = 2.0 * batch * rows * columns * contracted, IN_8_BITS * PRODUCTS
    work = StatedWork(flops, bytes_of(equation), efficiency, "a scaled product by its shapes")
    return LibraryKernel(equation.primitive.name, work)


_TABLE: Mapping[str, Callable[[JaxprEqn], LibraryKernel]] = {
    "dot_product_attention_fwd": cudnn_attention.forward,
    "dot_product_attention_bwd": cudnn_attention.backward,
    "dot_product_attention_fp8_fwd": cudnn_attention.fp8_forward,
    "dot_product_attention_fp8_bwd": cudnn_attention.fp8_backward,
    "scaled_matmul": _scaled_product,
}
"""By the names of primitives."""
