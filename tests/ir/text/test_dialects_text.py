"""The text of the mesh and shard dialects: both forms of every op, in any module, there and back, with its places."""

from __future__ import annotations

import random
import re

import pytest
from dialect_texts import FORMS, GAP, MIXED, REFERENCE, function, in_shard
from jax.extend.mlir import ir
from jax.interpreters import mlir

from sdy_jax.cli.main import main
from sdy_jax.cli.opt import optimize
from sdy_jax.ir.operations import pre_order
from sdy_jax.ir.text.assembly import canonical, pretty_form, read_pretty
from sdy_jax.ir.text.cursor import Cursor, Position, TextSpan
from sdy_jax.ir.text.mesh_dialects import KINDS, OPS, REDUCTIONS, REQUIRED, Declaration
from sdy_jax.ir.text.modules import SourceError, parse_module
from sdy_jax.ir.text.statement import Statement, generic_form, make_statement, read_generic
from sdy_jax.ir.text.translation import module_text, rewrite
from sdy_jax.ir.verification import verify_module
from sdy_jax.mesh_dialects.view import dialect_ops

BOTH = [*FORMS, *((in_shard(a), in_shard(b)) for a, b in FORMS if not re.search("shard_shape|shard\\.|partial_", b))]
BY_FORM = pytest.mark.parametrize(("pretty", "generic"), BOTH, ids=[pretty[:60] for pretty, _ in BOTH])


def parsed(text: str) -> ir.Module:
    return parse_module(text, mlir.make_ir_context(), "m.mlir")


def error(text: str) -> SourceError:
    with pytest.raises(SourceError) as caught:
        parsed(text)
    return caught.value


def statement_of(text: str) -> tuple[str, Statement]:
    """A line's names of results, and the statement after them."""
    match = re.match(r'((?:%\d+(?::\d)? = )?)("?)((?:mesh|shard)\.\w+)"?', text)
    assert match is not None
    read = read_generic if match[2] else read_pretty
    return match[1], read(OPS[match[3]], Cursor(text, match.end()))


def with_properties(statement: Statement) -> str:
    return "".join(piece.text for piece in generic_form(canonical(statement), properties=True))


# Both forms of one op.


def test_every_op_of_both_dialects_has_an_example():
    assert {statement_of(pretty)[1].op.full_name for pretty, _ in BOTH} == set(OPS)


@BY_FORM
def test_each_form_becomes_the_other(pretty, generic):
    results, statement = statement_of(pretty)
    assert results + with_properties(statement) == generic
    results, statement = statement_of(generic)
    assert f"{results}{pretty_form(statement)}" == pretty


@BY_FORM
def test_any_space_may_be_a_comment_and_a_new_line(pretty, generic):
    results, statement = statement_of(pretty)
    apart = results + pretty.removeprefix(results).replace(" ", " // mesh.mesh @x\n\t")
    if '"' not in pretty:
        assert re.sub(r" // mesh.mesh @x\n\t", " ", with_properties(statement_of(apart)[1])) == with_properties(
            statement
        )


@BY_FORM
def test_attributes_may_stand_in_either_braces_or_in_both(pretty, generic):
    _, statement = statement_of(generic)
    in_one = generic.replace("}> {", ", ").replace("<{", "{").replace("}>", "}")
    assert statement_of(in_one)[1].same_as(statement)
    if "}> {" not in generic and ", mesh = " in generic:
        in_both = generic.replace(", mesh = ", "}> {mesh = ").replace("}> :", "} :")
        assert statement_of(in_both)[1].same_as(statement)


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("all_reduce %0 on @m reduction = <max> : T -> T", "all_reduce %0 on @m reduction = max : T -> T"),
        ("all_reduce %0 on @m mesh_axes = [] reduction = sum : T -> T", "all_reduce %0 on @m : T -> T"),
        ("scatter %0 on @m scatter_dim = 0 root = [] : (T) -> T",
         "scatter %0 on @m scatter_axis = 0 root = [] : (T) -> T"),
        ("sharding @m split_axes = [[0]] partial = sum[1] : S", "sharding @m split_axes = [[0]] partial = sum [1] : S"),
        ("sharding @m split_axes = [[0]] halo_sizes = [] : S", "sharding @m split_axes = [[0]] : S"),
    ],
)  # fmt: skip
def test_other_spellings_are_read_and_never_printed(text, printed):
    full, expected = (
        "mesh." + form.replace("T", "tensor<4xf32>").replace(": S", ": !mesh.sharding") for form in (text, printed)
    )
    assert pretty_form(statement_of(full)[1]) == expected
    assert pretty_form(statement_of(in_shard(full))[1]) == in_shard(expected) or "partial" in text


