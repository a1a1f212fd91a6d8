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
from op_cases import CASES, INTS, RNG, X, conv, pairs

from sdy_jax.ir.graph import Block, Graph, Op, Value
from sdy_jax.ir.meshes import AxisRef, Mesh, MeshAxis
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.lowering.ops import re_emission
from sdy_jax.lowering.ops.registry import EMITTERS, LocalOp, strategies_of
from sdy_jax.runtime.meshes import RefinedMesh
from sdy_jax.shardy.rules.registry import RuleBook

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
        local = LocalOp(op, self.mesh, tuple(map(get, op.operands)), tuple(map(get, op.results)), self)
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
        local = LocalOp(graph_op, REFINED, tuple(shardings), last(graph_op, result), Interpreter(graph))
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
