"""Random ops that combine many elements: products, reductions, windows, transforms, decompositions."""

from __future__ import annotations

import random
from collections.abc import Sequence

from random_programs.tensors import (
    Case,
    Pairs,
    Shape,
    Tensor,
    comparator,
    family,
    i64s,
    ints,
    pairs,
    reducer,
    reductions,
    some_shape,
)


@family
def dot(rng: random.Random, x: Tensor) -> Case | None:
    if x.rank not in (1, 2) or x.dtype != "f32":
        return None
    rhs = (x.shape[-1], *some_shape(rng, 0, 1))
    return Case("stablehlo.dot", [x, Tensor(rhs)], [Tensor(x.shape[:-1] + rhs[1:])])


@family
def dot_general(rng: random.Random, x: Tensor) -> Case | None:
    if x.dtype != "f32" or x.rank > 4:
        return None
    dims = rng.sample(range(x.rank), x.rank)
    left_batch, dims = dims[: (cut := rng.choice((0, 0, 1, 2)))], dims[cut:]
    left_contracted = dims[: rng.choice((0, 1, 1, 1, 2))]
    shared = [x.shape[d] for d in left_batch + left_contracted]
    sizes = [*shared, *some_shape(rng, 0, 2)]
    order = rng.sample(range(len(sizes)), len(sizes))
    place = [order.index(i) for i in range(len(sizes))]
    rhs = tuple(sizes[o] for o in order)
    right_batch, right_contracted = place[: len(left_batch)], place[len(left_batch) : len(shared)]
    out = [x.shape[d] for d in left_batch]
    out += [n for d, n in enumerate(x.shape) if d not in left_batch + left_contracted]
    out += [n for d, n in enumerate(rhs) if d not in right_batch + right_contracted]
    numbers = (
        f"dot_dimension_numbers = #stablehlo.dot<lhs_batching_dimensions = {ints(left_batch)}, "
        f"rhs_batching_dimensions = {ints(right_batch)}, lhs_contracting_dimensions = {ints(left_contracted)}, "
        f"rhs_contracting_dimensions = {ints(right_contracted)}>"
    )
    return Case("stablehlo.dot_general", [x, Tensor(rhs)], [Tensor(tuple(out))], numbers)


