"""Arrays as the per-device function has them: key arrays are words, and no type is weak."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sdy_jax.jax_internals.sharding_types import weakly_typed


def raw_array(x: Any) -> Any:
    """A key array's words; everything else as it is."""
    if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    return jax.random.key_data(x)


def raw_type(info: Any) -> Any:
    """The type of `raw_array` of a value of this type."""
    return jax.eval_shape(raw_array, info) if jnp.issubdtype(info.dtype, jax.dtypes.prng_key) else info


def wrapped_array(x: jax.Array, info: Any) -> Any:
    """A result as the plain function returns it: words of keys as keys, weak types weak, float0 as numpy's."""
    if info.dtype == jax.dtypes.float0:
        return np.zeros(info.shape, jax.dtypes.float0)
    if jnp.issubdtype(info.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(x, impl=jax.random.key_impl(jnp.empty((), info.dtype)))
    return weakly_typed(x) if info.weak_type else x
