"""Terms of a reduction in partitioned modules: lost, made up or combined wrongly anywhere, they are found."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.mlir import ir
from jax.interpreters import mlir
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax.ir.graph import Graph
from sdy_jax.ir.meshes import AxisRef, sort_and_merge
from sdy_jax.ir.validity import RuleError
from sdy_jax.lowering.planner.facts.verifier import verify_partitioned

CONTEXT = mlir.make_ir_context()
T = "tensor<8x8xf32>"
SPLIT, TERMS, WHOLE = '[{}, {"p"}]', '[{}, {}], unreduced={"p"}', "[{}, {}]"


def arg(sharding):
    return f"{{sdy.sharding = #sdy.sharding<@m, {sharding}>}}"


def res(*shardings):
    return f"{{sdy.sharding = #sdy.sharding_per_value<[{', '.join(f'<@m, {s}>' for s in shardings)}]>}}"


DOT = f"%t = stablehlo.dot %x, %x {res(TERMS)} : ({T}, {T}) -> {T}"
REDUCED = f'%r = sdy.all_reduce {{"p"}} %t out_sharding=<@m, {WHOLE}> : {T}'


def module(body, returns="%x", returned=SPLIT, more=""):
    """A function of `%x`, split along p, of `%w`, replicated, and of a predicate and a number."""
    return f"""sdy.mesh @m = <["p"=2, "q"=2]>
func.func @main(%x: {T} {arg(SPLIT)}, %w: {T}, %i: tensor<i32>) -> ({T} {arg(returned)}) {{
{body}
return {returns} : {T}
}}
{more}"""


def unary(name, x, sharding):
    return f"%u = stablehlo.{name} {x} {res(sharding)} : {T}"


def binary(name, x, y, sharding):
    return f"%u = stablehlo.{name} {x}, {y} {res(sharding)} : {T}"


def lines(*ops):
    return "\n".join(ops)


def named(kind, after=""):
    return f'sdy.reduction_kind = "{kind}"{after}'


OF_ROWS = '[{}], unreduced={"p"}'
MAXIMUM = f"""%z = stablehlo.constant dense<0xFF800000> : tensor<f32>
%k = stablehlo.reduce(%x init: %z) applies stablehlo.maximum across dimensions = [1]
 {res(OF_ROWS).replace("{sdy.sharding", "{" + named("max", ", sdy.sharding"))}
 : ({T}, tensor<f32>) -> tensor<8xf32>"""

VALID = {
    "largest": module(
        lines(
            MAXIMUM,
            f'%u = sdy.all_reduce {{"p"}} %k out_sharding=<@m, [{{}}]> {{{named("max")}}} : tensor<8xf32>',
        )
    ),
    "reduced at once": module(lines(DOT, REDUCED), "%r", WHOLE),
    "reduced later": module(lines(DOT, unary("negate", "%t", TERMS), REDUCED.replace("%t", "%u")), "%r", WHOLE),
    "added": module(lines(DOT, binary("add", "%t", "%t", TERMS), REDUCED.replace("%t", "%u")), "%r", WHOLE),
    "scaled": module(lines(DOT, binary("multiply", "%t", "%w", TERMS), REDUCED.replace("%t", "%u")), "%r", WHOLE),
    "returned": module(DOT, "%t", TERMS),
    "awaited": module(
        lines(DOT, f"%u = stablehlo.custom_call @sdy_jax.after(%x, %t) {res(SPLIT)} : ({T}, {T}) -> {T}"), "%u"
    ),
    "split": module(unary("tanh", "%x", SPLIT)),
}


@pytest.mark.parametrize("name", VALID)
def test_terms_that_are_kept_are_accepted(name):
    verify_partitioned(ir.Module.parse(VALID[name], CONTEXT).operation)


def loop(init, carried, returned):
    return f"""%l = stablehlo.while(%a = {init}) : {T} attributes {res(carried)}
cond {{ %c = stablehlo.constant dense<true> : tensor<i1>
  stablehlo.return %c : tensor<i1> }}
