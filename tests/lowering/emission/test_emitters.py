"""Every op family, re-run op by op as lax calls, gives what the plain function gives; and on shards too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.mlir import ir
from jax.interpreters import mlir

from sdy_jax.ir.graph import Block, Graph, Op, Value
from sdy_jax.lowering.emission import re_emission
from sdy_jax.lowering.emission.local_op import EMITTERS, LocalOp
from sdy_jax.lowering.strategies import strategies_of
from sdy_jax.op_rules.registry import RuleBook
from sdy_jax.representation.mesh import AxisRef, Mesh, MeshAxis
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.runtime.mesh import RefinedMesh

ONE = RefinedMesh.of(Mesh(()))


class Interpreter:
    """Runs a graph's main function; calls are inlined, shardings looked up by value."""

    def __init__(self, graph: Graph, mesh: RefinedMesh = ONE, shardings: dict[Value, TensorSharding] | None = None):
        self.graph, self.mesh, self.shardings = graph, mesh, shardings or {}
        self.env: dict[Value, Any] = {}

    def run_block(self, block: Block, arguments: Sequence[Any]) -> list[Any]:
        self.env.update(zip(block.arguments, arguments, strict=True))
        for op in block.ops[:-1]:
            operands = [self.env[v] for v in op.operands]
            results = self.call(op, operands) if op.name == "func.call" else self.compute(op, operands)
            self.env.update(zip(op.results, results, strict=True))
        return [self.env[v] for v in block.terminator.operands]

    def call(self, op: Op, operands: Sequence[Any]) -> list[Any]:
        name = str(op.attributes["callee"].value)
        return self.run_block(self.graph.functions[name].blocks[0], operands)

    def compute(self, op: Op, operands: Sequence[Any]) -> Sequence[Any]:
        get = self.shardings.get
        local = LocalOp(op, self.mesh, tuple(map(get, op.operands)), tuple(map(get, op.results)), self.run_block)
        results = EMITTERS.get(op.name, re_emission.re_emit)(local, *operands)
        results = results if isinstance(results, (list, tuple)) else (results,)
        for result, value in zip(results, op.results, strict=True):
            if value.shape is not None:
                assert result.dtype == re_emission.numpy_dtype(value.dtype), op
                assert result.shape == local.result_shape(value.index), op
        return results


def rerun(function: Callable[..., Any], *args: Any) -> tuple[list[Any], list[Any]]:
    """The leaves of what the plain function and its op-by-op copy return."""
    lowered = jax.jit(function, keep_unused=True).lower(*args)
    graph = Graph(lowered.compiler_ir().operation)
    main = graph.functions["main"].blocks[0]
    got = jax.jit(lambda *xs: Interpreter(graph).run_block(main, xs))(*jax.tree.leaves(args))
    return jax.tree.leaves(jax.jit(function)(*args)), got


def assert_same(expected: Sequence[Any], got: Sequence[Any]) -> None:
    assert len(expected) == len(got)
    for want, have in zip(expected, got, strict=True):
        assert want.dtype == have.dtype
        wide = np.complex128 if jnp.issubdtype(want.dtype, jnp.complexfloating) else np.float64
        np.testing.assert_allclose(np.asarray(have).astype(wide), np.asarray(want).astype(wide), 1e-6, 1e-6)


RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(8, 6)), jnp.float32)
ODD = jnp.array([[np.nan, -np.inf, -0.0, 0.0], [np.inf, 1.5, -2.5, 0.5]], jnp.float32)
INTS = jnp.array([3, -1, 7, 100, -9, 0], jnp.int32)


def elementwise(x: jax.Array) -> Any:
    unary = (
        jnp.abs,
        jnp.exp,
        jnp.log,
        jnp.sin,
        jnp.cos,
        jnp.tan,
        jnp.tanh,
        jnp.sqrt,
        lax.rsqrt,
        jnp.floor,
        jnp.ceil,
        jnp.round,
        jnp.sign,
        jnp.isfinite,
        jnp.cbrt,
        jnp.expm1,
        jnp.log1p,
        lax.logistic,
        lax.erf,
        lax.erf_inv,
        lax.erfc,
        lax.lgamma,
        lax.digamma,
        lax.bessel_i1e,
        jnp.arcsin,
        jnp.arccos,
        jnp.arctan,
        jnp.sinh,
        jnp.cosh,
        jnp.arcsinh,
        jnp.arccosh,
        jnp.arctanh,
        jnp.square,
        lax.round,
        lambda v: lax.reduce_precision(v, 5, 3),
    )
    binary = (
        jnp.add,
        jnp.subtract,
        jnp.multiply,
        jnp.divide,
        jnp.maximum,
        jnp.minimum,
        jnp.power,
        lax.rem,
        jnp.arctan2,
        lax.nextafter,
        lax.eq,
        lax.ne,
        lax.lt,
        lax.le,
        lax.gt,
        lax.ge,
    )
    return [f(x) for f in unary], [f(x, x[::-1]) for f in binary], jnp.clip(x, -1, 1), jnp.where(x > 0, x, 2.0)


