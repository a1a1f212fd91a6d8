"""Prices that several models of a program share, whatever numbers their layouts have."""

import itertools
import random

import numpy as np
import pytest

from sdy_jax.ir.meshes import AxisRef, Mesh
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.lowering.planner.problem import layout_table
from sdy_jax.lowering.planner.problem.layout_table import LayoutTable, Prices, ValueClass
from sdy_jax.lowering.planner.setting import Memo
from sdy_jax.lowering.reshard.planner import plan_reshard
from sdy_jax.lowering.targets.cost_model import CostModel

MESH, COSTS = Mesh.of(x=2, y=4), CostModel.of_platform("cpu")
X, Y = AxisRef("x"), AxisRef("y")
LISTS = [(), (X,), (Y,), (X, Y)]
LAYOUTS = [
    TensorSharding.closed("mesh", pair)
    for pair in itertools.product(LISTS, repeat=2)
    if len(set(sum(pair, ()))) == len(sum(pair, ()))
]


def pair(costs, shape, itemsize, source, target):
    return plan_reshard(shape, itemsize, source, target, MESH, costs).cost


def priced(shape, layouts, memo):
    table = LayoutTable("mesh", MESH)
    numbers = [table.number(layout) for layout in layouts]
    return Prices(table, COSTS, pair, memo=memo).matrix(ValueClass(shape, 4.0), numbers, numbers)


@pytest.mark.parametrize("shape", [(64, 32), (61, 32)])
def test_shared_prices_are_those_that_each_model_computes(shape):
    memo, rng = Memo(), random.Random(1)
    for count in (len(LAYOUTS), len(LAYOUTS), 5, 5):
        layouts = rng.sample(LAYOUTS, count)
        assert np.array_equal(priced(shape, layouts, memo), priced(shape, layouts, Memo()))


@pytest.mark.parametrize("most", [layout_table._MOST_REMEMBERED, 3])
def test_layouts_in_another_order_are_not_priced_again_unless_they_are_too_many(most, monkeypatch):
    monkeypatch.setattr(layout_table, "_MOST_REMEMBERED", most)
    memo, asked, own = Memo(), [], Prices._priced
    monkeypatch.setattr(Prices, "_priced", lambda self, of, layouts: asked.append(of) or own(self, of, layouts))
    for layouts in (LAYOUTS, LAYOUTS[::-1]):
        priced((64, 32), layouts, memo)
    assert len(asked) == (1 if most > len(LAYOUTS) else 2)
