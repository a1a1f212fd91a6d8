"""Small programs with the bytes that a good partitioner moves for them, worked out by hand (eight devices, x=2, y=4).

Each is planned, its module verified, and run against the plain function.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.mlir import ir
from jax.interpreters.mlir import make_ir_context

import sdy_jax as sdy
from sdy_jax.lowering.planner.facts.verifier import verify_partitioned
from sdy_jax.lowering.targets.cost_model import CostModel
from sdy_jax.testing import assert_same

MESH = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("x", "y"))
f32 = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
i32 = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
c64 = partial(jax.ShapeDtypeStruct, dtype=jnp.complex64)
A, B = f32((64, 128)), f32((128, 32))
HALF, HALF_BITS = f32((32, 128)), jax.ShapeDtypeStruct(A.shape, jnp.bfloat16)
INDEX, ROWS, UPDATES = i32(()), i32((16,)), f32((16, 128))
LAYER = (A, f32((128, 256)), f32((256, 128)))
SYSTEM = (f32((16, 16)), f32((16, 64)))
IMAGES = (f32((8, 32, 32, 16)), f32((3, 3, 16, 16)))


@dataclass(frozen=True)
class Example:
    """`inputs` and `output` are shardings without quotes."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    inputs: str
    output: str
    wire_bytes: float


def two_dots(a, b, c):
    return a @ b + a @ c


def feed_forward(x, w, v):
    return jnp.tanh(x @ w) @ v


def loop(value, count):
    def body(state):
        return state[0] + 1, sdy.sharding_constraint(jnp.tanh(state[1]), '[{"y"}, {}]')

    return lax.while_loop(lambda state: state[0] < count, body, (0, value))[1]


def manual(a):
    rows = '[{"y"}, {}]'
    return sdy.manual_computation(jnp.sin, in_shardings=rows, out_shardings=rows, manual_axes={"y"}, mesh=MESH)(a)


def pad(a):
    return jnp.pad(a, ((1, 1), (0, 0)))


def concatenate(a, b):
    return jnp.concatenate([a, b])


def add_rows(table, rows, updates):
    return table.at[rows].add(updates)


def broadcast(a):
    return lax.broadcast_in_dim(a, A.shape, [0])