do {{ %n = stablehlo.negate %a {res(carried)} : {T}
  stablehlo.return {returned} : {T} }}"""


def branches(index, first, sharding):
    return f"""%l = "stablehlo.case"({index}) ({{ stablehlo.return {first} : {T} }}, {{ stablehlo.return %w : {T} }})
 {res(sharding)} : (tensor<i32>) -> {T}"""


INDEX = f"""%z = stablehlo.constant dense<0> : tensor<i32>
%y = stablehlo.iota dim = 0 {res('[{"p"}]')} : tensor<8xi32>
%k = stablehlo.reduce(%y init: %z) applies stablehlo.add across dimensions = [0] {res('[], unreduced={"p"}')}
 : (tensor<8xi32>, tensor<i32>) -> tensor<i32>"""


def manual(taken, given, returned):
    return f"""%l = sdy.manual_computation(%t) in_shardings=[<@m, {taken}>] out_shardings=[<@m, {given}>]
manual_axes={{"q"}} (%a: {T}) {{ {returned}
sdy.return %b : {T} }} : ({T}) -> {T}"""


def called(said, taken, given):
    return (
        f"%l = func.call @g(%t) {res(said)} : ({T}) -> {T}",
        f"func.func private @g(%a: {T} {arg(taken)}) -> ({T} {arg(given)}) {{\n return %a : {T} }}",
    )


def of_call(said, taken, given, returned=WHOLE):
    call, function = called(said, taken, given)
    return module(lines(DOT, call), "%l", returned, function)


INNER = f"%b = stablehlo.negate %a {res(TERMS)} : {T}"
BOTH = f"{T}, {T}"
BROKEN = {
    # what an op makes of terms
    "lost": (
        "V6",
        module(lines(DOT, unary("negate", "%t", WHOLE)), "%u", WHOLE),
        "stablehlo.negate: operand 0 is unred",
    ),
    "dropped": (
        "V6",
        module(f"{DOT}\nstablehlo.custom_call @f(%t) {{has_side_effect = true}} : ({T}) -> ()"),
        "custom_call",
    ),
    "of another axis": (
        "V6",
        module(lines(DOT, unary("negate", "%t", '[{}, {}], unreduced={"q"}')), "%u", WHOLE),
        'along "p", what it makes is not',
    ),
    "by another reduction": (
        "V6",
        module(lines(MAXIMUM, f"%u = stablehlo.negate %k {res(OF_ROWS)} : tensor<8xf32>")),
        'operand 0 is unreduced by max along "p", what it makes is unreduced by sum',
    ),
    "made by another reduction": (
        "V7",
        module(MAXIMUM.replace(named("max"), named("min"))),
        "it makes terms of a max, its result is unreduced by min",
    ),
    "combined by another": (
        "V10",
        module(lines(MAXIMUM, '%u = sdy.all_reduce {"p"} %k out_sharding=<@m, [{}]> : tensor<8xf32>')),
        "the operand is unreduced by max, it is reduced by sum",
    ),
    "not linear": (
        "V8",
        module(lines(DOT, unary("tanh", "%t", TERMS)), "%u", TERMS),
        "stablehlo.tanh of the terms is not terms of its result",
    ),
    "a whole one is added": (
        "V8",
        module(lines(DOT, binary("add", "%t", "%w", TERMS)), "%u", TERMS),
        "operand 1 is not: it would count once per term",
    ),
    "terms times terms": (
        "V8",
        module(lines(DOT, binary("multiply", "%t", "%t", TERMS)), "%u", TERMS),
        "stablehlo.multiply of the terms",
    ),
    "a split factor": (
        "V8",
        module(lines(DOT, binary("multiply", "%t", "%x", TERMS)), "%u", TERMS),
        'operand 0 is unreduced by sum along "p", but "p" splits operand 1',
    ),
    "made up": (
        "V7",
        module(unary("negate", "%w", '[{}, {}], unreduced={"q"}'), "%u", '[{}, {}], unreduced={"q"}'),
        'its result is unreduced along "q", along which it combines nothing',
    ),
    "made up beside": (
        "V7",
        module(DOT.replace('{"p"}', '{"p", "q"}'), "%t", '[{}, {}], unreduced={"p", "q"}'),
        'stablehlo.dot: its result is unreduced along "q", along which it combines nothing',
    ),
    "not said": (
        "V7",
        module(DOT.replace(TERMS, WHOLE), "%t", WHOLE),
        'stablehlo.dot: it combines along "p", its result is not unreduced along that',
    ),
    "unlike results": (
        "V9",
        module(
            f"""%z = stablehlo.constant dense<0.0> : tensor<f32>