@pytest.mark.parametrize("spelling", ["#mesh<partial max>", "#mesh.partial<max>", "#mesh<partial<max>>"])
def test_an_attribute_of_the_dialect_has_several_generic_spellings(spelling):
    _, statement = statement_of(f'"mesh.all_reduce"(%0) {{mesh = @m, reduction = {spelling}}} : (f32) -> f32')
    assert pretty_form(statement) == "mesh.all_reduce %0 on @m reduction = max : f32 -> f32"


@pytest.mark.parametrize(
    "generic",
    [
        '"shard.sharding"() <{grid = @m, operandSegmentSizes = array<i32: 0, 0>, partial_axes = array<i16: 1>, '
        "partial_type = #shard<partial max>, split_axes = #shard<axisarray[[0]]>}> : () -> !shard.sharding",
        '"mesh.mesh"() <{shape = array<i64: -2>, sym_name = "m"}> : () -> ()',
        '"mesh.all_reduce"(%0) <{mesh = @m::@n}> : (f32) -> f32',
        '"mesh.all_reduce"(%0) <{mesh = @m, mesh_axes = [0]}> : (f32) -> f32',
        '"mesh.all_reduce"(%0, %0) <{mesh = @m}> : (f32, f32) -> f32',
        '"mesh.all_reduce"() <{mesh = @m}> : () -> f32',
        '"mesh.process_linear_index"() : () -> index',
        '"mesh.sharding"() <{mesh = @m, partial_axes = array<i16: 1>, split_axes = #mesh<axisarray[]>}> : () -> index',
    ],
)
def test_what_the_pretty_form_cannot_say_stays_generic(generic):
    _, statement = statement_of(generic)
    assert pretty_form(statement) is None
    assert with_properties(statement) == generic


# Random ops, made from the table.

_TENSORS = ("tensor<4x?xf32>", "tensor<f32>", "memref<2xi8, strided<[1]>>", "tensor<8xcomplex<f64>>")
_EXTRA = ("unit", "1 : i8", '"mesh.mesh @m"', "[#mesh<partial max>, {c = @d}]")


def random_value(rng: random.Random, kind: str) -> object:
    numbers = tuple(rng.choice([0, 1, 2, 7, -1, 300]) for _ in range(rng.randrange(4)))
    return {
        "axes": numbers,
        "indices": tuple(rng.choice([n, int(GAP)]) for n in numbers),
        "dimensions": tuple(rng.choice([0, 1, 12, int(GAP)]) for _ in numbers),
        "axis lists": tuple(numbers[:n] for n in range(rng.randrange(4))),
        "reduction": rng.choice(REDUCTIONS),
        "unit": True,
        "symbol": rng.choice(["m", "a b", "x.y$1"]),
        "name": rng.choice(["m", "0"]),
    }.get(kind, rng.choice([0, 3, -2, 2**40]))


def random_attributes(rng: random.Random, op: Declaration) -> dict[str, object]:
    """Values by name; some of those left out that may be, and both or none of the two about partial values."""
    given = {a.name: random_value(rng, a.kind) for a in op.attributes}
    left_out = {a.name for a in op.attributes if a.default is not REQUIRED and rng.random() < 0.5}
    if op.unprinted or not given.get("partial_axes") or left_out & {"partial_type", "partial_axes"}:
        left_out |= {"partial_type", "partial_axes"}
    return {name: value for name, value in given.items() if name not in left_out}


def random_statement(rng: random.Random, op: Declaration) -> tuple[Statement, dict[str, str]]:
    """A statement of an op, and the types of the values in it by name."""
    values = random_attributes(rng, op)
    counts = {a.dynamic: values[a.name].count(int(GAP)) for a in op.attributes if a.dynamic and a.name in values}
    result = {"tensor": rng.choice(_TENSORS), "index": "index"}.get(op.result, f"!{op.dialect}.sharding")
    groups, types, named = {}, [], {}
    for operand in op.operands:
        is_written = "functional-type" in op.format or f"type(${operand.name})" in op.format
        implied = {"result": rng.choice(_TENSORS) if is_written else result, "sharding": f"!{op.dialect}.sharding"}
        type_ = implied.get(operand.type, operand.type)
        several = rng.randrange(3) if operand.name == "device" else counts.get(operand.name, 0)
        count = several if operand.variadic else 1
        groups[operand.name] = [TextSpan(f"%v{len(named) + n}", 0) for n in range(count)]
        named.update({value.text: type_ for value in groups[operand.name]})
        types += [TextSpan(type_, 0)] * count
    kinds = {attribute.name: KINDS[attribute.kind] for attribute in op.attributes}
    attributes = {name: TextSpan(kinds[name].generic(value, op.dialect), 0) for name, value in values.items()}
    if rng.random() < 0.3:
        attributes["a.b"] = TextSpan(rng.choice(_EXTRA), 0)
    results = (TextSpan(result, 0),) * (rng.randrange(1, 3) if op.results is None else op.results)
    return canonical(make_statement(op, groups, attributes, tuple(types), results)), named


