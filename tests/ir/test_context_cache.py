"""What is remembered of MLIR's attributes and types keeps no more than one context alive."""

from __future__ import annotations

import gc
import weakref

import jax
import numpy as np
import pytest
from jax.interpreters import mlir
from sharding_dump import parse

import sdy_jax as sdy
from sdy_jax.ir.attributes import sharding_from_attribute, sharding_to_attribute
from sdy_jax.ir.custom_ops import CustomOp, function_of, register
from sdy_jax.ir.graph import Graph
from sdy_jax.ir.parsers import parse_sharding

frees_contexts = pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="newer jaxlibs keep unused contexts")
PROGRAM = """
sdy.mesh @mesh = <["data"=2, "model"=4]>
func.func @main(%x: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>}) -> tensor<8x8xf32> {
  %0 = stablehlo.tanh %x : tensor<8x8xf32>
  return %0 : tensor<8x8xf32>
}"""


def alive(contexts: list[weakref.ref]) -> int:
    gc.collect()
    return sum(context() is not None for context in contexts)


@frees_contexts
def test_the_context_of_a_module_goes_with_the_module() -> None:
    def read() -> weakref.ref:
        return weakref.ref(Graph(parse(PROGRAM).operation).context)

    assert alive([read() for _ in range(4)]) <= 1


@frees_contexts
def test_the_context_of_a_plan_goes_with_the_plan() -> None:
    def planned() -> weakref.ref:
        plan = sdy.partition(sdy.loads(PROGRAM)).plan(jax.ShapeDtypeStruct((8, 8), "float32"))
        return weakref.ref(plan.stages["traced"].context)

    assert alive([planned() for _ in range(4)]) <= 1


@pytest.mark.more("custom ops")
@frees_contexts
def test_a_custom_op_goes_with_what_it_was_traced_for() -> None:
    rule = "([i])->([i]) {i=8}"

    def read() -> weakref.ref:
        context = mlir.make_ir_context()
        op = CustomOp("twice", lambda x: [x * 2])
        key = register(op, context)
        assert function_of(key, context, "here") is op
        return weakref.ref(op)

    def partitioned(run: bool) -> weakref.ref:
        def twice(x: jax.Array) -> jax.Array:
            return x * 2

        function = sdy.partition(lambda x: sdy.custom_op(twice, rule)(x), mesh=jax.make_mesh((8,), ("x",)))
        function.plan(np.ones(8, np.float32))
        if run:
            function(np.ones(8, np.float32))
        return weakref.ref(twice)

    assert alive([read() for _ in range(4)]) == 0
    assert alive([partitioned(run=False) for _ in range(4)]) <= 1
    functions = [partitioned(run=True) for _ in range(4)]
    jax.clear_caches()  # jax's own keep what it has compiled
    assert alive(functions) <= 1


def test_an_attribute_is_made_and_read_once_in_each_context() -> None:
    first, second = mlir.make_ir_context(), mlir.make_ir_context()
    sharding = parse_sharding('@mesh, [{"a"}, {?}]')
    made = sharding_to_attribute(sharding, first)
    assert sharding_to_attribute(sharding, first) is made
    assert sharding_from_attribute(made) is sharding_from_attribute(made)
    other = sharding_to_attribute(sharding, second)
    assert (made.context, other.context) == (first, second)
    assert sharding_to_attribute(sharding, first).context == first
    assert sharding_from_attribute(other) == sharding_from_attribute(made) == sharding