%u:2 = stablehlo.reduce(%x init: %z), (%x init: %z) across dimensions = [1] {res('[{}], unreduced={"p"}', "[{}]")}
 : ({T}, {T}, tensor<f32>, tensor<f32>) -> (tensor<8xf32>, tensor<8xf32>)
 reducer(%a: tensor<f32>, %b: tensor<f32>) (%c: tensor<f32>, %d: tensor<f32>) {{
  %e = stablehlo.add %a, %b : tensor<f32>
  %f = stablehlo.add %c, %d : tensor<f32>
  stablehlo.return %e, %f : tensor<f32>, tensor<f32> }}"""
        ),
        'its results are unreduced by sum along "p", not unreduced',
    ),
    # where terms flow
    "returned": ("V6", module(DOT, "%t", WHOLE), "func.return: operand 0 is unreduced by sum"),
    "returned as terms": (
        "V6",
        module("", "%w", TERMS),
        "func.return: operand 0 is not unreduced, what it flows into is",
    ),
    "an argument of a call": ("V6", of_call(WHOLE, WHOLE, WHOLE), "func.call: operand 0 is unreduced by sum"),
    "a function's result": ("V6", of_call(WHOLE, TERMS, WHOLE), "func.return: operand 0 is unreduced by sum"),
    "a call's result": ("V6", of_call(WHOLE, TERMS, TERMS), "func.return: operand 0 is unreduced by sum"),
    "into a loop": (
        "V6",
        module(lines(DOT, loop("%t", WHOLE, "%n")), "%l", WHOLE),
        "stablehlo.while: operand 0 is unred",
    ),
    "out of a body": (
        "V6",
        module(lines(DOT, loop("%w", WHOLE, "%t")), "%l", WHOLE),
        "stablehlo.return: operand 0 is unreduced by sum",
    ),
    "whole in a loop of terms": (
        "V6",
        module(lines(DOT, loop("%t", TERMS, "%w")), "%l", TERMS),
        "stablehlo.return: operand 0 is not unreduced, what it flows into is unreduced by sum",
    ),
    "out of a branch": (
        "V6",
        module(lines(DOT, branches("%i", "%t", WHOLE)), "%l", WHOLE),
        "stablehlo.return: operand 0 is unreduced by sum",
    ),
    "the number of a branch": (
        "V6",
        module(lines(INDEX, branches("%k", "%w", WHOLE)), "%l", WHOLE),
        "stablehlo.case: operand 0 is unreduced by sum",
    ),
    "past a barrier": (
        "V6",
        module(lines(DOT, f'%l = "stablehlo.optimization_barrier"(%t) {res(WHOLE)} : ({T}) -> {T}'), "%l", WHOLE),
        "stablehlo.optimization_barrier: operand 0 is unreduced by sum",
    ),
    "into a computation": (
        "V6",
        module(lines(DOT, manual(WHOLE, WHOLE, f"%b = stablehlo.negate %a : {T}")), "%l", WHOLE),
        "sdy.manual_computation: operand 0 is unreduced by sum",
    ),
    "out of a computation": (
        "V6",
        module(lines(DOT, manual(TERMS, WHOLE, INNER)), "%l", WHOLE),
        "sdy.return: operand 0 is unreduced by sum",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_terms_that_are_taken_for_something_else_are_refused_with_op_axis_and_remedy(name):
    rule, text, message = BROKEN[name]
    parsed = ir.Module.parse(text, CONTEXT)
    with pytest.raises(RuleError) as caught:
        verify_partitioned(parsed.operation)
    assert str(caught.value).startswith(f"[{rule}] ")
    assert message in str(caught.value)
    assert re.search(r'; .*\(at "-":\d+:\d+\)$', str(caught.value))


# What the partitioner makes, with one statement or one collective changed.

MESH = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
RNG = np.random.default_rng(0)
X, W = (RNG.normal(size=(16, 16)).astype(np.float32) for _ in range(2))


def accumulated(x, w):
    return jax.lax.fori_loop(0, 3, lambda i, s: s + x @ (w + i), jnp.zeros((16, 16), np.float32))


PROGRAMS = {
    "sums of products": lambda x, w: jnp.tanh(-(x @ w).T + (w @ x).T),
    "a loop": accumulated,
    "a lookup": lambda x, w: w[jnp.arange(16) % 7].sum(1) + x.max(1),
    "branches": lambda x, w: jax.lax.cond(x.sum() > 0, lambda: x @ w, lambda: w @ x),
    "a softmax": lambda x, w: jax.nn.softmax(x @ w, axis=1) @ w,
    "a gradient": jax.grad(lambda x, w: (jnp.tanh(x @ w) @ w).sum()),
}


def changed(module, change):
    """A copy with one change, and what that is; None where the change says nothing new."""
    number, kind = change
    copy = module.clone().operation
    graph = Graph(copy)
    op = [op for op in graph.ops if op.results][number]
    value, sharding = op.results[0], op.results[0].sharding
    if kind == "whole" and sharding is not None and sharding.unreduced_axes:
        graph.set_sharding(value, replace(sharding, unreduced_axes=()))
    elif kind == "terms" and sharding is not None and "a" not in str(sharding).split("@mesh")[1]:
        axes = sort_and_merge([*sharding.unreduced_axes, AxisRef("a")], graph.meshes["mesh"])
        graph.set_sharding(value, replace(sharding, unreduced_axes=axes))
    elif kind == "left out" and op.name in ("sdy.all_reduce", "sdy.reduce_scatter"):
        value.mlir.replace_all_uses_with(op.operands[0].mlir)
    else:
        return None
    return copy, f"{op.name}: {kind}"


def is_refused(module):
    try:
        verify_partitioned(module)
    except RuleError:
        return True
    return False


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_change_of_one_statement_goes_unnoticed(name):
    options = {"mesh": MESH, "in_shardings": (P(None, "b"), P("b")), "layouts": "local"}  # with reductions in all
    plan = sdy.partition(PROGRAMS[name], **options).plan(X, W)
    module = plan.stages["partitioned"]
    verify_partitioned(module)
    count, tried = sum(1 for op in Graph(module.clone().operation).ops if op.results), []
    for change in itertools.product(range(count), ("whole", "terms", "left out")):
        made = changed(module, change)
        if made is None:
            continue
        copy, what = made
        tried.append(what)
        assert is_refused(copy), what
    assert {what.split(": ")[1] for what in tried} == {"whole", "terms", "left out"}


def test_an_argument_of_a_computation_says_where_it_lies_when_a_collective_takes_it():
    text = """
sdy.mesh @mesh = <["a"=2, "b"=4]>
func.func @main(%x: tensor<8x16xf32>) -> tensor<8xf32> {
  %0 = sdy.named_computation<"f">(%x) (%y: tensor<8x16xf32>) {
    %1 = sdy.reshard %y <@mesh, [{}, {}], unreduced={"b"}> : tensor<8x16xf32>
    %2 = stablehlo.constant dense<0.0> : tensor<f32>
    %3 = stablehlo.reduce(%1 init: %2) applies stablehlo.add across dimensions = [1]
        : (tensor<8x16xf32>, tensor<f32>) -> tensor<8xf32>
    sdy.return %3 : tensor<8xf32>
  } : (tensor<8x16xf32>) -> tensor<8xf32>
  return %0 : tensor<8xf32>
}"""
    function = sdy.partition(sdy.loads(text), mesh=MESH, on_unknown="ignore")
    module = function.plan(X[:8]).stages["partitioned"]
    verify_partitioned(module)
    assert "replicated_to_unreduced" in str(module)
    np.testing.assert_allclose(function(X[:8]), X[:8].sum(1), rtol=1e-5)