def integers(x: jax.Array) -> Any:
    out = []
    for dtype in (jnp.int8, jnp.uint8, jnp.int32, jnp.uint32, jnp.int16):
        a, b = x.astype(dtype), (x % 5 + 1).astype(dtype)
        out += [
            a + b,
            a * b,
            a // b,
            a % b,
            a & b,
            a | b,
            a ^ b,
            ~a,
            a << b,
            a >> b,
            lax.clz(a),
            lax.population_count(a),
            lax.shift_right_logical(a, b),
            lax.shift_right_arithmetic(a, b),
            jnp.maximum(a, b),
            a < b,
            a.astype(bool),
            a.astype(jnp.bfloat16),
            jnp.abs(b.astype(jnp.int8)),
        ]
    return out


def booleans(x: jax.Array) -> Any:
    a, b = x > 0, x > 0.5
    return (
        a & b,
        a | b,
        a ^ b,
        ~a,
        jnp.any(a, 0),
        jnp.all(b, 1),
        a.astype(jnp.float16),
        jnp.maximum(a, b),
        a == b,
        jnp.array([True, False, True, True, False, True]) & a,
        jnp.sort(a, 0),
        jnp.sum(a),
    )


def complexes(x: jax.Array) -> Any:
    z = lax.complex(x, x[::-1])
    return (
        z * z,
        z / (z + 2),
        jnp.abs(z),
        jnp.exp(z),
        z.real,
        z.imag,
        jnp.conj(z),
        jnp.sin(z),
        z == z,
        jnp.sum(z, 0),
        z * jnp.array([1, 2j, 3, 4, 5, 6]),
        z * (1 + 2j),
        z @ z.T,
        jnp.sqrt(z),
        jnp.prod(z, 1),
        x.astype(jnp.complex64),
    )


def halves(x: jax.Array) -> Any:
    return [
        (
            v @ v.T,
            jnp.sum(v, 0),
            jnp.max(v),
            jnp.sort(v, 1),
            v * jnp.array([1, 2, 3, 4, 5, 6], v.dtype),
            jnp.tanh(v),
            jnp.cumsum(v, 0),
            jnp.arange(300, dtype=v.dtype),
            v.astype(jnp.float8_e4m3fn).astype(v.dtype),
        )
        for v in (x.astype(jnp.bfloat16), x.astype(jnp.float16))
    ]


def movement(x: jax.Array) -> Any:
    return (
        jnp.broadcast_to(x[:, None], (8, 3, 6)),
        x.reshape(4, 12),
        x.T,
        x[::-1],
        x[1:7:2, 3:],
        jnp.pad(x, 1),
        lax.pad(x, 9.0, ((1, -1, 1), (-2, 3, 0))),
        jnp.concatenate([x, x[:2]]),
        jnp.tile(x, 2),
        jnp.roll(x, 3, 0),
        lax.bitcast_convert_type(x, jnp.int32),
        lax.bitcast_convert_type(x, jnp.uint8),
        jnp.eye(6),
        jnp.stack([x, x]),
        lax.iota(jnp.float32, 7),
        x + jnp.asarray(np.arange(48.0).reshape(8, 6), jnp.float32),
        jnp.split(x, 2),
    )


def dynamic(x: jax.Array, i: jax.Array) -> Any:
    slices = [lax.dynamic_slice(x, (i[k], i[k + 1]), (3, 2)) for k in range(5)]
    updates = [lax.dynamic_update_slice(x, x[:2, :3] * 2, (i[k], i[k + 1])) for k in range(5)]
    raw = lax.dynamic_slice_p.bind(x, i[1], i[4], slice_sizes=(3, 2))
    return slices, updates, raw, lax.dynamic_update_slice_p.bind(x, x[:2], i[1], i[4])


def indexing(x: jax.Array, i: jax.Array) -> Any:
    rows = x[i], x.at[i].get(mode="fill"), x.at[i].get(mode="clip"), jnp.take(x, i, 1), x[i, i % 6], x[:, i[:2]]
    along = jnp.take_along_axis(x, jnp.argsort(x, 0), 0), jnp.take_along_axis(x, i[None] % 6, 1)
    at = x.at[i]
    updates = [
        at.add(2),
        at.max(0.5),
        at.min(0.5),
        at.multiply(3),
        at.set(0),
        at.add(2, mode="clip"),
        x.at[:, i].add(1),
        x.at[i, i % 6].add(1),
        x.at[1:3].set(7),
        x.at[i].apply(jnp.sin),
        jax.vmap(lambda r, k: r.at[k].add(1))(x, jnp.arange(8)),
        jax.vmap(lambda r: r[i])(x),
    ]
    return rows, along, updates, jax.ops.segment_sum(x, jnp.arange(8) % 3, 3), jax.grad(lambda v: jnp.sum(v[i] ** 2))(x)


def reductions(x: jax.Array) -> Any:
    custom = lax.reduce(x, jnp.float32(2), lax.add, (0,)), lax.reduce(x, jnp.float32(0), lax.mul, (1,))
    pairs = lax.reduce((x, x), (jnp.float32(0), jnp.float32(1)), lambda a, b: (a[0] + b[0], a[1] * b[1]), (0,))
    odd = lax.reduce(x, jnp.float32(0), lambda a, b: a + b * b, (1,))
    kinds = [f(x, 0) for f in (jnp.sum, jnp.prod, jnp.max, jnp.min, jnp.argmax, jnp.argmin, jnp.mean, jnp.var)]
    ints = x.astype(jnp.int32)
    bits = [
        lax.reduce(ints, jnp.int32(n), f, (0,))
        for n, f in ((-1, lax.bitwise_and), (0, lax.bitwise_or), (0, lax.bitwise_xor))
    ]
    return custom, pairs, odd, kinds, bits, jnp.cumsum(x, 1), jnp.cumprod(x, 0), lax.cummax(x, reverse=True)


