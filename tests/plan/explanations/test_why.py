"""`plan.why` follows every axis back to its annotation, and `plan.why_not` names what blocks one."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import train_lm
from jax.extend.mlir import ir
from jax.sharding import PartitionSpec as P
from random_programs import RandomProgram
from sharding_dump import parse

import sdy_jax as sdy
from sdy_jax.ir.graph import Graph
from sdy_jax.ir.meshes import AxisRef, overlaps
from sdy_jax.ir.operations import body_of, main_function, terminator_of
from sdy_jax.ir.parsers import parse_axis
from sdy_jax.plan.explanations.origins import StatedBorder
from sdy_jax.plan.explanations.why import Explanation, given_arguments
from sdy_jax.shardy.passes.pipelines import plan_import, run_pipeline
from sdy_jax.shardy.propagation import propagate
from sdy_jax.shardy.propagation.engine import Engine
from sdy_jax.shardy.propagation.explanations import Blockers, Reason, axis_at
from sdy_jax.shardy.rules import RuleBook

MATRIX = "tensor<8x8xf32>"
HERE = Path(__file__).name


def explain(text):
    """Explains a module as it is before import; its arguments are called `%arg0`, its results `result[0]`."""
    module = parse(text).operation
    imported = module.clone().operation
    run_pipeline(imported, plan_import("shardy"))
    block = body_of(main_function(imported))
    inputs = [argument.get_name(ir.AsmState(imported)) for argument in block.arguments]
    count = len(terminator_of(block).operands)
    outputs = [f"result[{i}]" for i in range(count)] if count != 1 else ["result"]
    return Explanation(imported, inputs, outputs, StatedBorder(given_arguments(module)), compat="shardy")


def program(body, *arguments, results="", returned=MATRIX):
    """@main of matrices with these shardings (empty: none), `%x`, `%y`, ... in order."""

    def typed(type_, sharding):
        return f"{type_} {{sdy.sharding = #sdy.sharding<@mesh, {sharding}>}}" if sharding else type_

    head = ", ".join(f"%{name}: {typed(MATRIX, s)}" for name, s in zip("xyz", arguments, strict=False))
    return f"func.func @main({head}) -> ({typed(returned, results)}) {{\n{body}\n}}"


def add(x, y, **options):
    """A program that adds two matrices with these shardings."""
    return program(f"%0 = stablehlo.add %x, %y : {MATRIX}\nreturn %0 : {MATRIX}", x, y, **options)


def negate(x, **options):
    return program(f"%0 = stablehlo.negate %x : {MATRIX}\nreturn %0 : {MATRIX}", x, **options)


def only(answer):
    """The one obstacle of an answer."""
    (obstacle,) = answer
    return obstacle


def line_of(text, function):
    """`file:line` of the first line of a function of this file that contains `text`."""
    lines, first = inspect.getsourcelines(function)
    return f"{HERE}:{first + next(i for i, line in enumerate(lines) if text in line)}"


# --- why: functions ---------------------------------------------------------------------------------------------------


def mlp(x, params):
    hidden = jnp.tanh(x @ params["up"])
    return hidden @ params["down"]


@pytest.fixture(scope="module")
def plan(mesh):
    specs = (P("data"), {"up": P(None, "model"), "down": None})
    return sdy.partition(mlp, mesh=mesh, in_shardings=specs).plan(
        jnp.ones((8, 16)), {"up": jnp.ones((16, 32)), "down": jnp.ones((32, 16))}
    )


def test_a_chain_goes_from_value_to_value_back_to_the_argument(plan):
    answer = plan.why("params['down']")
    assert [(c.axis, c.dim) for c in answer.chains] == [("model", 0)]
    through_dot, through_tanh, through_first_dot, annotation = answer
    assert (through_dot.op, through_dot.dim, through_dot.level) == ("stablehlo.dot_general", 1, 3)
    assert "which is summed over" in through_dot.text and through_dot.line.endswith(line_of("hidden @", mlp))
    assert through_tanh.op == "stablehlo.tanh" and through_tanh.function == "mlp"
    assert through_first_dot.value == "params['up']" and through_first_dot.type == "f32[16,32@model]"
    assert through_first_dot.text.startswith("operand 1 of dot_general at ")
    assert annotation.kind == "annotation" and "in_shardings of params['up']: P(None, 'model')" in annotation.text


def test_the_annotation_names_the_line_where_the_function_is_partitioned(plan):
    *_, annotation = plan.why("params['down']")
    assert re.fullmatch(rf".*{HERE}:\d+", annotation.line)
    number = int(annotation.line.rpartition(":")[2])
    assert "sdy.partition(" in Path(__file__).read_text().splitlines()[number - 1]


def test_each_axis_of_each_dimension_has_a_chain(plan):
    assert [(c.axis, c.dim) for c in plan.why("result").chains] == [("data", 0)]
    hidden = plan.why(line_of("tanh", mlp)).chains
    assert {(c.axis, c.dim) for c in hidden} == {("data", 0), ("model", 1)}


def test_a_value_without_axes_is_pointed_to_why_not(mesh):
    plan = sdy.partition(jnp.tanh, mesh=mesh).plan(jnp.ones((8, 8)))
    assert not list(plan.why("x")) and "no axis splits it; `why_not` says" in str(plan.why("x"))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("params['up']", {"params['up']"}),
        ("params", {"params['up']", "params['down']"}),
        ("result", {"result"}),
        ("%arg0", {"%arg0, x"}),
    ],
)
def test_values_go_by_path_argument_name_and_mlir_name(plan, name, values):
    assert {value for value, _ in plan.why(name).types} == values


def test_mlir_names_are_those_of_the_propagated_module(plan):
    names = re.findall(r"(%\w+) = stablehlo.tanh", plan.mlir("propagated"))
    ((label, _),) = plan.why(names[0]).types
    assert label.startswith(f"{names[0]}, tanh at ")


def test_an_unknown_value_is_answered_with_similar_names(plan):
    with pytest.raises(sdy.SdyError, match=r"no value is called \"params\['upp'\]\"; did you mean params\['up'\]"):
        plan.why("params['upp']")
    with pytest.raises(sdy.SdyError, match=rf"did you mean .*{HERE}"):
        plan.why(f"{HERE}:1")


def test_an_unknown_axis_is_answered_with_the_mesh(plan):
    with pytest.raises(sdy.SdyError, match=r"'modl'; did you mean model\? The mesh is data=2, model=4"):
        plan.why_not("x", "modl")
    with pytest.raises(sdy.SdyError, match="no part of the axis 'model', whose size is 4"):
        plan.why_not("x", "model:(1)3")
    with pytest.raises(sdy.SdyError, match="has no dim 2"):
        plan.why_not("x", "model", 2)


def test_an_axis_may_be_a_part_of_one(plan):
    assert only(plan.why_not("params['up']", "model:(1)2", 1)).reason == "PRESENT"
    assert only(plan.why_not("params['up']", '"model":(2)2', 1)).reason == "PRESENT"


def test_the_gradient_of_an_attention_weight_is_explained_line_by_line():
    """The language model of the example: one chain from the gradient to the weight's annotation."""
    config = train_lm.Config(layers=1)
    mesh = train_lm.parse_mesh("data=2,model=4")
    window = np.zeros((config.batch, config.sequence + 1), np.int32)
    specs, tokens = train_lm.shardings(config, mesh)
    params = jax.eval_shape(lambda: train_lm.init_params(config, jax.random.key(0)))

    def gradients(params, window):
        return jax.grad(train_lm.loss_fn)(params, window, lambda x: x)

    plan = sdy.partition(gradients, mesh=mesh, in_shardings=(specs["params"], tokens)).plan(params, window)
    answer = plan.why("result['layers'][0]['qkv']")
    (chain,) = answer.chains
    assert (chain.type, chain.axis, chain.dim) == ("f32[128,3,8@model,16]", "model", 2)
    *steps, annotation = chain.links
    assert annotation.text.startswith("in_shardings of params['layers'][0]['")
    assert "model" in annotation.text and re.search(rf"{HERE}:\d+$", annotation.text)
    lines = Path(train_lm.__file__).read_text().splitlines()
    attention = inspect.getsourcelines(train_lm.attention)
    for step in steps:
        file, _, number = step.line.rpartition(":")
        assert file.endswith("train_lm.py") and lines[int(number) - 1].strip()
        assert f"at {step.line}" in step.text and step.level is not None
    inside = range(attention[1], attention[1] + len(attention[0]))
    assert any(int(s.line.rpartition(":")[2]) in inside and s.function == "attention" for s in steps)
    assert "backward pass" in str(answer)


