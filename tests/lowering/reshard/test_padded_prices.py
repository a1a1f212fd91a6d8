"""Prices of reshards for the planner where blocks are padded, beside what reshards then cost."""

import itertools

import numpy as np
import pytest

from sdy_jax.ir.meshes import AxisRef, Mesh
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.lowering.planner.problem.layout_table import LayoutTable, Prices, ValueClass
from sdy_jax.lowering.reshard.planner import plan_reshard
from sdy_jax.lowering.targets.cost_model import CostModel

MESH, COSTS = Mesh.of(x=2, y=4), CostModel.of_platform("cpu")
X, Y = AxisRef("x"), AxisRef("y")


def exact(shape, source, target, itemsize=4.0):
    return plan_reshard(shape, itemsize, source, target, MESH, COSTS).cost


def priced(shape, layouts):
    table = LayoutTable("mesh", MESH)
    numbers = [table.number(layout) for layout in layouts]
    prices = Prices(table, COSTS, lambda costs, shape, itemsize, a, b: exact(shape, a, b, itemsize))
    return prices.matrix(ValueClass(shape, 4.0), numbers, numbers)


def layouts_of(rank):
    lists = itertools.product([(), (X,), (Y,), (X, Y)], repeat=rank)
    return [TensorSharding.closed("mesh", dims) for dims in lists if sum(dims, ()) in ((), (X,), (Y,), (X, Y), (Y, X))]


@pytest.mark.parametrize("shape", [(61, 64, 32), (6, 16, 8), (197, 64), (30, 62, 8)])
def test_prices_of_padded_blocks_are_mostly_those_of_reshards(shape):
    layouts = layouts_of(len(shape))
    found = priced(shape, layouts)
    wanted = np.array([[exact(shape, a, b) for b in layouts] for a in layouts])
    assert (found == 0).tolist() == (wanted == 0).tolist()
    assert np.mean(np.abs(found - wanted) <= 0.03 * wanted) > 0.8


def test_blocks_that_do_not_nest_are_not_cut_for_free():
    """6 rows lie on two devices in blocks of 3; a slice of these is no block of one row for one of eight devices."""
    halves, rows = (TensorSharding.closed("mesh", [axes, ()]) for axes in ((X,), (X, Y)))
    assert priced((6, 8), [halves, rows])[0, 1] == exact((6, 8), halves, rows) > 0