def windows(x: jax.Array) -> Any:
    pool = lambda v, f, init: lax.reduce_window(v, init, f, (3, 2), (2, 1), "SAME")  # noqa: E731
    return (
        pool(x, lax.max, -jnp.inf),
        pool(x, lax.add, 0.0),
        jax.grad(lambda v: jnp.sum(pool(v, lax.max, -jnp.inf) ** 2))(x),
    )


def dots(x: jax.Array) -> Any:
    b = jnp.stack([x, x + 1])
    return (
        x @ x.T,
        jnp.einsum("bij,bkj->bik", b, b),
        jnp.dot(x, x.T, precision="highest"),
        jnp.tensordot(x, x, 2),
        lax.dot_general(
            x.astype(jnp.int8), x.T.astype(jnp.int8), (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32
        ),
        lax.dot_general(
            x.astype(jnp.bfloat16),
            x.T.astype(jnp.bfloat16),
            (((1,), (0,)), ((), ())),
            preferred_element_type=jnp.float32,
        ),
        lax.dot_general(x, x.T, (((1,), (0,)), ((), ())), precision=lax.DotAlgorithmPreset.F32_F32_F32),
    )


def convolutions(x: jax.Array) -> Any:
    image, kernel = (
        jnp.arange(2 * 9 * 9 * 4.0).reshape(2, 9, 9, 4) / 99,
        jnp.arange(3 * 3 * 4 * 8.0).reshape(3, 3, 4, 8) / 99,
    )
    names = ("NHWC", "HWIO", "NHWC")

    def conv(k: jax.Array, **options: Any) -> jax.Array:
        options = {"window_strides": (1, 1), "padding": "SAME", **options}
        return lax.conv_general_dilated(image * x[0, 0], k, dimension_numbers=names, **options)

    gradient = jax.grad(lambda k: jnp.sum(conv(k, window_strides=(2, 2)) ** 2))(kernel)
    return (
        conv(kernel),
        conv(kernel, window_strides=(2, 1), padding="VALID"),
        conv(kernel, rhs_dilation=(2, 2)),
        conv(kernel, lhs_dilation=(2, 1), padding=((1, 2), (0, -1))),
        conv(kernel[:, :, :2], feature_group_count=2),
        conv(kernel[:, :, :1], feature_group_count=4),
        conv(kernel, batch_group_count=2),
        gradient / 1e4,
    )


def control(x: jax.Array, i: jax.Array) -> Any:
    scan = lax.scan(lambda c, r: (c * 0.5 + r, c + x[0]), x[0], x)
    loop = lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, c[1] * 2 + x), (0, x))
    cond = lax.cond(x[0, 0] > 0, lambda: x, lambda: -x)
    cases = [lax.switch(i[k], [lambda: x, lambda: x + 1, lambda: x * 2]) for k in range(5)]
    return scan, loop, cond, cases, lax.fori_loop(0, i[0], lambda k, c: c + k, x), lax.optimization_barrier((x, i))


def sorting(x: jax.Array) -> Any:
    keys = lax.sort((jnp.round(x), x), num_keys=2, dimension=0), lax.sort((jnp.round(x), x), num_keys=1)
    return (
        jnp.sort(x),
        jnp.argsort(x),
        keys,
        lax.top_k(x, 2),
        jnp.median(x, 0),
        jnp.unique(x[:, 0], size=4),
        lax.sort(x, 0),
    )


def random(x: jax.Array) -> Any:
    key = jax.random.key(7)
    k = jax.random.key(3, impl="rbg")
    return (
        jax.random.normal(key, (5,)),
        jax.random.permutation(key, 9),
        jax.random.randint(key, (4,), 0, 99),
        jax.random.bits(k, (6,)),
        jax.random.categorical(key, x),
        lax.rng_bit_generator(jnp.zeros(4, jnp.uint32), (3,)),
    )


def linear_algebra(x: jax.Array) -> Any:
    a = x[:6] @ x[:6].T + 6 * jnp.eye(6)
    return (
        jnp.linalg.qr(x),
        jnp.linalg.svd(x, compute_uv=False),
        jnp.linalg.eigvalsh(a),
        jnp.linalg.cholesky(a),
        jnp.linalg.solve(a, x[:6]),
        jnp.linalg.inv(a),
        jnp.linalg.det(a),
        jnp.fft.fft(x),
        jnp.fft.rfft2(x),
        jnp.fft.irfft(jnp.fft.rfft(x)),
        lax.linalg.triangular_solve(a, x[:6], left_side=True, lower=True),
    )


def network(x: jax.Array) -> Any:
    def loss(w: jax.Array) -> jax.Array:
        h = jax.nn.gelu(x @ w) + jax.nn.silu(x @ w)
        h = jax.nn.softmax(h) + jax.nn.log_softmax(h) + jax.nn.relu(h)
        return jnp.mean(jax.nn.standardize(h) ** 2 + jax.nn.one_hot(jnp.arange(8), 5)) + jax.nn.logsumexp(h)

    return jax.value_and_grad(loss)(jnp.ones((6, 5)) / 3)


