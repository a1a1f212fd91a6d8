"""Propagation edges and sharding origins: those that jaxlib's passes write, and attributes that jaxlib parses."""

from __future__ import annotations

import re

import jax
import pytest
from debug_info_oracle import dump, oracle_dumps
from jax.extend.mlir import ir
from random_programs import RandomProgram
from sharding_dump import parse

from sdy_jax.shardy.passes.pipelines import run_pipeline

EDGES, ORIGINS = "debug-propagation-edge-sharding=true", "debug-sharding-origins=true"
BOTH = f"{EDGES} {ORIGINS}"
SINK = "func.func(sdy-sink-data-flow-edges{sink-debug-sharding-origins=true sink-debug-propagation-edge-sharding=true})"
CASES = [
    ("sdy-basic-propagate{%s}", ()),
    ("sdy-aggressive-propagate{%s}", ()),
    ("sdy-user-priority-propagate{%s}", ("priority",)),
    ("sdy-apply-sharding-constraints{%s},sdy-op-priority-propagate{%s}", ()),
    ("sdy-add-data-flow-edges,sdy-op-priority-propagate{%s}", ("while", "barrier")),
    ("sdy-manual-axes-cleanup,sdy-add-data-flow-edges,sdy-op-priority-propagate{%s}", ("manual", "barrier")),
    ("sdy-sharding-group-import,sdy-op-priority-propagate{%s}", ("group",)),
    (
        "sdy-manual-axes-cleanup,sdy-add-data-flow-edges,sdy-apply-sharding-constraints{%s},"
        f"sdy-sharding-group-import,sdy-user-priority-propagate{{%s}},{SINK}",
        ("manual", "barrier", "group", "while", "priority"),
    ),
]
IS_NEW = jax.__version_info__ >= (0, 12)


def ours(text, passes):
    module = parse(text)
    with module.context, ir.Location.unknown(module.context):
        run_pipeline(module.operation, passes.replace("priority-propagate{", "priority-propagate{compat=shardy "))
        module.operation.verify()
        ir.Module.parse(str(module))
    return dump(module)


T41 = """
func.func @main(%x: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"a"}, {?}]>}, %y: tensor<8x8xf32>)
    -> (tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{?}, {"c"}]>}) {
  %0 = stablehlo.add %x, %y : tensor<8x8xf32>
  %1 = sdy.sharding_constraint %0 <@mesh, [{"a", "b", ?}, {?}]> : tensor<8x8xf32>
  return %1 : tensor<8x8xf32>
}"""


def test_the_program_of_the_specification():
    text = ours(T41, f"sdy-user-priority-propagate{{{BOTH}}}")
    expected = [
        '  arg_attrs 0 {"sdy.sharding_origins": {a = "self", c = "output: 0"}}',
        '  arg_attrs 1 {"sdy.sharding_origins": {a = "input: 0", b = "constraint_0", c = "output: 0"}}',
        '  res_attrs 0 {"sdy.propagation_edges": #sdy.propagation_edges<[{step-0 = [{"a" = operand-0 -> [result-0]}, '
        '{"b" = operand-0 -> [result-0]}, {"c" = result-0 -> [operand-0]}]}]>, '
        '"sdy.sharding_origins": {a = "constraint_0", b = "constraint_0", c = "self"}}',
        'stablehlo.add {"sdy.propagation_edges": #sdy.propagation_edges<[{step-1 = [{"a" = operand-0 -> [operand-1, '
        'result-0]}]}, {step-3 = [{"b" = result-0 -> [operand-1]}, {"c" = result-0 -> [operand-0, operand-1]}]}]>, '
        '"sdy.sharding_origins": [{a = "input: 0", b = "constraint_0", c = "output: 0"}]}',
        'sdy.sharding_constraint {"sdy.propagation_edges": #sdy.propagation_edges<[{step-2 = [{"b" = result-0 -> '
        '[operand-0]}, {"c" = result-0 -> [operand-0]}]}]>, "sdy.sharding_origins": {a = "self", b = "self", '
        'c = "output: 0"}, "sdy.sharding_origin_name": "constraint_0"}',
    ]
    found = re.sub(r"""'(sdy\.\w+)': '((?:[^'\\]|\\.)*)'""", r'"\1": \2', text).splitlines()
    for line in expected:
        assert line in found


