"""The types in which layers read weights.

A layer that casts its weights, float32 to bfloat16, would cast them for each microbatch, forward and back. A stage
casts its whole stack once, and the layer gets what it would make. Sums of gradients have the wide type all the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from sdy_jax.pipelines.buffers import sum_type
from sdy_jax.pipelines.jaxprs import called


def type_read(jaxpr: Any, variable: Any) -> Any:
    """The narrower type to which a function casts an input wherever it reads it, if that loses nothing in sums of
    gradients; else the input's own."""
    own = variable.aval.dtype
    found = set(_types_read(jaxpr, variable))
    read = found.pop() if len(found) == 1 else own
    is_narrower = jnp.issubdtype(own, jnp.floating) and jnp.issubdtype(read, jnp.floating) and read != own
    return read if is_narrower and read.itemsize < own.itemsize and sum_type(read) == own else own


def _types_read(jaxpr: Any, variable: Any) -> Iterator[Any]:
    """The types to which it is cast, and its own for each other use."""
    if variable in jaxpr.outvars:
        yield variable.aval.dtype
    for eqn in jaxpr.eqns:
        for index, each in enumerate(eqn.invars):
            if each is not variable:
                continue
            inner = called(eqn)
            if inner is not None:
                yield from _types_read(inner, inner.invars[index])
            else:
                is_cast = eqn.primitive.name == "convert_element_type"
                yield eqn.params["new_dtype"] if is_cast else variable.aval.dtype
