"""Batching dimensions hidden in iota parts of indices: found as jaxlib finds them, and beyond; numbers on devices."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.mlir import ir
from jax.interpreters.mlir import make_ir_context
from jax.sharding import PartitionSpec as P
from sdy_oracle import run_passes
from sharding_dump import parse

import sdy_jax as sdy
from sdy_jax.ir.graph import Graph, Value
from sdy_jax.ir.text.modules import parse_module
from sdy_jax.shardy.passes.batching import At, Ramp, Ramps
from sdy_jax.shardy.passes.pipelines import run_pipeline

PASS = "sdy-explicit-gather-scatter-batching"
UNSORTED = "indices_are_sorted = false"


def ours(text: str, options: str = "{compat=shardy}") -> str:
    module = parse(text)
    with module.context, ir.Location.unknown(module.context):
        run_pipeline(module.operation, f"{PASS}{options}")
        module.operation.verify()
    return expression(module)


def expression(module: ir.Module) -> str:
    """What main returns, as one expression: jaxlib's pass also reorders and merges ops."""
    return _expression(Graph(module.operation).outputs[0])


def _expression(value: Value) -> str:
    op = value.defining_op
    if op is None:
        return f"%{value.index}"
    attributes = ", ".join(f"{name} = {op.attributes[name]}" for name in sorted(op.attributes))
    return f"{op.name}({', '.join(map(_expression, op.operands))}) {{{attributes}}} : {value.type}"


def theirs(texts: Sequence[str]) -> list[str]:
    found = run_passes((text, f"func.func({PASS})") for text in texts)
    return [expression(parse(text)) for text in found if text]


def ints(*shape: int) -> str:
    return f"tensor<{'x'.join(map(str, shape))}xi32>"


def floats(*shape: int) -> str:
    return f"tensor<{'x'.join(map(str, shape))}xf32>"


DATA, IOTA = "given", "iota 0"
COLUMN = (8, 3, 1)
COLUMNS = {
    "iota 0": f"stablehlo.iota dim = 0 : {ints(*COLUMN)}",
    "iota 1": f"stablehlo.iota dim = 1 : {ints(*COLUMN)}",
    "iota 2": f"stablehlo.iota dim = 2 : {ints(*COLUMN)}",
    "broadcast": f"""stablehlo.iota dim = 0 : {ints(8)}
      %NAME = stablehlo.broadcast_in_dim %NAMEa, dims = [0] : ({ints(8)}) -> {ints(*COLUMN)}""",
    "turned broadcast": f"""stablehlo.iota dim = 1 : {ints(3, 8)}
      %NAME = stablehlo.broadcast_in_dim %NAMEa, dims = [1, 0] : ({ints(3, 8)}) -> {ints(*COLUMN)}""",
    "reshape": f"""stablehlo.iota dim = 0 : {ints(8, 3)}
      %NAME = stablehlo.reshape %NAMEa : ({ints(8, 3)}) -> {ints(*COLUMN)}""",
    "reshape that moves": f"""stablehlo.iota dim = 1 : {ints(1, 8, 3)}
      %NAME = stablehlo.reshape %NAMEa : ({ints(1, 8, 3)}) -> {ints(*COLUMN)}""",
    "reshape that splits": f"""stablehlo.iota dim = 0 : {ints(24)}
      %NAME = stablehlo.reshape %NAMEa : ({ints(24)}) -> {ints(*COLUMN)}""",
    "convert": f"""stablehlo.iota dim = 0 : tensor<8x3x1xi64>
      %NAME = stablehlo.convert %NAMEa : (tensor<8x3x1xi64>) -> {ints(*COLUMN)}""",
    "transpose": f"""stablehlo.iota dim = 1 : {ints(3, 8, 1)}
      %NAME = stablehlo.transpose %NAMEa, dims = [1, 0, 2] : ({ints(3, 8, 1)}) -> {ints(*COLUMN)}""",
}
"""One element of the index vectors each; `NAMEa` is what it is made of."""