MANUAL = """
func.func @main(%x: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"a"}, {"b", ?}]>}) -> (tensor<8x8xf32>) {
  %0 = sdy.manual_computation(%x) in_shardings=[<@mesh, [{"a"}, {?}]>] out_shardings=[<@mesh, [{"a", ?}, {?}]>]
      manual_axes={"a"} (%p: tensor<4x8xf32>) {
    %1 = stablehlo.negate %p : tensor<4x8xf32>
    sdy.return %1 : tensor<4x8xf32>
  } : (tensor<8x8xf32>) -> tensor<8x8xf32>
  return %0 : tensor<8x8xf32>
}"""


def test_sinking_moves_them_to_the_data_flow_op():
    text = ours(MANUAL, f"sdy-add-data-flow-edges,sdy-user-priority-propagate{{{BOTH}}},{SINK}")
    (manual,) = [line for line in text.splitlines() if line.startswith("sdy.manual_computation")]
    step = '[#sdy.propagation_edges<[{step-%d = [{"b" = operand-0 -> [result-0]}]}]>]'
    for name, value in {
        "sdy.block_arg_propagation_edges": step % 1,
        "sdy.result_propagation_edges": step % 3,
        "sdy.block_arg_sharding_origins": '[{a = "self", b = "self"}]',
        "sdy.result_sharding_origins": '[{a = "self", b = "mc_0_input: 0"}]',
        "sdy.sharding_origin_name": '"mc_0"',
    }.items():
        assert f"'{name}': '{value}'" in manual


def test_only_what_is_asked_for_is_written():
    edges, origins = (ours(T41, f"sdy-user-priority-propagate{{{option}}}") for option in (EDGES, ORIGINS))
    assert "propagation_edges" in edges and "origin" not in edges
    assert "origin" in origins and "propagation_edges" not in origins
    assert "sdy.prop" not in ours(T41, "sdy-aggressive-propagate")


def test_steps_are_numbered_on_through_several_passes():
    text = T41.replace('[{"a", "b", ?}, {?}]', '[{"a"}, {}]')
    found = ours(text, f"sdy-apply-sharding-constraints{{{EDGES}}},sdy-aggressive-propagate{{{EDGES}}}")
    (constraint,) = [line for line in found.splitlines() if line.startswith("sdy.sharding_constraint")]
    assert '{step-0 = [{"a" = result-0 -> [operand-0]}]}' in constraint
    later = [int(n) for line in found.splitlines() if line != constraint for n in re.findall(r"step-(\d+)", line)]
    assert set(later) == set(range(1, max(later) + 1))


def test_an_edge_between_other_sources_is_left_out_where_the_dialect_cannot_say_it():
    text = """
    func.func @main(
        %x: tensor<8xf32>, %y: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"a"}]>}, %i: tensor<i32>
    ) -> tensor<8xf32> {
      %0 = "stablehlo.case"(%i) ({ stablehlo.return %x : tensor<8xf32> }, { stablehlo.return %y : tensor<8xf32> })
        : (tensor<i32>) -> tensor<8xf32>
      return %0 : tensor<8xf32>
    }"""
    found = ours(text, f"sdy-add-data-flow-edges,sdy-user-priority-propagate{{{BOTH}}}")
    (edge,) = [line for line in found.splitlines() if line.startswith("sdy.data_flow_edge")]
    assert ("operand-1" in edge) is IS_NEW and "sharding_origins': '{a = \"input: 1\"}" in edge


TWICE = """
func.func @main(%x: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"a"}]>})
    -> (tensor<8xf32>, tensor<8xf32>, tensor<8xf32>) {
  %0 = stablehlo.negate %x : tensor<8xf32>
  return %0, %x, %0 : tensor<8xf32>, tensor<8xf32>, tensor<8xf32>
}"""


