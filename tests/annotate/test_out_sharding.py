"""Functions of jax that take `out_sharding=`, all of them, with `jax.jit` and `sdy.partition`: values and types."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beside_jit import assert_as_jit
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

MODULES: dict[str, ModuleType] = {
    "numpy": jnp,
    "lax": lax,
    "random": jax.random,
    "ops": jax.ops,
    "initializers": jax.nn.initializers,
}
ALIASES = {"linalg.tensordot"}
KEY = jax.random.key(0)
SPLIT = P("a", "b")


def on(array: Any, *entries: Any) -> jax.Array:
    return jax.device_put(array, P(*entries))


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).random(shape, dtype=np.float32)


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(0, 8, shape).astype(np.int32)


Call = tuple[Callable[..., Any], tuple[Any, ...]]
"""What is called with `out_sharding=`, on arguments that are made on the mesh: an array and how it is split."""

RAGGED = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))


def given(array: Any, *entries: Any) -> tuple[Any, tuple[Any, ...]]:
    return array, entries


Call = tuple[Callable[..., Any], P, tuple[tuple[Any, tuple[Any, ...]], ...]]


def segmented(kind: str) -> Call:
    reduced = getattr(jax.ops, f"segment_{kind}")
    return lambda x, i, **o: reduced(x, i, 8, **o), P("a"), (given(floats(16, 4)), given(numbers(16)))


CALLS: dict[str, Call] = {
    "numpy.arange": (lambda **o: jnp.arange(8, **o), P("a"), ()),
    "numpy.array": (lambda x, **o: jnp.array(x, **o), SPLIT, (given(floats(8, 4)),)),
    "numpy.asarray": (lambda x, **o: jnp.asarray(x, **o), SPLIT, (given(floats(8, 4)),)),
    "numpy.bincount": (lambda x, **o: jnp.bincount(x, length=8, **o), P("a"), (given(numbers(16), "b"),)),
    "numpy.broadcast_to": (lambda x, **o: jnp.broadcast_to(x, (8, 4), **o), SPLIT, (given(floats(4)),)),
    "numpy.dot": (jnp.dot, P("a"), (given(floats(8, 16), None, "b"), given(floats(16, 4), "b"))),
    "numpy.einsum": (
        lambda x, y, **o: jnp.einsum("ijk,kl->jil", x, y, **o),
        P(None, "a"),
        (given(floats(4, 2, 8), "a", None, "b"), given(floats(8, 4), "b")),
    ),
    "numpy.empty": (lambda **o: jnp.empty((8, 4), **o) * 0, SPLIT, ()),
    "numpy.full": (lambda **o: jnp.full((8, 4), 3.0, **o), SPLIT, ()),
    "numpy.full_like": (lambda x, **o: jnp.full_like(x, 3.0, **o), SPLIT, (given(floats(8, 4), "b"),)),
    "numpy.histogram": (lambda x, **o: jnp.histogram(x, 8, **o)[0], P(), (given(floats(16)),)),
    "numpy.matmul": (jnp.matmul, P("a"), (given(floats(8, 16), None, "b"), given(floats(16, 4), "b"))),
    "numpy.ones": (lambda **o: jnp.ones((8, 4), **o), SPLIT, ()),
    "numpy.ones_like": (jnp.ones_like, SPLIT, (given(floats(8, 4), "b"),)),
    "numpy.percentile": (
        lambda x, **o: jnp.percentile(x, jnp.array([20.0, 50.0]), axis=0, **o),
        P(None, "b"),
        (given(floats(9, 4), None, "b"),),
    ),
    "numpy.ravel": (jnp.ravel, P("b"), (given(floats(8, 4), "a", "b"),)),
    "numpy.repeat": (
        lambda x, **o: jnp.repeat(x, np.array([1, 2, 1]), axis=0, total_repeat_length=4, **o),
        SPLIT,
        (given(floats(3, 4)),),
    ),
    "numpy.reshape": (lambda x, **o: jnp.reshape(x, (4, 8), **o), SPLIT, (given(floats(8, 4), "b"),)),
    "numpy.tensordot": (
        lambda x, y, **o: jnp.tensordot(x, y, 1, **o),
        P("a"),
        (given(floats(8, 16), None, "b"), given(floats(16, 4), "b")),
    ),
    "numpy.zeros": (lambda **o: jnp.zeros((8, 4), **o), SPLIT, ()),
    "numpy.zeros_like": (jnp.zeros_like, SPLIT, (given(floats(8, 4), "b"),)),
    "lax.broadcast": (lambda x, **o: lax.broadcast(x, (8,), **o), SPLIT, (given(floats(4)),)),
    "lax.broadcast_in_dim": (lambda x, **o: lax.broadcast_in_dim(x, (8, 4), (1,), **o), SPLIT, (given(floats(4)),)),
    "lax.broadcasted_iota": (lambda **o: lax.broadcasted_iota(jnp.int32, (8, 4), 1, **o), SPLIT, ()),
    "lax.conv_general_dilated": (
        lambda x, w, **o: lax.conv_general_dilated(x, w, (1,), "SAME", **o),
        P("a"),
        (given(floats(8, 4, 16), "a"), given(floats(4, 4, 3))),
    ),
    "lax.dot": (lax.dot, P("a"), (given(floats(8, 16), None, "b"), given(floats(16, 4), "b"))),
    "lax.dot_general": (
        lambda x, y, **o: lax.dot_general(x, y, (((2,), (1,)), ((0,), (0,))), **o),
        P("a"),
        (given(floats(4, 8, 16), "a", None, "b"), given(floats(4, 16, 4), "a", "b")),
    ),
    "lax.empty": (lambda **o: lax.empty((8, 4), jnp.float32, **o) * 0, SPLIT, ()),
    "lax.ragged_dot": (
        lambda x, y, n, **o: lax.ragged_dot(x, y, n, **o),
        P(),
        (given(floats(8, 4)), given(floats(2, 4, 4)), given(np.array([3, 5], np.int32))),
    ),
    "lax.ragged_dot_general": (
        lambda x, y, n, **o: lax.ragged_dot_general(x, y, n, RAGGED, **o),
        P(),
        (given(floats(8, 4)), given(floats(2, 4, 4)), given(np.array([3, 5], np.int32))),
    ),
    "lax.reduce": (
        lambda x, **o: lax.reduce(x, np.float32(0), lax.add, (0,), **o),
        P(None, unreduced={"a"}),
        (given(floats(8, 4), "a"),),
    ),
    "lax.reduce_max": (lambda x, **o: lax.reduce_max(x, (0,), **o), P("b"), (given(floats(8, 4), "a", "b"),)),
    "lax.reduce_min": (lambda x, **o: lax.reduce_min(x, (0,), **o), P("b"), (given(floats(8, 4), "a", "b"),)),
    "lax.reduce_sum": (
        lambda x, **o: lax.reduce_sum(x, (0,), **o),
        P(None, unreduced={"a"}),
        (given(floats(8, 4), "a"),),
    ),
    "lax.reshape": (lambda x, **o: lax.reshape(x, (4, 8), **o), SPLIT, (given(floats(8, 4), "b"),)),
    "lax.rng_bit_generator": (
        lambda key, **o: lax.rng_bit_generator(key, (8, 4), **o)[1],
        SPLIT,
        (given(np.arange(4, dtype=np.uint32)),),
    ),
    **{f"ops.segment_{kind}": segmented(kind) for kind in ("max", "min", "prod", "sum")},
    "initializers.ones": (lambda **o: jax.nn.initializers.ones(KEY, (8, 4), **o), SPLIT, ()),
    "initializers.zeros": (lambda **o: jax.nn.initializers.zeros(KEY, (8, 4), **o), SPLIT, ()),
}

DRAWN: dict[str, tuple[Any, ...]] = {
    "bernoulli": (0.3, (8, 4)),
    "beta": (2.0, 3.0, (8, 4)),
    "bits": ((8, 4),),
    "cauchy": ((8, 4),),
    "chisquare": (3.0, (8, 4)),
    "exponential": ((8, 4),),
    "f": (3.0, 4.0, (8, 4)),
    "gamma": (2.0, (8, 4)),
    "generalized_normal": (2.0, (8, 4)),
    "geometric": (0.3, (8, 4)),
    "gumbel": ((8, 4),),
    "laplace": ((8, 4),),
    "loggamma": (2.0, (8, 4)),
    "logistic": ((8, 4),),
    "lognormal": (1.0, (8, 4)),
    "maxwell": ((8, 4),),
    "normal": ((8, 4),),
    "pareto": (2.0, (8, 4)),
    "poisson": (3.0, (8, 4)),
    "rademacher": ((8, 4),),
    "randint": ((8, 4), 0, 10),
    "rayleigh": (1.0, (8, 4)),
    "t": (3.0, (8, 4)),
    "triangular": (0.0, 0.5, 1.0, (8, 4)),
    "truncated_normal": (-1.0, 1.0, (8, 4)),
    "uniform": ((8, 4),),
    "wald": (1.0, (8, 4)),
    "ball": (4, 2, (8,)),
    "categorical": (np.zeros((8, 4, 5), np.float32), -1),
    "dirichlet": (np.ones(4, np.float32), (8,)),
    "multivariate_normal": (np.zeros(4, np.float32), np.eye(4, dtype=np.float32), (8,)),
    "orthogonal": (4, (8,)),
    "permutation": (floats(8, 4),),
}
"""The functions of `jax.random`, with what follows the key."""


def drawn(name: str) -> tuple[Callable[..., Any], P, tuple[Any, ...]]:
    # What is made of matrices, or drawn in whole rows, may be split over leading dimensions only.
    spec = P("a") if name in ("ball", "dirichlet", "multivariate_normal", "orthogonal") else SPLIT
    return lambda **o: getattr(jax.random, name)(KEY, *DRAWN[name], **o), spec, ()


CALLS |= {f"random.{name}": drawn(name) for name in DRAWN}


def taking_out_sharding() -> list[str]:
    """The functions of this version of jax that have the parameter."""
    found = []
    for name, module in MODULES.items():
        for each in dir(module):
            try:
                parameters = inspect.signature(getattr(module, each)).parameters
            except (TypeError, ValueError):
                continue
            found += [f"{name}.{each}"] if "out_sharding" in parameters else []
    return found


@pytest.mark.dear(cases=24)
@pytest.mark.parametrize("name", taking_out_sharding())
def test_results_lie_as_out_sharding_says(name: str) -> None:
    call, spec, arguments = CALLS[name]

    def row(jit: Callable[..., Any]) -> Any:
        result = jit(lambda *args: call(*args, out_sharding=spec))(*(on(x, *entries) for x, entries in arguments))
        assert jax.typeof(result).sharding.spec.unreduced == spec.unreduced
        return jax.sharding.reshard(result, P()) if spec.unreduced else result

    assert_as_jit(row, (2, 4), ("a", "b"), (AxisType.Explicit,) * 2)