def program(
    columns: Sequence[str],
    index_map: Sequence[int],
    sizes: Sequence[int],
    *,
    scatter: bool = False,
    nested: bool = False,
    rest: int = 0,
    batching: bool = False,
) -> str:
    """Indices of shape 8 x 3 x (number of columns) into a tensor of these sizes, and `rest` if that is not 0.

    With `batching` the tensor has a batching dimension of size 3 at the end already.
    """
    count = len(columns)
    lines = [
        f"%c{i} = {COLUMNS[c]}" if "\n" not in COLUMNS[c] else f"%c{i}a = {COLUMNS[c].replace('NAME', f'c{i}')}"
        for i, c in enumerate(columns)
        if c != DATA
    ]
    names = [f"%c{i}" if c != DATA else "%x" for i, c in enumerate(columns)]
    join = "%s = stablehlo.concatenate {}, dim = 2 : ({}) -> {}"
    indices = names[0]
    if nested:
        lines.append(
            join.replace("%s", "%n").format(", ".join(names[:2]), ", ".join([ints(*COLUMN)] * 2), ints(8, 3, 2))
        )
        names, types = ["%n", *names[2:]], [ints(8, 3, 2), *[ints(*COLUMN)] * (count - 2)]
    else:
        types = [ints(*COLUMN)] * count
    if len(names) > 1:
        lines.append(join.format(", ".join(names), ", ".join(types), ints(8, 3, count)))
        indices = "%s"
    shape = (*sizes, *([3] if batching else []), *([rest] if rest else []))
    window = (8, 3, *([rest] if rest else []))
    offset = "[2]" if rest else "[]"
    single = list(range(len(sizes)))
    pair = ([len(sizes)], [1]) if batching else ([], [])
    if scatter:
        numbers = (
            f"#stablehlo.scatter<update_window_dims = {offset}, inserted_window_dims = {single}, "
            f"input_batching_dims = {pair[0]}, scatter_indices_batching_dims = {pair[1]}, "
            f"scatter_dims_to_operand_dims = {list(index_map)}, index_vector_dim = 2>"
        )
        lines.append(
            f"""%0 = "stablehlo.scatter"(%t, {indices}, %u) <{{{UNSORTED}, scatter_dimension_numbers = {numbers},
            unique_indices = false}}> ({{
          ^bb0(%p: tensor<f32>, %q: tensor<f32>):
            %r = stablehlo.add %p, %q : tensor<f32>
            stablehlo.return %r : tensor<f32>
          }}) : ({floats(*shape)}, {ints(8, 3, count)}, {floats(*window)}) -> {floats(*shape)}"""
        )
    else:
        numbers = (
            f"#stablehlo.gather<offset_dims = {offset}, collapsed_slice_dims = {single}, "
            f"operand_batching_dims = {pair[0]}, start_indices_batching_dims = {pair[1]}, "
            f"start_index_map = {list(index_map)}, index_vector_dim = 2>"
        )
        slices = ", ".join(["1"] * (len(shape) - bool(rest)) + [str(rest)] * bool(rest))
        lines.append(
            f'%0 = "stablehlo.gather"(%t, {indices}) <{{dimension_numbers = {numbers}, {UNSORTED}, '
            f"slice_sizes = array<i64: {slices}>}}>"
            f" : ({floats(*shape)}, {ints(8, 3, count)}) -> {floats(*window)}"
        )
    result = shape if scatter else window
    body = "\n  ".join(lines)
    return f"""func.func @main(%t: {floats(*shape)}, %x: {ints(*COLUMN)}, %u: {floats(*window)}) -> {floats(*result)} {{
  {body}
  return %0 : {floats(*result)}
}}"""


