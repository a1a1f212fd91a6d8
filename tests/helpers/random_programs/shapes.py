"""Random ops that map elements one by one, or only move them."""

from __future__ import annotations

import math
import random

from random_programs.tensors import Case, Shape, Tensor, family, i64s
from sdy_jax.ir.meshes import primes
from sdy_jax.shardy.rules.registry import names

UNARY = names(
    "stablehlo",
    "abs cbrt ceil cosine exponential exponential_minus_one floor log log_plus_one logistic negate round_nearest_even "
    "round_nearest_afz rsqrt sign sine sqrt tan tanh",
)
BINARY = names("stablehlo", "add atan2 divide maximum minimum multiply power remainder subtract")
INTEGER = names("stablehlo", "and or xor shift_left shift_right_arithmetic shift_right_logical")
LOGICAL = names("stablehlo", "and or xor")
LESS = "comparison_direction = #stablehlo<comparison_direction LT>"


@family
def elementwise(rng: random.Random, x: Tensor) -> Case | None:
    kinds = {"f32": _of_floats, "i1": _of_booleans, "complex<f32>": _of_complex}
    return kinds.get(x.dtype, _of_integers)(rng, x)


def _of_floats(rng: random.Random, f: Tensor) -> Case:
    b, scalar = f.of("i1"), Tensor(())
    return rng.choice(
        [
            *[Case(rng.choice(UNARY), [f], [f])] * 4,
            *[Case(rng.choice(BINARY), [f, f], [f])] * 4,
            Case("stablehlo.is_finite", [f], [b]),
            Case("stablehlo.convert", [f], [f.of("i32")]),
            Case("stablehlo.complex", [f, f], [f.of("complex<f32>")]),
            Case("stablehlo.compare", [f, f], [b], LESS),
            Case("stablehlo.reduce_precision", [f], [f], "exponent_bits = 5 : i32, mantissa_bits = 10 : i32"),
            Case("stablehlo.select", [b, f, f], [f]),
            Case("stablehlo.select", [Tensor((), "i1"), f, f], [f]),
            Case("stablehlo.clamp", [f, f, f], [f]),
            Case("stablehlo.clamp", [scalar, f, scalar], [f]),
        ]
    )


def _of_integers(rng: random.Random, i: Tensor) -> Case:
    return rng.choice(
        [
            Case(rng.choice(INTEGER), [i, i], [i]),
            Case(f"stablehlo.{rng.choice(('not', 'popcnt', 'count_leading_zeros'))}", [i], [i]),
            Case("stablehlo.convert", [i], [i.of("f32")]),
            Case("stablehlo.compare", [i, i], [i.of("i1")], LESS),
        ]
    )


def _of_booleans(rng: random.Random, b: Tensor) -> Case:
    f = b.of("f32")
    return rng.choice(
        [
            Case("stablehlo.not", [b], [b]),
            Case(rng.choice(LOGICAL), [b, b], [b]),
            Case("stablehlo.select", [b, f, f], [f]),
        ]
    )


def _of_complex(rng: random.Random, c: Tensor) -> Case:
    name = rng.choice(names("stablehlo", "real imag abs add multiply"))
    binary = name in ("stablehlo.add", "stablehlo.multiply")
    return Case(name, [c, c] if binary else [c], [c if binary else c.of("f32")])


@family
def bitcast_convert(rng: random.Random, x: Tensor) -> Case | None:
    if x.dtype not in ("f32", "i32"):
        return None
    halves = Tensor((*x.shape, 2), "i16")
    other = x.of("i32" if x.dtype == "f32" else "f32")
    operand, result = rng.choice([(x, other), (x, halves), (halves, x)])
    return Case("stablehlo.bitcast_convert", [operand], [result])


@family
def transpose(rng: random.Random, x: Tensor) -> Case | None:
    order = rng.sample(range(x.rank), x.rank)
    result = Tensor(tuple(x.shape[d] for d in order), x.dtype)
    return Case("stablehlo.transpose", [x], [result], f"permutation = {i64s(order)}")


