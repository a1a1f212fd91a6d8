"""Slices, pads, reversals, concatenations and what is made of them, along split dimensions: numbers and bytes."""

from contextvars import ContextVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from partitioned_ops import LINE, PLANE, setting
from slice_programs import FUNCTIONS, padded_stencil, stencil
from wire_totals import agreed, f32

import sdy_jax as sdy

pytestmark = pytest.mark.usefixtures("poisoned_padding")

PARTITIONED = ContextVar("PARTITIONED", default=None)
ROWS, REVERSED, BOTH = P("x"), P(("y", "x")), P("y", "x")


def split(x):
    """Splits an array inside of a partitioned function; the plain function that it is compared with has no mesh."""
    sharding = PARTITIONED.get()
    return x if sharding is None else lax.with_sharding_constraint(x, sharding)


def check(function, *args, mesh=LINE, spec=ROWS, gathers=1, **tolerances):
    """Compares numbers, and counts the gathers: a result that cannot leave the function split is gathered there."""

    def inside(*xs):
        return split(function(*(split(x) for x in xs)))

    partitioned = sdy.partition(inside, mesh=mesh)
    with setting(PARTITIONED, NamedSharding(mesh, spec)):
        plan, found = partitioned.plan(*args), partitioned(*args)
    wanted = jax.jit(lambda *xs: inside(*xs))(*args)
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    if tolerances:
        np.testing.assert_allclose(found, wanted, **tolerances)
    else:
        np.testing.assert_array_equal(found, wanted)
    assert sum(c.kind != "collective_permute" for c in plan.collectives if c.wire_bytes) <= gathers, plan
    return plan


def integers(*shape):
    return jax.random.randint(jax.random.key(sum(shape)), shape, -50, 50)


SMALL = {"a wrapped edge": 2, "a queue": 2, "unequal operands": 2, "a reversal of every second": 2}
"""Few rows may be cheaper as partial sums than as strips of which most devices hold nothing."""


@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows_that_do_not_divide(name):
    check(FUNCTIONS[name], integers(65, 4), gathers=SMALL.get(name, 1))
    check(FUNCTIONS[name], integers(13, 4).astype(float), mesh=PLANE, spec=REVERSED, gathers=3)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_two_split_dimensions(name):
    check(FUNCTIONS[name], integers(14, 9), mesh=PLANE, spec=BOTH, gathers=4)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(24, 4), (7, 1), (5, 4)], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_few_rows(name, shape):
    for dtype in (jnp.int8, jnp.bfloat16, jnp.complex64):
        check(FUNCTIONS[name], integers(*shape).astype(dtype), gathers=9)
    check(FUNCTIONS[name], integers(*shape) > 0 if name == "edges" else integers(*shape), mesh=PLANE, gathers=9)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients(name):
    def loss(x):
        return (FUNCTIONS[name](x) ** 2 / 2).sum()

    check(jax.grad(loss), integers(65, 4).astype(float), gathers=7, rtol=1e-6)


def test_no_rows_and_one():
    check(lambda x: jnp.concatenate([x[:0], x, x[3:3]]), integers(13, 2))
    check(lambda x: jnp.concatenate([x[:1], x]), integers(1, 2))
    check(lambda x: jnp.pad(x, ((2, 1), (0, 0))), integers(0, 2))
    check(lambda x: x[4:4], integers(13, 2))


def test_partial_sums_are_shifted_and_joined_before_they_are_reduced():
    def function(x, w):
        return jnp.roll(x @ w, 1, 0) + jnp.pad(x @ w, ((2, 0), (0, 0)))[:-2]

    x, w = integers(64, 16).astype(float), integers(16, 16).astype(float)
    specs = {"mesh": PLANE, "in_shardings": (P("x", "y"), P("y")), "out_shardings": P("x")}
    plan = agreed(function, x, w, **specs, layouts="local")
    assert sorted(c.kind for c in plan.collectives if c.wire_bytes) == [
        "all_reduce",
        "collective_permute",
        "collective_permute",
    ]
    assert agreed(function, x, w, **specs).wire_bytes <= plan.wire_bytes
    np.testing.assert_array_equal(sdy.partition(function, **specs)(x, w), function(x, w))


