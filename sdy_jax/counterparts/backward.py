"""The backward pass of a function of arrays as another one: cotangents of its results to those of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

Flat = Callable[..., Sequence[Any]]
"""A function of arrays that returns a list of arrays."""


def smooth(types: Sequence[Any]) -> tuple[int, ...]:
    """Those of which there are derivatives: floating-point and complex numbers."""
    return tuple(i for i, type_ in enumerate(types) if jnp.issubdtype(type_.dtype, jnp.inexact))


def backward_of(fun: Flat, arguments: Sequence[int], results: Sequence[int]) -> Flat:
    """The backward pass of a function: of all its arguments, then of the cotangents of some results, it returns the
    cotangents of some arguments. Cotangents are converted to the types of results."""

    def backward(*xs: Any) -> list[Any]:
        given, cotangents = list(xs[: len(xs) - len(results)]), xs[len(xs) - len(results) :]

        def of_smooth(*ys: Any) -> list[Any]:
            merged = list(given)
            for i, y in zip(arguments, ys, strict=True):
                merged[i] = y
            outs = fun(*merged)
            return [outs[i] for i in results]

        outs, pull = jax.vjp(of_smooth, *(given[i] for i in arguments))
        return list(pull([x.astype(out.dtype) for x, out in zip(cotangents, outs, strict=True)]))

    return backward