CASES = {
    "first": program([IOTA, DATA], [0, 1], [8, 16]),
    "last, but dimension 0": program([DATA, IOTA], [1, 0], [8, 16]),
    "not dimension 0": program([DATA, IOTA], [0, 1], [16, 8]),
    "two": program([IOTA, DATA, "iota 1"], [0, 1, 2], [8, 16, 3]),
    "nothing else": program([IOTA, "iota 1"], [0, 1], [8, 3]),
    "one element": program([IOTA], [0], [8], rest=5),
    "the same twice": program([IOTA, DATA, IOTA], [0, 1, 2], [8, 16, 8]),
    "another size": program([IOTA, DATA], [0, 1], [10, 16]),
    "along another dimension": program(["iota 1", DATA], [0, 1], [3, 16]),
    "along the vectors": program(["iota 2", DATA], [0, 1], [1, 16]),
    "concatenated twice": program([IOTA, DATA, DATA], [0, 1, 2], [8, 4, 5], nested=True),
    "in the middle": program([DATA, IOTA, DATA], [1, 0, 2], [8, 4, 5]),
    "slices": program([IOTA, DATA], [0, 1], [8, 16], rest=5),
    "batching already": program([IOTA, DATA], [0, 1], [8, 16], batching=True),
    "scatter": program([IOTA, DATA], [0, 1], [8, 16], rest=5, scatter=True),
    "scatter, batching already": program([IOTA, DATA], [0, 1], [8, 16], batching=True, scatter=True),
    **{kind: program([kind, DATA], [0, 1], [8, 16]) for kind in COLUMNS if kind != "reshape that splits"},
    "no concatenation": """func.func @main(%t: tensor<8x5x16xf32>) -> tensor<8x3xf32> {
      %i = stablehlo.iota dim = 0 : tensor<8x3x3xi32>
      %0 = "stablehlo.gather"(%t, %i) <{dimension_numbers = #stablehlo.gather<collapsed_slice_dims = [0, 1, 2],
        start_index_map = [1, 0, 2], index_vector_dim = 2>,
        indices_are_sorted = false, slice_sizes = array<i64: 1, 1, 1>}>
        : (tensor<8x5x16xf32>, tensor<8x3x3xi32>) -> tensor<8x3xf32>
      return %0 : tensor<8x3xf32>
    }""",
    "not collapsed": """func.func @main(%t: tensor<8x16xf32>, %x: tensor<8x3x1xi32>) -> tensor<8x3x1xf32> {
      %i = stablehlo.iota dim = 0 : tensor<8x3x1xi32>
      %s = stablehlo.concatenate %i, %x, dim = 2 : (tensor<8x3x1xi32>, tensor<8x3x1xi32>) -> tensor<8x3x2xi32>
      %0 = "stablehlo.gather"(%t, %s) <{dimension_numbers = #stablehlo.gather<offset_dims = [2],
        collapsed_slice_dims = [1], start_index_map = [0, 1], index_vector_dim = 2>,
        indices_are_sorted = false, slice_sizes = array<i64: 1, 1>}>
        : (tensor<8x16xf32>, tensor<8x3x2xi32>) -> tensor<8x3x1xf32>
      return %0 : tensor<8x3x1xf32>
    }""",
    "vectors along dimension 0": """func.func @main(%t: tensor<8x16xf32>, %x: tensor<1x8xi32>) -> tensor<8xf32> {
      %i = stablehlo.iota dim = 1 : tensor<1x8xi32>
      %s = stablehlo.concatenate %i, %x, dim = 0 : (tensor<1x8xi32>, tensor<1x8xi32>) -> tensor<2x8xi32>
      %0 = "stablehlo.gather"(%t, %s) <{dimension_numbers = #stablehlo.gather<collapsed_slice_dims = [0, 1],
        start_index_map = [0, 1], index_vector_dim = 0>, indices_are_sorted = false, slice_sizes = array<i64: 1, 1>}>
        : (tensor<8x16xf32>, tensor<2x8xi32>) -> tensor<8xf32>
      return %0 : tensor<8xf32>
    }""",
}


def random_program(seed: int) -> str:
    """Without pieces of several elements before others: jaxlib then counts pieces instead of elements."""
    rng = random.Random(seed)
    count = rng.randint(1, 4)
    kinds = [kind for kind in COLUMNS if kind != "reshape that splits"]
    columns = rng.choices([DATA, *kinds], [6, *[1] * len(kinds)], k=count)
    sizes = [rng.choice((8, 8, 3, 5)) for _ in range(count)]
    index_map = rng.sample(range(count), count)
    choices = {name: rng.random() < 0.3 for name in ("scatter", "batching")}
    return program(columns, index_map, sizes, rest=rng.choice((0, 4)), **choices)


@pytest.mark.more("many programs beside jaxlib's pass")
def test_batching_becomes_explicit_where_the_oracle_makes_it_so() -> None:
    """Both versions of jaxlib do the same here."""
    texts = [*CASES.values(), *(random_program(seed) for seed in range(150))]
    found = theirs(texts)
    assert sum("batching_dims = [0]" in text for text in found) > 10
    assert [t for t, expected in zip(texts, found, strict=True) if ours(t) != expected] == []


@pytest.mark.slow
def test_many_random_programs_get_the_batching_dimensions_of_the_oracle() -> None:
    texts = [random_program(seed) for seed in range(1000, 2000)]
    assert [t for t, expected in zip(texts, theirs(texts), strict=True) if ours(t) != expected] == []


