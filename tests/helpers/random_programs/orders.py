"""Random ops on elements in an order: sorting, the largest, running totals."""

from __future__ import annotations

import random

from random_programs.tensors import Case, Tensor, comparator, family, i64s, pairs, reducer, reductions


@family
def sort(rng: random.Random, x: Tensor) -> Case | None:
    """The dimension is not negative: such a one Shardy takes for none, and would sort shards."""
    if not x.rank or x.dtype.startswith("complex"):
        return None
    operands = [x, *([x.of("i32")] * rng.choice((0, 0, 1)))]
    attributes = f"dimension = {rng.randrange(x.rank)} : i64, is_stable = true"
    region = comparator([t.dtype for t in operands], rng.choice(("LT", "LT", "GT")))
    return Case("stablehlo.sort", operands, operands, attributes, region)


@family
def top_k(rng: random.Random, x: Tensor) -> Case | None:
    """Among floats equal elements are rare, so that they may come in any order; jaxlib 0.10 reads no such op."""
    if not x.rank or x.dtype not in ("f32", "i32") or not x.shape[-1]:
        return None
    k = rng.randint(1, x.shape[-1])
    values = Tensor((*x.shape[:-1], k), x.dtype)
    order = ", is_stable = false" if x.dtype == "f32" and k % 3 == 1 else ""
    return Case("chlo.top_k", [x], [values, values.of("i32")], f"k = {k} : i64{order}")


@family
def cumulative(rng: random.Random, x: Tensor) -> Case | None:
    """What comes before an element, from the start or from the end, together with it or without."""
    if not x.rank or 0 in x.shape:
        return None
    (op, start), dim = rng.choice(reductions(x.dtype)), rng.randrange(x.rank)
    n = x.shape[dim]
    window = [n if d == dim else 1 for d in range(x.rank)]
    own = rng.choice([(n - 1, 0), (n - 1, 0), (0, n - 1), (n, -1)])
    padding = [own if d == dim else (0, 0) for d in range(x.rank)]
    attributes = f"window_dimensions = {i64s(window)}, padding = {pairs(padding)}"
    operands = [x, Tensor((), x.dtype)]
    return Case("stablehlo.reduce_window", operands, [x], attributes, reducer(op, 1, x.dtype), [start])


_PLACE_OF = """{{
^bb0(%x: tensor<{0}>, %i: tensor<i32>, %y: tensor<{0}>, %j: tensor<i32>):
  %s = stablehlo.compare {1}, %x, %y : (tensor<{0}>, tensor<{0}>) -> tensor<i1>
  %t = stablehlo.compare EQ, %x, %y : (tensor<{0}>, tensor<{0}>) -> tensor<i1>
  %u = stablehlo.compare LT, %i, %j : (tensor<i32>, tensor<i32>) -> tensor<i1>
  %v = stablehlo.and %t, %u : tensor<i1>
  %w = stablehlo.or %s, %v : tensor<i1>
  %z = stablehlo.select %s, %x, %y : (tensor<i1>, tensor<{0}>, tensor<{0}>) -> tensor<{0}>
  %k = stablehlo.select %w, %i, %j : (tensor<i1>, tensor<i32>, tensor<i32>) -> tensor<i32>
  stablehlo.return %z, %k : tensor<{0}>, tensor<i32>
}}"""


@family
def extreme(rng: random.Random, x: Tensor) -> Case | None:
    """The largest or smallest of a dimension, with the integer that goes with it."""
    if not x.rank or x.dtype not in ("f32", "i32"):
        return None
    dim, direction = rng.randrange(x.rank), rng.choice(("GT", "LT"))
    kept = Tensor(x.shape[:dim] + x.shape[dim + 1 :], x.dtype)
    end = {"f32": "1000.0", "i32": "1000"}[x.dtype]
    starts = [f"-{end}" if direction == "GT" else end, "0"]
    operands = [x, x.of("i32"), Tensor((), x.dtype), Tensor((), "i32")]
    region = _PLACE_OF.format(x.dtype, direction)
    return Case("stablehlo.reduce", operands, [kept, kept.of("i32")], f"dimensions = {i64s([dim])}", region, starts)
