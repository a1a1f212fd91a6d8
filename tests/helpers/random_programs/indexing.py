"""Random ops that take and put elements at computed places."""

from __future__ import annotations

import random
from dataclasses import dataclass

from random_programs.tensors import Case, Shape, Tensor, adder, family, i64s, ints, reducer, some_shape


@family
def dynamic_slice(rng: random.Random, x: Tensor) -> Case | None:
    out = tuple(rng.choice((n, rng.randint(min(n, 1), n))) for n in x.shape)
    operands = [x] + [Tensor((), "i32")] * x.rank
    return Case("stablehlo.dynamic_slice", operands, [Tensor(out, x.dtype)], f"slice_sizes = {i64s(out)}")


@family
def dynamic_update_slice(rng: random.Random, x: Tensor) -> Case | None:
    update = tuple(rng.choice((n, rng.randint(min(n, 1), n))) for n in x.shape)
    operands = [x, Tensor(update, x.dtype)] + [Tensor((), "i32")] * x.rank
    return Case("stablehlo.dynamic_update_slice", operands, [x])


@dataclass
class Indexing:
    """Random dimension numbers that gather and scatter share."""

    indices: Shape
    slices: Shape
    offset: list[int]
    collapsed: list[int]
    input_batching: list[int]
    indices_batching: list[int]
    index_map: list[int]
    index_vector: int
    sizes: list[int]


def some_indexing(rng: random.Random, inputs: Shape) -> Indexing:
    dims = rng.sample(range(len(inputs)), len(inputs))
    batching = sorted(dims[: rng.choice((0, 0, 1, 2))])
    rest = [d for d in dims if d not in batching]
    collapsed = sorted(rest[: rng.randint(0, len(rest))])
    windows = [d for d in range(len(inputs)) if d not in batching + collapsed]
    sizes = [1 if d in batching + collapsed else rng.choice((n, rng.randint(1, n))) for d, n in enumerate(inputs)]
    index_map = rng.sample(rest, rng.randint(0, len(rest)))

    batches: list[tuple[int, int | None]] = [(n, None) for n in some_shape(rng, 0, 2)]
    batches += [(inputs[d], d) for d in batching]
    rng.shuffle(batches)
    index_vector = rng.randint(0, len(batches))
    shape = [n for n, _ in batches]
    implicit = index_vector == len(batches) and len(index_map) == 1 and rng.random() < 0.5
    indices = tuple(shape if implicit else [*shape[:index_vector], len(index_map), *shape[index_vector:]])
    place = {d: at if at < index_vector else at + 1 for at, (_, d) in enumerate(batches) if d is not None}

    rank = len(batches) + len(windows)
    offset = sorted(rng.sample(range(rank), len(windows)))
    window_sizes, batch_sizes = iter([sizes[d] for d in windows]), iter(shape)
    slices = tuple(next(window_sizes) if d in offset else next(batch_sizes) for d in range(rank))
    indices_batching = [place[d] for d in batching]
    return Indexing(indices, slices, offset, collapsed, batching, indices_batching, index_map, index_vector, sizes)


@family
def gather(rng: random.Random, x: Tensor) -> Case | None:
    if not x.rank or 0 in x.shape:
        return None
    i = some_indexing(rng, x.shape)
    numbers = (
        f"#stablehlo.gather<offset_dims = {ints(i.offset)}, collapsed_slice_dims = {ints(i.collapsed)}, "
        f"operand_batching_dims = {ints(i.input_batching)}, start_indices_batching_dims = {ints(i.indices_batching)}, "
        f"start_index_map = {ints(i.index_map)}, index_vector_dim = {i.index_vector}>"
    )
    attributes = f"dimension_numbers = {numbers}, slice_sizes = {i64s(i.sizes)}, indices_are_sorted = false"
    return Case("stablehlo.gather", [x, Tensor(i.indices, "i32")], [Tensor(i.slices, x.dtype)], attributes)


@family
def take_along_axis(rng: random.Random, x: Tensor) -> Case | None:
    """Elements along one dimension, at other indices for every place in the others."""
    if not 1 <= x.rank <= 4 or 0 in x.shape:
        return None
    axis = rng.randrange(x.rank)
    others = [d for d in range(x.rank) if d != axis]
    out = Tensor((*x.shape[:axis], rng.choice((1, 3, x.shape[axis])), *x.shape[axis + 1 :]), x.dtype)
    numbers = (
        f"#stablehlo.gather<collapsed_slice_dims = [{axis}], operand_batching_dims = {ints(others)}, "
        f"start_indices_batching_dims = {ints(others)}, start_index_map = [{axis}], index_vector_dim = {x.rank}>"
    )
    attributes = f"dimension_numbers = {numbers}, slice_sizes = {i64s([1] * x.rank)}, indices_are_sorted = false"
    return Case("stablehlo.gather", [x, Tensor((*out.shape, 1), "i32")], [out], attributes)


def overwrite(dtype: str) -> str:
    """A region that keeps the second of two values."""
    return f"{{\n^bb0(%x: tensor<{dtype}>, %y: tensor<{dtype}>):\n  stablehlo.return %y : tensor<{dtype}>\n}}"


def doubling(dtype: str) -> str:
    """A region that combines one of two values with itself: no reduction."""
    op = adder(dtype)
    return (
        f"{{\n^bb0(%x: tensor<{dtype}>, %y: tensor<{dtype}>):\n  %s = stablehlo.{op} %y, %y : tensor<{dtype}>\n"
        f"  stablehlo.return %s : tensor<{dtype}>\n}}"
    )


COMBINERS = {
    "f32": ("add", "multiply", "maximum", "minimum", "subtract"),
    "i32": ("add", "or", "minimum", "maximum"),
    "i1": ("or", "and", "xor"),
}


@family
def scatter(rng: random.Random, x: Tensor) -> Case | None:
    if not x.rank or 0 in x.shape:
        return None
    i, count = some_indexing(rng, x.shape), rng.choice((1, 1, 1, 2))
    numbers = (
        f"#stablehlo.scatter<update_window_dims = {ints(i.offset)}, inserted_window_dims = {ints(i.collapsed)}, "
        f"input_batching_dims = {ints(i.input_batching)}, "
        f"scatter_indices_batching_dims = {ints(i.indices_batching)}, "
        f"scatter_dims_to_operand_dims = {ints(i.index_map)}, index_vector_dim = {i.index_vector}>"
    )
    op = rng.choice(COMBINERS.get(x.dtype, ("add",)))
    regions = [reducer(op, count, x.dtype, rng.random() < 0.5)] * 3
    regions += [overwrite(x.dtype), doubling(x.dtype)] * (count == 1)
    operands = [*[x] * count, Tensor(i.indices, "i32"), *[Tensor(i.slices, x.dtype)] * count]
    return Case(
        "stablehlo.scatter", operands, [x] * count, f"scatter_dimension_numbers = {numbers}", rng.choice(regions)
    )