@pytest.mark.parametrize("name", OPS)
def test_random_ops_go_through_jaxlib_and_back(name):
    rng, context = random.Random(name), mlir.make_ir_context()
    for _ in range(30):
        statement, named = random_statement(rng, OPS[name])
        pretty, generic = pretty_form(statement), with_properties(statement)
        assert pretty is not None
        arguments = ", ".join(f"{value}: {type_}" for value, type_ in named.items())
        count = len(statement.result_types)
        results = f"%r:{count} = " if count > 1 else "%r = " if count else ""
        texts = [f"func.func @f({arguments}) {{\n {results}{form}\n return\n}}" for form in (pretty, generic)]
        modules = [parse_module(text, context) for text in texts]
        printed = [module_text(module) for module in modules]
        assert printed[0] == printed[1]
        assert f" {pretty.replace('%v', '%arg')}\n" in printed[0]
        assert module_text(parse_module(printed[0], context)) == printed[0]
        assert f" {generic.replace('%v', '%arg')}\n" in module_text(modules[0], generic=True)


# Whole modules.


@pytest.mark.parametrize("text", [MIXED, in_shard(MIXED)], ids=["mesh", "shard"])
def test_a_mixed_module_goes_round(text):
    module = parsed(text)
    verify_module(module.operation)
    pretty, generic = module_text(module), module_text(module, generic=True)
    assert not re.search(r'"mesh\.\w+"\(', pretty)
    assert module_text(parsed(pretty)) == pretty
    assert module_text(parsed(generic)) == pretty
    assert module_text(parsed(generic), generic=True) == generic
    context = mlir.make_ir_context()
    context.allow_unregistered_dialects = True
    assert ir.Module.parse(generic, context).operation.verify()


def test_locations_and_their_aliases_survive():
    module = parsed(MIXED)
    text = module_text(module, enable_debug_info=True)
    gathered = "mesh.all_gather %arg0 on @ring mesh_axes = [0] gather_axis = 1 : tensor<4x3xf32> -> tensor<4x6xf32>"
    assert f"{gathered} loc(#loc" in text
    again = parsed(text)
    assert module_text(again, enable_debug_info=True) == text
    places = [[str(op.operation.location) for op in dialect_ops(m.operation)] for m in (module, again)]
    assert places[0] == places[1]


def test_without_ops_of_the_dialects_the_text_is_jaxlibs():
    text = 'module {\n  func.func private @mesh.x() attributes {a = "mesh.mesh @m(shape = 2)", mesh.foo}\n}\n'
    assert module_text(parsed(text)) == text == str(parsed(text))


@pytest.mark.parametrize("name", REFERENCE)
def test_examples_of_the_reference_go_round(name):
    module = parsed(REFERENCE[name])
    verify_module(module.operation)
    text = module_text(module)
    assert module_text(parsed(text)) == text


def test_lines_stay_the_same():
    lines, parsed_lines = (text.split("\n") for text in (MIXED, rewrite(MIXED).text))
    assert len(lines) == len(parsed_lines)
    for line, parsed_line in zip(lines, parsed_lines, strict=True):
        if "mesh." not in line.replace("sdy.mesh", "") and not line.startswith("      "):
            assert line == parsed_line


def test_an_op_that_has_no_pretty_form_stays_generic_in_its_module():
    text = function("%s = shard.sharding @g split_axes = [[0]] partial = max [1] : !shard.sharding")
    printed = module_text(parsed(f"shard.grid @g(shape = 2x4)\n{text}"))
    assert '"shard.sharding"() {grid = @g, operandSegmentSizes' in printed
    assert "shard.grid @g(shape = 2x4)" in printed
    assert module_text(parsed(printed)) == printed


def test_names_of_ops_elsewhere_are_no_ops():
    text = function(
        """%0 = stablehlo.constant {a = "mesh.mesh @z(shape = 2)", b = "mesh.mesh", mesh.mesh = 1, shard.x}
          dense<1> : tensor<i32>
        // mesh.mesh @comment
        %1 = stablehlo.negate %0 : tensor<i32> loc("mesh.mesh"("shard.grid":1:2))
        %2 = stablehlo.custom_call @mesh.mesh(%1) : (tensor<i32>) -> tensor<i32>"""
    )
    assert [op.name for op in dialect_ops(parsed(text).operation)] == ["mesh"]