CASES = {
    "elementwise": (elementwise, X / 3),
    "odd values": (elementwise, ODD),
    "integers": (integers, INTS),
    "booleans": (booleans, X),
    "complex": (complexes, X),
    "half floats": (halves, X),
    "movement": (movement, X),
    "dynamic slices": (dynamic, X, INTS),
    "gather and scatter": (indexing, X, INTS),
    "reductions": (reductions, X),
    "reductions of odd values": (reductions, ODD),
    "windows": (windows, X),
    "dots": (dots, X),
    "convolutions": (convolutions, X),
    "control flow": (control, X, INTS),
    "sorting": (sorting, X),
    "sorting odd values": (sorting, ODD),
    "random": (random, X),
    "linear algebra": (linear_algebra, X),
    "network": (network, X),
}


@pytest.mark.parametrize("name", CASES)
def test_op_by_op_copy_equals_the_plain_function(name: str) -> None:
    assert_same(*rerun(*CASES[name]))


MESH = Mesh((MeshAxis("x", 2), MeshAxis("y", 4)))
REFINED = RefinedMesh.of(MESH)
COMBINE: dict[str, Callable[..., Any]] = {
    "sum": lax.psum,
    "max": lax.pmax,
    "min": lax.pmin,
    "product": lambda v, a: jnp.prod(lax.all_gather(v, a), 0),
    "or": lambda v, a: lax.pmax(v.astype(jnp.int32), a).astype(bool),
}


def shard(*dims: str) -> TensorSharding:
    """`shard("", "xy")` splits dimension 1 along x and y."""
    return TensorSharding.closed("mesh", [[AxisRef(a) for a in dim] for dim in dims])


def run_op(
    function: Callable[..., Any],
    args: Sequence[Any],
    name: str,
    operands: Sequence[TensorSharding | None],
    result: TensorSharding,
    partial: str = "",
) -> tuple[Any, Any]:
    """Runs the op called `name` of `function`, whose operands are the arguments or computed from them whole, on shards.

    Operands without a sharding are replicated. Shards of sizes that do not divide are padded with nan or one.
    The op's strategy must allow the sharded factors; partial results over `partial` are combined by its kind.

    Returns:
        The op's last result, plain and partitioned.
    """
    graph = Graph(jax.jit(function, keep_unused=True).lower(*args).compiler_ir().operation)
    graph_op = next(op for f in graph.functions.values() for op in f.walk() if op.name == name)
    plain = Interpreter(graph)
    plain.run_block(graph.functions["main"].blocks[0], args)
    whole = [plain.env[v] for v in graph_op.operands]
    shardings = [*operands, *[None] * (len(whole) - len(operands))]
    kind = check_splits(graph_op, shardings, result, bool(partial))
    padded = [pad_to_blocks(x, s) for x, s in zip(whole, shardings, strict=True)]

    def local_run(*xs: Any) -> Any:
        run_block = Interpreter(graph).run_block
        local = LocalOp(graph_op, REFINED, tuple(shardings), last(graph_op, result), run_block)
        out = EMITTERS[name](local, *xs)
        out = out[-1] if isinstance(out, (list, tuple)) else out
        assert out.shape == local.result_shape(len(graph_op.results) - 1)
        return COMBINE[kind](out, tuple(partial)) if partial else out

    mesh = REFINED.to_jax(np.array(jax.devices()[:8]).reshape(2, 4))
    specs = tuple(REFINED.spec(s) for s in shardings)
    got = jax.jit(jax.shard_map(local_run, mesh=mesh, in_specs=specs, out_specs=REFINED.spec(result), check_vma=False))(
        *padded
    )
    expected = plain.env[graph_op.results[-1]]
    return expected, got[tuple(slice(0, n) for n in expected.shape)]


def last(op: Op, sharding: TensorSharding) -> tuple[TensorSharding | None, ...]:
    """Shardings of an op's results: all but the last are replicated."""
    return (*[None] * (len(op.results) - 1), sharding)


def check_splits(op: Op, operands: Sequence[TensorSharding | None], result: TensorSharding, partial: bool) -> str:
    """Asserts that one strategy allows these shardings, and gives its reduction kind."""
    rule = RuleBook().rule_of(op)
    if rule is None:
        return ""
    strategy = strategies_of(op, rule)[0]
    left_partial = False
    for mapping, sharding in zip(rule.mappings, [*operands, *last(op, result)], strict=True):
        for factors, axes in zip(mapping, sharding.axes if sharding else (), strict=False):
            assert not axes or factors[0] in strategy.splittable, (str(rule), strategy)
            left_partial = left_partial or (bool(axes) and factors[0] in strategy.partial)
    assert left_partial == partial, (str(rule), strategy)
    return strategy.reduction


def pad_to_blocks(x: jax.Array, sharding: TensorSharding | None) -> jax.Array:
    if sharding is None:
        return x
    junk = jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else True if x.dtype == bool else 1  # a valid index
    counts = sharding.shard_counts(MESH)
    return jnp.pad(x, [(0, -n % g) for n, g in zip(x.shape, counts, strict=True)], constant_values=junk)


