"""Results without elements: read as any other, in blocks of the sharding that they have."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy

MESH = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
SPECS = (None, P(), P("x"), P(("y", "x")), P("x", "y"), P(None, "x"), P(None, "x", "y"), P(None, None, "y"))
OPS = {
    "cholesky": jnp.linalg.cholesky,
    "determinant": lambda x: jnp.linalg.det(x)[:, None, None],
    "add": lambda x: x + 1,
    "transpose": lambda x: x.swapaxes(1, 2),
    "reverse": lambda x: x[::-1],
    "product": lambda x: jnp.einsum("bij,bjk->bik", x, x),
    "sum": lambda x: x.sum(0, keepdims=True) + x,
    "sort": lambda x: jnp.sort(x, 0),
    "concatenate": lambda x: jnp.concatenate([x, x]),
    "gather": lambda x: x[jnp.arange(x.shape[0])],
    "cumulative sum": lambda x: jnp.cumsum(x, 0),
    "scan": lambda x: jax.lax.scan(lambda c, r: (c, r * 2), 0.0, x)[1],
    "random": lambda x: jax.random.normal(jax.random.key(0), x.shape) + x,
    "pair": lambda x: (x, {"whole": jnp.ones(8), "empty": x.astype(bool)}),
}


@pytest.mark.dear(cases=14)
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("shape", [(16, 0, 0), (0, 8, 8), (1000, 0, 0)], ids=str)
def test_results_can_be_read_wherever_they_lie(name: str, shape: tuple[int, ...]) -> None:
    x, plain = jnp.zeros(shape), jax.jit(OPS[name])
    pairs = [(SPECS[i], SPECS[(i * 3 + 1) % len(SPECS)]) for i in range(len(SPECS))]
    for given, made in pairs if name in ("cholesky", "add", "pair") else pairs[::3]:
        spec = {"whole": None, "empty": made} if name == "pair" else made
        stated = (made, spec) if name == "pair" else made
        run = sdy.partition(OPS[name], mesh=MESH, in_shardings=given, out_shardings=stated, on_unknown="ignore")
        for _ in range(2):  # the second call is not planned
            found = run(x)
            jax.tree.map(np.testing.assert_array_equal, found, plain(x))
            leaves = [leaf for leaf in jax.tree.leaves(found) if not leaf.size]
            assert all(
                {s.data.shape for s in y.addressable_shards} == {y.sharding.shard_shape(y.shape)} for y in leaves
            )
            if made is not None:
                named = jax.sharding.NamedSharding(MESH, made)
                assert all(y.sharding.is_equivalent_to(named, y.ndim) for y in leaves)


def test_they_are_arguments_of_the_next_call() -> None:
    def double(x: Any) -> Any:
        return x * 2

    run = sdy.partition(double, mesh=MESH, in_shardings=P("x"), out_shardings=P("x"), donate_argnums=0)
    x = jnp.zeros((16, 0))
    for _ in range(3):
        x = run(x)
    assert np.asarray(x).shape == (16, 0)