def test_types_of_the_dialects_alone_are_known():
    text = "module {\n  func.func private @f(!mesh.sharding) -> !shard.sharding\n}\n"
    assert module_text(parsed(text)) == text


def test_a_mesh_may_have_the_name_of_an_sdy_mesh():
    text = 'module {\n  sdy.mesh @m = <["a"=2]>\n  mesh.mesh @m(shape = 2)\n}\n'
    assert module_text(parsed(text)) == text


def test_opt_prints_either_form(tmp_path, capsys):
    (tmp_path / "m.mlir").write_text(MIXED)
    assert main(["opt", str(tmp_path / "m.mlir")]) == 0
    pretty = capsys.readouterr().out
    assert main(["opt", "--generic", str(tmp_path / "m.mlir")]) == 0
    generic = capsys.readouterr().out
    assert '"mesh.mesh"() <{shape = array<i64: 2, 4>, sym_name = "ring"}> : () -> ()' in generic
    (tmp_path / "g.mlir").write_text(generic)
    assert main(["opt", str(tmp_path / "g.mlir")]) == 0
    assert capsys.readouterr().out == pretty


@pytest.mark.parametrize("number", ["1" * 5000, "123456789012345678901234567890"])
@pytest.mark.parametrize(
    "statement",
    [
        "mesh.mesh @z(shape = 2xN)",
        "%1 = mesh.all_reduce %0 on @m mesh_axes = [N] : tensor<4xf32> -> tensor<4xf32>",
        "%1 = mesh.sharding @m split_axes = [[N]] : !mesh.sharding",
        '%1 = "mesh.all_reduce"(%0) {mesh = @m, mesh_axes = array<i16: N>} : (tensor<4xf32>) -> tensor<4xf32>',
    ],
)
def test_numbers_may_be_too_long(statement, number):
    assert error(function(statement, "%0: tensor<4xf32>").replace("N", number)).position is not None


# Places.


def test_every_op_knows_its_place():
    text = """
mesh.mesh @pod(shape = 2x?x4) mesh.mesh @ring(shape = 2x4)
func.func @f(%x: tensor<4x3xf32>) -> tensor<4x6xf32> {
  %1 = mesh.all_gather %x on @ring   // é
     mesh_axes = [0] gather_axis = 1 {a.b = "é"}
     : tensor<4x3xf32> -> tensor<4x6xf32> %2 = stablehlo.negate %1 {a = "é"} : tensor<4x6xf32>
  %3 = mesh.all_reduce %2 on @ring : tensor<4x6xf32> -> tensor<4x6xf32> return %3 : tensor<4x6xf32>
}"""
    lines = text.encode().split(b"\n")
    for op in pre_order(parsed(text).operation)[1:]:
        match = re.fullmatch(r'loc\("m.mlir":(\d+):(\d+)\)', str(op.location))
        assert match is not None
        found = lines[int(match[1]) - 1][int(match[2]) - 1 :].decode()
        assert found.startswith(op.name.replace("func.return", "return"))


@pytest.mark.parametrize(
    ("statement", "place", "message"),
    [
        ("%1 = mesh.all_gather %z on @m\n gather_axis = 0 : T -> T", (4, 24), "use of undeclared SSA value name"),
        ("%1 = mesh.all_gather %0 on @m\n gather_axi = 0 : T -> T", (5, 2), "mesh.all_gather: expected `gather_axis`,"),
        ("%1 = mesh.all_gather %0 on @m\n gather_axis = [0] : T -> T", (5, 16), "mesh.all_gather: expected an index, "),
        ("%1 = mesh.all_gather %0 on @m\n gather_axis = 0 : T -> U", (5, 37), "mesh.all_gather: expected a type, got"),
        ("%1 = mesh.all_reduce %0\n on @m mesh_axes = [0, 99999] : T -> T", (5, 20), "integer constant out of range"),
        ("%1 = foo.bar %0 : T", (4, 8), "foo.bar: unknown dialect `foo`; to fix: lower it to StableHLO"),
        ("mesh.meshes @m", (4, 3), "mesh.meshes: the mesh dialect has no such op; it has mesh, mesh_shape, "),
        ('"shard.mesh"() : () -> ()', (4, 3), "shard.mesh: the shard dialect has no such op; it has grid, grid_shape"),
        ('"foo.bar"() : () -> ()', (4, 3), "foo.bar: unknown dialect `foo`"),
        ('"foo.bar"() : () -> () loc("x":1:2)', (4, 3), "foo.bar: unknown dialect `foo`"),
        ("%1 = stablehlo.negate %0 : !foo.bar", (4, 30), "unknown dialect `foo`"),
        ('%1 = "mesh.all_gather"(%0) ({}) : (T) -> T', (4, 30), "mesh.all_gather: expected `:`, got `(`"),
        (
            '%1 = "mesh.all_gather"(%0) <{a = 1}> {a = 2} : () -> ()',
            (4, 41),
            "mesh.all_gather: attribute a is given twice",
        ),
        ('%1 = "mesh.all_gather"(%0) {a = 1, b = ]} : (T) -> T', (4, 42), "mesh.all_gather: `]` without a partner"),
        ("%1 = mesh.all_reduce\n %0 on @m : T -> T %2 = stablehlo.negate %9 : T", (5, 66), "use of undeclared SSA"),
        ("mesh.mesh @a(shape = 2xx4)", (4, 24), "mesh.mesh: expected dimensions, such as `2x?x4`, got `2xx4`"),
    ],
)
def test_an_error_has_the_users_place(statement, place, message):
    found = error(function(statement, "%0: T").replace("T", "tensor<4xf32>"))
    assert found.message.startswith(message)
    assert found.position == Position(*place)