@pytest.mark.parametrize(
    ("given", "wanted", "sharding", "edges"),
    [
        ("2x2", "4", '[{"c":(1)2}, {"c":(2)2}]', ['"c"']),
        ("4x2", "8", '[{"a", "c":(1)2}, {"c":(2)2}]', ['"a"', '"c"']),
        ("2x8", "16", '[{"c":(1)2}, {"c":(2)2, "a"}]', ['"a"', '"c":(1)2', '"c":(2)2']),
        ("2x2x2", "8", '[{"d":(1)2}, {"d":(2)2}, {"d":(4)2}]', ['"d":(1)4', '"d":(2)4']),
    ],
)
def test_parts_of_an_axis_that_come_together_are_recorded_as_the_oracle_does(given, wanted, sharding, edges):
    text = f"""sdy.mesh @mesh = <["a"=2, "c"=4, "d"=8]>
    func.func @main(%x: tensor<{given}xf32> {{sdy.sharding = #sdy.sharding<@mesh, {sharding}>}})
        -> tensor<{wanted}xf32> {{
      %0 = stablehlo.reshape %x : (tensor<{given}xf32>) -> tensor<{wanted}xf32>
      return %0 : tensor<{wanted}xf32>
    }}"""
    (line,) = [x for x in ours(text, f"sdy-aggressive-propagate{{{EDGES}}}").splitlines() if "reshape" in x]
    assert re.findall(r"{([^{}=]*) = operand-0", line) == edges


def test_the_origins_of_a_value_that_is_returned_twice_are_written_once():
    lines = ours(TWICE, f"sdy-aggressive-propagate{{{ORIGINS}}}").splitlines()
    assert ["sharding_origins" in line for line in lines if "res_attrs" in line] == [False, True, True]


@pytest.mark.parametrize("text", [T41, MANUAL, TWICE], ids=["T41", "manual", "twice"])
def test_these_programs_are_explained_as_the_oracle_explains_them(text):
    cases = [(text, f"sdy-add-data-flow-edges,sdy-user-priority-propagate{{{option}}}") for option in (EDGES, ORIGINS)]
    assert oracle_dumps(cases) == [ours(*case) for case in cases]


def test_removal_leaves_no_trace():
    debug = f"sdy-add-data-flow-edges,sdy-apply-sharding-constraints{{{BOTH}}},sdy-user-priority-propagate{{{BOTH}}}"
    for text in (T41, MANUAL):
        text = ours(text, f"{debug},{SINK},sdy-remove-propagation-debug-info")
        left = set(re.findall(r"sdy\.\w*(?:origins|edges)", text))
        assert not left


UNLIKE = {
    7: "jaxlib names no origin for an axis that two sharding groups with a common member gave; we name the group's"
}
"""Programs that we explain otherwise than the oracle, and how."""


def compare(seed):
    """Each option alone, and both; where jaxlib's own pass fails or crashes there is nothing to compare with."""
    passes, features = CASES[seed % len(CASES)]
    text = RandomProgram(seed, features).text
    return [(text, passes.replace("%s", options)) for options in (EDGES, ORIGINS, BOTH)]


def agree(found, expected):
    """Whether the oracle says what we say. For an axis of unknown origin (`": 0"`) it says anything; the records of no
    steps that jaxlib 0.12 prints, it does not parse."""
    expected = re.sub(r"(?<=[\[ ])#sdy.propagation_edges<\[\]>(, )?", "", expected).replace(">, ]", ">]")
    return re.fullmatch(re.escape(found).replace(re.escape('": 0"'), '"[^"]*"'), expected) is not None


def check(seeds):
    cases = [case for seed in seeds for case in compare(seed)]
    compared = 0
    for (text, passes), expected in zip(cases, oracle_dumps(cases), strict=True):
        if expected is None:
            continue
        found = ours(text, passes)
        for _ in range(4):  # for axes without an origin jaxlib's answer, or crash, depends on the order of a hash table
            if not agree(found, expected) and "sharding_origins" in found:
                expected = oracle_dumps([(text, passes)])[0] or expected
        assert agree(found, expected), f"{passes}\n{text}\n{expected}\n{found}"
        compared += 1
    return compared


def fuzz(seed):
    return {"oracle": check([seed])}


@pytest.mark.more("random programs beside those that are listed")
def test_random_programs_are_explained_as_the_oracle_explains_them():
    assert check(set(range(13)) - UNLIKE.keys()) > 18


@pytest.mark.slow
def test_many_random_programs_are_explained_as_the_oracle_explains_them():
    assert check(range(1000, 1300)) > 600
