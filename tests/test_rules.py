"""Op sharding rules against the ones that jaxlib's own pass computes for the same ops."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from jax.extend.mlir import ir, passmanager
from jax.interpreters import mlir

from sdy_jax.graph import Graph, Op
from sdy_jax.representation.attributes import rule_from_attribute
from sdy_jax.representation.rule import OpShardingRule
from sdy_jax.rules import RuleBook, dataflow, has_no_rule_silently
from sdy_jax.rules.predicates import is_elementwise
from sdy_jax.rules.registry import RULES

Shape = tuple[int, ...]


@dataclass
class Tensor:
    """A type in a program's text."""

    shape: Shape
    dtype: str = "f32"

    def __str__(self) -> str:
        return f"tensor<{''.join(f'{n}x' for n in self.shape)}{self.dtype}>"


@dataclass
class Case:
    """One op in generic form. `$i` in `attributes` and `region` stand for nothing: they are plain MLIR."""

    name: str
    operands: list[Tensor]
    results: list[Tensor]
    attributes: str = ""
    region: str = ""

    def __str__(self) -> str:
        args = ", ".join(f"%a{i}" for i in range(len(self.operands)))
        region = f" ({self.region})" if self.region else ""
        types = f"({', '.join(map(str, self.operands))}) -> ({', '.join(map(str, self.results))})"
        properties = f" <{{{self.attributes}}}>" if self.attributes else ""
        return f'%r:{len(self.results)} = "{self.name}"({args}){properties}{region} : {types}'


def function_of(case: Case, number: int) -> str:
    args = ", ".join(f"%a{i}: {t}" for i, t in enumerate(case.operands))
    return f"func.func @f{number}({args}) {{\n  {case}\n  return\n}}\n"


def parse(text: str) -> ir.Module:
    with mlir.make_ir_context():
        return ir.Module.parse(text)


def oracle(module: ir.Module, conservative: bool) -> None:
    option = "{conservative-propagation=true}" if conservative else ""
    with module.context:
        pipeline = f"builtin.module(func.func(sdy-populate-op-sharding-rules{option}))"
        passmanager.PassManager.parse(pipeline).run(module.operation)


def rules_of(text: str, conservative: bool = False) -> list[tuple[str, str, str]]:
    """Per op of a module: its text, our rule and the oracle's, as texts, which outlive the modules."""
    module, theirs = parse(text), parse(text)
    oracle(theirs, conservative)
    book, graph = RuleBook(conservative, compat="shardy"), Graph(module.operation)
    found = []
    for op, other in zip(graph.ops, Graph(theirs.operation).ops, strict=True):
        attribute = other.attributes.get("sdy.sharding_rule")
        expected = str(rule_from_attribute(attribute)) if attribute else "none"
        found.append((str(op.mlir), str(book.rule_of(op) or "none"), expected))
    return found


def assert_same_rules(text: str, conservative: bool) -> None:
    for op, ours, theirs in rules_of(text, conservative):
        assert ours == theirs, op


# --- generated ops, one generator per family -------------------------------------------------------------------------

Generator = Callable[[random.Random], Case]
GENERATORS: list[Generator] = []


def generator(function: Generator) -> Generator:
    GENERATORS.append(function)
    return function


def some_shape(rng: random.Random, low: int = 0, high: int = 4) -> Shape:
    return tuple(rng.choice((1, 2, 3, 4, 5, 6, 8)) for _ in range(rng.randint(low, high)))


def i64s(values: object) -> str:
    values = tuple(values)  # type: ignore[arg-type]
    return f"array<i64{': ' if values else ''}{', '.join(map(str, values))}>"


def pairs(values: list[tuple[int, int]]) -> str:
    if not values:
        return "dense<> : tensor<0x2xi64>"
    return f"dense<[{', '.join(f'[{a}, {b}]' for a, b in values)}]> : tensor<{len(values)}x2xi64>"


def ints(values: object) -> str:
    return f"[{', '.join(map(str, values))}]"  # type: ignore[call-overload]


