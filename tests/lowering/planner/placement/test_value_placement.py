"""A value is where its op makes it and where reshards have brought it; each user takes the nearest."""

import re

import numpy as np
import pytest
from partitioned_text import partitioned, run_partitioned, types_of
from plain_program import plain_module, run_plain

from sdy_jax.ir.graph import Graph
from sdy_jax.lowering.planner.facts.verifier import verify_partitioned

T = "tensor<8x8xf32>"
ROWS, COLUMNS, BOTH, WHOLE = '[{"b"}, {}]', '[{}, {"b"}]', '[{"a"}, {"b"}]', "[{}, {}]"


def sharded(dims):
    return f"#sdy.sharding<@mesh, {dims}>"


def main(argument, results, body):
    """A function of one 8 x 8 tensor with given shardings of it and of the results."""
    types = ", ".join(f"{T} {{sdy.sharding = {sharded(dims)}}}" for dims in results)
    return f"""sdy.mesh @mesh = <["a"=2, "b"=4]>
      func.func @main(%x: {T} {{sdy.sharding = {sharded(argument)}}}) -> ({types}) {{ {body} }}"""


def constraint(source, dims):
    return f"sdy.sharding_constraint {source} <@mesh, {dims}> : {T}"


SORTED = f"""%1 = "stablehlo.sort"(%x) <{{dimension = 1 : i64}}> ({{
    ^bb0(%l: tensor<f32>, %r: tensor<f32>):
      %c = stablehlo.compare LT, %l, %r : (tensor<f32>, tensor<f32>) -> tensor<i1>
      stablehlo.return %c : tensor<i1>
  }}) {{sdy.sharding = #sdy.sharding_per_value<[<@mesh, {COLUMNS}>]>}} : ({T}) -> {T}"""
"""An op that must have its second dimension whole, and whose result is declared to be split along it."""

CASES = {
    "one user takes a result where it is made": (
        main(COLUMNS, [ROWS], f"{SORTED} return %1 : {T}"),
        ["all_to_all"],
    ),
    "several users too, if that is where they want it": (
        main(
            COLUMNS,
            [ROWS, ROWS, '[{"b"}, {"a"}]'],
            f"{SORTED} return %1, %1, %1 : {T}, {T}, {T}",
        ),
        ["all_slice", "all_to_all"],
    ),
    "one moves where it is declared": (
        main(
            COLUMNS,
            [ROWS, COLUMNS, COLUMNS],
            f"{SORTED} return %1, %1, %1 : {T}, {T}, {T}",
        ),
        ["all_to_all", "all_to_all"],
    ),
    "a constraint that nobody needs moves nothing": (
        main('[{"a"}, {}]', ['[{"a"}, {}]'], f"%1 = {constraint('%x', COLUMNS)} return %1 : {T}"),
        [],
    ),
    "several constraints are one way": (
        main(
            ROWS,
            [COLUMNS],
            f"""%1 = {constraint("%x", WHOLE)}
                %2 = {constraint("%1", BOTH)} return %2 : {T}""",
        ),
        ["all_to_all"],
    ),
    "a constraint is kept for those who use it": (
        main(
            ROWS,
            [COLUMNS, ROWS],
            f"""%1 = {constraint("%x", COLUMNS)}
                %2 = stablehlo.tanh %1 : {T} return %2, %1 : {T}, {T}""",
        ),
        ["all_to_all"],
    ),
    "the nearest copy moves on": (
        main(
            '[{"a", "b"}, {}]',
            [WHOLE, COLUMNS, '[{"b"}, {"a"}]'],
            f"return %x, %x, %x : {T}, {T}, {T}",
        ),
        ["all_gather", "all_slice", "all_slice"],
    ),
    "what can be made anew is, through constraints too": (
        main(
            WHOLE,
            [WHOLE],
            f"""%0 = stablehlo.iota dim = 0 : {T}
                %1 = {constraint("%0", BOTH)}
                %2 = stablehlo.add %1, %x {{sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{{}}, {{}}]>]>}} : {T}
                return %2 : {T}""",
        ),
        [],
    ),
    "a partial result is reduced once for several users": (
        main(
            COLUMNS,
            [WHOLE, ROWS, '[{}, {"a"}]'],
            f"""%0 = stablehlo.dot_general %x, %x, contracting_dims = [1] x [1] : ({T}, {T}) -> {T}
                %1 = {constraint("%0", WHOLE)}
                %2 = stablehlo.tanh %1 : {T} return %1, %1, %2 : {T}, {T}, {T}""",
        ),
        ["all_reduce", "all_slice", "all_slice"],
    ),
    "into a loop it moves once, before": (
        main(
            ROWS,
            [WHOLE],
            f"""%0 = {constraint("%x", BOTH)}
                %n = stablehlo.constant dense<0> : tensor<i32>
                %1:2 = stablehlo.while(%i = %n, %s = %x) : tensor<i32>, {T}
                  attributes {{sdy.sharding = #sdy.sharding_per_value<[<@mesh, []>, <@mesh, [{{}}, {{}}]>]>}}
                cond {{
                  %m = stablehlo.constant dense<3> : tensor<i32>
                  %c = stablehlo.compare LT, %i, %m : (tensor<i32>, tensor<i32>) -> tensor<i1>
                  stablehlo.return %c : tensor<i1>
                }} do {{
                  %k = stablehlo.constant dense<1> : tensor<i32>
                  %j = stablehlo.add %i, %k : tensor<i32>
                  %t = stablehlo.add %s, %0 : {T}
                  stablehlo.return %j, %t : tensor<i32>, {T}
                }}
                return %1#1 : {T}""",
        ),
        ["all_gather"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_moves(name):
    text, expected = CASES[name]
    module = partitioned(text)
    verify_partitioned(module.operation)
    assert sorted(re.findall(r"sdy\.(all_\w+|collective_permute|reduce_scatter)", str(module))) == expected, str(module)
    x = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    wanted = run_plain(plain_module(text), [x], types_of(Graph(module.operation).outputs))
    for found, want in zip(run_partitioned(module, [x]), wanted, strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)