@family
def convolution(rng: random.Random, x: Tensor) -> Case | None:
    if x.dtype != "f32" or not 2 <= x.rank <= 4 or 0 in x.shape:
        return None
    batch_at, feature_at, *space_at = rng.sample(range(x.rank), x.rank)
    batch, features = x.shape[batch_at], x.shape[feature_at]
    inside = [x.shape[d] for d in space_at]
    groups = [(g, 1) for g in (2, 3, 4) if features % g == 0] + [(1, g) for g in (2, 3, 4) if batch % g == 0]
    feature_groups, batch_groups = rng.choice([(1, 1)] * 2 + groups)
    per_group, outs = features // feature_groups, rng.choice((1, 2, 3)) * feature_groups * batch_groups
    kernel = [rng.randint(1, n) for n in inside]
    strides, base, spread = ([rng.choice((1, 1, 2, 3)) for _ in inside] for _ in range(3))
    padding = [rng.choice([(0, 0), (1, 1), (0, 2), (-1, 3), (5, 0)]) for _ in inside]
    out = windowed(inside, kernel, strides, padding, base, spread)
    if 0 in out:
        return None

    def placed(sizes: list[int]) -> tuple[Shape, list[int]]:
        """`sizes` (two special ones, then space) in random places; the place of each."""
        order = rng.sample(range(len(sizes)), len(sizes))
        return tuple(sizes[o] for o in order), [order.index(i) for i in range(len(sizes))]

    rhs, at_rhs = placed([per_group, outs, *kernel])
    result, at_out = placed([batch // batch_groups, outs, *out])

    def labels(at: list[int], special: str) -> str:
        text = [""] * len(at)
        for i, place in enumerate(at):
            text[place] = special[i] if i < 2 else str(i - 2)
        return f"[{', '.join(text)}]"

    at_lhs = [batch_at, feature_at, *space_at]
    numbers = f"#stablehlo.conv<{labels(at_lhs, 'bf')}x{labels(at_rhs, 'io')}->{labels(at_out, 'bf')}>"
    attributes = (
        f"dimension_numbers = {numbers}, feature_group_count = {feature_groups} : i64, "
        f"batch_group_count = {batch_groups} : i64, window_strides = {i64s(strides)}, padding = {pairs(padding)}, "
        f"lhs_dilation = {i64s(base)}, rhs_dilation = {i64s(spread)}"
    )
    return Case("stablehlo.convolution", [x, Tensor(rhs)], [Tensor(result)], attributes)


@family
def reduce(rng: random.Random, x: Tensor) -> Case | None:
    if not x.rank:
        return None
    count, (op, start) = rng.choice((1, 1, 2)), rng.choice(reductions(x.dtype))
    dims = sorted(rng.sample(range(x.rank), rng.choice((0, 1, 1, 1, x.rank))))
    kept = Tensor(tuple(n for d, n in enumerate(x.shape) if d not in dims), x.dtype)
    operands = [x] * count + [Tensor((), x.dtype)] * count
    region = reducer(op, count, x.dtype)
    return Case("stablehlo.reduce", operands, [kept] * count, f"dimensions = {i64s(dims)}", region, [start] * count)


def windowed(
    sizes: Sequence[int],
    window: Sequence[int],
    strides: Sequence[int],
    padding: Pairs,
    base: Sequence[int],
    spread: Sequence[int],
) -> Shape:
    """How many windows there are in each dimension."""
    dims = zip(sizes, window, strides, padding, base, spread, strict=True)
    lengths = [((n - 1) * b + 1, (w - 1) * d + 1, s, p) for n, w, s, p, b, d in dims]
    return tuple(
        max((n + a + b - w) // s + 1, 0) if n + min(a, 0) + min(b, 0) > 0 else 0 for n, w, s, (a, b) in lengths
    )


def some_windows(rng: random.Random, x: Shape, dilations: bool = True) -> tuple[str, Shape]:
    """The attributes of a windowed op, and the shape of what it gives."""
    sizes = [rng.choice((1, 1, min(2, n), n)) for n in x]
    if rng.random() < 0.3:
        return f"window_dimensions = {i64s(sizes)}", tuple(n - w + 1 for n, w in zip(x, sizes, strict=True))
    strides = [rng.choice((1, 1, 2, 3)) for _ in x]
    padding = [rng.choice([(0, 0), (0, 0), (1, 0), (1, 1)]) for _ in x]
    attributes = f"window_dimensions = {i64s(sizes)}, window_strides = {i64s(strides)}, padding = {pairs(padding)}"
    base = spread = [1] * len(x)
    if dilations and rng.random() < 0.3:
        base, spread = ([rng.choice((1, 1, 2)) for _ in x] for _ in range(2))
        attributes += f", base_dilations = {i64s(base)}, window_dilations = {i64s(spread)}"
    return attributes, windowed(x, sizes, strides, padding, base, spread)


@family
def reduce_window(rng: random.Random, x: Tensor) -> Case | None:
    if not x.rank or 0 in x.shape:
        return None
    count, (op, start) = rng.choice((1, 1, 2)), rng.choice(reductions(x.dtype))
    attributes, out = some_windows(rng, x.shape)
    if 0 in out:
        return None
    operands, results = [x] * count + [Tensor((), x.dtype)] * count, [Tensor(out, x.dtype)] * count
    region = reducer(op, count, x.dtype)
    return Case("stablehlo.reduce_window", operands, results, attributes, region, [start] * count)


@family
def select_and_scatter(rng: random.Random, x: Tensor) -> Case | None:
    if not x.rank or 0 in x.shape or x.dtype != "f32":
        return None
    attributes, out = some_windows(rng, x.shape, dilations=False)
    operands = [x, Tensor(out), Tensor(())]
    return Case("stablehlo.select_and_scatter", operands, [x], attributes, f"{comparator()}, {reducer('add')}", ["0.0"])


@family
def fft(rng: random.Random, x: Tensor) -> Case | None:
    if not x.rank or x.dtype not in ("f32", "complex<f32>") or 0 in x.shape:
        return None
    *batch, n = x.shape
    kind = rng.choice(("FFT", "IFFT", "IRFFT")) if x.dtype != "f32" else "RFFT"
    result = x
    if kind == "RFFT":
        result = Tensor((*batch, n // 2 + 1), "complex<f32>")
    elif kind == "IRFFT":
        result = Tensor((*batch, max(1, 2 * (n - 1))), "f32")
    count = rng.randint(1, min(3, x.rank))
    lengths = (result if kind == "IRFFT" else x).shape[-count:]
    attributes = f"fft_type = #stablehlo<fft_type {kind}>, fft_length = {i64s(lengths)}"
    return Case("stablehlo.fft", [x], [result], attributes)


@family
def cholesky(rng: random.Random, x: Tensor) -> Case | None:
    if not 1 <= x.rank <= 3 or x.dtype != "f32":
        return None
    square = x if x.rank > 1 and x.shape[-1] == x.shape[-2] else Tensor((*x.shape, x.shape[-1]))
    return Case("stablehlo.cholesky", [square], [square], "lower = true")


@family
def triangular_solve(rng: random.Random, x: Tensor) -> Case | None:
    if x.rank < 2 or x.dtype != "f32":
        return None
    left, transpose = rng.random() < 0.5, rng.choice(("NO_TRANSPOSE", "TRANSPOSE", "ADJOINT"))
    n = x.shape[-2 if left else -1]
    attributes = (
        f"left_side = {str(left).lower()}, lower = true, unit_diagonal = false, "
        f"transpose_a = #stablehlo<transpose {transpose}>"
    )
    return Case("stablehlo.triangular_solve", [Tensor((*x.shape[:-2], n, n)), x], [x], attributes)


@family
def rng_bit_generator(rng: random.Random, x: Tensor) -> Case | None:
    state = Tensor((rng.choice((2, 2, 4)),), "ui64") if rng.random() < 0.8 else Tensor((2,), "ui64")
    algorithm = "THREE_FRY" if state.shape == (2,) else "DEFAULT"
    attributes = f"rng_algorithm = #stablehlo<rng_algorithm {algorithm}>"
    return Case("stablehlo.rng_bit_generator", [state], [state, x.of("ui32")], attributes)


@family
def batch_norm_inference(rng: random.Random, x: Tensor) -> Case | None:
    if not x.rank or x.dtype != "f32":
        return None
    feature = rng.randrange(x.rank)
    attributes = f"epsilon = 1.0e-3 : f32, feature_index = {feature} : i64"
    operands = [x] + [Tensor((x.shape[feature],))] * 4
    return Case("stablehlo.batch_norm_inference", operands, [x], attributes)