# --- why: what import and export do -----------------------------------------------------------------------------------


def test_an_applied_constraint_is_a_link():
    text = program(
        f'%0 = stablehlo.negate %x : {MATRIX}\n%1 = sdy.sharding_constraint %0 <@mesh, [{{"a"}}, {{}}]> : {MATRIX}\n'
        f"return %1 : {MATRIX}",
        "",
    )
    applied, annotation = explain(text).why("%0")
    assert applied.kind == "constraint" and "applied to its input" in applied.text
    assert annotation.text == "sharding constraint P('a') at -:4"


def test_an_argument_without_a_sharding_of_its_own_names_the_constraint_on_it():
    text = program(f'%0 = sdy.sharding_constraint %x <@mesh, [{{"a"}}, {{}}]> : {MATRIX}\nreturn %0 : {MATRIX}', "")
    applied, annotation = explain(text).why("%arg0")
    assert applied.kind == "constraint" and annotation.text == "sharding constraint P('a') at -:3"


def test_a_sharding_group_is_a_link():
    text = program(
        f"sdy.sharding_group %x group_id=3 : {MATRIX}\n%0 = stablehlo.negate %y : {MATRIX}\n"
        f"sdy.sharding_group %0 group_id=3 : {MATRIX}\nreturn %0 : {MATRIX}",
        '[{"a"}, {?}]',
        "",
        results='[{?}, {"b"}]',
    )
    explanation = explain(text)
    first, second = explanation.why("%1").chains
    assert [link.kind for link in first.links] == ["group", "annotation"]
    assert "the sharding of %arg0" in first.links[-1].text
    assert "the sharding of result" in second.links[-1].text
    through_group = explanation.why("%arg0").chains[1].links
    assert [link.kind for link in through_group] == ["group", "propagation", "annotation"]


