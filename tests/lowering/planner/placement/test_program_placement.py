"""Placement of the ops and reshards of modules."""

from __future__ import annotations

from sharding_dump import parse

from sdy_jax.ir.operations import body_of, named, post_order, pre_order, terminator_of

_LOOP = """
func.func @main(%x: tensor<i32>) -> tensor<i32> {
  %0 = stablehlo.negate %x : tensor<i32>
  %1 = stablehlo.while(%a = %0) : tensor<i32>
   cond {
    %p = stablehlo.compare LT, %a, %a : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %p : tensor<i1>
  } do {
    %n = stablehlo.negate %a : tensor<i32>
    stablehlo.return %n : tensor<i32>
  }
  return %1 : tensor<i32>
}"""


def _short(ops: list) -> list[str]:
    return [op.name.split(".")[1] for op in ops]


def test_the_two_orders_of_a_module_with_regions() -> None:
    module = parse(_LOOP)
    inside = ["compare", "return", "negate", "return"]
    assert _short(pre_order(module.operation)) == ["module", "mesh", "func", "negate", "while", *inside, "return"]
    assert _short(post_order(module.operation)) == ["mesh", "negate", *inside, "while", "return", "func", "module"]


def test_ops_are_found_by_name_in_regions_too() -> None:
    module = parse(_LOOP)
    found = named(module.operation, "stablehlo.negate", "stablehlo.compare")
    assert _short(found) == ["negate", "compare", "negate"]


def test_changes_during_placement_do_not_show() -> None:
    module = parse(_LOOP)
    for op in pre_order(module.operation):
        if op.name == "stablehlo.negate":
            op.results[0].replace_all_uses_with(op.operands[0])
            op.erase()
    assert named(module.operation, "stablehlo.negate") == []


def test_the_terminator_is_the_last_op() -> None:
    module = parse(_LOOP)
    function = module.body.operations[1].operation
    assert terminator_of(body_of(function)).name == "func.return"