def reducer(op: str, count: int = 1, dtype: str = "f32", swapped: bool = False) -> str:
    """A region that combines its arguments n and n + count."""
    scalar = Tensor((), dtype)
    args = ", ".join(f"%x{i}: {scalar}" for i in range(2 * count))
    order = (lambda a, b: (b, a)) if swapped else (lambda a, b: (a, b))
    lines = [
        f'%s{i} = "stablehlo.{op}"(%x{order(i, i + count)[0]}, %x{order(i, i + count)[1]}) : ({scalar}, {scalar}) -> {scalar}'
        for i in range(count)
    ]
    returned = ", ".join(f"%s{i}" for i in range(count))
    types = ", ".join([str(scalar)] * count)
    return f"{{\n^bb0({args}):\n  " + "\n  ".join(lines) + f"\n  stablehlo.return {returned} : {types}\n}}"


def comparator(count: int) -> str:
    args = ", ".join(f"%x{i}: tensor<f32>" for i in range(2 * count))
    return (
        f"{{\n^bb0({args}):\n  %s = stablehlo.compare LT, %x0, %x1 : (tensor<f32>, tensor<f32>) -> tensor<i1>\n"
        "  stablehlo.return %s : tensor<i1>\n}"
    )


UNARY = "abs cbrt ceil cosine exponential exponential_minus_one floor log log_plus_one logistic negate round_nearest_even \
round_nearest_afz rsqrt sign sine sqrt tan tanh".split()
BINARY = "add atan2 divide maximum minimum multiply power remainder subtract".split()
INTEGER = "and or xor shift_left shift_right_arithmetic shift_right_logical".split()


@generator
def elementwise(rng: random.Random) -> Case:
    x = some_shape(rng)
    f, i, b = Tensor(x), Tensor(x, "i32"), Tensor(x, "i1")
    c = Tensor(x, "complex<f32>")
    return rng.choice(
        [Case(f"stablehlo.{n}", [f], [f]) for n in UNARY]
        + [Case(f"stablehlo.{n}", [f, f], [f]) for n in BINARY]
        + [Case(f"stablehlo.{n}", [i, i], [i]) for n in INTEGER]
        + [
            Case("stablehlo.not", [i], [i]),
            Case("stablehlo.popcnt", [i], [i]),
            Case("stablehlo.count_leading_zeros", [i], [i]),
            Case("stablehlo.is_finite", [f], [b]),
            Case("stablehlo.convert", [f], [i]),
            Case("stablehlo.complex", [f, f], [c]),
            Case("stablehlo.real", [c], [f]),
            Case("stablehlo.imag", [c], [f]),
            Case("stablehlo.compare", [f, f], [b], "comparison_direction = #stablehlo<comparison_direction LT>"),
            Case("stablehlo.reduce_precision", [f], [f], "exponent_bits = 5 : i32, mantissa_bits = 10 : i32"),
            Case("stablehlo.select", [b, f, f], [f]),
            Case("stablehlo.select", [Tensor((), "i1"), f, f], [f]),
            Case("stablehlo.clamp", [f, f, f], [f]),
            Case("stablehlo.clamp", [Tensor(()), f, Tensor(())], [f]),
        ]
    )


@generator
def bitcast_convert(rng: random.Random) -> Case:
    x = some_shape(rng)
    narrow, wide = Tensor((*x, 2), "i16"), Tensor(x, "i32")
    operand, result = rng.choice([(narrow, wide), (wide, narrow), (wide, Tensor(x)), (Tensor(x), wide)])
    return Case("stablehlo.bitcast_convert", [operand], [result])


@generator
def transpose(rng: random.Random) -> Case:
    x = some_shape(rng)
    order = rng.sample(range(len(x)), len(x))
    return Case("stablehlo.transpose", [Tensor(x)], [Tensor(tuple(x[d] for d in order))], f"permutation = {i64s(order)}")


@generator
def broadcast_in_dim(rng: random.Random) -> Case:
    out = some_shape(rng, 1)
    dims = rng.sample(range(len(out)), rng.randint(0, len(out)))
    operand = tuple(rng.choice((1, out[d])) for d in dims)
    return Case(
        "stablehlo.broadcast_in_dim", [Tensor(operand)], [Tensor(out)], f"broadcast_dimensions = {i64s(dims)}"
    )


@generator
def reshape(rng: random.Random) -> Case:
    def grouped(primes: list[int]) -> Shape:
        shape = [1] * rng.randint(1, 4)
        for p in primes:
            shape[rng.randrange(len(shape))] *= p
        return tuple(shape) if math.prod(shape) > 1 else rng.choice([(), (1,), (1, 1)])

    primes = [rng.choice((2, 2, 2, 3, 3, 5)) for _ in range(rng.randint(0, 6))]
    return Case("stablehlo.reshape", [Tensor(grouped(primes))], [Tensor(grouped(primes))])