WHILE = """
  %c = stablehlo.constant dense<0> : tensor<i32>
  %0:2 = stablehlo.while(%p = %x, %q = %c) : tensor<8x8xf32>, tensor<i32>
  cond {
    %k = stablehlo.constant dense<4> : tensor<i32>
    %t = stablehlo.compare LT, %q, %k : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %t : tensor<i1>
  } do {
    %r = sdy.sharding_constraint %p <@mesh, [{?}, {"b", ?}]> : tensor<8x8xf32>
    stablehlo.return %r, %q : tensor<8x8xf32>, tensor<i32>
  }
  return %0#0 : tensor<8x8xf32>"""


def test_a_loop_carry_is_a_link():
    rows, columns = explain(program(WHILE, '[{"a"}, {?}]')).why("result").chains
    returned, carried, annotation = rows.links
    assert returned.value == "loop carry 0 of stablehlo.while at -:5"
    assert carried.text.startswith("initial value of loop carry 0 of stablehlo.while at -:5: %arg0, dim 0")
    assert annotation.text == 'the sharding of %arg0: [{"a"}, {?}]'
    assert columns.links[-1].text == 'sharding constraint [{?}, {"b", ?}] at -:11'


MANUAL = """
  %0 = sdy.manual_computation(%x) in_shardings=[<@mesh, [{"a"}, {?}]>] out_shardings=[<@mesh, [{"a", ?}, {?}]>]
      manual_axes={"a"} (%p: tensor<4x8xf32>) {
    %1 = stablehlo.negate %p : tensor<4x8xf32>
    sdy.return %1 : tensor<4x8xf32>
  } : (tensor<8x8xf32>) -> tensor<8x8xf32>
  return %0 : tensor<8x8xf32>"""


def test_the_border_of_a_manual_computation_is_a_link():
    explanation = explain(program(MANUAL, '[{"a"}, {"b", ?}]'))
    manual, free = explanation.why("result").chains
    assert manual.links[-1].text.startswith('out_shardings[0] of the manual computation at -:4: [{"a", ?}, {?}]')
    texts = [link.text for link in free.links]
    assert texts[1].startswith("value that the body returns of result 0 of sdy.manual_computation")
    assert texts[3].startswith("value outside of argument 0 of sdy.manual_computation")


