"""Ops of jax that return their operands, for what they do where programs are evaluated, lowered or mapped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def identity_op(
    name: str,
    *,
    evaluated: Callable[..., None] = lambda **parameters: None,
    lowered: Callable[..., Sequence[Any]] = lambda ctx, *values, **parameters: values,
    mapped: Callable[..., bool] = lambda axis_data, **parameters: True,
) -> Primitive:
    """A primitive that returns its operands; tangents pass it by.

    Args:
        name: the primitive's name.
        evaluated: is called with its parameters where it is evaluated.
        lowered: its lowering.
        mapped: whether `vmap` keeps it, given jax's data of the mapped axis and the parameters.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True

    def evaluate(*values: Any, **parameters: Any) -> list[Any]:
        evaluated(**parameters)
        return list(values)

    def differentiate(primals: Sequence[Any], tangents: Sequence[Any], **parameters: Any) -> tuple[Any, Any]:
        return primitive.bind(*primals, **parameters), list(tangents)

    def batch(axis_data: Any, values: Sequence[Any], dims: Sequence[Any], **parameters: Any) -> tuple[Any, Any]:
        return primitive.bind(*values, **parameters) if mapped(axis_data, **parameters) else values, dims

    primitive.def_impl(evaluate)
    primitive.def_abstract_eval(lambda *types, **_: types)
    ad.primitive_jvps[primitive] = differentiate
    batching.fancy_primitive_batchers[primitive] = batch
    mlir.register_lowering(primitive, lowered)
    return primitive
