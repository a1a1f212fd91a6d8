"""Lookups and updates of sharded dimensions: masked, partial, in the own block; with the plain numbers."""

from __future__ import annotations

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


def integers(low, high, *shape, dtype=np.int32):
    return RNG.integers(low, high, shape).astype(dtype)


T = floats(64, 128)
IDS = integers(0, 64, 16)
UPDATES = floats(16, 128)
STEP = np.int32(5)


def rows(table, ids):
    return table.at[ids].get(mode="clip")


def filled(table, ids):
    return jnp.take(table, ids, 0)


def along(table, ids):
    return jnp.take_along_axis(table, ids, 1)


def windows(table, starts):
    return jax.vmap(lambda start: lax.dynamic_slice(table, (start, 0), (3, table.shape[1])))(starts)


def row(table, start):
    return lax.dynamic_slice(table, (start, 0), (1, table.shape[1]))


def put_row(table, update, start):
    return lax.dynamic_update_slice(table, update, (start, 0))


ROW_NUMBERS = lax.ScatterDimensionNumbers((1,), (0,), (0,))


def scattered(function, unique=False):
    return lambda table, ids, updates: function(
        table, ids[:, None], updates, ROW_NUMBERS, unique_indices=unique, mode="drop"
    )


def embedding_gradient(table, ids):
    return jax.grad(lambda t: (jnp.sin(t[ids])).sum())(table)


def along_gradient(table, ids):
    return jax.grad(lambda t: (jnp.sin(along(t, ids))).sum())(table)


MANY, UPDATE_ROWS = integers(0, 64, 256), floats(256, 128)
COUNTED = [
    # name, function, arguments, shardings, result's sharding, kinds, bytes
    ("row", row, [T, STEP], [P("y"), P()], P(), "all_reduce", 768),
    ("row kept in parts", row, [T, STEP], [P("y"), P()], P(None, "y"), "reduce_scatter", 384),
    ("put a row", put_row, [T, UPDATES[:1], STEP], [P("y"), P(), P()], P("y"), "", 0),
    ("rows", rows, [T, IDS], [P("y"), P("x")], P("x"), "all_reduce", 6144),
    ("rows kept in parts", rows, [T, IDS], [P("y"), P("x")], P("x", "y"), "reduce_scatter", 3072),
    ("rows or nan", filled, [T, IDS], [P("y"), P("x")], P("x"), "all_reduce", 6144),
    ("columns of rows", rows, [T, IDS], [P(None, "y"), P("x")], P("x", "y"), "", 0),
    ("along", along, [T, integers(0, 128, 64, 4)], [P("x", "y"), P("x")], P("x"), "all_reduce", 768),
    ("windows", windows, [T, IDS[:4]], [P("y"), P()], P(), "all_reduce", 9216),
    ("add to own rows", scattered(lax.scatter_add), [T, IDS, UPDATES], [P("y"), P(), P()], P("y"), "", 0),
    ("set own rows", scattered(lax.scatter), [T, IDS, UPDATES], [P("y"), P(), P()], P("y"), "", 0),
    ("few updates in parts, own rows", scattered(lax.scatter_add), [T, IDS, UPDATES], [P("y"), P("x"), P("x")], P("y"),
     "all_gather all_gather", 4128),
    ("few updates in parts", scattered(lax.scatter_add), [T, IDS, UPDATES], [P(), P("x"), P("x")], P(),
     "all_gather all_gather", 4128),
    ("many updates in parts", scattered(lax.scatter_add), [T, MANY, UPDATE_ROWS], [P(), P("x"), P("x")], P(),
     "all_reduce", 32768),
    ("many updates in parts, result in parts", scattered(lax.scatter_add), [T, MANY, UPDATE_ROWS],
     [P(), P("x"), P("x")], P("x"), "reduce_scatter", 16384),
    ("many maxima in parts", scattered(lax.scatter_max), [T, MANY, UPDATE_ROWS], [P(), P("x"), P("x")], P(),
     "all_reduce", 32768),
    ("gradient of rows", embedding_gradient, [T, IDS], [P("y"), P("x")], P("y"), None, 6144 + 4128),
    ("gradient of many rows", embedding_gradient, [T, MANY], [P(), P("x")], P(), "all_reduce", 32768),
    ("gradient along", along_gradient, [T, integers(0, 128, 64, 4)], [P("x", "y"), P("x")], P("x", "y"), "all_reduce",
     768),
]  # fmt: skip