def test_a_copied_constant_is_explained_by_its_use():
    text = program(
        f"%k = stablehlo.constant dense<2.0> : {MATRIX}\n%0 = stablehlo.add %x, %k : {MATRIX}\n"
        f"%1 = stablehlo.add %y, %k : {MATRIX}\n%2 = stablehlo.add %0, %1 : {MATRIX}\nreturn %2 : {MATRIX}",
        '[{"a"}, {?}]',
        '[{"b"}, {?}]',
    )
    ends = [chain.links[-1].text for chain in explain(text).why("-:3").chains]
    assert ends == ['the sharding of %arg0: [{"a"}, {?}]', 'the sharding of %arg1: [{"b"}, {?}]']


def test_an_axis_that_export_shortened_is_followed_from_what_it_was():
    text = program(
        "%0 = stablehlo.slice %x [0:6, 0:8] : (tensor<8x8xf32>) -> tensor<6x8xf32>\nreturn %0 : tensor<6x8xf32>",
        '[{"c"}, {?}]',
        returned="tensor<6x8xf32>",
        results='[{"c"}, {?}]',
    )
    (chain,) = explain(text).why("result").chains
    assert chain.axis == "c:(1)2"
    change, annotation = chain.links
    assert change.kind == "export" and "'c' of size 4" in change.text and "does not divide 6 evenly" in change.text
    assert annotation.text == 'the sharding of result: [{"c"}, {?}]'


def test_other_functions_of_a_module_are_explained_by_name():
    text = negate('[{"a"}, {?}]') + "\n" + negate('[{?}, {"b"}]').replace("@main", "@other")
    _, chain = explain(text).why("%0").chains  # one %0 in each function
    through, annotation = chain.links
    assert "argument 0 of @other" in through.text
    assert annotation.text == 'the sharding of argument 0 of @other: [{?}, {"b"}]'


def test_user_and_op_priorities_are_told():
    chains = explain(add('[{"a", ?}p1, {"b"}]', "")).why("%arg1").chains
    (rows, _), (columns, _) = (chain.links for chain in chains)
    assert (rows.priority, columns.priority) == (1, 0) and "user priority 1" in rows.text
    assert "op priority 0" in columns.text and "user priority" not in columns.text


def test_the_two_parts_of_a_split_axis_come_together_again():
    text = program(
        "%0 = stablehlo.reshape %x : (tensor<8x8xf32>) -> tensor<2x4x8xf32>\nreturn %0 : tensor<2x4x8xf32>",
        '[{"c"}, {?}]',
        returned="tensor<2x4x8xf32>",
    )
    major, minor = explain(text).why("%0").chains
    assert (major.axis, major.dim, minor.axis, minor.dim) == ("c:(1)2", 0, "c:(2)2", 1)
    for chain in (major, minor):
        assert chain.links[-2].axis == "c" and "along" in chain.links[-2].text and "[ij" in chain.links[-2].text


FEATURES = [("while", "barrier"), ("group",), ("manual", "barrier"), ("constant", "priority")]


@pytest.mark.parametrize("seed", range(12))
def test_every_axis_of_a_random_program_ends_at_an_annotation(seed):
    explanation = explain(RandomProgram(seed, FEATURES[seed % len(FEATURES)], ops=14).text)
    naming = explanation.naming
    for name in [n.name for n in (*naming._boundary, *naming._exported)]:
        for chain in explanation.why(name).chains:
            assert chain.links[-1].kind == "annotation", f"{name}: {chain}"
            assert chain.links[-1].text
            before = parse_axis(quoted(chain.axis))
            for link in chain.links:  # an axis may be split or merged on its way, not replaced
                axis = parse_axis(quoted(link.axis))
                assert overlaps(axis, before), str(chain)
                before = axis


def quoted(axis):
    name, colon, rest = axis.partition(":")
    return f'"{name}"{colon}{rest}'


def test_propagating_again_gives_the_shardings_of_the_plan(plan):
    naming = plan.explanation.naming
    text = plan.mlir("propagated")
    assert str(naming._after_export.graph.module) == text


