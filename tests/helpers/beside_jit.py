"""What a function of `jit` gives with `jax.jit` and with `sdy.partition`: values, types and shardings, or errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType

import sdy_jax as sdy

Row = Callable[[Callable[..., Any]], Any]


class Seen:
    """What a function saw while it was traced."""

    def __init__(self) -> None:
        self.types: list[Any] = []

    def __call__(self, x: Any) -> Any:
        self.types.append((str(jax.typeof(x)), jax.typeof(x).sharding.spec, jax.typeof(x).sharding.mesh.axis_types))
        return x


def assert_as_jit(row: Row, sizes: Sequence[int], names: Sequence[str], types: Sequence[AxisType]) -> None:
    """Runs a row with both, a mesh in context. An error has to be of the class of jit's, and begin with its words."""
    mesh = jax.make_mesh(tuple(sizes), tuple(names), axis_types=tuple(types))
    ours, theirs = (outcome(row, jit, mesh) for jit in (sdy.partition, jax.jit))
    if isinstance(theirs, Exception):
        assert isinstance(ours, type(theirs)), repr(ours)
        assert summary(ours) == summary(theirs)
        return
    if isinstance(ours, Exception):
        raise ours
    compare(ours, theirs)


def outcome(row: Row, jit: Callable[..., Any], mesh: jax.sharding.Mesh) -> Any:
    """What a row returns, or raises."""
    with jax.set_mesh(mesh):
        try:
            return row(jit)
        except Exception as error:
            return error


def compare(ours: Any, theirs: Any) -> None:
    """Asserts that values, types and shardings are the same."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for own, wanted in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        if isinstance(wanted, np.ndarray):
            np.testing.assert_allclose(own, wanted, rtol=2e-5, atol=2e-5)
        if not isinstance(wanted, jax.Array):
            assert isinstance(wanted, np.ndarray) or own == wanted
            continue
        assert str(jax.typeof(own)) == str(jax.typeof(wanted))
        assert own.sharding == wanted.sharding
        np.testing.assert_allclose(own, wanted, rtol=2e-5, atol=2e-5)


def summary(error: BaseException) -> str:
    """The first words of what an error says."""
    return str(error).split(".")[0].split(":")[0]