@pytest.mark.parametrize("case", COUNTED, ids=lambda case: case[0])
def test_lookups_move_what_is_found_and_updates_nothing(case):
    _, function, args, ins, out, kinds, wire_bytes = case
    plan = check(function, args, ins, out, kinds=kinds, wire_bytes=wire_bytes)
    assert not plan.notes, plan


def test_overwriting_needs_every_update_everywhere():
    """Only one device knows the last of several writes; a third device cannot tell it from two partial results."""
    for unique, ids in ((True, RNG.permutation(64).astype(np.int32)), (False, integers(0, 8, 64))):
        plan = check(scattered(lax.scatter, unique), [T, ids, floats(64, 128)], [P(), P("y"), P("y")], P())
        assert {c.kind for c in plan.collectives} == {"all_gather"}, plan
        assert "it is gathered: all_gather" in str(plan)


# Numbers: many indexings in one program, over several meshes.

SPLITS = [
    (PLANE, P("y", "x"), P("x")),
    (PLANE, '[{"y":(2)2}, {"y":(1)2, "x"}]', None),
    (CUBE, P("x", ("z", "y")), P("z", "x")),
    (LINE, P("x", None), P()),
]
SPLIT_IDS = [f"{len(mesh.axis_names)}D {table} {ids}" for mesh, table, ids in SPLITS]
OUT_OF_RANGE = np.array([3, -5, 15, 40, 0, 7, 8, 2_000_000_000, -1, 16, -16, -17, 31, 2, 2, 2], np.int32)
PAIRS = np.stack([OUT_OF_RANGE, OUT_OF_RANGE[::-1]], 1)


def gathered(x, indices, offset, collapsed, index_map, sizes):
    numbers = lax.GatherDimensionNumbers(offset, collapsed, index_map)
    return lax.gather(x, indices, numbers, sizes, mode="clip")


def lookups(x, pairs):
    one = pairs[:, :1]
    bits = pairs.astype(jnp.uint32)
    return {
        "rows": gathered(x, one, (1,), (0,), (0,), (1, 16)),
        "columns": gathered(x, one, (0,), (1,), (1,), (16, 1)),
        "large unsigned": gathered(x, bits[:, :1], (1,), (0,), (0,), (1, 16)),
        "bytes": gathered(x, one.astype(jnp.int8), (1,), (0,), (0,), (1, 16)),
        "elements": gathered(x, pairs, (), (0, 1), (1, 0), (1, 1)),
        "of the first row": gathered(x, one, (), (0, 1), (1,), (1, 1)),
        "one kept": gathered(x, one, (0, 1), (), (0,), (1, 16)),
        "windows": gathered(x, one, (0, 1), (), (0,), (3, 16)),
        "windows both ways": gathered(x, pairs, (0, 2), (), (1, 0), (5, 7)),
        "wide windows": gathered(x, one, (1, 2), (), (1,), (16, 13)),
        "row and window": gathered(x, pairs, (1,), (0,), (0, 1), (1, 4)),
        "nan": jnp.take(x, one[:, 0], 0),
        "wrapped": jnp.take(x, one, 1, mode="wrap"),
        "along": jnp.take_along_axis(x, pairs, 1),
        "sliced": [
            lax.dynamic_slice(x, (start, one[1, 0]), (3, 9)) for start in (pairs[0, 0], pairs[1, 0], pairs[3, 0])
        ],
    }


@pytest.mark.parametrize(("mesh", "table", "ids"), SPLITS, ids=SPLIT_IDS)
def test_lookups(mesh, table, ids):
    x = floats(16, 16)
    x[3], x[9, 4], x[15, 15] = np.nan, np.inf, -np.inf
    check(lookups, [x, PAIRS], [table, ids], mesh=mesh, rtol=0)