# --- why not: one test per reason -------------------------------------------------------------------------------------


def test_the_axis_is_there_already():
    assert only(explain(negate('[{"a"}, {}]')).why_not("result", "a")).reason == "PRESENT"


def test_a_scalar_cannot_be_split():
    text = "func.func @main(%x: tensor<f32>) -> tensor<f32> {\nreturn %x : tensor<f32>\n}"
    assert only(explain(text).why_not("result", "a")).reason == "SCALAR"


def test_a_closed_dimension_blocks():
    found = only(explain(add('[{"a"}, {?}]', "[{}, {?}]")).why_not("%arg1", "a"))
    assert found.reason == "CLOSED" and found.op == "stablehlo.add" and found.line == "-:3"
    assert "operand 0 (%arg0, f32[8@a,8]) has it, but does not give it to operand 1" in found.text
    assert found.because == ("the sharding of %arg1: [{}, {?}]",)


def test_a_dimension_closed_by_a_constraint_names_its_line(mesh):
    def fun(x, y):
        z = jax.lax.with_sharding_constraint(y, P())
        return x + z

    plan = sdy.partition(fun, mesh=mesh, in_shardings=(P("data"), None)).plan(jnp.ones((8, 8)), jnp.ones((8, 8)))
    found = only(plan.why_not(line_of("with_sharding", fun), "data"))
    assert found.reason == "CLOSED" and line_of("return x + z", fun) in found.text
    assert found.because[0].startswith("sharding constraint P() at ") and line_of("with_shard", fun) in found.because[0]


def test_explicit_replication_blocks():
    found = only(explain(add('[{"a"}, {?}]', '[{?}, {?}], replicated={"a"}')).why_not("%arg1", "a"))
    assert found.reason == "REPLICATED" and 'replicated={"a"}' in found.because[0]


def test_an_unreduced_axis_blocks():
    found = only(explain(negate('[{"a"}, {"b"}]', results='[{?}, {?}], unreduced={"b"}')).why_not("result", "b"))
    assert found.reason == "UNREDUCED" and 'unreduced={"b"}' in found.because[0]


def test_an_axis_of_another_dimension_blocks():
    found = only(explain(add('[{"a"}, {?}]', '[{?}, {"a"}]')).why_not("%arg1", "a", 0))
    assert found.reason == "USED" and "'a' splits dim 1 of f32[8,8@a] already" in found.text
    assert found.because == ('the sharding of %arg1: [{?}, {"a"}]',)


def test_tensors_of_an_op_that_disagree_block_each_other():
    explanation = explain(add('[{"a"}, {?}]', '[{"b"}, {?}]'))
    own = only(explanation.why_not("%arg1", "a"))
    assert own.reason == "FACTOR_CONFLICT" and "dim 0 of f32[8@b,8] is split along 'b' instead" in own.text
    result = only(explanation.why_not("%0", "a"))
    assert result.reason == "FACTOR_CONFLICT" and "operand 1 is in the way" in result.text
    assert result.because == ('the sharding of %arg1: [{"b"}, {?}]',)


def test_a_conflict_is_followed_to_who_won():
    text = program(
        f"%0 = stablehlo.negate %y : {MATRIX}\n%1 = stablehlo.add %x, %0 : {MATRIX}\nreturn %1 : {MATRIX}",
        '[{"a"}, {?}]',
        '[{"b"}, {?}]',
    )
    found = only(explain(text).why_not("%0", "a"))
    assert found.reason == "FACTOR_CONFLICT"
    through, annotation = found.because
    assert "%arg1" in through and "op priority 0" in through and annotation == 'the sharding of %arg1: [{"b"}, {?}]'


def test_an_operand_gets_no_more_than_a_result_that_is_closed():
    text = program(
        f"%0 = stablehlo.add %x, %y {{sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{{}}, {{?}}]>]>}} : {MATRIX}\n"
        f"return %0 : {MATRIX}",
        '[{"a"}, {?}]',
        "",
    )
    found = only(explain(text).why_not("%arg1", "a"))
    assert found.reason == "CLOSED" and "result is in the way" in found.text


