"""Products of groups of rows: split along rows, groups, batches and all other dimensions."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agreement import rarely
from jax import lax
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from partitioned_ops import PLANE
from uneven_blocks import normal

import sdy_jax as sdy

pytestmark = pytest.mark.usefixtures("poisoned_padding")

ROWS, D, HIDDEN, EXPERTS = 45, 6, 10, 5
SIZES = np.array([7, 0, 20, 3, 9], np.int32)  # and some rows are in no group


def as_op(function, *args):
    """The module of a function whose ragged products are ops, as they are for accelerators."""
    return jax.jit(function).trace(*args).lower(lowering_platforms=("tpu",)).as_text()


def laid_out(x, spec):
    return lax.with_sharding_constraint(x, NamedSharding(PLANE, spec))


def numbers(contracting, batching=((), ()), ragged=0, groups=()):
    return lax.RaggedDotDimensionNumbers((contracting, batching), [ragged], list(groups))


BY_ROWS = partial(lax.ragged_dot_general, ragged_dot_dimension_numbers=numbers(([1], [1]), groups=[0]))
SUMMED = partial(lax.ragged_dot_general, ragged_dot_dimension_numbers=numbers(([0], [0])))
BATCHES = partial(
    lax.ragged_dot_general,
    ragged_dot_dimension_numbers=numbers(([2], [2]), ([0], [1]), ragged=1, groups=[0]),
)
TURNED = partial(lax.ragged_dot_general, ragged_dot_dimension_numbers=numbers(([0], [2]), ragged=1, groups=[1]))

BATCHES_IN_GROUPS = partial(lax.ragged_dot_general, ragged_dot_dimension_numbers=numbers(([2], [1]), ([0], [0])))

CASES = {
    "rows": (BY_ROWS, (ROWS, D), (EXPERTS, D, HIDDEN)),
    "summed": (SUMMED, (ROWS, D), (ROWS, HIDDEN)),
    "batches": (BATCHES, (3, ROWS, D), (EXPERTS, 3, D, HIDDEN)),
    "batches in groups": (BATCHES_IN_GROUPS, (ROWS, 8, D), (ROWS, D, HIDDEN)),
    "turned": (TURNED, (D, ROWS), (HIDDEN, EXPERTS, D)),
}

SPLITS = [
    *(
        ("rows", *specs)
        for specs in [(P("x"), P()), (P(), P("x")), (P("x"), P("y")), (P(None, "x"), P(None, None, "y"))]
    ),
    *(("summed", *specs) for specs in [(P("x"), P()), (P(None, "x"), P(None, "y"))]),
    *rarely(*(("batches", *specs) for specs in [(P("x", "y"), P()), (P(None, "y"), P("x")), (P(), P(None, "x", "y"))])),
    *rarely(("batches in groups", P(None, "x"), P(None, None, "y"))),
    *rarely(*(("turned", *specs) for specs in [(P(None, "x"), P(None, "y")), (P("x"), P("y"))])),
]


@pytest.mark.parametrize("case", SPLITS, ids=str)
def test_numbers(case):
    name, left, right = case
    function, *shapes = CASES[name]
    x, y = (normal(*shape) for shape in shapes)
    program = sdy.loads(as_op(lambda x, y, n: function(laid_out(x, left), laid_out(y, right), n), x, y, SIZES))
    f = sdy.partition(program, mesh=PLANE, layouts="local")
    plan = f.plan(x, y, SIZES)
    assert not plan.notes, plan
    assert not {x.shape, y.shape} & {c.shape for c in plan.collectives if c.kind == "all_gather"}, plan
    (found,) = jax.tree.leaves(f(x, y, SIZES))
    np.testing.assert_allclose(found, function(x, y, SIZES), rtol=1e-4, atol=1e-5)


def test_groups_that_differ_along_a_batch_are_not_split():
    function, *shapes = CASES["batches"]
    x, y = (normal(*shape) for shape in shapes)
    sizes = np.stack([SIZES, SIZES[::-1], SIZES])
    f = sdy.partition(sdy.loads(as_op(function, x, y, sizes)), mesh=PLANE, on_unknown="ignore")
    (found,) = jax.tree.leaves(f(x, y, sizes))
    np.testing.assert_allclose(found, function(x, y, sizes), rtol=1e-4, atol=1e-5)


def test_each_device_computes_what_its_experts_get():
    """Forward and backward, by the prices of an H100: weights stay where they are."""
    mesh, rows, d, hidden = AbstractMesh((8,), ("x",)), 16384, 2048, 512

    def loss(weights, x, sizes):
        return jnp.tanh(lax.ragged_dot(x, weights, sizes)).sum()

    types = [jax.ShapeDtypeStruct(shape, np.float32) for shape in ((8, d, hidden), (rows, d))]
    types.append(jax.ShapeDtypeStruct((8,), np.int32))
    program = sdy.loads(as_op(jax.grad(loss), *types))
    specs = {"in_shardings": (P("x"), P(), P()), "out_shardings": P("x")}
    plan = sdy.partition(program, mesh=mesh, costs=sdy.CostModel.of_machine("h100", ("x",)), **specs).plan(*types)
    products = 2 * 2 * rows * d * hidden
    done = sum(work.flops * work.runs.times for work in plan.work)
    assert products / 8 <= done <= 1.05 * products / 8
    assert plan.wire_bytes <= 2 * 7 / 8 * 4 * rows * hidden


def test_a_row_meets_one_matrix_however_many_there_are():
    mesh, rows, d, hidden = AbstractMesh((8,), ("x",)), 131072, 2048, 4096
    costs = sdy.CostModel.of_machine("v5e", ("x",))

    def time(experts):
        shapes = ((rows, d), (d, hidden)) if experts is None else ((rows, d), (experts, d, hidden))
        types = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
        if experts is not None:
            types.append(jax.ShapeDtypeStruct((experts,), np.int32))
        program = sdy.loads(as_op(jnp.matmul if experts is None else lax.ragged_dot, *types))
        specs = {"in_shardings": (P("x"), *(P(),) * (len(types) - 1)), "out_shardings": P("x")}
        return sdy.partition(program, mesh=mesh, costs=costs, **specs).plan(*types).time.compute

    assert time(8) == time(32) == time(None)
