"""Random ops with windows over split dimensions: convolutions with both gradients, reduce_window, select_and_scatter.

Numbers are small integers, in floats too, so that sums are exact in any order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from partitioned_ops import LINE, PLANE, op

SPECS: list[tuple[jax.sharding.Mesh, list[Any]]] = [
    (LINE, ["x"]),
    (PLANE, ["x", "y"]),
    (PLANE, [("y", "x")]),
    (PLANE, ["y"]),
]
"""Axes for one dimension, or for two."""


class Program(NamedTuple):
    """`function(split, *arguments)`, where `split(x, *spec)` splits a value over `mesh`."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    mesh: jax.sharding.Mesh
    text: str


def _ints(rng: np.random.Generator, low: int, high: int, rank: int) -> list[int]:
    return [int(n) for n in rng.integers(low, high, rank)]


def _numbers(rng: np.random.Generator, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    return rng.integers(-4, 5, shape).astype(dtype)


def _split_over(rng: np.random.Generator, rank: int) -> tuple[jax.sharding.Mesh, list[Any]]:
    mesh, axes = SPECS[rng.integers(len(SPECS))]
    spec: list[Any] = [None] * rank
    for dim, of_dim in zip(rng.permutation(rank), axes, strict=False):
        spec[dim] = of_dim
    return mesh, spec


def random_convolution(rng: np.random.Generator) -> Program | None:
    """A convolution of any padding, stride, dilations and groups, and its gradients; None for one without results."""
    rank = int(rng.integers(1, 3))
    sizes, window = _ints(rng, 1, 26 if rank == 1 else 14, rank), _ints(rng, 1, 6, rank)
    strides, base, spread = (_ints(rng, 1, 4, rank) for _ in range(3))
    base = [1] * rank if rng.random() < 0.5 else base
    padding = [tuple(_ints(rng, -1, 4, 2)) for _ in range(rank)]
    features, batches = [(1, 1), (1, 1), (2, 1), (1, 2)][rng.integers(4)]
    results = _results(sizes, window, strides, padding, base, spread)
    if min(results) <= 0:
        return None
    numbers = ("NCHW"[: 2 + rank], "OIHW"[: 2 + rank], "NCHW"[: 2 + rank])
    groups = {"feature_group_count": features, "batch_group_count": batches}
    options = {"lhs_dilation": base, "rhs_dilation": spread, "dimension_numbers": numbers, **groups}
    mesh, spec = _split_over(rng, rank)
    outputs = 2 * features * batches

    def function(split: Any, x: Any, kernel: Any, cotangent: Any) -> Any:
        def convolution(x: Any, kernel: Any) -> Any:
            return lax.conv_general_dilated(x, kernel, strides, padding, **options)

        y, pull = jax.vjp(convolution, split(x, None, None, *spec), kernel)
        return y, pull(split(cotangent, None, None, *spec))

    x = _numbers(rng, 2 * batches, 2 * features, *sizes)
    kernel, cotangent = _numbers(rng, outputs, 2, *window), _numbers(rng, 2, outputs, *results)
    return Program(function, (x, kernel, cotangent), mesh, f"{sizes} {window} {strides} {padding} {options} {spec}")


def _results(sizes: Any, window: Any, strides: Any, padding: Any, base: Any, spread: Any) -> list[int]:
    dims = zip(sizes, window, strides, padding, base, spread, strict=True)
    return [
        ((n - 1) * b + 1 + low + high - (k - 1) * d - 1) // s + 1 if (n - 1) * b + 1 + min(low, high, 0) * 2 > 0 else 0
        for n, k, s, (low, high), b, d in dims
    ]


def _some_window(rng: np.random.Generator, rank: int) -> tuple[list[int], list[int], list[int]]:
    sizes, window = _ints(rng, 1, 30 if rank == 1 else 13, rank), _ints(rng, 1, 6, rank)
    return sizes, list(sizes) if rng.random() < 0.2 else window, _ints(rng, 1, 5, rank)


def _larger(old: Any, new: Any) -> Any:
    first = (old[0] > new[0]) | ((old[0] == new[0]) & (old[1] < new[1]))
    return jnp.where(first, old[0], new[0]), jnp.where(first, old[1], new[1])


POOLS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lax.add,
    "max": lax.max,
    "min": lax.min,
    "product": lax.mul,
    "of another form": lambda a, b: a + b * 1,
    "sum from 3": lax.add,
}


def _lowest(dtype: Any) -> Any:
    return -np.inf if dtype == np.float32 else np.iinfo(dtype).min


