"""Reading MLIR text: positions, excerpts, and the mistakes that jaxlib would die of."""

from __future__ import annotations

import re

import pytest
from dialect_breaks import EDGES, MANUAL
from jax.interpreters import mlir

from sdy_jax.cli.opt import optimize
from sdy_jax.ir.text.cursor import Cursor
from sdy_jax.ir.text.modules import Position, SourceError, _blank_locations, fatal_mistakes, parse_module, split_modules
from sdy_jax.ir.verification import verify_module


@pytest.fixture(scope="module")
def context():
    return mlir.make_ir_context()


def error(text, context):
    with pytest.raises(SourceError) as caught:
        parse_module(text, context, "m.mlir")
    return caught.value


def test_an_error_has_its_parts(context):
    found = error("func.func @f() {\n\t%0 = stablehlo.tanh %x : tensor<f32>\n}", context)
    assert (found.file, found.position) == ("m.mlir", Position(2, 22))
    assert found.message == "use of undeclared SSA value name"
    place, line, mark = str(found).splitlines()
    assert place == "m.mlir:2:22: error: use of undeclared SSA value name"
    assert (line, line[mark.index("^") :]) == ("   %0 = stablehlo.tanh %x : tensor<f32>", "%x : tensor<f32>")


def test_columns_count_bytes_but_the_mark_counts_characters(context):
    found = error('func.func @"éé"() { %0 = stablehlo.tanh %x : tensor<f32> }', context)
    _, line, mark = str(found).splitlines()
    assert line[mark.index("^") :].startswith("%x")
    assert found.position == Position(1, line.index("%x") - 2 + 1 + 2)


def test_a_missing_token_is_said_with_what_is_there(context):
    argument = "%x: tensor<f32> {sdy.sharding = #sdy.sharding<@m, [[]]>}"
    found = error(f"sdy.mesh @m = <[]>\nfunc.func @f({argument}) {{ return }}", context)
    assert found.message == "expected '{', got `[`"


def test_modules_split_at_lines_of_their_own():
    text = "a\n// -----\nb // -----\n  // -----\t\n// ----- c\n"
    assert [part.strip() for part in split_modules(text)] == ["a", "b // -----", "// ----- c"]
    assert [part.splitlines().index(part.strip()) for part in split_modules(text)] == [0, 2, 4]
    assert list(split_modules("")) == [""]
    assert [part.strip() for part in split_modules("// -----\n// -----")] == ["", "", ""]


def test_a_nul_character_is_not_taken_for_the_end(context):
    found = error("func.func @f() {\n  return\n}\n  \0 x", context)
    assert (found.position, found.message) == (Position(4, 3), "a NUL character")


FATAL = [
    EDGES.replace("-> [operand-1]", "-> [operand--1]"),
    EDGES.replace('<[<@m, [{"a"}, {}]>]>', '<[<@none, [{"a"}, {}]>]>'),
    MANUAL.replace('in_shardings=[<@m, [{"a"}, {}]>]', "in_shardings=[<@max, []>]"),
    MANUAL.replace('out_shardings=[<@m, [{"a"}, {}]>]', "out_shardings=[<mesh<[], device_ids=[1]>, []>]"),
    """sdy.mesh @"a b" = < [ ] , device_ids=[0]>
    func.func @f(%x: tensor<8xf32>) {
      %0 = "sdy.manual_computation"(%x) <{in_shardings = #sdy.sharding_per_value<[<@"a b", []>]>,
        manual_axes = #sdy<manual_axes{}>, out_shardings = #sdy.sharding_per_value<[<@"a b", []>]>}> ({
        ^bb0(%p: tensor<8xf32>): "sdy.return"(%p) : (tensor<8xf32>) -> () }) : (tensor<8xf32>) -> tensor<8xf32>
      return }""",
]


@pytest.mark.parametrize("text", FATAL)
def test_what_jaxlib_dies_of_is_an_error(text, context):
    found = error(text, context)
    assert found.position is not None
    assert found.message.startswith(("[D1]", "[S2]", "[O2a]"))


def test_brackets_in_comments_and_strings_close_no_location():
    text = 'return loc(fused["a)", // )\n "b"]) loc("c")'
    assert _blank_locations(text).split() == ["return"]


def test_a_comparison_is_no_bracket():
    text = "{a = affine_set<(d0) : (d0 - 8 <= 0, d0 >= 0)>, b = () -> ()} x"
    assert Cursor(text, 0).bracket().text == text[1:-3]


