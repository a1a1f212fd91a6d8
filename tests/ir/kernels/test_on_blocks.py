"""Calls bound again on blocks: what changes is the grid, the shapes and the estimate of costs, and nothing else."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from kernel_splits import calls_of

from sdy_jax.ir.kernels.grid_rule import PallasCall, call_on_blocks

KEPT = ("compiler_params", "debug", "input_output_aliases", "interpret", "mesh", "metadata", "name")
PARAMS = pltpu.CompilerParams(dimension_semantics=("parallel",), vmem_limit_bytes=1 << 20)


def scaled(x_ref, y_ref, out_ref, other_ref):
    out_ref[...] = x_ref[...] * 2
    other_ref[...] = y_ref[...]


def run(x, y):
    rows = pl.BlockSpec((2, 8), lambda i: (i, 0))
    return pl.pallas_call(
        scaled,
        grid=(8,),
        in_specs=[rows, pl.BlockSpec((2, 8), lambda i: (i, 0), pipeline_mode=pl.Buffered(1))],
        out_specs=[rows, rows],
        out_shape=[pltpu.HBM((16, 8), jnp.float32), jax.ShapeDtypeStruct((16, 8), jnp.bfloat16)],
        compiler_params=PARAMS,
        cost_estimate=pl.CostEstimate(flops=800, bytes_accessed=1601, transcendentals=0),
        input_output_aliases={1: 1},
        metadata={"kind": "test"},
        name="scaled_rows",
    )(x, y)


def on_blocks(whole, parts, **firsts):
    rows = 16 // parts
    avals = [jax.ShapeDtypeStruct((rows, 8), dtype) for dtype in (jnp.float32, jnp.bfloat16)]

    def part(x, y, first=None):
        given = {} if first is None else {0: first}
        return call_on_blocks(PallasCall(whole.params), [8 // parts], [x, y], [(rows, 8)] * 2, given, True)

    (found,) = calls_of(part, *avals, *firsts.values())
    return found


def whole_call():
    (found,) = calls_of(run, jnp.ones((16, 8)), jnp.ones((16, 8), jnp.bfloat16))
    return found


def test_parameters_stay_but_for_grid_shapes_and_costs():
    whole = whole_call()
    part = on_blocks(whole, 4)
    assert {name: part.params[name] for name in KEPT} == {name: whole.params[name] for name in KEPT}
    assert part.params["jaxpr"] is whole.params["jaxpr"]
    mapping = part.params["grid_mapping"]
    assert mapping.grid == (2,) and [b.array_aval.shape for b in mapping.block_mappings] == [(4, 8)] * 4
    blocks = whole.params["grid_mapping"].block_mappings
    for new, old in zip(mapping.block_mappings, blocks, strict=True):
        assert new.replace(array_aval=old.array_aval) == old
    estimate = part.params["cost_estimate"]
    assert (estimate.flops, estimate.bytes_accessed, estimate.transcendentals) == (200, 400, 0)


def test_results_stay_in_the_memory_that_they_are_for():
    whole, part = whole_call(), on_blocks(whole_call(), 2)
    assert [a.memory_space for a in part.params["out_avals"]] == [a.memory_space for a in whole.params["out_avals"]]
    spaces = [[b.array_aval.memory_space for b in x.params["grid_mapping"].block_mappings] for x in (whole, part)]
    assert spaces[0] == spaces[1]
    assert [(a.shape, a.dtype) for a in part.params["out_avals"]] == [((8, 8), jnp.float32), ((8, 8), jnp.bfloat16)]


def test_a_first_step_is_a_scalar_more_and_aliases_move_behind_it():
    part = on_blocks(whole_call(), 2, first=jnp.int32(4))
    mapping = part.params["grid_mapping"]
    assert mapping.num_index_operands == 1 and mapping.num_inputs == 2
    assert part.params["input_output_aliases"] == ((2, 1),)
    assert [x.aval.shape for x in part.invars] == [(1,), (8, 8), (8, 8)]