@generator
def empty_reshape(rng: random.Random) -> Case:
    return Case("stablehlo.reshape", [Tensor((2, 0))], [Tensor((0, 3))])


@generator
def dot(rng: random.Random) -> Case:
    n, k, m = some_shape(rng, 3, 3)
    lhs, rhs = rng.choice([(k,), (n, k)]), rng.choice([(k,), (k, m)])
    return Case("stablehlo.dot", [Tensor(lhs), Tensor(rhs)], [Tensor(lhs[:-1] + rhs[1:])])


@generator
def dot_general(rng: random.Random) -> Case:
    batch, contract = some_shape(rng, 0, 2), some_shape(rng, 0, 2)
    left, right = some_shape(rng, 0, 2), some_shape(rng, 0, 2)

    def shuffled(free: Shape) -> tuple[Shape, list[int], list[int], list[int]]:
        sizes = batch + contract + free
        order = rng.sample(range(len(sizes)), len(sizes))
        at = [order.index(i) for i in range(len(sizes))]
        kept = sorted(at[len(batch) + len(contract) :])
        return tuple(sizes[o] for o in order), at[: len(batch)], at[len(batch) : len(batch) + len(contract)], kept

    lhs, lb, lc, lk = shuffled(left)
    rhs, rb, rc, rk = shuffled(right)
    out = batch + tuple(lhs[d] for d in lk) + tuple(rhs[d] for d in rk)
    numbers = (
        f"dot_dimension_numbers = #stablehlo.dot<lhs_batching_dimensions = {ints(lb)}, "
        f"rhs_batching_dimensions = {ints(rb)}, lhs_contracting_dimensions = {ints(lc)}, "
        f"rhs_contracting_dimensions = {ints(rc)}>"
    )
    return Case("stablehlo.dot_general", [Tensor(lhs), Tensor(rhs)], [Tensor(out)], numbers)


