"""What a whole op does by its strategies: as much as people count, or what it writes."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest
from jax import lax

from sdy_jax.ir.graph import Graph
from sdy_jax.lowering.ops.registry import strategies_of
from sdy_jax.lowering.planner.problem.op_problem import Kinds, flops_per_operation, work_in_shards
from sdy_jax.shardy.rules import RuleBook
from sdy_jax.shardy.rules.op_attributes import operations_of


def shapes(*given: tuple[int, ...], dtype: type = np.float32) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in given]


def convolution(x: jax.Array, kernel: jax.Array) -> jax.Array:
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=2)


PRODUCTS = {
    "stablehlo.dot_general": (lax.batch_matmul, shapes((4, 8, 16), (4, 16, 32))),
    "stablehlo.convolution": (convolution, shapes((2, 16, 16, 8), (3, 3, 4, 6))),
    "chlo.ragged_dot": (lax.ragged_dot, [*shapes((64, 8), (4, 8, 16)), *shapes((4,), dtype=np.int32)]),
}


def work_and_flops(name, function, arguments):
    """By each strategy of the op of this name, and as people count."""
    module = jax.jit(function).trace(*arguments).lower(lowering_platforms=("tpu",)).compiler_ir()
    with module.context:
        (op,) = (op for op in Graph(module.operation).ops if op.name == name)
        rule = RuleBook().rule_of(op)
        whole = (1,) * len(rule.factor_sizes)
        return {work_in_shards(found, rule, whole).operations for found in strategies_of(op, rule)}, operations_of(op)


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_half_of_its_multiplications_and_additions(name):
    work, flops = work_and_flops(name, *PRODUCTS[name])
    assert work == {flops / 2}


@pytest.mark.parametrize(
    ("name", "function", "flops"),
    [
        *((name, function, 2) for name, (function, _) in PRODUCTS.items()),
        ("stablehlo.tanh", lax.tanh, 1),
        ("stablehlo.transpose", lambda x: x.T, 0),
    ],
)
def test_an_operation_of_the_cost_model_is_two_of_people_in_products_and_one_elsewhere(name, function, flops):
    arguments = PRODUCTS[name][1] if name in PRODUCTS else shapes((8, 16))
    module = jax.jit(function).trace(*arguments).lower(lowering_platforms=("tpu",)).compiler_ir()
    with module.context:
        (op,) = (op for op in Graph(module.operation).ops if op.name == name)
        assert flops_per_operation(op, Kinds(RuleBook()).of(op)) == flops


def test_an_update_does_what_it_writes():
    update = (4, 8, 16)
    arguments = [*shapes((4, 64, 16), update), *shapes((), dtype=np.int32)]

    def updated(x, part, start):
        return lax.dynamic_update_slice_in_dim(x, part, start, 1)

    assert work_and_flops("stablehlo.dynamic_update_slice", updated, arguments)[0] == {math.prod(update)}