def test_what_is_used_elsewhere_too_is_cut_as_it_is():
    """A sum of pads that is returned, beside a slice of it."""

    def function(x):
        total = jnp.pad(x, ((1, 1), (0, 0))) + 2 * jnp.pad(x, ((0, 2), (0, 0)))
        return split(total[1:-1]) + total.sum()

    check(function, integers(65, 4), gathers=3)


def test_a_repeated_row_that_is_used_elsewhere_too():
    def function(x):
        rows = jnp.broadcast_to(x[:1, None], (1, 2, x.shape[1]))
        return jnp.concatenate([rows.reshape(2, -1), x + rows.sum(1), x[:1]])

    for shape in ((65, 4), (13, 4), (3, 4)):
        check(function, integers(*shape), gathers=9)
    check(function, integers(14, 9), mesh=PLANE, spec=BOTH, gathers=9)


@pytest.mark.parametrize("mode", ["edge", "reflect", "symmetric", "wrap"])
def test_margins_of_two_dimensions(mode):
    def function(x):
        return jnp.pad(x, ((1, 2), (2, 1)), mode)

    check(function, integers(14, 9), mesh=PLANE, spec=BOTH, gathers=9)
    options = {"mesh": PLANE, "in_shardings": P("x", "y"), "out_shardings": P("x", "y")}
    plan = agreed(lambda x: jnp.pad(x, ((4, 4), (2, 2)), mode), f32(1024, 64), **options)
    # A column of a block is 2 KiB. Rows stay where they are, unless they come from the other end: then four of 68 B.
    assert plan.wire_bytes == (3 * 2048 + 4 * 68 if mode == "wrap" else 2048)


ROW = 256
"""Bytes of a row of the arrays below."""


def sums(*results):
    """What leaves no split result to be gathered: 448 bytes of an all_reduce."""
    return sum(result.sum(0) for result in results)


SENT = {
    "a shift by one row": (lambda x: jnp.pad(x[1:], ((0, 1), (0, 0))), ROW),
    "a shift by a pad": (lambda x: lax.pad(x, 0.0, [(1, -1, 0), (0, 0, 0)]), ROW),
    "a shift behind zeros": (lambda x: jnp.concatenate([jnp.zeros_like(x[:1]), x[:-1]]), ROW),
    "a rotation by three": (lambda x: jnp.roll(x, 3, 0), 3 * ROW),
    "a padded stencil": (padded_stencil, 2 * ROW),
    "a periodic stencil": (lambda x: jnp.roll(x, 1, 0) - 2 * x + jnp.roll(x, -1, 0), 2 * ROW),
    "a causal window": (lambda x: sum(jnp.pad(x, ((3, 0), (0, 0)))[i : i + 1024] for i in range(4)), 3 * ROW),
    "the gradient of a stencil": (jax.grad(lambda x: ((x[:-2] + x[1:-1] + x[2:]) ** 2).sum()), 4 * ROW),
    "the gradient of a padded stencil": (jax.grad(lambda x: (padded_stencil(x) ** 2).sum()), 4 * ROW),
    "the gradient of a rotation": (jax.grad(lambda x: (x * jnp.roll(x, 3, 0) ** 2).sum()), 6 * ROW),
    "a mirrored edge": (lambda x: jnp.pad(x, ((4, 4), (0, 0)), mode="reflect"), 3 * ROW),
    "a repeated edge": (lambda x: jnp.pad(x, ((4, 4), (0, 0)), mode="edge"), 3 * ROW),
    "half": (lambda x: x[512:], 128 * ROW),
    "every second": (lambda x: x[::2], 0),
    "interleaved": (lambda x: jnp.stack([x[::2], x[1::2]], 1).reshape(x.shape), 0),
    "all elements rotated": (lambda x: jnp.roll(x, 1), 4),
}


@pytest.mark.parametrize("name", SENT)
def test_bytes(name):
    function, wanted = SENT[name]
    assert agreed(function, f32(1024, 64), mesh=LINE, in_shardings=ROWS, out_shardings=ROWS).wire_bytes == wanted


