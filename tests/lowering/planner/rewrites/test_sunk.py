"""What is much larger than what it is made of is made in the loops that read it, element by element."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from partitioned_ops import LINE
from sharding_dump import parse

from sdy_jax.ir.graph import Graph
from sdy_jax.lowering.planner.rewrites.loop_rewrites import sink_into_loops, use_invariants_from_outside
from sdy_jax.testing import assert_same

LAYERS, ROWS = 3, 64
WEIGHTS = jnp.asarray(np.random.default_rng(0).standard_normal((LAYERS, 16, 16)), jnp.float32)
X = jnp.asarray(np.random.default_rng(1).standard_normal((16, ROWS, 16)), jnp.float32)


def attention(h, w):
    """Masked: jax moves the mask, as wide as all scores, in front of the loop over layers."""
    scores = jnp.einsum("bsd,btd->bst", h @ w, h)
    scores = jnp.where(jnp.tril(jnp.ones((ROWS, ROWS), bool)), scores, -1e30)
    return h + jax.nn.softmax(scores) @ h, None


def loss(weights, x):
    return jnp.mean(jax.lax.scan(jax.checkpoint(attention), x, weights)[0] ** 2)


def test_masks_of_scanned_attention_are_not_held_at_full_width():
    step = jax.value_and_grad(loss)
    plan = assert_same(step, WEIGHTS, X, mesh=LINE, in_shardings=(P(), P("x")), rtol=1e-4)
    masks = [op for op in plan.graph.ops if op.name == "stablehlo.broadcast_in_dim" and is_mask(op.results[0])]
    assert masks and {op.block.parent.name for op in masks} == {"stablehlo.while"}


def is_mask(value):
    return value.shape[-2:] == (ROWS, ROWS) and value.dtype == "i1" and value.rank == 3


LOOP = """
func.func @main(%x: tensor<64x64xf32>, %n: tensor<64xf32>) -> tensor<64x64xf32> {{
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %trips = stablehlo.constant dense<{trips}> : tensor<i32>
  %wide = stablehlo.broadcast_in_dim %n, dims = [1] : (tensor<64xf32>) -> tensor<64x64xf32>
  %done:3 = stablehlo.while(%i = %zero, %v = %x, %kept = %x) : tensor<i32>, tensor<64x64xf32>, tensor<64x64xf32>
  cond {{
    %more = stablehlo.compare LT, %i, %trips : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  }} do {{
    %next = stablehlo.add %i, %one : tensor<i32>
    %r = {op}
    stablehlo.return %next, %r, {kept} : tensor<i32>, tensor<64x64xf32>, tensor<64x64xf32>
  }}
  return %done#{result} : tensor<64x64xf32>
}}
"""
ADDED = "stablehlo.add %v, %wide : tensor<64x64xf32>"
PRODUCT = (
    "stablehlo.dot_general %v, %wide, contracting_dims = [1] x [0] : (tensor<64x64xf32>, tensor<64x64xf32>) -> "
    "tensor<64x64xf32>"
)


def loop(op=ADDED, trips=3, result=1, kept="%kept"):
    return Graph(parse(LOOP.format(op=op, trips=trips, result=result, kept=kept)).operation)


def where(graph, name):
    """The kinds of ops in whose regions those of a name lie; None for the function's."""
    return [op.block.parent.name if op.block.parent else None for op in graph.ops if op.name == name]


@pytest.mark.parametrize(("op", "kept", "inside"), [(ADDED, "%kept", 1), (PRODUCT, "%kept", 0), (ADDED, "%wide", 0)])
def test_only_what_is_read_element_by_element_is_made_in_a_loop(op, kept, inside):
    made = where(sink_into_loops(loop(op, kept=kept)), "stablehlo.broadcast_in_dim")
    assert made.count("stablehlo.while") == inside and len(made) == 1 + inside


@pytest.mark.parametrize(("trips", "is_outside"), [(3, True), (1, True), (0, False)])
def test_what_a_loop_returns_from_outside_is_that_value_if_there_is_a_trip(trips, is_outside):
    graph = loop(trips=trips, result=2, kept="%wide")
    use_invariants_from_outside(graph)
    (returned,) = graph.outputs
    assert (returned.defining_op.name == "stablehlo.broadcast_in_dim") is is_outside
