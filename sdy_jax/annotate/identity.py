"""Primitives that compute the identity: the annotations of one array."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

PrimitiveParameters = dict[str, Any]
Batched = Callable[[PrimitiveParameters, int, Sequence[str] | None], PrimitiveParameters]
"""`batched(parameters, position, axes)`: the parameters for an array with one more dimension, which `vmap` puts at
`position` and, with `spmd_axis_name`, splits along `axes`; None leaves it open."""


def identity_primitive(
    name: str, *, batched: Batched, transposed: Callable[[PrimitiveParameters], PrimitiveParameters] | None
) -> Primitive:
    """A primitive that returns its operand, wherever its lowering is not overridden.

    Args:
        name: the primitive's name.
        batched: its parameters under `vmap`.
        transposed: its parameters for the cotangent; tangents have the primitive's own. None says that it speaks of the
            array alone, so that tangents and cotangents pass it by.
    """
    primitive = Primitive(name)
    primitive.def_impl(lambda x, **_: x)
    primitive.def_abstract_eval(lambda x, **_: x)
    mlir.register_lowering(primitive, lambda ctx, x, **_: [x])

    def batch(axis_data: Any, values: Sequence[jax.Array], dims: Sequence[int | None], **parameters: Any) -> Any:
        (x,), (dim,) = values, dims
        if dim is not None:
            parameters = batched(parameters, dim, axis_data.spmd_name)
        return primitive.bind(x, **parameters), dim

    batching.fancy_primitive_batchers[primitive] = batch
    if transposed is None:
        ad.primitive_jvps[primitive] = lambda primals, tangents, **parameters: (
            primitive.bind(*primals, **parameters),
            tangents[0],
        )
    else:
        ad.deflinear2(primitive, lambda ct, _, **parameters: [primitive.bind(ct, **transposed(parameters))])
    return primitive