@generator
def convolution(rng: random.Random) -> Case:
    space = rng.randint(0, 2)
    groups = rng.choice([(1, 1), (1, 1), (2, 1), (4, 1), (1, 2), (1, 4)])
    fg, bg = groups
    batch, per_group, outs = rng.choice((1, 2, 3)) * bg, rng.choice((1, 2, 3)), rng.choice((1, 2, 3)) * fg * bg
    inside = [rng.choice((1, 4, 7, 8, 16)) for _ in range(space)]
    kernel = [rng.randint(1, n) for n in inside]
    strides = [rng.choice((1, 1, 2)) for _ in range(space)]
    pads = [rng.choice([(0, 0), (1, 1), (0, 2)]) for _ in range(space)]
    out = [(n + a + b - k) // s + 1 for n, k, s, (a, b) in zip(inside, kernel, strides, pads, strict=True)]

    def placed(sizes: list[int]) -> tuple[Shape, list[int]]:
        """`sizes` (two special ones, then space) in random places; the place of each."""
        order = rng.sample(range(len(sizes)), len(sizes))
        return tuple(sizes[o] for o in order), [order.index(i) for i in range(len(sizes))]

    lhs, at_lhs = placed([batch, per_group * fg, *inside])
    rhs, at_rhs = placed([per_group, outs, *kernel])
    result, at_out = placed([batch // bg, outs, *out])

    def labels(at: list[int], special: str) -> str:
        text = [""] * len(at)
        for i, place in enumerate(at):
            text[place] = special[i] if i < 2 else str(i - 2)
        return f"[{', '.join(text)}]"

    numbers = f"#stablehlo.conv<{labels(at_lhs, 'bf')}x{labels(at_rhs, 'io')}->{labels(at_out, 'bf')}>"
    attributes = (
        f"dimension_numbers = {numbers}, feature_group_count = {fg} : i64, batch_group_count = {bg} : i64, "
        f"window_strides = {i64s(strides)}, padding = {pairs(pads)}"
    )
    return Case("stablehlo.convolution", [Tensor(lhs), Tensor(rhs)], [Tensor(result)], attributes)


@generator
def reduce(rng: random.Random) -> Case:
    x, count = some_shape(rng, 1), rng.randint(1, 2)
    dims = sorted(rng.sample(range(len(x)), rng.randint(0, len(x))))
    kept = tuple(n for d, n in enumerate(x) if d not in dims)
    operands = [Tensor(x)] * count + [Tensor(())] * count
    return Case(
        "stablehlo.reduce", operands, [Tensor(kept)] * count, f"dimensions = {i64s(dims)}", reducer("add", count)
    )


def some_windows(rng: random.Random, x: Shape) -> tuple[list[int], list[int], list[tuple[int, int]], Shape]:
    sizes = [rng.choice((1, 1, min(2, n), n)) for n in x]
    strides = [rng.choice((1, 1, 2)) for _ in x]
    pads = [rng.choice([(0, 0), (0, 0), (1, 0), (1, 1)]) for _ in x]
    out = tuple((n + a + b - w) // s + 1 for n, w, s, (a, b) in zip(x, sizes, strides, pads, strict=True))
    return sizes, strides, pads, out


@generator
def reduce_window(rng: random.Random) -> Case:
    x, count = some_shape(rng, 1, 3), rng.randint(1, 2)
    sizes, strides, pads, out = some_windows(rng, x)
    attributes = f"window_dimensions = {i64s(sizes)}, window_strides = {i64s(strides)}, padding = {pairs(pads)}"
    if rng.random() < 0.3:
        out = tuple(n - w + 1 for n, w in zip(x, sizes, strict=True))
        attributes = f"window_dimensions = {i64s(sizes)}"
    operands = [Tensor(x)] * count + [Tensor(())] * count
    return Case("stablehlo.reduce_window", operands, [Tensor(out)] * count, attributes, reducer("add", count))


@generator
def select_and_scatter(rng: random.Random) -> Case:
    x = some_shape(rng, 1, 3)
    sizes, strides, pads, out = some_windows(rng, x)
    attributes = f"window_dimensions = {i64s(sizes)}, window_strides = {i64s(strides)}, padding = {pairs(pads)}"
    operands = [Tensor(x), Tensor(out), Tensor(())]
    return Case(
        "stablehlo.select_and_scatter", operands, [Tensor(x)], attributes, f"{comparator(1)}, {reducer('add')}"
    )


@generator
def slice_(rng: random.Random) -> Case:
    x = some_shape(rng)
    start = [rng.randint(0, n - 1) if rng.random() < 0.5 else 0 for n in x]
    limit = [rng.randint(s + 1, n) if rng.random() < 0.5 else n for s, n in zip(start, x, strict=True)]
    out = tuple(b - a for a, b in zip(start, limit, strict=True))
    attributes = f"start_indices = {i64s(start)}, limit_indices = {i64s(limit)}, strides = {i64s([1] * len(x))}"
    return Case("stablehlo.slice", [Tensor(x)], [Tensor(out)], attributes)


@generator
def pad(rng: random.Random) -> Case:
    x = some_shape(rng)
    low = [rng.choice((0, 0, 1)) for _ in x]
    high = [rng.choice((0, 0, 2, -a)) for a in low]
    between = [rng.choice((0, 0, 1)) for _ in x]
    out = tuple(n + a + b + (n - 1) * c for n, a, b, c in zip(x, low, high, between, strict=True))
    attributes = f"edge_padding_low = {i64s(low)}, edge_padding_high = {i64s(high)}, interior_padding = {i64s(between)}"
    return Case("stablehlo.pad", [Tensor(x), Tensor(())], [Tensor(out)], attributes)


@generator
def concatenate(rng: random.Random) -> Case:
    x = some_shape(rng, 1)
    dim = rng.randrange(len(x))
    sizes = [rng.randint(1, 4) for _ in range(rng.randint(1, 3))]

    def with_size(n: int) -> Tensor:
        return Tensor((*x[:dim], n, *x[dim + 1 :]))

    return Case(
        "stablehlo.concatenate", [with_size(n) for n in sizes], [with_size(sum(sizes))], f"dimension = {dim} : i64"
    )


@generator
def reverse(rng: random.Random) -> Case:
    x = some_shape(rng)
    dims = rng.sample(range(len(x)), rng.randint(0, len(x)))
    return Case("stablehlo.reverse", [Tensor(x)], [Tensor(x)], f"dimensions = {i64s(dims)}")


@generator
def dynamic_slice(rng: random.Random) -> Case:
    x = some_shape(rng)
    out = tuple(rng.choice((n, rng.randint(1, n))) for n in x)
    operands = [Tensor(x)] + [Tensor((), "i32")] * len(x)
    return Case("stablehlo.dynamic_slice", operands, [Tensor(out)], f"slice_sizes = {i64s(out)}")


@generator
def dynamic_update_slice(rng: random.Random) -> Case:
    x = some_shape(rng)
    update = tuple(rng.choice((n, rng.randint(1, n))) for n in x)
    operands = [Tensor(x), Tensor(update)] + [Tensor((), "i32")] * len(x)
    return Case("stablehlo.dynamic_update_slice", operands, [Tensor(x)])


@dataclass
class Indexing:
    """Random dimension numbers that gather and scatter share."""

    inputs: Shape
    indices: Shape
    slices: Shape
    offset: list[int]
    collapsed: list[int]
    input_batching: list[int]
    indices_batching: list[int]
    index_map: list[int]
    index_vector: int
    sizes: list[int] = field(default_factory=list)


def some_indexing(rng: random.Random, collapse_to_one: bool) -> Indexing:
    inputs = some_shape(rng, 1, 4)
    dims = rng.sample(range(len(inputs)), len(inputs))
    batching = sorted(dims[: rng.choice((0, 0, 1, 2))])
    rest = [d for d in dims if d not in batching]
    collapsed = sorted(rest[: rng.randint(0, len(rest))])
    windows = [d for d in range(len(inputs)) if d not in batching + collapsed]
    sizes = [1 if d in batching + collapsed else rng.choice((n, rng.randint(1, n))) for d, n in enumerate(inputs)]
    index_map = rng.sample(rest, rng.randint(0, len(rest)))

    batches: list[tuple[int, int | None]] = [(n, None) for n in some_shape(rng, 0, 2)] + [(inputs[d], d) for d in batching]
    rng.shuffle(batches)
    index_vector = rng.randint(0, len(batches))
    shape = [n for n, _ in batches]
    implicit = index_vector == len(batches) and len(index_map) == 1 and rng.random() < 0.5
    indices = tuple(shape if implicit else shape[:index_vector] + [len(index_map)] + shape[index_vector:])
    place = {d: at if at < index_vector else at + 1 for at, (_, d) in enumerate(batches) if d is not None}

    rank = len(batches) + len(windows)
    offset = sorted(rng.sample(range(rank), len(windows)))
    window_sizes, batch_sizes = iter([sizes[d] for d in windows]), iter(shape)
    slices = tuple(next(window_sizes) if d in offset else next(batch_sizes) for d in range(rank))
    return Indexing(
        inputs, indices, slices, offset, collapsed, batching, [place[d] for d in batching], index_map, index_vector, sizes
    )


@generator
def gather(rng: random.Random) -> Case:
    i = some_indexing(rng, True)
    numbers = (
        f"#stablehlo.gather<offset_dims = {ints(i.offset)}, collapsed_slice_dims = {ints(i.collapsed)}, "
        f"operand_batching_dims = {ints(i.input_batching)}, start_indices_batching_dims = {ints(i.indices_batching)}, "
        f"start_index_map = {ints(i.index_map)}, index_vector_dim = {i.index_vector}>"
    )
    attributes = f"dimension_numbers = {numbers}, slice_sizes = {i64s(i.sizes)}, indices_are_sorted = false"
    return Case("stablehlo.gather", [Tensor(i.inputs), Tensor(i.indices, "i32")], [Tensor(i.slices)], attributes)


OVERWRITE = "{\n^bb0(%x: tensor<f32>, %y: tensor<f32>):\n  stablehlo.return %y : tensor<f32>\n}"
DOUBLING = (
    "{\n^bb0(%x: tensor<f32>, %y: tensor<f32>):\n  %s = stablehlo.add %y, %y : tensor<f32>\n"
    "  stablehlo.return %s : tensor<f32>\n}"
)


@generator
def scatter(rng: random.Random) -> Case:
    i, count = some_indexing(rng, False), rng.choice((1, 1, 1, 2))
    numbers = (
        f"#stablehlo.scatter<update_window_dims = {ints(i.offset)}, inserted_window_dims = {ints(i.collapsed)}, "
        f"input_batching_dims = {ints(i.input_batching)}, "
        f"scatter_indices_batching_dims = {ints(i.indices_batching)}, "
        f"scatter_dims_to_operand_dims = {ints(i.index_map)}, index_vector_dim = {i.index_vector}>"
    )
    dtype, region = rng.choice(
        [("f32", reducer(op, count, "f32", swap)) for op in ("add", "multiply", "maximum", "subtract") for swap in (0, 1)]
        + [("i1", reducer("or", count, "i1")), ("i32", reducer("or", count, "i32"))]
        + ([("f32", OVERWRITE), ("f32", DOUBLING)] if count == 1 else [])
    )
    inputs, updates = [Tensor(i.inputs, dtype)] * count, [Tensor(i.slices, dtype)] * count
    operands = [*inputs, Tensor(i.indices, "i32"), *updates]
    return Case("stablehlo.scatter", operands, inputs, f"scatter_dimension_numbers = {numbers}", region)


@generator
def sort(rng: random.Random) -> Case:
    x, count = rng.choice([some_shape(rng, 1), (1, 4, 1)]), rng.randint(1, 2)
    dim = rng.randrange(len(x))
    attributes = f"dimension = {dim} : i64, is_stable = true"
    return Case("stablehlo.sort", [Tensor(x)] * count, [Tensor(x)] * count, attributes, comparator(count))


@generator
def fft(rng: random.Random) -> Case:
    x = some_shape(rng, 1)
    count = rng.randint(1, min(3, len(x)))
    kind = rng.choice(("FFT", "IFFT", "RFFT", "IRFFT"))
    half = (*x[:-1], x[-1] // 2 + 1)
    complex_, real = "complex<f32>", "f32"
    operand, result = {
        "FFT": (Tensor(x, complex_), Tensor(x, complex_)),
        "IFFT": (Tensor(x, complex_), Tensor(x, complex_)),
        "RFFT": (Tensor(x, real), Tensor(half, complex_)),
        "IRFFT": (Tensor(half, complex_), Tensor(x, real)),
    }[kind]
    attributes = f"fft_type = #stablehlo<fft_type {kind}>, fft_length = {i64s(x[-count:])}"
    return Case("stablehlo.fft", [operand], [result], attributes)


@generator
def cholesky(rng: random.Random) -> Case:
    x = some_shape(rng, 1, 3)
    square = Tensor((*x, x[-1]))
    return Case("stablehlo.cholesky", [square], [square], "lower = true")


@generator
def triangular_solve(rng: random.Random) -> Case:
    batch, n, m = some_shape(rng, 0, 2), rng.randint(1, 5), rng.randint(1, 5)
    left, transpose = rng.random() < 0.5, rng.choice(("NO_TRANSPOSE", "TRANSPOSE", "ADJOINT"))
    b = Tensor((*batch, n, m) if left else (*batch, m, n))
    attributes = (
        f"left_side = {str(left).lower()}, lower = true, unit_diagonal = false, "
        f"transpose_a = #stablehlo<transpose {transpose}>"
    )
    return Case("stablehlo.triangular_solve", [Tensor((*batch, n, n)), b], [b], attributes)


@generator
def rng_bit_generator(rng: random.Random) -> Case:
    state, x = Tensor((2,), "ui64"), Tensor(some_shape(rng), "ui32")
    attributes = "rng_algorithm = #stablehlo<rng_algorithm THREE_FRY>"
    return Case("stablehlo.rng_bit_generator", [state], [state, x], attributes)


@generator
def batch_norm_inference(rng: random.Random) -> Case:
    x = some_shape(rng, 1)
    feature = rng.randrange(len(x))
    attributes = f"epsilon = 1.0e-3 : f32, feature_index = {feature} : i64"
    operands = [Tensor(x)] + [Tensor((x[feature],))] * 4
    return Case("stablehlo.batch_norm_inference", operands, [Tensor(x)], attributes)


GROUPS = "replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>"


@generator
def collective(rng: random.Random) -> Case:
    x, count = some_shape(rng, 1, 3), rng.randint(1, 2)
    dim = rng.randrange(len(x))
    doubled = (*x[:dim], 2 * x[dim], *x[dim + 1 :])
    same = [Tensor(x)]
    return rng.choice(
        [
            Case("stablehlo.all_reduce", same * count, same * count, GROUPS, reducer("add")),
            Case("stablehlo.collective_broadcast", same, same, GROUPS),
            Case(
                "stablehlo.collective_permute",
                same,
                same,
                "source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>",
            ),
            Case(
                "stablehlo.all_gather",
                same * count,
                [Tensor(doubled)] * count,
                f"all_gather_dim = {dim} : i64, {GROUPS}",
            ),
            Case(
                "stablehlo.reduce_scatter",
                [Tensor(doubled)],
                same,
                f"scatter_dimension = {dim} : i64, {GROUPS}",
                reducer("add"),
            ),
        ]
    )


@generator
def all_to_all(rng: random.Random) -> Case:
    x = some_shape(rng, 1, 3)
    split, concat = rng.randrange(len(x)), rng.randrange(len(x))
    operand, result = list(x), list(x)
    operand[split] *= 2
    result[split] = operand[split]
    if split != concat:
        result[split] = operand[split] // 2
        result[concat] = 2 * operand[concat]
    attributes = (
        f"split_dimension = {split} : i64, concat_dimension = {concat} : i64, split_count = 2 : i64, {GROUPS}"
    )
    return Case("stablehlo.all_to_all", [Tensor(tuple(operand))], [Tensor(tuple(result))], attributes)


def call(target: str, operands: list[Tensor], results: list[Tensor]) -> Case:
    return Case("stablehlo.custom_call", operands, results, f'call_target_name = "{target}"')


ELEMENTWISE_TARGETS = """annotate_device_placement Cholesky CompactWyHelper InspectSharding
    InvertDiagBlocksLowerTriangular InvertDiagBlocksUpperTriangular LayoutConstraint mhlo.erf MoveToDevice MoveToHost
    X64SplitHigh X64SplitLow xla.megascale.provide_metadata _SPMDInternalOp_MultiPad _SPMDInternalOp_RotateRight
    _SPMDInternalOp_MultiRotate _SPMDInternalOp_MultiSlice _SPMDInternalOp_Wrap X64Combine Sharding mhlo.tan
    sdy_testonly GatherTensor lapack_spotrf_ffi""".split()


@generator
def custom_call(rng: random.Random) -> Case:
    x = some_shape(rng)
    return call(rng.choice(ELEMENTWISE_TARGETS), [Tensor(x)], [Tensor(x)])


@generator
def decomposition(rng: random.Random) -> Case:
    batch, m, n = some_shape(rng, 0, 2), rng.randint(1, 5), rng.randint(1, 5)
    matrix, square, vector = Tensor((*batch, m, n)), Tensor((*batch, n, n)), Tensor((*batch, n))
    return rng.choice(
        [
            call("Eigh", [square], [square, vector]),
            call("Qr", [matrix], [matrix, Tensor((*batch, min(m, n)))]),
            call("QrDecompositionBlock", [matrix], [matrix, Tensor((*batch, min(m, n)))]),
            call("ProductOfElementaryHouseholderReflectors", [matrix, Tensor((*batch, min(m, n)))], [matrix]),
        ]
    )


@generator
def largest(rng: random.Random) -> Case:
    x = some_shape(rng, 1)
    out = (*x[:-1], rng.randint(1, x[-1]))
    values, indices = Tensor(out), Tensor(out, "i32")
    inputs, scalars = [Tensor(x), Tensor(x, "i32")], [Tensor(()), Tensor((), "i32")]
    return rng.choice(
        [
            call("mhlo.topk", [Tensor(x)], [values, indices]),
            call("ApproxTopK", inputs + scalars, [values, indices]),
            call("PartialReduce", inputs + scalars, [values, indices]),
        ]
    )


@generator
def ruleless(rng: random.Random) -> Case:
    x = Tensor(some_shape(rng, 1, 2))
    return rng.choice(
        [
            Case("stablehlo.iota", [], [x], "iota_dimension = 0 : i64"),
            Case("chlo.erf", [x], [x]),
            Case("stablehlo.optimization_barrier", [x], [x]),
            Case(
                "stablehlo.map",
                [x, x],
                [x],
                f"dimensions = {i64s(range(len(x.shape)))}",
                reducer("add"),
            ),
            Case("stablehlo.rng", [Tensor(())] * 2 + [Tensor((len(x.shape),), "i64")], [x], "rng_distribution = #stablehlo<rng_distribution UNIFORM>"),
        ]
    )


@pytest.mark.parametrize("conservative", [False, True])
@pytest.mark.parametrize("make", GENERATORS, ids=lambda g: g.__name__.rstrip("_"))
def test_generated_ops_have_the_oracles_rule(make: Generator, conservative: bool) -> None:
    rng = random.Random(make.__name__)
    assert_same_rules("".join(function_of(make(rng), i) for i in range(60)), conservative)