def test_an_op_of_another_dialect_is_named_with_what_to_do():
    for statement in ('"foo.bar"() : () -> ()', "foo.bar"):
        assert error(statement).message == (
            "foo.bar: unknown dialect `foo`; to fix: lower it to StableHLO by that dialect's own passes, or "
            "write it as a stablehlo.custom_call @bar with an sdy.sharding_rule"
        )


@pytest.mark.parametrize("op", ["mesh.all_reduce %0 on @m {A} : T -> T", "stablehlo.negate %0 {A} : T"])
def test_attributes_of_other_dialects_are_carried_through(op: str):
    text = function("%1 = " + op.replace("A", "a = #foo.b, foo.c = 1 : i32"), "%0: T {foo.d = #foo<e f>}")
    found = module_text(parsed(text.replace("T", "tensor<4xf32>")))
    assert "#foo.b" in found and "foo.c = 1" in found and "#foo<e f>" in found


VALID = {
    "a recv that does not say from whom": """
mesh.mesh @m(shape = 2x4)
func.func @f(%0: tensor<4xf32>) -> tensor<4xf32> {
  %1 = mesh.send %0 on @m mesh_axes = [0] destination = [1] : (tensor<4xf32>) -> tensor<4xf32>
  %2 = mesh.recv %0 on @m mesh_axes = [0] : (tensor<4xf32>) -> tensor<4xf32>
  return %2 : tensor<4xf32>
}""",
    "a generic reduction": """
mesh.mesh @m(shape = 2x4)
func.func @f(%0: tensor<4xf32>) -> tensor<4xf64> {
  %1 = mesh.all_reduce %0 on @m mesh_axes = [0] reduction = <generic> : tensor<4xf32> -> tensor<4xf64>
  %2 = mesh.reduce %1 on @m mesh_axes = [0] reduction = generic root = [1] : (tensor<4xf64>) -> tensor<4xf64>
  return %2 : tensor<4xf64>
}""",
    "shardings as arguments of functions and blocks": """
mesh.mesh @m(shape = 2x4)
func.func private @f(%s: !mesh.sharding, %a: tensor<8xf32>) -> (tensor<8xf32>, !mesh.sharding) {
  %0 = mesh.shard %a to %s : tensor<8xf32>
  return %0, %s : tensor<8xf32>, !mesh.sharding
}
func.func @main(%a: tensor<8xf32>, %s: !mesh.sharding) -> tensor<8xf32> {
  %0:2 = call @f(%s, %a) : (!mesh.sharding, tensor<8xf32>) -> (tensor<8xf32>, !mesh.sharding)
  cf.br ^bb1(%0#1: !mesh.sharding)
^bb1(%t: !mesh.sharding):
  %1 = mesh.shard %a to %t annotate_for_users : tensor<8xf32>
  return %1 : tensor<8xf32>
}""",
}


@pytest.mark.parametrize("dialect", ["mesh", "shard"])
@pytest.mark.parametrize("name", VALID)
def test_what_cannot_run_is_valid_text_all_the_same(name, dialect):
    text = VALID[name] if dialect == "mesh" else in_shard(VALID[name])
    once = optimize(text, "", "-")
    assert optimize(once, "", "-") == once
    assert optimize(optimize(text, "", "-", generic=True), "", "-") == once
