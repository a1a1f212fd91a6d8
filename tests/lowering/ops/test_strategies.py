"""Reduction factors of reduce, products and convolutions: sharded as what they are, with the plain numbers."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from partitioned_ops import CUBE, LINE, PLANE, check, op

import sdy_jax as sdy

RNG = np.random.default_rng(0)


def floats(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def integers(*shape, dtype=np.int32):
    return RNG.integers(0, 100, shape).astype(dtype)


T = floats(64, 128)
SPLITS = [
    (PLANE, P("x", "y")),
    (PLANE, P(None, ("y", "x"))),
    (PLANE, '[{"y":(2)2}, {"y":(1)2, "x"}]'),
    (CUBE, P("z", ("y", "x"))),
    (LINE, P(None, "x")),
]
SPLIT_IDS = [f"{len(mesh.axis_names)}D {spec}" for mesh, spec in SPLITS]


# One op, its collectives and their bytes per device.


def sums(x):
    return x.sum(1)


def reduced(function, init, dtype=np.float32):
    return lambda x: lax.reduce(x, np.array(init, dtype), function, (1,))


def pairwise(body, *inits):
    """A reduction of the values together with their positions."""

    def run(x):
        positions = lax.broadcasted_iota(jnp.int32, x.shape, 1)
        return lax.reduce((x, positions), inits, lambda a, b: body(*a, *b), (1,))

    return run


def larger(value, position, other, other_position):
    first = value >= other
    return lax.select(first, value, other), lax.select(first, position, other_position)


def both_ways(value, position, other, other_position):
    return lax.max(value, other), lax.min(position, other_position)


argmax = functools.partial(lax.argmax, axis=1, index_dtype=jnp.int32)
A, B = floats(64, 128), floats(128, 32)
BITS = integers(64, 128)
WHOLE = np.float32(-np.inf), np.int32(2**31 - 1)
COUNTED = [
    # name, function, arguments, shardings, result's sharding, kinds, bytes
    ("sum", sums, [T], [P("x", "y")], P("x"), "all_reduce", 192),
    ("sum kept in parts", sums, [T], [P(None, "y")], P("y"), "reduce_scatter", 192),
    ("max", lambda x: x.max(1), [T], [P("x", "y")], P("x"), "all_reduce", 192),
    ("max kept in parts", lambda x: x.max(1), [T], [P(None, "y")], P("y"), "reduce_scatter", 192),
    ("any kept in parts", lambda x: x.any(1), [T > 3], [P(None, "y")], P("y"), "reduce_scatter", 48),
    ("xor kept in parts", lambda x: lax.reduce_xor(x, (1,)), [BITS], [P(None, "y")], P("y"), "reduce_scatter", 192),
    ("product", lambda x: (1 + x / 9).prod(1), [T], [P("x", "y")], P("x"), "all_reduce", 384),
    ("any", lambda x: x.any(1), [T > 3], [P("x", "y")], P("x"), "all_reduce", 48),
    ("and", lambda x: lax.reduce_and(x, (1,)), [BITS], [P("x", "y")], P("x"), "all_reduce", 384),
    ("xor", lambda x: lax.reduce_xor(x, (1,)), [BITS], [P("x", "y")], P("x"), "all_reduce", 384),
    ("argmax", argmax, [T], [P("x", "y")], P("x"), "all_reduce all_reduce", 768),
    ("pairs", pairwise(larger, *WHOLE), [T], [P("x", "y")], (P("x"), P("x")), "all_reduce all_reduce", 768),
    ("two kinds", pairwise(both_ways, *WHOLE), [T], [P("x", "y")], (P("x"), P("x")), "all_reduce all_reduce", 768),
    ("dot", jnp.matmul, [A, B], [P("x", "y"), P("y")], P("x"), "all_reduce", 6144),
    ("dot kept in parts", jnp.matmul, [A, B], [P("x", "y"), P("y")], P("x", "y"), "reduce_scatter", 3072),
    ("dot over two axes", jnp.matmul, [A, B], [P(None, ("x", "y")), P(("x", "y"))], P("x"),
     "reduce_scatter all_reduce", 10240),
]  # fmt: skip


@pytest.mark.parametrize("case", COUNTED, ids=lambda case: case[0])
def test_reductions_move_partial_results_only(case):
    _, function, args, ins, out, kinds, wire_bytes = case
    check(function, args, ins, out, kinds=kinds, wire_bytes=wire_bytes)


# Reductions.


def every_kind(x, c, n, p):
    return {
        "sum": x.sum(1),
        "total": x.sum(),
        "max": x.max(1),
        "min": x.min(1),
        "product": (1 + x / 9).prod(1),
        "half": x.astype(jnp.bfloat16).max(1),
        "complex": (c.sum(1), (1 + c / 9).prod(1)),
        "integers": (n.sum(1), n.max(1), n.min(1), n.prod(1), lax.reduce_and(n, (1,)), lax.reduce_or(n, (1,))),
        "wrapped": lax.reduce_sum(n.astype(jnp.int8), (1,)),
        "booleans": (p.any(1), p.all(1), lax.reduce_xor(p, (1,)), p.sum(1), p.argmax(1)),
        "small floats": lax.reduce(x.astype(jnp.float8_e4m3fn), lowest(jnp.float8_e4m3fn), lax.max, (1,)).astype("f4"),
    }


def lowest(dtype):
    return np.array(jnp.finfo(dtype).min, dtype)


@pytest.mark.dear
@pytest.mark.parametrize(("mesh", "spec"), SPLITS[1:4], ids=SPLIT_IDS[1:4])
def test_every_kind_of_reduction(mesh, spec):
    x = floats(8, 32)
    x[1, 30], x[2, 3], x[3, 9], x[4] = np.nan, np.inf, -np.inf, -np.inf
    c = (floats(8, 32) + 1j * floats(8, 32)).astype(np.complex64)
    args = [x, c, integers(8, 32), floats(8, 32) > 1]
    plan = check(every_kind, args, [spec] * 4, mesh=mesh, atol=1e-5)
    assert not plan.notes, plan
    at_the_boundary = {"all_gather"} if '"y":(2)2' in spec else set()  # results are laid out on whole axes
    # Booleans are smaller than the pairs of their argmax.
    moved = {c.dtype for c in plan.collectives if c.kind == "all_to_all"}
    assert moved <= {"i1"}, plan
    of_booleans = {"all_to_all", "all_gather"} if moved else set()
    assert {c.kind for c in plan.collectives if c.wire_bytes} == {"all_reduce"} | at_the_boundary | of_booleans, plan


@pytest.mark.parametrize("kind", ["xor", "and", "or", "add", "multiply", "maximum", "minimum"])
def test_four_bit_integers_are_reduced(kind):
    """lax reduces them by some kinds only."""
    text = f"""stablehlo.reduce(%a init: %b) applies stablehlo.{kind} across dimensions = [1]
        : (tensor<8x32xi4>, tensor<i4>) -> tensor<8xi4>"""
    args = [jnp.asarray(integers(8, 32) % 8).astype(jnp.int4), jnp.int4(3)]
    plan = check(op(text, "8xi4"), args, [P("x", "y"), P()], P("x"))
    assert {c.kind for c in plan.collectives if c.wire_bytes} == {"all_reduce"}, plan


def initials(x, start):
    return {
        "sum from five": lax.reduce(x, np.float32(5), lax.add, (1,)),
        "product from two": lax.reduce(1 + x / 9, np.float32(2), lax.mul, (1,)),
        "max from a half": lax.reduce(x, np.float32(0.5), lax.max, (1,)),
        "sum from an argument": lax.reduce(x, start, lax.add, (1,)),
        "body from an argument": lax.reduce(x, start, plus_one, (1,)),
        "body from three": lax.reduce(x, np.float32(3), plus_one, (0, 1)),
    }


def plus_one(a, b):
    """Associative, its identity is -1; every use of another initial value can be seen in the result."""
    return a + b + 1


@pytest.mark.parametrize(("mesh", "spec"), SPLITS, ids=SPLIT_IDS)
def test_the_initial_value_counts_once(mesh, spec):
    plan = check(initials, [floats(8, 32), np.float32(7)], [spec, P()], mesh=mesh, atol=1e-5)
    assert not plan.notes, plan


def bodies(x, c):
    positions = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    y = jnp.where(abs(x) < 9, x, 0)
    return {
        "argmax": (jnp.argmax(x, 1), jnp.argmin(x, 1), jnp.argmax(x), jnp.argmin(x, 0)),
        "pairs": pairwise(larger, *WHOLE)(y),  # the body is not associative on NaN
        "two kinds": pairwise(both_ways, *WHOLE)(x),
        "same kind twice": lax.reduce((x, positions), (np.float32(0), np.int32(2)), added, (1,)),
        "in order": lax.reduce((1 + y / 9, jnp.sin(3 * y)), (np.float32(1), np.float32(0)), composed, (1,)),
        "first in order": lax.reduce((x, positions), (np.float32(0), np.int32(-1)), first_known, (1,)),
        "largest complex": lax.reduce(c, np.complex64(0), larger_modulus, (1,)),
    }


def added(a, b):
    return a[0] + b[0], a[1] + b[1]


def composed(a, b):
    """The composition of x -> s x + t, which does not commute."""
    return a[0] * b[0], a[0] * b[1] + a[1]


def first_known(a, b):
    known = a[1] >= 0
    return lax.select(known, a[0], b[0]), lax.select(known, a[1], b[1])


def larger_modulus(a, b):
    return lax.select(lax.abs(a) >= lax.abs(b), a, b)


@pytest.mark.parametrize(("mesh", "spec"), SPLITS[1:4], ids=SPLIT_IDS[1:4])
@pytest.mark.more("reductions by bodies that have no name")
def test_bodies_of_no_kind_reduce_the_partial_results(mesh, spec):
    x = floats(8, 32)
    x[1, 30], x[2, 31], x[2, 3], x[3] = np.nan, np.inf, np.inf, -np.inf
    x[5] = np.round(x[5])  # ties
    c = (floats(8, 32) + 1j * floats(8, 32)).astype(np.complex64)
    plan = check(bodies, [x, c], [spec, spec], mesh=mesh, atol=1e-5)
    assert not plan.notes, plan


def test_what_is_replicated_is_counted_once():
    ones = np.ones((8, 16), np.int32)
    for spec in (P("x"), P(None, "y"), P("y"), P()):
        check(lambda v: (v.sum(), v.sum(0), v @ v.T, lax.reduce_xor(v, (0, 1))), [ones], [spec])


# Products.

ARRAYS = {
    "f32": floats(16, 32),
    "f16": floats(16, 32).astype(np.float16),
    "bf16": jnp.asarray(floats(16, 32)).astype(jnp.bfloat16),
    "f8": jnp.asarray(floats(16, 32)).astype(jnp.float8_e4m3fn),
    "i8": integers(16, 32, dtype=np.int8),
    "u8": integers(16, 32, dtype=np.uint8),
    "i32": integers(16, 32),
    "c64": (floats(16, 32) + 1j * floats(16, 32)).astype(np.complex64),
    "bool": floats(16, 32) > 1,
}
PRODUCTS = [
    ("f32", "float32"), ("f16", "float16"), ("f16", "float32"), ("bf16", "bfloat16"), ("bf16", "float32"),
    ("f8", "float32"), ("f8", "bfloat16"), ("i8", "int8"), ("i8", "int32"), ("u8", "uint8"), ("u8", "int32"),
    ("i32", "int32"), ("c64", "complex64"), ("bool", "int32"), ("bool", "bool"),
]  # fmt: skip
MLIR_NAMES = {
    "float32": "f32", "float16": "f16", "bfloat16": "bf16", "int8": "i8", "uint8": "ui8", "int32": "i32",
    "complex64": "complex<f32>", "bool": "i1",
}  # fmt: skip


@pytest.mark.parametrize(("operand", "result"), PRODUCTS, ids=lambda name: name)
def test_products_accumulate_in_the_plain_program_s_type(operand, result):
    x = ARRAYS[operand]

    def product(a, b):
        return lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=result)

    plan = check(product, [x, x[:8]], [P(None, "y"), P(None, "y")], P(), kinds="all_reduce", atol=1e-5)
    assert plan.collectives[-1].dtype == MLIR_NAMES[result]


def contractions(a, b):
    return {
        "matrix": jnp.einsum("bik,bjk->bij", a, b),
        "batched": jnp.einsum("bik,bik->bi", a, b),
        "two dimensions": jnp.einsum("bik,bjk->ij", a, b),
        "all": jnp.einsum("bik,bik->", a, b),
        "outer": jnp.einsum("bik,cjk->bcij", a, b[:2]),
        "highest": jnp.einsum("bik,bjk->bij", a, b, precision="highest"),
    }


@pytest.mark.parametrize(
    ("mesh", "specs"),
    [
        (PLANE, (P("x", None, "y"), P("x", None, "y"))),
        (PLANE, (P(None, None, ("y", "x")), P(None, "y"))),
        (PLANE, ('[{}, {"y":(2)2}, {"y":(1)2, "x"}]', None)),
        (CUBE, (P("z", "x", "y"), P("z", "x"))),
        (LINE, (P(None, None, "x"), None)),
    ],
)
def test_contractions(mesh, specs):
    check(contractions, [floats(8, 4, 16), floats(8, 4, 16)], specs, mesh=mesh, atol=1e-5)


# Convolutions.


def conv(x, kernel, **options):
    names = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=names, **options)


IMAGE, KERNEL = floats(8, 4, 4, 16), floats(3, 3, 16, 16)
KINDS_OF_CONV = {
    "plain": (1, 1, KERNEL),
    "groups": (4, 1, KERNEL[:, :, :4]),
    "depthwise": (16, 1, KERNEL[:, :, :1]),
    "two to a group": (16, 1, floats(3, 3, 1, 32)),
    "batch groups": (1, 4, KERNEL),
}
CONV_SPECS = [
    (PLANE, P("x", None, None, "y"), P(None, None, "y")),
    (CUBE, P("z", None, None, ("x", "y")), P(None, None, "x", "y")),
]


@pytest.mark.dear
@pytest.mark.parametrize("kind", KINDS_OF_CONV)
def test_convolutions_and_their_gradients(kind):
    features, batches, kernel = KINDS_OF_CONV[kind]
    options = {"feature_group_count": features, "batch_group_count": batches}

    def all_three(x, k):
        y, pull = jax.vjp(functools.partial(conv, **options), x, k)
        return y, pull(jnp.sin(y))

    for mesh, *specs in CONV_SPECS:
        check(all_three, [IMAGE / 4, kernel / 4], specs, mesh=mesh, atol=1e-4)


CONV_COUNTED = [
    ("input features", {}, KERNEL, P("x", None, None, "y"), P(None, None, "y"), P("x"), "all_reduce", 6144),
    ("batch and output features", {}, KERNEL, P("x"), P(None, None, None, "y"), P("x", None, None, "y"), "", 0),
    ("groups", {"feature_group_count": 4}, KERNEL[:, :, :4], P("x", None, None, "y"), P(None, None, None, "y"),
     P("x", None, None, "y"), "", 0),
    ("depthwise", {"feature_group_count": 16}, KERNEL[:, :, :1], P(None, None, None, ("x", "y")),
     P(None, None, None, ("x", "y")), P(None, None, None, ("x", "y")), "", 0),
    ("batch groups", {"batch_group_count": 4}, KERNEL, P("y"), P(None, None, None, "y"), P(None, None, None, "y"),
     "", 0),
]  # fmt: skip


@pytest.mark.parametrize("case", CONV_COUNTED, ids=lambda case: case[0])
def test_convolutions_move_partial_results_only(case):
    _, options, kernel, image_spec, kernel_spec, out, kinds, wire_bytes = case
    function = functools.partial(conv, **options)
    check(function, [IMAGE, kernel], [image_spec, kernel_spec], out, kinds=kinds, wire_bytes=wire_bytes, atol=1e-4)


def test_the_gradient_of_a_kernel_is_summed_over_the_batch():
    def gradient(x, k):
        return jax.grad(lambda w: (conv(x, w) ** 2).sum())(k)

    plan = check(gradient, [IMAGE, KERNEL], [P(("x", "y")), P()], P(), kinds="all_reduce", rtol=1e-4)
    assert plan.wire_bytes <= 2 * 7 / 8 * KERNEL.nbytes


@pytest.mark.parametrize(("dtype", "result"), [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("int8", "int32")])
def test_convolutions_of_other_types(dtype, result):
    x, k = (jnp.asarray(np.round(a)).astype(dtype) for a in (IMAGE, KERNEL))
    check(functools.partial(conv, preferred_element_type=jnp.dtype(result)), [x, k],
          [P("x", None, None, "y"), P(None, None, "y")], P("x"))  # fmt: skip


# Solvers and windows: what they do not mix stays sharded.

SOLVE = (
    '"stablehlo.triangular_solve"(%a, %b) <{{left_side = {left}, lower = true, unit_diagonal = false, '
    "transpose_a = #stablehlo<transpose {transpose}>}}> : "
    "(tensor<4x16x16xf32>, tensor<4x{b}xf32>) -> tensor<4x{b}xf32>"
)


@pytest.mark.parametrize(("left", "spec"), [("true", P(None, None, "y")), ("false", P("x", "y"))])
def test_right_hand_sides_are_solved_where_they_lie(left, spec):
    shape = "16x8" if left == "true" else "8x16"
    a = np.tril(floats(4, 16, 16)) + 9 * np.eye(16, dtype=np.float32)
    for transpose in ("NO_TRANSPOSE", "TRANSPOSE"):
        solve = op(SOLVE.format(left=left, transpose=transpose, b=shape), f"4x{shape}xf32")
        args = [a, floats(4, *map(int, shape.split("x")))]
        check(solve, args, [P(), spec], spec, kinds="", wire_bytes=0, atol=1e-5)
        check(solve, args, [P("x", "y"), P(None, "y", "x")], atol=1e-5)


@pytest.mark.parametrize(
    "target",
    ["Cholesky", "CompactWyHelper", "Eigh", "InvertDiagBlocksLowerTriangular", "InvertDiagBlocksUpperTriangular", "Qr"],
)
def test_batches_of_matrices_are_split_and_matrices_are_not(target):
    """The calls of TPUs, which the CPU cannot run."""
    results = {"Eigh": ["4x8x8xf32", "4x8xf32"], "Qr": ["4x8x8xf32", "4x8xf32"]}.get(target, ["4x8x8xf32"])
    types = ", ".join(f"tensor<{t}>" for t in results)
    call = op(f"stablehlo.custom_call @{target}(%a) : (tensor<4x8x8xf32>) -> {f'({types})'}", *results)
    for spec in (P("x", "y"), P("x", None, "y"), P("x")):
        plan = sdy.partition(call, mesh=PLANE, in_shardings=spec).plan(floats(4, 8, 8))
        assert re.search(r"@\w+\(.*<@mesh, \[\{\"x\"[^}]*\}, \{\}, \{\}\]>", plan.mlir("partitioned")), plan


def pooled(x):
    def total(v):
        return (lax.reduce_window(v, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") ** 2).sum()

    positions = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    pairs = lax.reduce_window((x, positions), WHOLE, lambda a, b: larger(*a, *b), (1, 3, 1, 1), (1, 1, 1, 1), "SAME")
    return jax.grad(total)(x), lax.reduce_window(x, 1.0, lax.add, (1, 2, 1, 1), (1, 1, 1, 1), "SAME"), pairs


def test_windows_leave_other_dimensions_alone():
    for mesh, spec in ((PLANE, P("x", None, None, "y")), (CUBE, P("z", None, None, ("y", "x"))), (LINE, P("x"))):
        plan = check(pooled, [IMAGE], [spec], mesh=mesh)
        assert not plan.wire_bytes, plan
