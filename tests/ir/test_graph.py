"""The graph: what it reads of a module, and the shardings that it writes."""

from __future__ import annotations

from jax.extend.mlir import ir
from sharding_dump import parse

from sdy_jax.ir.graph import Graph
from sdy_jax.ir.operations import text_of_constant
from sdy_jax.ir.parsers import parse_sharding
from sdy_jax.ir.stored_shardings import function_sharding, function_shardings, set_function_shardings

_DIAMOND = """
func.func @main(%x: tensor<8xf32>, %y: tensor<8xf32>) -> (tensor<8xf32>, tensor<8xf32>) {
  %0 = stablehlo.tanh %x : tensor<8xf32>
  %1 = stablehlo.add %0, %y : tensor<8xf32>
  %2 = stablehlo.multiply %0, %0 : tensor<8xf32>
  return %1, %2 : tensor<8xf32>, tensor<8xf32>
}"""

_CONSTANTS = """
func.func @main() -> tensor<2xcomplex<f32>> {
  %0 = stablehlo.constant dense<[(1.0,2.0), (3.0,4.0)]> : tensor<2xcomplex<f32>>
  %1 = stablehlo.constant dense<[(1.0,2.0), (3.0,4.0)]> : tensor<2xcomplex<f32>>
  %2 = stablehlo.constant dense<[(1.0,2.0), (3.0,5.0)]> : tensor<2xcomplex<f32>>
  return %0 : tensor<2xcomplex<f32>>
}"""


def _names(uses: list) -> list[tuple[str, int]]:
    return [(op.name, number) for op, number in uses]


def test_uses_are_in_program_order_and_the_use_list_in_the_modules_order() -> None:
    module = parse(_DIAMOND)
    value = Graph(module.operation).main.blocks[0].ops[0].results[0]
    assert _names(value.uses) == [("stablehlo.add", 0), ("stablehlo.multiply", 0), ("stablehlo.multiply", 1)]
    assert _names(value.use_list()) == [("stablehlo.multiply", 1), ("stablehlo.multiply", 0), ("stablehlo.add", 0)]


def test_replaced_uses_are_replaced_here_and_in_the_module() -> None:
    module = parse(_DIAMOND)
    graph = Graph(module.operation)
    tanh, _, multiply, _ = graph.main.blocks[0].ops
    y = graph.arguments[1]
    graph.replace_uses(tanh.results[0], y)
    assert multiply.operands == [y, y] and list(multiply.mlir.operands) == [y.mlir, y.mlir]
    assert not tanh.results[0].uses
    own, *new = _names(y.uses)
    assert own == ("stablehlo.add", 1)
    assert new == [("stablehlo.add", 0), ("stablehlo.multiply", 0), ("stablehlo.multiply", 1)]


def test_a_redirected_use_list_is_turned_round() -> None:
    module = parse(_DIAMOND)
    body = module.body.operations[1].regions[0].blocks[0]
    tanh = body.operations[0].operation
    copy = tanh.clone(ir.InsertionPoint(tanh)).operation
    tanh.results[0].replace_all_uses_with(copy.results[0])
    value = Graph(module.operation).main.blocks[0].ops[0].results[0]
    assert _names(value.use_list()) == _names(value.uses)


def test_values_of_equal_types_share_one_type_object() -> None:
    module = parse(_DIAMOND)
    graph = Graph(module.operation)
    assert len({id(v.type) for v in (*graph.arguments, *graph.outputs)}) == 1


def test_signatures_tell_what_ops_compute_apart_and_nothing_else() -> None:
    module = parse(_DIAMOND)
    graph = Graph(module.operation)
    tanh, add, multiply, _ = graph.main.blocks[0].ops
    before = tanh.signature
    graph.set_sharding(tanh.results[0], parse_sharding('[{"a"}]', "mesh"))
    assert tanh.signature == before
    assert add.signature != multiply.signature


def test_constants_of_complex_numbers_are_compared_by_their_elements() -> None:
    module = parse(_CONSTANTS)
    one, same, other, _ = Graph(module.operation).main.blocks[0].ops
    assert one.signature == same.signature != other.signature


def test_the_text_of_a_constant_parses_and_leaves_the_module_as_it_was() -> None:
    module = parse(_CONSTANTS)
    before = str(module)
    text = text_of_constant(Graph(module.operation).main.blocks[0].ops[2].mlir)
    assert "5.0" in text
    assert ir.Operation.parse(text, context=module.context).operation.name == "stablehlo.constant"
    assert str(module) == before


def test_many_shardings_are_stored_at_once() -> None:
    module = parse(_DIAMOND)
    graph = Graph(module.operation)
    a, b = parse_sharding('[{"a"}]', "mesh"), parse_sharding('[{"b"}]', "mesh")
    tanh = graph.main.blocks[0].ops[0]
    graph.set_shardings([(graph.arguments[1], a), (tanh.results[0], b)])
    graph.set_result_shardings(graph.main, {0: b, 1: a})
    again = Graph(module.operation)
    assert [v.sharding for v in again.arguments] == [None, a]
    assert again.main.blocks[0].ops[0].results[0].sharding == b
    assert again.result_shardings(again.main) == [b, a]


def test_a_functions_shardings_are_set_by_number() -> None:
    module = parse(_DIAMOND)
    main = Graph(module.operation).main.mlir
    a = parse_sharding('[{"a"}]', "mesh")
    set_function_shardings(main, "arg_attrs", {})
    set_function_shardings(main, "arg_attrs", {0: None})
    assert "arg_attrs" not in main.attributes, "nothing has changed"
    set_function_shardings(main, "arg_attrs", {1: a})
    assert function_shardings(main, "arg_attrs") == [None, a]
    assert [function_sharding(main, "arg_attrs", i) for i in range(2)] == [None, a]
    set_function_shardings(main, "arg_attrs", {1: None})
    assert function_shardings(main, "arg_attrs") == [None, None]