SUMMED = {
    "a stencil": (lambda x: sums(stencil(x)), 2 * ROW),
    "differences": (lambda x: sums(x[1:] - x[:-1]), ROW),
    "jnp.diff": (lambda x: sums(jnp.diff(x, axis=0)), ROW),
    "one row": (lambda x: x[7], 0),
}


@pytest.mark.parametrize("name", SUMMED)
def test_bytes_beside_a_sum(name):
    function, wanted = SUMMED[name]
    plan = agreed(function, f32(1024, 64), mesh=LINE, in_shardings=ROWS)
    assert plan.wire_bytes == wanted + 2 * 7 / 8 * ROW


def test_bytes_of_concatenations():
    two = agreed(lambda x, y: jnp.concatenate([x, y]), f32(512, 64), f32(512, 64), **_rows(2))
    assert two.wire_bytes <= 16384 + 16384
    queue = agreed(
        lambda x, row: jnp.concatenate([x[1:], row]),
        f32(1024, 64),
        f32(1, 64),
        mesh=LINE,
        in_shardings=(ROWS, P()),
        out_shardings=ROWS,
    )
    assert queue.wire_bytes == ROW


_ROWS_TO_SUM = {"mesh": LINE, "in_shardings": ROWS}


def _rows(count):
    return {"mesh": LINE, "in_shardings": (ROWS,) * count, "out_shardings": ROWS}


def test_bytes_of_two_split_dimensions():
    """Blocks of 512 x 16: an element of a column's strip stands for 2 KiB, of a row's for 64 bytes."""

    def laplacian(x):
        p = jnp.pad(x, 1)
        return p[:-2, 1:-1] + p[2:, 1:-1] + p[1:-1, :-2] + p[1:-1, 2:] - 4 * x

    options = {"mesh": PLANE, "in_shardings": P("x", "y"), "out_shardings": P("x", "y")}
    assert agreed(laplacian, f32(1024, 64), **options).wire_bytes <= 2 * 2048 + 2 * 64
    nine = lambda x: sums(*(x[i : 1022 + i, j : 62 + j] for i in range(3) for j in range(3)))  # noqa: E731
    halo = agreed(nine, f32(1024, 64), mesh=PLANE, in_shardings=P("x", "y"))
    assert sum(c.wire_bytes for c in halo.collectives if c.kind == "collective_permute") <= 2 * 2048 + 6 * 64


def test_two_dimensions_are_reversed_by_one_permute():
    options = {"mesh": PLANE, "in_shardings": P("x", "y"), "out_shardings": P("x", "y")}
    assert agreed(lambda x: x[::-1, ::-1], f32(1024, 64), **options).wire_bytes == 1024 * 64 * 4 / 8
    x = integers(16, 8)
    np.testing.assert_array_equal(sdy.partition(lambda x: x[::-1, ::-1], **options)(x), x[::-1, ::-1])


def test_what_costs_more_than_a_gather_is_gathered():
    """All rows behind each other eight times: every device wants rows of all."""
    plan = agreed(lambda x: jnp.concatenate([x] * 8), f32(64, 64), **_rows(1))
    assert plan.wire_bytes <= 7 * 8 * ROW


def test_ops_without_savings_stay_as_they_are():
    plan = sdy.partition(lambda x: (x[1:] - x[:-1]).sum(0) + x[::2].sum(0), **_ROWS_TO_SUM).plan(f32(1024, 64))
    assert "sdy_jax.pieces" not in str(plan.stages["partitioned"])


def test_joined_programs_are_read_back():
    """The op that makes several results of one exchange prints, parses and runs as part of the partitioned program."""
    fn = sdy.partition(padded_stencil, **_rows(1))
    x = integers(64, 4).astype(float)
    module = fn.plan(x).stages["partitioned"]
    assert "sdy_jax.pieces" in str(module)
    again = sdy.partition(sdy.loads(fn.plan(x).mlir("partitioned")), mesh=LINE)
    np.testing.assert_array_equal(again(x), padded_stencil(x))
    assert again.plan(x).wire_bytes == fn.plan(x).wire_bytes