def nested(depth):
    """Modules with so many brackets, one in another."""
    begin = "func.func private @f() attributes {a = "
    return [
        f"{begin}{'[' * depth}{']' * depth}}}",
        f"{begin}affine_map<() -> ({'(' * depth}0{')' * depth})>}}",
        f"{begin}{'() -> (' * depth}{')' * depth}}}",
        f"func.func private @f({'tuple<' * depth}i32{'>' * depth})",
        f"func.func private @f() loc({depth * 'callsite(unknown at '}unknown{')' * depth})",
        "module {" * depth + "}" * depth,
        f"func.func @f(%c: i1) {{ {'scf.if %c {' * depth}{'}' * depth} return }}",
    ]


@pytest.mark.parametrize("text", nested(20000), ids=lambda text: text[:45][-8:])
def test_what_overflows_a_stack_is_an_error(text, context):
    found = error(text, context)
    assert found.message.startswith("more than 256 brackets are open here")
    assert text[found.position.column - 1] in "([{<"
    assert found.position.line == 1


@pytest.mark.parametrize("text", nested(240), ids=lambda text: text[:45][-8:])
def test_what_is_nested_less_deeply_is_read(text, context):
    verify_module(parse_module(text, context).operation)


def test_brackets_in_strings_and_arrows_do_not_count(context):
    many = "(" * 1000
    text = f'// {many}\nfunc.func private @f() attributes {{a = "{many}", b = [{"() -> (), " * 999}i8]}}'
    assert list(fatal_mistakes(text)) == []
    parse_module(text, context)


ABOVE = """sdy.mesh @mesh = <["a"=2]>
func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.add %x, %seen : tensor<4xf32>
  %1:2 = sdy.named_computation<"g">(%x) (%y: tensor<4xf32>) {
    %seen, %other = "test.two"(%y) : (tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>)
  ^bb0(%z: tensor<4xf32>):
"""


@pytest.mark.parametrize(
    "text",
    [ABOVE, ABOVE.replace("%seen, %other", "%other, %seen"), ABOVE.replace("%seen, %other", "%seen:2")],
)
def test_uses_above_the_region_that_makes_a_value_are_errors(text, context):
    """jaxlib's parser frees such a region before the uses, and corrupts the process's memory."""
    found = error(text, context)
    assert found.message == "%seen is used here, and made inside of a region below, which alone may use it"
    assert (found.position.line, found.position.column) == (3, 26)


def test_values_of_neighbouring_regions_may_have_one_name(context):
    region = """sdy.named_computation<"g">(%x) (%y: tensor<4xf32>) {
      %z:1 = "stablehlo.negate"(%y) : (tensor<4xf32>) -> tensor<4xf32>
      %v = stablehlo.negate %z#0 : tensor<4xf32>
      sdy.return %v : tensor<4xf32>
    } : (tensor<4xf32>) -> tensor<4xf32>"""
    text = f"""func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {{
    %0 = {region}
    %1 = {region}
    return %1 : tensor<4xf32>
    }}"""
    assert list(fatal_mistakes(text)) == []
    parse_module(text, context)


@pytest.mark.parametrize(
    "text",
    [
        EDGES,
        EDGES.replace("  return", '  // operand--1 <@none, []>\n  return {x = "operand--1 <@none, []>"}'),
        MANUAL,
        MANUAL.replace("@m,", "@maximal,").replace("@m ", "@maximal "),
        MANUAL.replace("  return", "  %1 = sdy.sharding_constraint %0 <@max, []> : tensor<8x8xf32>\n  return"),
    ],
)
def test_what_only_looks_fatal_is_accepted(text, context):
    assert list(fatal_mistakes(text)) == []
    parse_module(text, context)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("func.func @f(%given: T) {\n  %g = mesh.get_sharding %given : T -> S", "%given"),
        ("func.func @f(%e: i1,\n   %x.y-z: T) {\n  %g = mesh.get_sharding %x.y-z : T -> S", "%x.y-z"),
        (
            "func.func @f() {\n  %made = stablehlo.constant dense<1.0> : T\n  %g = mesh.get_sharding %made : T -> S",
            "%made",
        ),
        (
            "func.func @f(%p: T) {\n"
            '  %a, %b:2 =\n    "stablehlo.custom_call"(%p) {call_target_name = "é"} : (T) -> (T, T, T)\n'
            "  %g = mesh.get_sharding %b#1 : T -> S",
            "%b#1",
        ),
    ],
)
def test_messages_call_values_as_the_text_does(text, name):
    text = re.sub(r"\bT\b", "tensor<4xf32>", re.sub(r"\bS\b", "!mesh.sharding", text))
    with pytest.raises(SourceError) as caught:
        optimize(f"mesh.mesh @m(shape = 2)\n{text}\n  return\n}}", "", "é b.mlir")
    found = str(caught.value).split("\n")[0]
    message = f"mesh.get_sharding: the sharding of {name} is not known here; annotate it with mesh.shard"
    assert re.fullmatch(rf"é b.mlir:\d:8: error: {re.escape(message)}", found)