@pytest.mark.parametrize("start", [-3, 5, 14, 99])
def test_one_window_that_is_cut_afterwards_begins_where_it_fits(start):
    """XLA of jax 0.10 joins the cut with the window, and forgets that the window cannot begin beyond 12."""
    for dtype in (np.int32, np.uint32):
        index = np.array([start]).astype(dtype)
        check(
            lambda x, i: gathered(x, i, (0, 1), (), (0,), (4, 16)), [floats(16, 16), index], [P(), P()], P("y"), rtol=0
        )


@pytest.mark.dear
@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint32", "bfloat16", "float16", "complex64", "float8_e4m3fn", "int4"]
)
def test_lookups_of_any_type_are_exact(dtype):
    x = jnp.asarray(np.round(floats(16, 16) * 4)).astype(dtype)
    check(lambda t, i: (rows(t, i), windows(t, i)), [x, PAIRS[:, 0]], [P("y"), P("x")], P())
    plan = check(lambda t, i: row(t, i[1]), [x, PAIRS[:, 0]], [P("y"), P("x")], P())
    assert any(c.kind == "all_reduce" for c in plan.collectives), plan


def updates_of(function, x, pairs, u):
    def scatter(indices, updates, window, inserted, targets):
        numbers = lax.ScatterDimensionNumbers(window, inserted, targets)
        return function(x, indices, updates, numbers, mode="drop")

    one = pairs[:, :1]
    return {
        "rows": scatter(one, u, (1,), (0,), (0,)),
        "columns": scatter(one, u, (1,), (1,), (1,)),
        "unsigned": scatter(one.astype(jnp.uint32), u, (1,), (0,), (0,)),
        "elements": scatter(pairs, u[:, 0], (), (0, 1), (1, 0)),
        "in the first row": scatter(one, u[:, 0], (), (0, 1), (1,)),
        "one element": scatter(pairs[2], u[0, 0], (), (0, 1), (0, 1)),
        "one kept": scatter(one, u[:, None], (1, 2), (), (0,)),
        "windows": scatter(one, u[:, :3, None] + u[:, None], (1, 2), (), (0,)),
        "windows both ways": scatter(pairs, u[:, :5, None] + u[:, None, :7], (1, 2), (), (1, 0)),
        "row and window": scatter(pairs, u[:, :4], (1,), (0,), (0, 1)),
    }


ALL = {
    "add": lax.scatter_add,
    "mul": lax.scatter_mul,
    "max": lax.scatter_max,
    "min": lax.scatter_min,
    "set": lax.scatter,
}


UPDATED = [("add", 0), ("mul", 1), ("max", 2), ("min", 1), ("set", 0), ("set", 2)]


@pytest.mark.dear(cases=4)
@pytest.mark.parametrize(("name", "split"), UPDATED)
@pytest.mark.more("scatters of all kinds beside gathers")
def test_updates(name, split):
    mesh, table, ids = SPLITS[split]

    def run(x, pairs, u):
        return updates_of(ALL[name], x, pairs, u)

    x, u = integers(-9, 9, 16, 16), integers(-9, 9, 16, 16)
    check(run, [x, PAIRS, u], [table, ids, ids], mesh=mesh)


@pytest.mark.parametrize("index", [11, 3, 200])
def test_one_update_of_a_block_that_was_just_cut_out(index):
    """XLA makes dynamic slices of such a scatter, which must not be joined with the one that cut the block out."""
    numbers = lax.ScatterDimensionNumbers((), (0, 1), (1,))
    args = [integers(0, 50, 16, 16, dtype=np.int8), np.array([index], np.uint8), np.int8(10)]
    check(
        lambda x, i, u: lax.scatter_min(x, i, u, numbers, mode="drop"), args, [P(), P(), P()], P(None, "x"), mesh=LINE
    )


@pytest.mark.parametrize("dtype", ["bool", "int8", "bfloat16", "complex64"])
def test_partial_updates_of_other_types(dtype):
    x, u = (jnp.asarray(integers(-4, 4, *shape)).astype(dtype) for shape in ((8, 8), (64, 8)))
    ids = integers(-2, 10, 64)
    function = lax.scatter_max if dtype == "bool" else lax.scatter_add  # JAX adds no booleans
    add = check(scattered(function), [x, ids, u], [P(None, "y"), P("x"), P("x", "y")], P(None, "y"))
    assert [c.kind for c in add.collectives] == ["all_reduce"], add