def _initial(name: str, dtype: Any) -> np.ndarray:
    highest = np.inf if dtype == np.float32 else np.iinfo(dtype).max
    values = {"max": _lowest(dtype), "min": highest, "product": 1, "sum from 3": 3}
    return np.array(values.get(name, 0), dtype)


def random_pool(rng: np.random.Generator) -> Program | None:
    """A reduce_window of any padding, stride and dilations over one or two values; gradients where jax has them."""
    rank = int(rng.integers(1, 3))
    sizes, window, strides = _some_window(rng, rank)
    base, spread = (_ints(rng, 1, 4, rank) if rng.random() < 0.4 else [1] * rank for _ in range(2))
    padding = [tuple(_ints(rng, 0, 4, 2)) if rng.random() < 0.6 else (0, 0) for _ in range(rank)]
    results = _results(sizes, window, strides, padding, base, spread)
    if min(results) <= 0:
        return None
    name, dtype = str(rng.choice([*POOLS, "pairs"])), [np.float32, np.int32][rng.integers(2)]
    mesh, spec = _split_over(rng, rank)
    options = {
        "window_dimensions": (1, *window),
        "window_strides": (1, *strides),
        "padding": [(0, 0), *padding],
        "base_dilation": (1, *base),
        "window_dilation": (1, *spread),
    }

    has_gradient = name == "sum" or (name == "max" and max(*base, *spread) == 1)

    def function(split: Any, x: Any, cotangent: Any) -> Any:
        x = split(x, None, *spec)
        if name == "pairs":
            pairs = (x, lax.broadcasted_iota(np.int32, x.shape, 1))
            return lax.reduce_window(pairs, (_initial("max", dtype), np.int32(2**31 - 1)), _larger, **options)

        def pool(x: Any) -> Any:
            return lax.reduce_window(x, _initial(name, dtype), POOLS[name], **options)

        if not has_gradient or dtype != np.float32:
            return pool(x)
        y, pull = jax.vjp(pool, x)
        return y, pull(split(cotangent, None, *spec))

    arguments = (_numbers(rng, 2, *sizes, dtype=dtype), _numbers(rng, 2, *results))
    return Program(function, arguments, mesh, f"{name} {sizes} {options} {spec}")


SCATTERED = """"stablehlo.select_and_scatter"(%a, %b, %c) <{{padding = dense<{padding}> : tensor<{rank}x2xi64>,
  window_dimensions = array<i64: {window}>, window_strides = array<i64: {strides}>}}> ({{
  ^bb0(%s: tensor<f32>, %t: tensor<f32>):
    %u = stablehlo.compare {direction}, %s, %t : (tensor<f32>, tensor<f32>) -> tensor<i1>
    stablehlo.return %u : tensor<i1>
  }}, {{
  ^bb0(%s: tensor<f32>, %t: tensor<f32>):
    %u = stablehlo.add %s, %t : tensor<f32>
    stablehlo.return %u : tensor<f32>
  }}) : (tensor<{x}>, tensor<{source}>, tensor<f32>) -> tensor<{x}>"""


def random_select_and_scatter(rng: np.random.Generator) -> Program | None:
    """One with padding, which jax writes for TPUs only; ties among the selected values, too."""
    rank = int(rng.integers(1, 3))
    sizes, window, strides = _some_window(rng, rank)
    padding = [tuple(_ints(rng, 0, k, 2)) if rng.random() < 0.6 else (0, 0) for k in window]
    results = _results(sizes, window, strides, padding, [1] * rank, [1] * rank)
    if min(results) <= 0:
        return None
    mesh, spec = _split_over(rng, rank)
    x = _numbers(rng, 2, *sizes) if rng.random() < 0.3 else rng.permutation(2 * math.prod(sizes)).reshape(2, *sizes)
    x, source = x.astype(np.float32), _numbers(rng, 2, *results)
    types = ["x".join([*map(str, a.shape), "f32"]) for a in (x, source)]
    text = SCATTERED.format(
        padding=[[0, 0], *map(list, padding)],
        rank=rank + 1,
        window=", ".join(map(str, [1, *window])),
        strides=", ".join(map(str, [1, *strides])),
        direction=str(rng.choice(["GE", "GT", "LE"])),
        x=types[0],
        source=types[1],
    )
    run = op(text, types[0])

    def function(split: Any, x: Any, source: Any, init: Any) -> Any:
        return run(split(x, None, *spec), split(source, None, *spec), init)

    return Program(function, (x, source, np.float32(rng.integers(0, 2))), mesh, f"{spec} {text}")