@pytest.mark.parametrize(
    ("name", "pairs"),
    [
        ("not dimension 0", "operand_batching_dims = [1], start_indices_batching_dims = [0]"),
        ("two", "operand_batching_dims = [0, 2], start_indices_batching_dims = [0, 1]"),
        ("nothing else", "operand_batching_dims = [0], start_indices_batching_dims = [0]"),
        ("along another dimension", "operand_batching_dims = [0], start_indices_batching_dims = [1]"),
        ("concatenated twice", "operand_batching_dims = [0], start_indices_batching_dims = [0]"),
        ("batching already", "operand_batching_dims = [0, 2], start_indices_batching_dims = [0, 1]"),
        ("turned broadcast", "operand_batching_dims = [0], start_indices_batching_dims = [0]"),
        ("reshape that moves", "operand_batching_dims = [0], start_indices_batching_dims = [0]"),
        ("convert", "operand_batching_dims = [0], start_indices_batching_dims = [0]"),
        ("transpose", "operand_batching_dims = [0], start_indices_batching_dims = [0]"),
        ("vectors along dimension 0", "operand_batching_dims = [0], start_indices_batching_dims = [1]"),
    ],
)
def test_plans_see_more_than_the_oracle(name: str, pairs: str) -> None:
    assert pairs in ours(CASES[name], "{compat=sdy_jax}")


@pytest.mark.parametrize("name", ["another size", "not collapsed", "one element"])
def test_what_is_no_batch_stays(name: str) -> None:
    assert ours(CASES[name], "{compat=sdy_jax}") == expression(parse(CASES[name]))


@pytest.mark.parametrize("options", ["{compat=sdy_jax}", "{compat=shardy}"])
def test_a_reshaped_iota_that_counts_through_two_dimensions_is_no_batch(options: str) -> None:
    """jaxlib takes it for one: it reads row i where the indices say row 3 * i + j."""
    text = program(["reshape that splits", DATA], [0, 1], [8, 16])
    assert ours(text, options) == expression(parse(text))


# Numbers.

X = jnp.arange(8 * 16.0).reshape(8, 16)
INDICES = (jnp.arange(24).reshape(8, 3) * 7) % 16
U = jnp.arange(24.0).reshape(8, 3)


def rows() -> jax.Array:
    return jnp.arange(8)[:, None]