@family
def broadcast_in_dim(rng: random.Random, x: Tensor) -> Case | None:
    rank = rng.randint(x.rank, min(x.rank + 2, 4)) if x.rank <= 4 else x.rank
    dims = rng.sample(range(rank), x.rank)
    shape = [rng.choice((2, 3, 4, 6, 8)) for _ in range(rank)]
    for source, to in enumerate(dims):
        if x.shape[source] != 1 or rng.random() < 0.3:
            shape[to] = x.shape[source]
    result = Tensor(tuple(shape), x.dtype)
    return Case("stablehlo.broadcast_in_dim", [x], [result], f"broadcast_dimensions = {i64s(dims)}")


def regrouped(rng: random.Random, shape: Shape) -> Shape:
    """As many elements in other dimensions."""
    if 0 in shape:
        return rng.choice([(0,), (0, 3), shape])
    result = [1] * rng.randint(1, 4)
    for p in primes(math.prod(shape)):
        result[rng.randrange(len(result))] *= p
    return tuple(result) if math.prod(shape) > 1 else rng.choice([(), (1,), (1, 1)])


def aligned(rng: random.Random, shape: Shape) -> Shape:
    """One dimension split in two, or two neighbours joined."""
    if len(shape) > 1 and rng.random() < 0.5:
        at = rng.randrange(len(shape) - 1)
        return (*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :])
    at = rng.randrange(len(shape)) if shape else 0
    if not shape or shape[at] < 2:
        return shape
    major = rng.choice([d for d in range(2, shape[at] + 1) if shape[at] % d == 0])
    return (*shape[:at], major, shape[at] // major, *shape[at + 1 :])


@family
def reshape(rng: random.Random, x: Tensor) -> Case | None:
    return Case("stablehlo.reshape", [x], [Tensor(regrouped(rng, x.shape), x.dtype)])


@family
def aligned_reshape(rng: random.Random, x: Tensor) -> Case | None:
    return Case("stablehlo.reshape", [x], [Tensor(aligned(rng, x.shape), x.dtype)])


@family
def slice_(rng: random.Random, x: Tensor) -> Case | None:
    if 0 in x.shape:
        return None
    start = [rng.randint(0, n - 1) if rng.random() < 0.4 else 0 for n in x.shape]
    limit = [rng.randint(s + 1, n) if rng.random() < 0.4 else n for s, n in zip(start, x.shape, strict=True)]
    strides = [rng.choice((1, 1, 1, 2, 3)) for _ in x.shape]
    out = tuple(-((a - b) // s) for a, b, s in zip(start, limit, strides, strict=True))
    attributes = f"start_indices = {i64s(start)}, limit_indices = {i64s(limit)}, strides = {i64s(strides)}"
    return Case("stablehlo.slice", [x], [Tensor(out, x.dtype)], attributes)


@family
def pad(rng: random.Random, x: Tensor) -> Case | None:
    low = [rng.choice((0, 0, 1, n, -(n // 3))) for n in x.shape]
    high = [rng.choice((0, 0, 2, -a, -(n // 4))) for n, a in zip(x.shape, low, strict=True)]
    between = [rng.choice((0, 0, 1, 2)) for _ in x.shape]
    out = tuple(n + a + b + max(n - 1, 0) * c for n, a, b, c in zip(x.shape, low, high, between, strict=True))
    if any(n < 0 for n in out):
        return None
    attributes = f"edge_padding_low = {i64s(low)}, edge_padding_high = {i64s(high)}, interior_padding = {i64s(between)}"
    return Case("stablehlo.pad", [x, Tensor((), x.dtype)], [Tensor(out, x.dtype)], attributes)


@family
def concatenate(rng: random.Random, x: Tensor) -> Case | None:
    if not x.rank:
        return None
    dim = rng.randrange(x.rank)
    others = [rng.choice((x.shape[dim], rng.randint(1, 4))) for _ in range(rng.randint(0, 2))]
    sizes = [x.shape[dim], *others]
    rng.shuffle(sizes)

    def with_size(n: int) -> Tensor:
        return Tensor((*x.shape[:dim], n, *x.shape[dim + 1 :]), x.dtype)

    operands, result = [with_size(n) for n in sizes], with_size(sum(sizes))
    return Case("stablehlo.concatenate", operands, [result], f"dimension = {dim} : i64")


@family
def reverse(rng: random.Random, x: Tensor) -> Case | None:
    dims = rng.sample(range(x.rank), rng.randint(0, x.rank))
    return Case("stablehlo.reverse", [x], [x], f"dimensions = {i64s(dims)}")