TABLE = jnp.asarray(RNG.normal(size=(16, 4)), jnp.float32).at[3].set(jnp.nan)
ROWS = jnp.array([3, -5, 15, 40, 0, 7, 8, 2_000_000_000], jnp.int32)
UPDATES = jnp.asarray(RNG.normal(size=(8, 4)), jnp.float32)
PLAIN = jnp.asarray(RNG.normal(size=(16, 4)), jnp.float32)
SHORT = PLAIN[:13]


def lookup(x: jax.Array, i: jax.Array) -> jax.Array:
    numbers = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))
    return lax.gather(x, i[:, None], numbers, (1, x.shape[1]), mode="promise_in_bounds")


def pairs(x: jax.Array, i: jax.Array) -> jax.Array:
    numbers = lax.GatherDimensionNumbers(offset_dims=(), collapsed_slice_dims=(0, 1), start_index_map=(1, 0))
    return lax.gather(x, jnp.stack([i // 2, i], 1), numbers, (1, 1), mode="promise_in_bounds")


def scattered(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,)
    )
    return lambda x, i, u: function(x, i[:, None], u, numbers, mode="promise_in_bounds")


def contracted(a: jax.Array) -> jax.Array:
    return lax.dot_general(a, a, (((0,), (0,)), ((), ())))


def reduced(init: float, function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda v: lax.reduce(v, np.float32(init), function, (0,))


def reduced_by(body: Callable[..., Any], *inits: Any) -> Callable[..., Any]:
    """A reduction of the values together with their positions, or of the values alone."""
    if len(inits) == 1:
        return lambda v: lax.reduce(v, inits[0], body, (0,))
    return lambda v: lax.reduce((v, lax.broadcasted_iota(jnp.int32, v.shape, 0)), inits, body, (0,))


def larger(a: Any, b: Any) -> Any:
    first = a[0] >= b[0]
    return lax.select(first, a[0], b[0]), lax.select(first, a[1], b[1])


def later(a: Any, b: Any) -> Any:
    """Does not commute, and tells how often it was applied."""
    return b[0], a[1] + b[1] + 1


def cut(*lengths: int) -> Callable[..., Any]:
    """Slices of these lengths from everywhere in both dimensions."""
    numbers = lax.GatherDimensionNumbers(offset_dims=(1, 2), collapsed_slice_dims=(), start_index_map=(1, 0))
    return lambda v, i: lax.gather(v, jnp.stack([i // 2, i], 1), numbers, lengths, mode="clip")


def patched(function: Callable[..., Any], *lengths: int) -> Callable[..., Any]:
    """Updates of these lengths anywhere in both dimensions."""
    numbers = lax.ScatterDimensionNumbers((1, 2), (), (1, 0))
    return lambda v, i, u: function(v, jnp.stack([i // 2, i], 1), u[:, : lengths[0], None] + jnp.ones(lengths), numbers)


ADD, MAX, MUL = scattered(lax.scatter_add), scattered(lax.scatter_max), scattered(lax.scatter_mul)
DUS = lax.dynamic_update_slice_p.bind
PATCH = -jnp.ones((5, 4), jnp.float32)
IMAGE, KERNEL = jnp.arange(2 * 5 * 8.0).reshape(2, 5, 8) / 9, jnp.arange(3 * 8 * 8.0).reshape(3, 8, 8) / 99


def conv(groups: int) -> Callable[..., Any]:
    return lambda v, k: lax.conv_general_dilated(
        v, k[:, : 8 // groups], (1,), "SAME", feature_group_count=groups, dimension_numbers=("NWC", "WIO", "NWC")
    )


NONE = shard("", "")
SHARDED = {
    "iota": (lambda: lax.broadcasted_iota(jnp.bfloat16, (400, 4), 0), (), "iota", (), shard("yx", "")),
    "iota, uneven": (lambda: lax.iota(jnp.int32, 13), (), "iota", (), shard("y")),
    "constant": (lambda: jnp.asarray(np.arange(12.0).reshape(6, 2)), (), "constant", (), shard("y", "x")),
    "splat": (lambda: jnp.full((6, 2), 3.0), (), "broadcast_in_dim", (), shard("y", "x")),
    "complex constant": (lambda: jnp.asarray(np.arange(8) * 1j), (), "constant", (), shard("xy")),
    "broadcast": (
        lambda v: lax.broadcast_in_dim(v, (4, 16, 4), (1, 2)),
        (PLAIN,),
        "broadcast_in_dim",
        (shard("x", ""),),
        shard("y", "x", ""),
    ),
    "reshape": (lambda v: v.reshape(4, 16), (PLAIN,), "reshape", (shard("yx", ""),), shard("y", "x")),
    "slice": (lambda v: v[:, 1:3], (PLAIN,), "slice", (shard("xy", ""),), shard("xy", "")),
    "pad": (lambda v: jnp.pad(v, ((0, 0), (1, 2))), (PLAIN,), "pad", (shard("xy", ""),), shard("xy", "")),
    "dot": (contracted, (PLAIN,), "dot_general", (shard("x", ""), shard("x", "y")), shard("", "y"), "x"),
    "dot, uneven": (contracted, (SHORT,), "dot_general", (shard("xy", ""), shard("xy", "")), NONE, "xy"),
    "convolution": (
        conv(1),
        (IMAGE, KERNEL),
        "convolution",
        (shard("x", "", "y"), shard("", "y", "")),
        shard("x", "", ""),
        "y",
    ),
    "convolution groups": (
        conv(4),
        (IMAGE, KERNEL),
        "convolution",
        (shard("x", "", "y"), shard("", "", "y")),
        shard("x", "", "y"),
    ),
    "depthwise convolution": (
        conv(8),
        (IMAGE, KERNEL),
        "convolution",
        (shard("", "", "xy"), shard("", "", "xy")),
        shard("", "", "xy"),
    ),
    "sum": (lambda v: jnp.sum(v, 0), (PLAIN,), "reduce", (shard("x", "y"),), shard("y"), "x"),
    "sum, uneven, with init": (reduced(5, lax.add), (SHORT,), "reduce", (shard("xy", ""),), shard(""), "xy"),
    "product with init": (reduced(2, lax.mul), (SHORT,), "reduce", (shard("y", ""),), shard(""), "y"),
    "max with init": (reduced(0.5, lax.max), (SHORT,), "reduce", (shard("y", "x"),), shard("x"), "y"),
    "any": (lambda v: jnp.any(v > 1.5, 0), (PLAIN,), "reduce", (shard("y", "x"),), shard("x"), "y"),
    "first largest, uneven": (
        reduced_by(larger, np.float32(-np.inf), np.int32(0)),
        (SHORT,),
        "reduce",
        (shard("yx", ""), shard("yx", "")),
        shard(""),
    ),
    "in order, uneven": (
        reduced_by(later, np.float32(-9), np.int32(0)),
        (SHORT,),
        "reduce",
        (shard("yx", ""), shard("yx", "")),
        shard(""),
    ),
    "in order, empty blocks": (
        reduced_by(later, np.float32(-9), np.int32(7)),
        (SHORT[:5],),
        "reduce",
        (shard("xy", ""), shard("xy", "")),
        shard(""),
    ),
    "plus one, uneven": (
        reduced_by(lambda a, b: a + b + 1, np.float32(3)),
        (SHORT,),
        "reduce",
        (shard("y", "x"),),
        shard("x"),
    ),
    "windows, uneven": (cut(5, 3), (SHORT, ROWS), "gather", (shard("xy", ""),), shard("", "", ""), "xy"),
    "windows both ways": (cut(3, 2), (PLAIN, ROWS), "gather", (shard("y", "x"),), shard("", "", ""), "yx"),
    "wide windows": (cut(11, 4), (SHORT, ROWS), "gather", (shard("y", "x"),), shard("", "", "x"), "y"),
    "updates by windows, uneven": (
        patched(lax.scatter_add, 3, 2),
        (SHORT, ROWS, UPDATES),
        "scatter",
        (shard("xy", ""),),
        shard("xy", ""),
    ),
    "set windows both ways": (
        patched(lax.scatter, 4, 3),
        (PLAIN, ROWS, UPDATES),
        "scatter",
        (shard("y", "x"),),
        shard("y", "x"),
    ),
    "split updates by windows": (
        patched(lax.scatter_max, 3, 2),
        (SHORT, ROWS[:7], UPDATES[:7]),
        "scatter",
        (shard("x", ""), shard("y", ""), shard("y", "", "")),
        shard("x", ""),
        "y",
    ),
    "lookup": (lookup, (TABLE, ROWS), "gather", (shard("yx", ""),), NONE, "yx"),
    "lookup, uneven": (lookup, (TABLE[:13], ROWS), "gather", (shard("y", "x"),), shard("", "x"), "y"),
    "lookup of small unsigned": (
        lookup,
        (TABLE, jnp.array([3, 200, 15, 1], jnp.uint8)),
        "gather",
        (shard("y", ""), shard("x", "")),
        shard("x", ""),
        "y",
    ),
    "lookup in two dimensions": (pairs, (PLAIN, ROWS), "gather", (shard("y", "x"),), shard(""), "yx"),
    "offset dimension": (lookup, (TABLE, ROWS), "gather", (shard("", "y"), shard("x", "")), shard("x", "y")),
    "scatter-add, own rows": (ADD, (PLAIN, ROWS, UPDATES), "scatter", (shard("yx", ""), None, NONE), shard("yx", "")),
    "scatter-add, uneven": (
        ADD,
        (SHORT, ROWS, UPDATES),
        "scatter",
        (shard("y", "x"), None, shard("", "x")),
        shard("y", "x"),
    ),
    "scatter-add, split": (
        ADD,
        (PLAIN, ROWS, UPDATES),
        "scatter",
        (shard("y", ""), shard("x", ""), shard("x", "")),
        shard("y", ""),
        "x",
    ),
    "scatter-add, split, uneven": (
        ADD,
        (PLAIN, ROWS[:7], UPDATES[:7]),
        "scatter",
        (NONE, shard("xy", ""), shard("xy", "")),
        NONE,
        "xy",
    ),
    "scatter-max, split, uneven": (
        MAX,
        (PLAIN, ROWS[:7], UPDATES[:7]),
        "scatter",
        (NONE, shard("xy", ""), shard("xy", "")),
        NONE,
        "xy",
    ),
    "scatter-mul, split": (MUL, (PLAIN, ROWS, UPDATES), "scatter", (NONE, shard("y", ""), shard("y", "")), NONE, "y"),
    "dynamic slice": (
        lambda v, i: lax.dynamic_slice(v, (0, i), (16, 2)),
        (PLAIN, 2),
        "dynamic_slice",
        (shard("xy", ""),),
        shard("xy", ""),
    ),
    **{
        f"slice of {n} rows at {i}, {axes}": (
            lambda v, i, n=n: lax.dynamic_slice_p.bind(v, i, i * 0, slice_sizes=(n, 4)),
            (SHORT, i),
            "dynamic_slice",
            (shard(axes, ""),),
            NONE,
            axes,
        )
        for i, n, axes in ((-3, 1, "y"), (0, 5, "xy"), (6, 1, "xy"), (6, 5, "y"), (50, 3, "y"), (3, 12, "x"))
    },
    "random bits": (
        lambda k: lax.rng_bit_generator(k, (6, 8))[1],
        (jnp.arange(4, dtype=jnp.uint32),),
        "rng_bit_generator",
        (),
        shard("y", "x"),
    ),
    **{
        f"update at {i}, {n} rows, {axes}": (
            lambda v, u, i: DUS(v, u, i, i * 0),
            (SHORT, PATCH[:n], i),
            "dynamic_update_slice",
            (shard(axes, ""), NONE),
            shard(axes, ""),
        )
        for i, n, axes in ((-3, 1, "y"), (0, 5, "xy"), (6, 1, "xy"), (6, 5, "y"), (50, 3, "y"), (3, 5, "x"))
    },
}


@pytest.mark.parametrize("name", SHARDED)
def test_op_on_shards_equals_the_op(name: str) -> None:
    function, args, op, operands, result, *partial = SHARDED[name]
    args = [jnp.asarray(a) for a in args]
    expected, got = run_op(function, args, f"stablehlo.{op}", operands, result, *partial)
    assert_same([expected], [got])


BRANCHES = """
module {
  func.func public @main(%i: tensor<i32>, %x: tensor<2xf32>) -> tensor<2xf32> {
    %0 = "stablehlo.case"(%i) ({
      stablehlo.return %x : tensor<2xf32>
    }, {
      %1 = stablehlo.negate %x : tensor<2xf32>
      stablehlo.return %1 : tensor<2xf32>
    }) : (tensor<i32>) -> tensor<2xf32>
    return %0 : tensor<2xf32>
  }
}
"""


@pytest.mark.parametrize(("index", "sign"), [(-1, -1), (0, 1), (1, -1), (7, -1)])
def test_a_branch_number_out_of_range_takes_the_last_branch(index: int, sign: int) -> None:
    with mlir.make_ir_context() as context:
        graph = Graph(ir.Module.parse(BRANCHES, context).operation)
    got = Interpreter(graph).run_block(graph.main.blocks[0], [jnp.int32(index), jnp.ones(2)])
    np.testing.assert_array_equal(got[0], sign * np.ones(2))


def re_lowered(function: Callable[..., Any], *args: Any) -> tuple[Graph, Graph, str]:
    """The module of a function, the module of its op-by-op copy, and the copy's jaxpr; emitted in 64-bit mode."""
    graph = Graph(jax.jit(function, keep_unused=True).lower(*args).compiler_ir().operation)
    with jax.enable_x64(True):
        traced = jax.jit(lambda *xs: Interpreter(graph).run_block(graph.main.blocks[0], xs)).trace(*args)
        return graph, Graph(traced.lower().compiler_ir().operation), str(traced.jaxpr)


def ops_called(graph: Graph, name: str) -> list[str]:
    """Types, attributes and regions of the ops of one name."""
    return [repr(op.signature) for f in graph.functions.values() for op in f.walk() if op.name == name]


MAX_POOL = ((1, 3), (1, 2), ((0, 0), (1, 1)))


def conv_options(v: jax.Array) -> jax.Array:
    image, kernel = v.reshape(2, 4, 6), v[:6, :2].reshape(2, 3, 2)
    options: dict[str, Any] = {"padding": ((1, 2),), "lhs_dilation": (2,), "rhs_dilation": (1,), "precision": "highest"}
    names = ("NWC", "WIO", "NWC")
    return lax.conv_general_dilated(image, kernel, (2,), feature_group_count=2, dimension_numbers=names, **options)


def rows_batched(v: jax.Array, i: jax.Array) -> jax.Array:
    return jax.vmap(lambda r, k: r.at[k].set(r[0]))(v, i)


REAL = (jnp.float32, jnp.bfloat16, jnp.int32, jnp.uint8)
ANY = (*REAL, jnp.complex64)
LAX_FORMS: dict[str, tuple[str, tuple[Any, ...], Callable[..., Any]]] = {
    "x[ids]": ("gather", (*ANY, jnp.bool_), lambda v: v[INTS]),
    "take": ("gather", ANY, lambda v: jnp.take(v, INTS, 1, mode="clip", indices_are_sorted=True)),
    "take_along_axis": ("gather", ANY, lambda v: jnp.take_along_axis(v, INTS[None, :] % 8, 0)),
    "batched rows": ("gather", ANY, lambda v: jax.vmap(lambda r, k: r[k])(v, INTS[:6, None].repeat(8, 1).T % 6)),
    "add": ("scatter", ANY, lambda v: v.at[INTS].add(v[0], indices_are_sorted=True)),
    "multiply": ("scatter", ANY, lambda v: v.at[INTS].multiply(v[0])),
    "max": ("scatter", REAL, lambda v: v.at[:, INTS].max(v[:, 1:2])),
    "min": ("scatter", REAL, lambda v: v.at[INTS, 1].min(v[0, 0], unique_indices=True)),
    "set": ("scatter", (*ANY, jnp.bool_), lambda v: v.at[INTS].set(v[0])),
    "batched set": ("scatter", ANY, lambda v: rows_batched(v, jnp.arange(8))),
    "sort": ("sort", (*ANY, jnp.bool_), lambda v: jnp.sort(v, 0)),
    "unstable": ("sort", ANY, lambda v: lax.sort(v, is_stable=False)),
    "argsort": ("sort", ANY, lambda v: jnp.argsort(v, 0)),
    "two keys": ("sort", ANY, lambda v: lax.sort((v, v[::-1], INTS[None] + jnp.zeros((8, 1), jnp.int32)), num_keys=2)),
    "convolution": ("convolution", REAL, conv_options),
    "max pool": ("reduce_window", REAL, lambda v: lax.reduce_window(v, lowest(v.dtype), lax.max, *MAX_POOL)),
    "cumsum": ("reduce_window", REAL, lambda v: jnp.cumsum(v, 0, dtype=v.dtype)),
    "fft": ("fft", (jnp.complex64,), jnp.fft.fft2),
    "ifft": ("fft", (jnp.complex64,), lambda v: jnp.fft.ifft(v, axis=0)),
    "rfft": ("fft", (jnp.float32,), lambda v: jnp.fft.irfft(jnp.fft.rfft(v))),
    "top_k": ("chlo.top_k", REAL, lambda v: lax.top_k(v, 2)),
}


def lowest(dtype: Any) -> Any:
    return np.array(-np.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min, dtype)


@pytest.mark.parametrize("name", LAX_FORMS)
def test_the_lax_form_of_an_op_lowers_to_that_very_op(name: str) -> None:
    op, dtypes, function = LAX_FORMS[name]
    op = op if "." in op else f"stablehlo.{op}"
    for dtype in dtypes:
        graph, again, jaxpr = re_lowered(function, X.astype(dtype))
        assert ops_called(graph, op), dtype
        assert ops_called(again, op) == ops_called(graph, op), dtype
        assert f"name={op}" not in jaxpr, dtype


UNUSUAL = """
module {
  func.func public @main(%x: tensor<2x3xf32>, %i: tensor<3x1xi32>, %u: tensor<3xf32>)
      -> (tensor<2x3xf32>, tensor<3xf32>, tensor<3xf32>, tensor<2x1xf32>) {
    %0 = "stablehlo.sort"(%x) <{dimension = 1 : i64}> ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %p = stablehlo.compare GT, %a, %b, TOTALORDER : (tensor<f32>, tensor<f32>) -> tensor<i1>
      stablehlo.return %p : tensor<i1>
    }) : (tensor<2x3xf32>) -> tensor<2x3xf32>
    %1 = "stablehlo.scatter"(%u, %i, %u) <{scatter_dimension_numbers = #stablehlo.scatter<
        inserted_window_dims = [0], scatter_dims_to_operand_dims = [0], index_vector_dim = 1>}> ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %c = stablehlo.subtract %a, %b : tensor<f32>
      stablehlo.return %c : tensor<f32>
    }) : (tensor<3xf32>, tensor<3x1xi32>, tensor<3xf32>) -> tensor<3xf32>
    %t = stablehlo.transpose %i, dims = [1, 0] : (tensor<3x1xi32>) -> tensor<1x3xi32>
    %2 = "stablehlo.gather"(%u, %t) <{slice_sizes = array<i64: 1>, dimension_numbers = #stablehlo.gather<
        collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 0>}>
        : (tensor<3xf32>, tensor<1x3xi32>) -> tensor<3xf32>
    %init = stablehlo.constant dense<1.0> : tensor<f32>
    %3 = "stablehlo.reduce_window"(%x, %init) <{window_dimensions = array<i64: 1, 3>}> ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %c = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %c : tensor<f32>
    }) : (tensor<2x3xf32>, tensor<f32>) -> tensor<2x1xf32>
    return %0, %1, %2, %3 : tensor<2x3xf32>, tensor<3xf32>, tensor<3xf32>, tensor<2x1xf32>
  }
}
"""


def test_what_lax_cannot_say_stays_as_it_is() -> None:
    with mlir.make_ir_context() as context:
        graph = Graph(ir.Module.parse(UNUSUAL, context).operation)
    x, i, u = X[:2, :3], jnp.array([[2], [5], [0]], jnp.int32), X[0, :3]
    traced = jax.jit(lambda *xs: Interpreter(graph).run_block(graph.main.blocks[0], xs)).trace(x, i, u)
    for name in ("sort", "scatter", "gather", "reduce_window"):
        assert f"name=stablehlo.{name}" in str(traced.jaxpr)
    got = traced.lower().compile()(x, i, u)
    subtracted = u - jnp.array([u[2], 0, u[0]])
    assert_same([-jnp.sort(-x, 1), subtracted, u[jnp.array([2, 2, 0])], 1 + jnp.sum(x, 1, keepdims=True)], got)