FUNCTIONS: dict[str, Callable[..., jax.Array]] = {
    "read": lambda x, i, u: x[rows(), i],
    "read, constants of numpy": lambda x, i, u: x[np.arange(8)[:, None], i],
    "read, indices out of range are filled": lambda x, i, u: x.at[rows(), i + 8].get(mode="fill", fill_value=-1),
    "read, indices out of range are clamped": lambda x, i, u: x.at[rows(), i + 8].get(mode="clip"),
    "read, negative indices": lambda x, i, u: x[rows(), i - 16],
    "take along an axis": lambda x, i, u: jnp.take_along_axis(x, i, axis=1),
    "read in a batch": lambda x, i, u: jax.vmap(lambda a, j: a[j])(x, i),
    "read element by element in a batch": lambda x, i, u: jax.vmap(lambda a, j: jax.vmap(lambda k: a[k])(j))(x, i),
    "add": lambda x, i, u: x.at[rows(), i].add(u),
    "set": lambda x, i, u: x.at[rows(), jnp.arange(3)[None] + i[:, :1] % 8].set(u),
    "multiply, clamped": lambda x, i, u: x.at[rows(), i + 8].multiply(u, mode="clip"),
    "maximum": lambda x, i, u: x.at[rows(), i].max(u),
    "add in a batch": lambda x, i, u: jax.vmap(lambda a, j, b: a.at[j].add(b))(x, i, u),
    "gradient": lambda x, i, u: jax.grad(lambda x: (x[rows(), i] ** 2 * u).sum())(x),
    "gradient for the updates": lambda x, i, u: jax.grad(lambda u: (x.at[rows(), i].add(u) ** 2).sum())(u),
    "concatenated indices": lambda x, i, u: jax.lax.gather(
        x,
        jnp.concatenate([jax.lax.broadcasted_iota(jnp.int32, (8, 3, 1), 0), i[..., None]], axis=2),
        jax.lax.GatherDimensionNumbers((), (0, 1), (0, 1)),
        (1, 1),
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_batches_split_without_communication(mesh: jax.sharding.Mesh, name: str) -> None:
    f = FUNCTIONS[name]
    split = P(("data", "model"))
    partitioned = sdy.partition(f, mesh=mesh, in_shardings=(split, split, split), out_shardings=split)
    np.testing.assert_allclose(partitioned(X, INDICES, U), f(X, INDICES, U))
    assert partitioned.plan(X, INDICES, U).collectives == ()


def test_two_batch_dimensions_split() -> None:
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x, i = jnp.arange(4 * 8 * 6.0).reshape(4, 8, 6), jnp.arange(32).reshape(4, 8) % 6

    def f(x: jax.Array, i: jax.Array) -> jax.Array:
        return x[jnp.arange(4)[:, None], jnp.arange(8)[None, :], i]

    partitioned = sdy.partition(f, mesh=mesh, in_shardings=P("x", "y"), out_shardings=P("x", "y"))
    np.testing.assert_allclose(partitioned(x, i), f(x, i))
    assert partitioned.plan(x, i).collectives == ()


def test_indices_that_only_look_like_a_count_are_gathered_right(mesh: jax.sharding.Mesh) -> None:
    split = P("model")
    for f in (
        lambda x, i: x[jnp.arange(8)[::-1][:, None], i],
        lambda x, i: x[(jnp.arange(8) + 1)[:, None], i],
        lambda x, i: x[jnp.arange(0, 16, 2)[:, None] % 8, i],
        lambda x, i: x[jnp.arange(8)[:, None].astype(jnp.int8) * 64 // 64, i],
        lambda x, i: x[jnp.arange(-4, 4)[:, None], i],
    ):
        partitioned = sdy.partition(f, mesh=mesh, in_shardings=(split, split), out_shardings=split)
        np.testing.assert_allclose(partitioned(X, INDICES), f(X, INDICES))


# Ramps.


Step = Callable[[jax.Array, Any], jax.Array]
STEPS: list[Step] = [
    lambda x, n: x + n,
    lambda x, n: x - n,
    lambda x, n: jnp.where(x < n, x + jnp.asarray(6, x.dtype), x),
    lambda x, n: jnp.where(x >= n, x, -x),
    lambda x, n: jnp.minimum(x, n),
    lambda x, n: jnp.maximum(x, n),
    lambda x, n: jax.lax.clamp(jnp.asarray(0, x.dtype), x, n),
    lambda x, n: x.astype(jnp.int8).astype(jnp.int32),
    lambda x, n: x.astype(jnp.uint8),
    lambda x, n: x.astype(jnp.float32).astype(jnp.int32),
    lambda x, n: x.T.reshape(6, 2, 2)[:, :, ::1].reshape(6, 4).T,
    lambda x, n: x.reshape(24).reshape(4, 6),
    lambda x, n: jnp.concatenate([x[1:], x[:1]]),
    lambda x, n: jnp.concatenate([x[:, 2:], x[:, :2]], axis=1),
    lambda x, n: jnp.broadcast_to(x[:1], (4, 6)),
    lambda x, n: x[:, ::-1],
]
NUMBERS = (-100, -3, -1, 0, 0, 1, 2, 5, 100)


def _random_index(seed: int) -> Callable[[], jax.Array]:
    """Index arithmetic on counts, of shape 4 x 6."""
    rng = random.Random(seed)
    dtype, dim = rng.choice((jnp.int32, jnp.int8, jnp.uint8)), rng.randrange(2)
    steps = [(rng.choice(STEPS), rng.choice(NUMBERS)) for _ in range(rng.randint(1, 5))]

    def index() -> jax.Array:
        x = jax.lax.broadcasted_iota(dtype, (4, 6), dim)
        for step, number in steps:
            x = step(x, jnp.asarray(number).astype(x.dtype))
        return x

    return index


@pytest.mark.more("numbers of many batched programs")
def test_a_ramp_is_what_is_computed() -> None:
    found = 0
    for seed in range(120):
        text = jax.jit(_random_index(seed)).lower().as_text()
        numbers = np.asarray(_random_index(seed)()).astype(np.int64)
        module = parse_module(text, make_ir_context(), "<text>")
        with module.context, ir.Location.unknown(module.context):
            run_pipeline(module.operation, "inline-calls")
        (value,) = Graph(module.operation).outputs
        for at in (None, At(0, 1), At(1, 3)):
            ramp = Ramps().of(value, at)
            part = numbers if at is None else np.take(numbers, [at.index], axis=at.dim)
            if ramp is not None:
                found += 1
                np.testing.assert_array_equal(part, np.broadcast_to(_numbers(ramp, part.shape), part.shape), text)
    assert found > 60


def _numbers(ramp: Ramp, shape: tuple[int, ...]) -> np.ndarray:
    if ramp.dim is None:
        return np.full(shape, ramp.start)
    return ramp.start + np.indices(shape)[ramp.dim]
