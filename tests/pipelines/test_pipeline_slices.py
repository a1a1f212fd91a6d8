"""Slices of buffers under `vmap` and derivatives: what jax's own are, and still slices where places are not mapped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from sdy_jax.pipelines.loops import slice_of, with_slice

BUFFER = np.cos(np.arange(60, dtype=np.float32)).reshape(3, 4, 5)
PART = np.arange(5, dtype=np.float32).reshape(1, 1, 5)


def ours(buffer: Any, part: Any, i: Any, j: Any) -> Any:
    """Writes a part and reads another one, which depends on both arrays."""
    return slice_of(with_slice(buffer, part, (i, j, 0)) * buffer, (i, j - 1, 0), (1, 2, 5))


def theirs(buffer: Any, part: Any, i: Any, j: Any) -> Any:
    return lax.dynamic_slice(lax.dynamic_update_slice(buffer, part, (i, j, 0)) * buffer, (i, j - 1, 0), (1, 2, 5))


def gradients(fun: Callable[..., Any]) -> Callable[..., Any]:
    return jax.grad(lambda *args: jnp.sum(jnp.sin(fun(*args))), (0, 1))


def second(fun: Callable[..., Any]) -> Callable[..., Any]:
    return jax.grad(lambda *args: sum(jnp.sum(x**2) for x in gradients(fun)(*args)), (0, 1))


MAPPED = {"buffers": (0, None, None, None), "parts": (None, 1, None, None), "both": (2, 0, None, None)}
CHANGES = {
    "values": lambda fun, dims: jax.vmap(fun, dims),
    "vmap of grad": lambda fun, dims: jax.vmap(gradients(fun), dims),
    "grad of vmap": lambda fun, dims: gradients(jax.vmap(fun, dims)),
    "second derivatives": lambda fun, dims: jax.vmap(second(fun), dims),
}


def given(dims: tuple[int | None, ...]) -> list[Any]:
    """Arguments, three of each that is mapped."""
    each = (BUFFER, PART, np.int32(2), np.int32(1))
    return [x if dim is None else np.stack([x, x + 1, x * 2], dim) for x, dim in zip(each, dims, strict=True)]


def close(found: Any, wanted: Any) -> None:
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mapped", MAPPED)
@pytest.mark.parametrize("change", CHANGES)
def test_slices_at_one_place_are_slices_under_vmap(change: str, mapped: str) -> None:
    dims = MAPPED[mapped]
    fun = jax.jit(CHANGES[change](ours, dims))
    jax.tree.map(close, fun(*given(dims)), CHANGES[change](theirs, dims)(*given(dims)))
    text = fun.lower(*given(dims)).as_text()
    assert "gather" not in text and "scatter" not in text


def test_slices_at_several_places() -> None:
    dims = (0, None, 0, None)
    args = [*given((0, None, None, None))[:2], np.int32([0, 2, 1]), np.int32(1)]
    np.testing.assert_array_equal(jax.vmap(ours, dims)(*args), jax.vmap(theirs, dims)(*args))


def test_derivatives_of_one_operand() -> None:
    """The other is known, or has none."""
    args = given((None,) * 4)
    for number in (0, 1):
        for mode in (jax.jacrev, jax.jacfwd):
            np.testing.assert_array_equal(mode(ours, number)(*args), mode(theirs, number)(*args))
    found = jax.linear_transpose(lambda part: with_slice(jnp.zeros_like(BUFFER), part, (2, 1, 0)), PART)(BUFFER)
    np.testing.assert_array_equal(found[0], BUFFER[2:, 1:2])
