"""Ops whose inside is the user's or a library's, for random programs: notes to the host, custom ops, functions with a
partitioning of their own, approximate searches, matrices that are factored in blocks.

Callbacks that return something are left out: with fewer cores than devices XLA for CPUs often waits for them forever,
in programs of `jax.jit` as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from random_functions import OPS, SHARDINGS, positive, split

import sdy_jax as sdy

_LARGE = 96
"""Rows of a matrix of doubles that is large enough to be factored in blocks."""


def _noted(x: jax.Array) -> jax.Array:
    jax.debug.callback(lambda x: None, x)
    jax.debug.inspect_array_sharding(x, callback=lambda sharding: None)
    return x * 2


def _scaled(x: jax.Array, y: jax.Array) -> jax.Array:
    rule = f"([i, j], [i, j])->([i, j]) {{i={len(x)}, j={x.shape[1]}}}"
    return sdy.custom_op(lambda x, y: jnp.sin(x) * y, rule)(x, y)


def _product(x: jax.Array, y: jax.Array) -> jax.Array:
    """Reductions that do not divide stay whole, or are filled up."""
    n, m, k = len(x), y.shape[1], x.shape[1]
    rule = f"([i, k], [k, j])->([i, j]) {{i={n}, j={m}, k={k}}} reduction={{k}}"
    return sdy.custom_op(lambda x, y: x @ y, rule, padding=0.0 if n % 2 else None)(x, y) / n


def _centred(x: jax.Array) -> jax.Array:
    rule = f"([i, j])->([i, j]) {{i={len(x)}, j={x.shape[1]}}} need_replication={{j}}"
    return sdy.custom_op(lambda x: x - x.mean(1, keepdims=True), rule)(x)


def _axes(entry: Any) -> tuple[str, ...]:
    return entry if isinstance(entry, tuple) else (entry,) if entry else ()


def _summing(mesh: Any, operands: Any, result: Any) -> Any:
    """Takes operands that are split along what is summed up."""
    taken = tuple(operand.sharding for operand in operands)
    rows, summed = (*taken[0].spec, None, None)[:2]
    columns = (*taken[1].spec, None, None)[1]

    def run(x: jax.Array, y: jax.Array) -> jax.Array:
        return lax.psum(x @ y, _axes(summed)) if summed else x @ y

    wanted = NamedSharding(mesh, P(rows, summed)), NamedSharding(mesh, P(summed, columns))
    return mesh, run, NamedSharding(mesh, P(rows, columns)), wanted


def _own_product(x: jax.Array, y: jax.Array) -> jax.Array:
    op = custom_partitioning(lambda x, y: x @ y)
    op.def_partition(_summing, sharding_rule="i k, k j -> i j", reduction_factors=("k",))
    return op(*lax.stop_gradient((x, y))) / len(x)


def _own_rows(x: jax.Array) -> jax.Array:
    def partition(mesh: Any, operands: Any, result: Any) -> Any:
        rows = NamedSharding(mesh, P(*operands[0].sharding.spec[:1]))
        return mesh, lambda x: jnp.cumsum(x, 1), rows, (rows,)

    op = custom_partitioning(lambda x: jnp.cumsum(x, 1))
    op.def_partition(partition, sharding_rule="i j -> i j", need_replication_factors=("j",))
    return op(lax.stop_gradient(x)) / len(x)


def _nearest(x: jax.Array, dim: int, whole: bool) -> jax.Array:
    """The candidates of a search come in no order."""
    k = max(1, x.shape[dim] // 2)
    values, _ = lax.approx_max_k(x, k, reduction_dimension=dim, aggregate_to_topk=whole, recall_target=1.0)
    return x + jnp.sort(values, dim)[:1, :1]


def _tiled(x: jax.Array, dim: int) -> jax.Array:
    """A large matrix, split along its rows or columns."""
    repeats = [-(-_LARGE // n) for n in x.shape]
    large, mesh = jnp.tile(x, repeats)[:_LARGE, :_LARGE], SHARDINGS.get()
    spec = P(mesh.axis_names) if mesh is not None and not dim else P(None, mesh and mesh.axis_names)
    return split(large, mesh and NamedSharding(mesh, spec))


def _factored(x: jax.Array, dim: int) -> jax.Array:
    large = positive(_tiled(x, dim))
    factor = lax.linalg.cholesky(split(large, _rows_of(dim)))
    return x + factor[: len(x), : x.shape[1]]


def _rows_of(dim: int) -> NamedSharding | None:
    mesh = SHARDINGS.get()
    return mesh and NamedSharding(mesh, P(mesh.axis_names) if not dim else P(mesh.axis_names[0]))


def _solved(x: jax.Array, y: jax.Array, dim: int) -> jax.Array:
    system = split(jnp.tril(_tiled(x, dim)) / _LARGE + jnp.eye(_LARGE), _rows_of(dim))
    found = lax.linalg.triangular_solve(system, _tiled(y, dim), left_side=True, lower=True)
    return found[: len(x), : x.shape[1]]


OPAQUE: list[Callable[[jax.Array, jax.Array, int], jax.Array]] = [
    lambda a, b, d: _noted(a),
    lambda a, b, d: _scaled(a, b),
    lambda a, b, d: _product(a, b),
    lambda a, b, d: _centred(a),
    lambda a, b, d: _own_product(a, b),
    lambda a, b, d: _own_rows(a),
    lambda a, b, d: _nearest(a, d, True),
    lambda a, b, d: _nearest(a, d, False),
    lambda a, b, d: _factored(a, d),
    lambda a, b, d: _solved(a, b, d),
    *OPS[:8],
]
"""Each of two matrices and a dimension; some that are not opaque stand between."""