def reshape(given, wanted, sharding):
    """A program that reshapes `%arg0` of shape `given`, sharded so, to `%0` of shape `wanted`."""
    return (
        f"func.func @main(%x: tensor<{given}xf32> {{sdy.sharding = #sdy.sharding<@mesh, {sharding}>}}) -> "
        f"tensor<{wanted}xf32> {{\n%0 = stablehlo.reshape %x : (tensor<{given}xf32>) -> tensor<{wanted}xf32>\n"
        f"return %0 : tensor<{wanted}xf32>\n}}"
    )


def test_a_size_that_an_axis_does_not_divide_blocks():
    found = only(explain(reshape("12", "6x2", '[{"c"}]')).why_not("%0", "c", 0))
    assert found.reason == "INDIVISIBLE" and "'c' of size 4 does not divide the part of size 6 of dim 0" in found.text


def test_a_part_of_a_dimension_has_to_wait_for_those_before_it():
    found = only(explain(reshape("2x6", "12", '[{?}, {"b"}]')).why_not("%0", "b"))
    assert found.reason == "MAJOR_FIRST" and "one that comes first is not split to its end" in found.text


def test_axes_that_do_not_fit_a_part_of_a_dimension_leave_no_room():
    text = """
    func.func @main(%x: tensor<12xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"c", ?}]>},
                    %y: tensor<6x2xf32> {sdy.sharding = #sdy.sharding<@mesh, [{?}, {"a"}]>}) -> tensor<6x2xf32> {
      %0 = stablehlo.reshape %x : (tensor<12xf32>) -> tensor<6x2xf32>
      %1 = stablehlo.add %0, %y : tensor<6x2xf32>
      return %1 : tensor<6x2xf32>
    }"""
    found = only(explain(text).why_not("%arg0", "a"))
    assert found.reason == "OVERFLOW" and "'c:(2)2', which does not fit its part" in found.text
    assert found.because == ('the sharding of %arg0: [{"c", ?}]',)


def blocks(text, value_id, axis, **options):
    """(reason, tensor in the way) for each op next to the value at `value_id`, in propagation with these options."""
    module = parse(text)
    graph = Graph(module.operation)
    engine = propagate(Engine(graph, rules=RuleBook(options.get("conservative", False), compat="shardy"), **options))
    blockers, found = Blockers(engine), []
    for entry in blockers.entries[engine.value_ids.of(value_id(graph))]:
        target = entry.value_ids.index(engine.value_ids.of(value_id(graph)))
        for factor, source, dim in blockers.neighbours(entry, target, 0):
            if axis_at(blockers.seen(entry)[source], dim, axis):
                block = blockers.block(entry, target, factor, source, axis)
                found.append((block.reason, block.at))
    return found


def test_in_basic_propagation_all_tensors_have_to_be_able_to_take_an_axis():
    text = program(
        f"%0 = stablehlo.add %x, %y : {MATRIX}\nreturn %0 : {MATRIX}", '[{"a"}, {?}]', "[{}, {?}]", results="[{?}, {?}]"
    )

    def result(graph):
        return graph.outputs[0]

    basic = blocks(text, result, AxisRef("a"), strategy="basic", op_priorities=False)
    assert basic == [(Reason.CLOSED, 1)]  # operand 1 keeps it from the result
    assert result(explain(text).naming._graph).sharding.axes[0] == (AxisRef("a"),)  # the usual strategy lets it pass


def test_conservative_propagation_leaves_out_parts_of_axes():
    text = reshape("8", "2x4", '[{"c"}]')
    found = blocks(text, lambda graph: graph.outputs[0], AxisRef("c"), conservative=True)
    assert found == [(Reason.CONSERVATIVE, 1)]


def test_a_rule_that_blocks_a_dimension_is_named():
    body = (
        "%0 = stablehlo.custom_call @foo(%x) {sdy.sharding_rule = #sdy.op_sharding_rule<([i, j])->([i, j]) "
        f"{{i=8, j=8}} blocked_propagation={{i}}>}} : ({MATRIX}) -> {MATRIX}\nreturn %0 : {MATRIX}"
    )
    found = only(explain(program(body, '[{"a"}, {?}]')).why_not("%0", "a"))
    assert found.reason == "BLOCKED_FACTOR" and found.op == "stablehlo.custom_call"


