"""Padding that spoils whatever depends on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdy_jax.lowering.ops import shards


def _poison(dtype: Any) -> jax.Array:
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.array(jnp.nan, dtype)
    return jnp.array(True) if dtype == np.bool_ else jnp.array(jnp.iinfo(dtype).max, dtype)


@contextmanager
def poisoned() -> Iterator[None]:
    """Inside, what fills shards up is NaN, or the greatest integer, where it would be zero."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "padding_value", _poison)
        yield