def convolution(images, kernel):
    return lax.conv_general_dilated(
        images, kernel, (1, 1), ((1, 1), (1, 1)), dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def pool(a):
    return lax.reduce_window(a, -jnp.inf, lax.max, (2,), (2,), "VALID")


def solve(a, b):
    return lax.linalg.triangular_solve(a + 16 * jnp.eye(16), b, left_side=True, lower=True)


EXAMPLES = [
    Example("dot, contracted", jnp.matmul, (A, B), "[{x},{y}] [{y},{}]", "[{x},{}]", 6144),
    Example("dot, scattered", jnp.matmul, (A, B), "[{x},{y}] [{y},{}]", "[{x},{y}]", 3072),
    Example("dot, one side sliced", jnp.matmul, (A, B), "[{x},{y}] [{},{}]", "[{x},{}]", 6144),
    Example("dot, free dimensions clash", jnp.matmul, (A, B), "[{x},{}] [{},{x}]", "[{x},{}]", 8192),
    Example("dot, weight gathered", jnp.matmul, (A, B), "[{x,y},{}] [{x},{}]", "[{x,y},{}]", 8192),
    Example("dot, nothing to do", jnp.matmul, (A, B), "[{x},{}] [{},{y}]", "[{x},{y}]", 0),
    Example("dot, result turned", jnp.matmul, (A, B), "[{x},{}] [{},{y}]", "[{y},{x}]", 1536),
    # 16,384 with the collectives of one dot; cheaper with the parts of the result gathered last
    Example("dot, contraction clashes", jnp.matmul, (A, B), "[{},{x}] [{y},{}]", "[{},{}]", 11008),
    Example("dot, part of an axis", jnp.matmul, (A, B), "[{},{y:(1)2}] [{y},{}]", "[{},{}]", 12288),
    Example("dot, axes turn", jnp.matmul, (A, B), "[{},{x}] [{x},{y}]", "[{},{x}]", 5120),
    Example("dot, scattered over two", jnp.matmul, (A, B), "[{},{x,y}] [{x,y},{}]", "[{x},{y}]", 7168),
    Example("dot, scattered and reduced", jnp.matmul, (A, B), "[{},{x,y}] [{x,y},{}]", "[{x},{}]", 10240),
    Example("dot, scattered in order", jnp.matmul, (A, B), "[{},{x,y}] [{x,y},{}]", "[{y,x},{}]", 7168),
    Example("sum of dots", two_dots, (A, B, B), "[{},{y}] [{y},{}] [{y},{}]", "[{},{}]", 12288),
    Example(
        "feed forward",
        feed_forward,
        LAYER,
        "[{x},{}] [{},{y}] [{y},{}]",
        "[{x},{}]",
        24576,
    ),
    Example("linear ops", lambda a, b: (-(a @ b)).T, (A, B), "[{},{y}] [{y},{}]", "[{y},{}]", 6144),
    Example("elementwise", jnp.add, (A, A), "[{x},{}] [{},{x}]", "[{x},{}]", 8192),
    Example("to fewer bits", lambda a: a.astype(jnp.bfloat16), (A,), "[{x},{}]", "[{},{x}]", 4096),
    Example(
        "to more bits",
        lambda a: a.astype(jnp.float32),
        (HALF_BITS,),
        "[{x},{}]",
        "[{},{x}]",
        4096,
    ),
    Example("broadcast", broadcast, (f32((64,)),), "[{x}]", "[{y},{}]", 64),
    Example("shared", lambda a: (jnp.tanh(a), jnp.sin(a)), (A,), "[{x},{}]", "[{},{x}] [{},{x}]", 8192),
    Example("a row", lambda a, i: lax.dynamic_slice(a, (i, 0), (1, 128)), (A, INDEX), "[{y},{}] []", "[{},{}]", 768),
    Example(
        "a row written",
        lambda a, u, i: lax.dynamic_update_slice(a, u, (i, 0)),
        (A, f32((1, 128)), INDEX),
        "[{y},{}] [{},{}] []",
        "[{y},{}]",
        0,
    ),
    Example("rows", lambda t, i: t[i], (A, ROWS), "[{y},{}] [{x}]", "[{x},{}]", 6144),
    Example("rows, scattered", lambda t, i: t[i], (A, ROWS), "[{y},{}] [{x}]", "[{x},{y}]", 3072),
    Example("rows of columns", lambda t, i: t[i], (A, ROWS), "[{},{y}] [{x}]", "[{x},{y}]", 0),
    Example(
        "rows added",
        add_rows,
        (A, ROWS, UPDATES),
        "[{y},{}] [{x}] [{x},{}]",
        "[{y},{}]",
        4128,
    ),
    Example(
        "few rows added",
        add_rows,
        (A, ROWS, UPDATES),
        "[{},{}] [{x}] [{x},{}]",
        "[{},{}]",
        4128,
    ),
    Example("a loop", loop, (A, INDEX), "[{x},{}] []", "[{y},{}]", 8192),
    Example("a manual computation", manual, (A,), "[{x},{}]", "[{x},{}]", 24576),
    Example("sum", lambda a: a.sum(1), (A,), "[{x},{y}]", "[{x}]", 192),
    Example("maximum", lambda a: a.max(1), (A,), "[{x},{y}]", "[{x}]", 192),
    Example("arg max", lambda a: jnp.argmax(a, 1), (A,), "[{x},{y}]", "[{x}]", 768),
    Example("sum, scattered", lambda a: a.sum(1), (A,), "[{},{y}]", "[{y}]", 192),
    Example("sort a whole dimension", lambda a: jnp.sort(a, 1), (A,), "[{},{y}]", "[{},{y}]", 12288),
    Example("sort", jnp.sort, (f32((1024,)),), "[{y}]", "[{y}]", 3072),
    Example("cumulative sum", lambda a: jnp.cumsum(a, 1), (A,), "[{x},{y}]", "[{x},{y}]", 384),
    Example("fft of one row", jnp.fft.fft, (c64((128,)),), "[{y}]", "[{y}]", 576),
    Example("fft", lambda a: jnp.fft.fft(a, axis=1), (c64(A.shape),), "[{},{y}]", "[{},{y}]", 24576),
    Example("reshape", lambda a: a.reshape(64, 128), (f32((8, 8, 128)),), "[{},{y},{}]", "[{y},{}]", 6144),
    Example("reshape, gathered", lambda a: a.reshape(64, 128), (f32((8, 8, 128)),), "[{},{y},{}]", "[{},{}]", 24576),
    Example("rows that do not divide", jnp.tanh, (f32((10, 6)),), "[{y},{}]", "[{},{x}]", 108),
    Example("transpose", jnp.transpose, (A,), "[{x},{y}]", "[{x},{y}]", 6144),
    Example("convolution", convolution, IMAGES, "[{x},{y},{},{}] [{},{},{},{}]", "[{x},{y},{},{}]", 16384),
    Example("pool", pool, (f32((32,)),), "[{y}]", "[{y}]", 0),
]

# Ops that need their neighbours' rows, or another algorithm on shards, still move whole dimensions. Behind each row:
# the bytes with an algorithm of its own.
MOVED = [
    Example("slice", lambda a: a[0:32], (A,), "[{y},{}]", "[{y},{}]", 9216),  # 8192
    Example("pad", pad, (f32((62, 128)),), "[{y},{}]", "[{y},{}]", 14080),  # 512
    Example("concatenate", concatenate, (HALF, HALF), "[{y},{}] [{y},{}]", "[{y},{}]", 12288),  # 8192
    Example("reverse", lambda a: lax.rev(a, (0,)), (A,), "[{y},{}]", "[{y},{}]", 12288),  # 8192
    Example("triangular solve", solve, SYSTEM, "[{},{}] [{},{y}]", "[{},{y}]", 3072),  # 0
]


@pytest.mark.parametrize("example", [*EXAMPLES, *MOVED], ids=lambda example: example.name)
def test_moves_no_more_than_the_hand_written_program(example):
    output = shardings(example.output)
    plan = assert_same(
        example.function,
        *map(some_array, example.arguments),
        mesh=MESH,
        in_shardings=shardings(example.inputs),
        out_shardings=output if len(output) > 1 else output[0],
        costs=CostModel(),
    )

    assert plan.wire_bytes <= example.wire_bytes
    module = ir.Module.parse(plan.mlir(), make_ir_context())
    assert module.operation.verify()
    verify_partitioned(module.operation)


def shardings(text):
    return tuple(re.sub(r"\b([xy])\b", r'"\1"', part) for part in text.split())


def some_array(like):
    random = np.random.default_rng(0)
    if like.dtype == jnp.int32:
        return random.integers(0, 16, like.shape, np.int32)
    return random.standard_normal(like.shape).astype(like.dtype)