def test_an_op_without_a_rule_is_named():
    body = f"%0 = stablehlo.custom_call @foo(%x) : ({MATRIX}) -> {MATRIX}\nreturn %0 : {MATRIX}"
    found = only(explain(program(body, '[{"a"}, {?}]')).why_not("%0", "a"))
    assert found.reason == "NO_RULE" and "stablehlo.custom_call, which has no sharding rule" in found.text


def test_loops_are_passed_through_their_edges_and_need_no_rule():
    found = only(explain(program(WHILE, '[{"a"}, {}]')).why_not("%arg0", "b"))
    assert found.reason == "CLOSED" and found.op == "sdy.data_flow_edge"
    assert "loop carry 0 of stablehlo.while at -:5" in found.text


@pytest.mark.parametrize(("allowed", "value"), [("BACKWARD", "%0"), ("NONE", "%0")])
def test_a_propagation_barrier_blocks(allowed, value):
    body = f"%0 = sdy.propagation_barrier %x allowed_direction={allowed} : {MATRIX}\nreturn %0 : {MATRIX}"
    found = only(explain(program(body, '[{"a"}, {?}]')).why_not(value, "a"))
    assert found.reason == "DIRECTION" and f"the barrier allows {allowed}" in found.text


def test_meshes_that_differ_block():
    meshes = 'sdy.mesh @mesh = <["a"=2, "b"=2, "c"=4]>\nsdy.mesh @other = <["a"=4]>\n'
    body = (
        f'%0 = sdy.sharding_constraint %y <@other, [{{"a"}}, {{}}]> : {MATRIX}\n'
        f"%1 = stablehlo.add %x, %0 : {MATRIX}\nreturn %1 : {MATRIX}"
    )
    first, second = explain(meshes + program(body, '[{"a"}, {?}]', "")).why_not("%1", "a")
    assert first.reason == second.reason == "MESHES"
    assert "@other" in first.text and "sharding constraint P('a')" in first.because[0]
    assert "@mesh" in second.text and "the sharding of %arg0" in second.because[0]


def test_a_manual_axis_cannot_be_used_inside():
    found = only(explain(program(MANUAL, '[{"a"}, {?}]')).why_not("%1", "a"))
    assert found.reason == "MANUAL" and "the manual computation at -:4" in found.text


def test_export_takes_axes_off_the_boundary_that_do_not_divide_it():
    text = """func.func @main(%x: tensor<7xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"c"}]>}) -> tensor<7xf32> {
      %0 = stablehlo.negate %x : tensor<7xf32>
      return %0 : tensor<7xf32>
    }"""
    assert only(explain(text).why_not("result", "c")).reason == "EXPORT"
    assert only(explain(text).why_not("%0", "c")).reason == "PRESENT"


def test_the_nearest_value_that_has_the_axis_is_found_through_other_ops():
    text = program(
        f"%0 = stablehlo.add %x, %y : {MATRIX}\n%1 = stablehlo.negate %y : {MATRIX}\n"
        f"%2 = stablehlo.tanh %1 : {MATRIX}\n%3 = stablehlo.multiply %2, %2 : {MATRIX}\n"
        f"sdy.sharding_group %0 group_id=0 : {MATRIX}\nreturn %3 : {MATRIX}",
        '[{"a"}, {?}]',
        "[{}, {}]",
    )
    found = only(explain(text).why_not("%3", "a"))
    assert found.reason == "CLOSED" and "3 ops away, stablehlo.add at -:3" in found.text


def test_no_value_that_corresponds_has_the_axis():
    found = only(explain(negate('[{"a"}, {}]')).why_not("%0", "b"))
    assert found.reason == "NO_SOURCE"
    found = only(explain(negate('[{"a"}, {}]')).why_not("%arg0", "b"))
    assert "its dimensions are closed by the sharding of %arg0: P('a')" in str(found)


@pytest.mark.parametrize("seed", range(12))
def test_every_missing_axis_of_a_random_program_has_an_obstacle(seed):
    explanation = explain(RandomProgram(seed, FEATURES[seed % len(FEATURES)]).text)
    naming = explanation.naming
    for name in [n.name for n in (*naming._boundary, *naming._exported)]:
        for axis in explanation._sizes:
            answer = explanation.why_not(name, axis)
            assert list(answer) and str(answer)