def test_an_unreduced_update_counts_what_was_there_once():
    x = integers(1, 9, 8, 8)
    for spec in (P("x"), P(("y", "x"))):
        for function in (lax.scatter_add, lax.scatter_mul, lax.scatter_max):
            args = [x, integers(0, 8, 64), integers(1, 3, 64, 8)]
            plan = check(scattered(function), args, [P(), spec, spec], P())
            assert [c.kind for c in plan.collectives] == ["all_reduce"], plan


# What JAX does not lower to, as MLIR.

SCATTER = """"stablehlo.scatter"({inputs}) <{{scatter_dimension_numbers = #stablehlo.scatter<{numbers}>,
    indices_are_sorted = false, unique_indices = false}}> ({{ {body} }}) : {type}"""
ROWS = "update_window_dims = [1], inserted_window_dims = [0], scatter_dims_to_operand_dims = [0], index_vector_dim = 1"


def one_input(body, dtype="i32"):
    """A scatter of rows, 64 updates of 8 elements into 8 rows."""
    scalar = f"tensor<{dtype}>"
    region = f"^bb0(%x: {scalar}, %y: {scalar}): {body} stablehlo.return %z : {scalar}"
    types = f"(tensor<8x8x{dtype}>, tensor<64x1xi32>, tensor<64x8x{dtype}>) -> tensor<8x8x{dtype}>"
    return op(SCATTER.format(inputs="%a, %b, %c", numbers=ROWS, body=region, type=types), f"8x8x{dtype}")


@pytest.mark.parametrize("kind", ["and", "or", "xor"])
def test_updates_by_bits_are_combined(kind):
    function = one_input(f"%z = stablehlo.{kind} %x, %y : tensor<i32>")
    args = [integers(0, 99, 8, 8), integers(-2, 10, 64, 1), integers(0, 99, 64, 8)]
    plan = check(function, args, [P(), P("x"), P("x")], P())
    assert [c.kind for c in plan.collectives] == ["all_reduce"], plan


def test_updates_by_any_body_meet_on_the_owner_of_the_row():
    body = "%n = stablehlo.add %y, %y : tensor<i32> %z = stablehlo.subtract %x, %n : tensor<i32>"
    args = [integers(0, 99, 8, 8), integers(-2, 10, 64, 1), integers(0, 99, 64, 8)]
    for table, ids in ((P("y"), P()), (P("y"), P("x")), (P(), P("x")), (P("x", "y"), P())):
        plan = check(one_input(body), args, [table, ids, ids], table)
        assert not {"all_reduce", "reduce_scatter"} & {c.kind for c in plan.collectives}, plan


def test_several_inputs_are_updated_together():
    region = """^bb0(%x: tensor<i32>, %y: tensor<f32>, %u: tensor<i32>, %v: tensor<f32>):
      %s = stablehlo.maximum %x, %u : tensor<i32> %t = stablehlo.maximum %y, %v : tensor<f32>
      stablehlo.return %s, %t : tensor<i32>, tensor<f32>"""
    types = (
        "(tensor<8x8xi32>, tensor<8x8xf32>, tensor<64x1xi32>, tensor<64x8xi32>, tensor<64x8xf32>) "
        "-> (tensor<8x8xi32>, tensor<8x8xf32>)"
    )
    text = SCATTER.format(inputs="%a, %b, %c, %d, %e", numbers=ROWS, body=region, type=types)
    function = op(text, "8x8xi32", "8x8xf32")
    args = [integers(-9, 9, 8, 8), floats(8, 8), integers(-2, 10, 64, 1), integers(-9, 9, 64, 8), floats(64, 8)]
    for table, ids in ((P("y"), P("x")), (P(None, "y"), P("x")), (P(), P(("x", "y")))):
        check(function, args, [table, table, ids, ids, ids], (table, table))


