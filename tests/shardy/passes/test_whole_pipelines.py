"""Whole pipelines on generated programs: every module is, as text, the one that jaxlib's pipeline makes.

`scripts/fuzz --suite test_whole_pipelines --count 50` compares 3,000 modules; docs/explanation/beside_shardy.md lists
what differs.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import cache

import pytest
from jax.extend.mlir import ir
from jax.interpreters.mlir import make_ir_context
from pipeline_programs import MESH, PipelineProgram
from sdy_oracle import Oracle
from sharding_dump import parse, plain_text

from sdy_jax.shardy.passes.pipelines import run_pipeline
from sdy_jax.shardy.rules.registry import INSTALLED_IS_NEW

V = "tensor<8x8xf32>"
IMPORT = "sdy-import-pipeline"
PROPAGATION = "sdy-propagation-pipeline"
EXPORT = "sdy-export-pipeline"
DEDUP = "{dedup-functions-fully=true}"
BEFORE = (IMPORT, IMPORT + DEDUP, PROPAGATION, PROPAGATION + DEDUP)
_CLOSED = "func.func(sdy-sink-data-flow-edges,sdy-sharding-constraint-to-reshard),sdy-close-shardings"
_RESHARDED = f"{_CLOSED},func.func(sdy-insert-explicit-reshards{{enable-full-version=true}})"
_EXPLICIT = EXPORT + "{enable-insert-explicit-collectives=true update-non-divisible-input-output-shardings=DIVIDES}"
COLLECTIVELY = (
    _RESHARDED,
    f"{_RESHARDED},canonicalize{{enable-patterns=sdy-reshard}},func.func(sdy-reshard-to-collectives)",
    *[_EXPLICIT.replace("DIVIDES", divides) for divides in ("true", "false") if not INSTALLED_IS_NEW],
)
"""Passes of partitioning; the pipeline of jaxlib 0.12 ends with one that has no counterpart."""
AFTER = (
    EXPORT,
    EXPORT + "{keep-sharding-rules=true}",
    EXPORT + "{avoid-export-for-partitioning=true}",
    EXPORT + "{update-non-divisible-input-output-shardings=false}",
)


@cache
def _context() -> ir.Context:
    return make_ir_context()


def ours(text: str, passes: str) -> str:
    module = parse(text, _context())
    with module.context, ir.Location.unknown(module.context), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_pipeline(module.operation, passes)
    return plain_text(module)


def cases(seed: int) -> Iterator[tuple[str, str]]:
    """A program that is to be propagated, and one with final shardings twice, each with a pipeline."""
    yield PipelineProgram(seed, 0.3).text, BEFORE[seed % len(BEFORE)]
    final = PipelineProgram(seed, 1.0, closed=seed % 2 == 0).text
    yield final, AFTER[seed % len(AFTER)]
    yield final, COLLECTIVELY[seed // 2 % len(COLLECTIVELY)]


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    with Oracle() as running:
        yield running


def check(seeds: range, oracle: Oracle) -> None:
    """jaxlib dies of few programs; what it makes of the others has to be ours."""
    answered, count = 0, 0
    for seed in seeds:
        for text, passes in cases(seed):
            theirs = oracle.run(text, passes)
            assert theirs is None or ours(text, passes) == theirs, f"seed {seed}, {passes}\n{text}"
            answered, count = answered + (theirs is not None), count + 1
    assert answered >= 0.9 * count, oracle.error


def fuzz(seed: int) -> dict[str, int]:
    with Oracle() as running:
        check(range(20 * seed, 20 * seed + 20), running)
    return {"oracle": 60}


def test_generated_programs_become_what_the_oracle_makes_of_them(oracle: Oracle) -> None:
    check(range(1_000_000, 1_000_012), oracle)


@pytest.mark.slow
def test_thousands_of_programs_become_what_the_oracle_makes_of_them(oracle: Oracle) -> None:
    check(range(2_000_000, 2_001_000), oracle)


def stated(dims: str) -> str:
    return f"{{sdy.sharding = #sdy.sharding<@mesh, {dims}>}}"


def made(dims: str) -> str:
    return f"{{sdy.sharding = #sdy.sharding_per_value<[<@mesh, {dims}>]>}}"


WHOLE = f"""
func.func private @f(%p: {V}) -> {V} {{
  %0 = sdy.sharding_constraint %p <@mesh, [{{}}, {{}}]> : {V}
  return %0 : {V}
}}
func.func @main(%x: {V} {stated('[{"a"}, {}]')}, %y: {V}) -> ({V}, {V}, {V}) {{
  %0 = stablehlo.add %x, %y : {V}
  %1 = sdy.sharding_constraint %0 <@mesh, [{{}}, {{}}]> : {V}
  %2 = func.call @f(%0) : ({V}) -> {V}
  %t = stablehlo.create_token : !stablehlo.token
  %3:2 = sdy.manual_computation(%t, %x) in_shardings=[<@mesh, []>, <@mesh, [{{}}, {{}}]>]
      out_shardings=[<@mesh, []>, <@mesh, [{{}}, {{}}]>] manual_axes={{"a"}} (%u: !stablehlo.token, %p: {V}) {{
    %4 = stablehlo.after_all %u : !stablehlo.token
    sdy.return %4, %p : !stablehlo.token, {V}
  }} : (!stablehlo.token, {V}) -> (!stablehlo.token, {V})
  return %1, %2, %3#1 : {V}, {V}, {V}
}}"""
EDGES = f"""
func.func @main(%x: {V}, %y: {V}) -> ({V}, {V}) {{
  %0:2 = stablehlo.optimization_barrier {{sdy.sharding =
    #sdy.sharding_per_value<[<@mesh, [{{"a"}}, {{}}]>, <@mesh, [{{?}}, {{}}]>]>}} %x, %y : {V}, {V}
  %1 = sdy.data_flow_edge %0#0 sharding=<@mesh, [{{"b"}}, {{}}]> : {V}
  return %1, %0#1 : {V}, {V}
}}"""
SUMS = f"""
func.func @main(%x: {V} {stated('[{"a"}, {}]')}) -> ({V}, {V} {stated('[{"a"}, {}]')}, {V}) {{
  %0 = sdy.replicated_to_unreduced {{"b"}} %x out_sharding=<@mesh, [{{"a"}}, {{}}], unreduced={{"b"}}> : {V}
  %1 = sdy.reshard %0 <@mesh, [{{"a"}}, {{}}]> : {V}
  %2 = sdy.sharded_to_unreduced [{{"a"}}, {{}}] %x out_sharding=<@mesh, [{{}}, {{}}], unreduced={{"a"}}> : {V}
  %3 = sdy.reshard %2 <@mesh, [{{}}, {{}}]> : {V}
  %4 = sdy.all_gather [{{"a"}}, {{}}] %x out_sharding=<@mesh, [{{}}, {{}}]> : {V}
  %5 = sdy.all_slice [{{"a"}}, {{}}] %4 out_sharding=<@mesh, [{{"a"}}, {{}}]> : {V}
  return %1, %5, %3 : {V}, {V}, {V}
}}"""
SCATTERED = f"""
func.func @main(%x: {V} {stated("[{}, {}]")}) -> ({V} {stated('[{"a", "b"}, {"c"}]')}) {{
  %0 = sdy.all_reduce {{"a"}} %x out_sharding=<@mesh, [{{}}, {{}}]> : {V}
  %1 = sdy.all_slice [{{"a", "b"}}, {{"c"}}] %0 out_sharding=<@mesh, [{{"a", "b"}}, {{"c"}}]> : {V}
  return %1 : {V}
}}"""
PARTS = f"""
func.func @main(%x: {V} {stated('[{"c":(1)2}, {}]')}) -> ({V} {stated('[{}, {}], unreduced={"c"}')}) {{
  %0 = sdy.reshard %x <@mesh, [{{}}, {{}}], unreduced={{"c"}}> : {V}
  return %0 : {V}
}}"""
JOINED = f"""
func.func @main(%x: {V} {stated('[{"b"}, {}]')}, %y: {V}) -> (tensor<24x8xf32>, tensor<8x8xf32>) {{
  %0 = stablehlo.concatenate %x, %y, %x, dim = 0 {made('[{"c", "a"}, {}]')}
      : ({V}, {V}, {V}) -> tensor<24x8xf32>
  %1 = stablehlo.concatenate %x, dim = 1 {made('[{}, {"b"}]')} : ({V}) -> {V}
  return %0, %1 : tensor<24x8xf32>, {V}
}}"""
TIES = f"""
func.func @main(%x: {V} {stated('[{"a", "b"}, {}]')}) -> (tensor<8x16xf32>, tensor<8x16xf32>) {{
  %0 = stablehlo.concatenate %x, %x, dim = 1 {made('[{"b", "a"}, {}]')} : ({V}, {V}) -> tensor<8x16xf32>
  %1 = stablehlo.concatenate %x, %x, dim = 1 {made('[{"c"}, {}]')} : ({V}, {V}) -> tensor<8x16xf32>
  return %0, %1 : tensor<8x16xf32>, tensor<8x16xf32>
}}"""
KINDS = {
    "returned values that are stated to be whole": (WHOLE, PROPAGATION),
    "edges that are there before import": (EDGES, IMPORT),
    "collectives that undo each other": (SUMS, EXPORT),
    "a sum of which blocks are kept": (SCATTERED, EXPORT),
    "parts of axes that become unreduced": (PARTS, EXPORT),
    "concatenations of what is sharded otherwise": (JOINED, EXPORT),
    "concatenations that two orders of axes suit alike": (TIES, EXPORT),
}


@pytest.mark.parametrize(("text", "passes"), KINDS.values(), ids=KINDS)
def test_each_kind_of_program_becomes_what_the_oracle_makes_of_it(text: str, passes: str, oracle: Oracle) -> None:
    assert ours(MESH + text, passes) == oracle.run(MESH + text, passes), oracle.error


PARTIAL = f"""
func.func @main(%x: {V} {stated('[{}, {"a"}]')}, %y: {V}) -> (tensor<8xf32> {stated('[{"a"}]')}, {V}) {{
  %z = stablehlo.constant dense<0.0> : tensor<f32>
  %0 = stablehlo.reduce(%x init: %z) applies stablehlo.add across dimensions = [1] {made("[{}]")}
      : ({V}, tensor<f32>) -> tensor<8xf32>
  %1 = stablehlo.tanh %0 {made('[{"a"}]')} : tensor<8xf32>
  return %1, %y : tensor<8xf32>, {V}
}}"""


def test_a_partial_sum_that_is_scattered_says_nothing_of_it_nor_do_arguments_of_being_whole(oracle: Oracle) -> None:
    passes = EXPORT + "{enable-insert-explicit-collectives=true}"
    found = ours(MESH + PARTIAL, passes)
    assert found == oracle.run(MESH + PARTIAL, passes), oracle.error
    assert "sdy.reduce_scatter" in found and "unreduced" not in found