def test_index_vectors_may_lie_along_any_dimension():
    gather = op(
        '"stablehlo.gather"(%a, %b) <{dimension_numbers = #stablehlo.gather<offset_dims = [0], '
        "collapsed_slice_dims = [0], start_index_map = [1, 0], index_vector_dim = 0>, "
        "slice_sizes = array<i64: 1, 3>}> : (tensor<16x16xf32>, tensor<2x16xi32>) -> tensor<3x16xf32>",
        "3x16xf32",
    )
    numbers = "inserted_window_dims = [0, 1], scatter_dims_to_operand_dims = [1, 0], index_vector_dim = 0"
    region = """^bb0(%x: tensor<f32>, %y: tensor<f32>):
      %z = stablehlo.add %x, %y : tensor<f32> stablehlo.return %z : tensor<f32>"""
    types = "(tensor<16x16xf32>, tensor<2x16xi32>, tensor<16xf32>) -> tensor<16x16xf32>"
    scatter = op(SCATTER.format(inputs="%a, %b, %c", numbers=numbers, body=region, type=types), "16x16xf32")
    for mesh, table, _ in SPLITS[:2]:
        check(gather, [floats(16, 16), PAIRS.T], [table, P(None, "x")], mesh=mesh)
        check(scatter, [floats(16, 16), PAIRS.T, floats(16)], [table, P(None, "x"), P("x")], mesh=mesh)


@pytest.mark.parametrize(
    "platform, shape, apart", [("tpu", (16, 4), True), ("tpu", (16,), False), ("cpu", (16, 4), False)]
)
def test_rows_for_an_array_of_indices_are_apart_on_tpus(platform, shape, apart):
    """There the sum of such rows and other values was computed twice, and what it is computed of kept beside it."""
    function = sdy.partition(lambda t, i: t[i] + 1.0, mesh=LINE, in_shardings=(P(), P("x")), out_shardings=P("x"))
    ids = integers(0, 64, *shape)
    lowered = jax.jit(function).trace(T, ids).lower(lowering_platforms=(platform,))
    assert ("optimization_barrier" in lowered.as_text()) == apart
    np.testing.assert_allclose(function(T, ids), T[ids] + 1.0)
    found = jax.grad(lambda t: jnp.sum(function(t, ids) ** 2))(T)
    np.testing.assert_allclose(found, jax.grad(lambda t: jnp.sum((t[ids] + 1.0) ** 2))(T), rtol=1e-5)


def label_loss(logits, labels):
    chosen = jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - chosen)


def shifted(table, ids):
    """Updates of ones, beside another array of the table's size."""
    return table * 2 + jnp.ones_like(table).at[ids].add(1.0)


def twice(table, ids):
    """The updated zeros are read by the sum, and by another op."""
    put = jnp.zeros_like(table).at[ids].add(1.0)
    return table * 2 + put, put * 3


ADDED = {
    # name: function, arguments, specs, adds of arrays of the table's size that are left
    "labels": (jax.grad(label_loss), (T, integers(0, 128, 64)), (P("x"), P("x")), 0),
    "labels, whole": (jax.grad(label_loss), (T, integers(0, 128, 64)), (P(), P()), 0),
    "labels, vocabulary split": (jax.grad(label_loss), (T, integers(0, 128, 64)), (P(None, "x"), P()), 0),
    "updates of ones": (shifted, (T, IDS), (P(None, "x"), P()), 1),
    "read twice": (twice, (T, IDS), (P(None, "x"), P()), 1),
}


@pytest.mark.parametrize("name", ADDED)
def test_updates_of_zeros_that_are_added_to_an_array_update_it(name):
    function, args, specs, left = ADDED[name]
    found = sdy.partition(function, mesh=LINE, in_shardings=specs)
    for ours, plain in zip(*(jax.tree.leaves(f(*args)) for f in (found, function)), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-6, atol=1e-7)
    emitted = found.lower(*args).as_text().splitlines()
    (scatter,) = [line for line in emitted if "stablehlo.scatter" in line]
    table = emitted[emitted.index(scatter) :]
    local = next(line for line in table if line.strip().startswith("})")).rpartition("-> ")[2]
    adds = [line for line in emitted if "stablehlo.add" in line and line.rpartition(": ")[2] == local]
    assert len(adds) == left
