"""The passes around propagation, each against jaxlib's own pass of that name, and those that only we have."""

from __future__ import annotations

import re

import pytest
from jax.extend.mlir import ir
from random_programs import RandomProgram
from sharding_dump import dump, parse, run_oracle

from sdy_jax.errors import ParseError, ShardingError
from sdy_jax.graph import Graph
from sdy_jax.passes.export import export_module
from sdy_jax.passes.import_ import import_module
from sdy_jax.passes.registry import IMPORT, full_name, run
from sdy_jax.passes.registry import parse as parse_passes
from sdy_jax.propagation import propagate

IN_ORDER = [name for name in IMPORT if name.startswith("sdy-")]
FEATURES = ("while", "barrier", "group", "manual", "constant", "priority")


def ours(text: str, passes: str) -> ir.Module:
    module = parse(text)
    with module.context, ir.Location.unknown(module.context):
        run(module.operation, passes)
        module.operation.verify()
    return module


def plain(module: ir.Module) -> str:
    """The module's text without what our passes leave out on purpose: the copy of a mesh that stablehlo reads."""
    return re.sub(r" \{stablehlo\.mesh = .*", "", re.sub(r" \{sdy\.sharding_rule = [^}]*\}[^}]*\}", "", str(module)))


@pytest.mark.parametrize("count", range(1, len(IN_ORDER) + 1), ids=lambda n: IN_ORDER[n - 1])
def test_import_passes_make_the_module_that_the_oracle_makes(count: int) -> None:
    passes = ",".join(IN_ORDER[:count])
    for seed in range(8):
        text = RandomProgram(seed, FEATURES).text
        expected = parse(text)
        run_oracle(expected, passes)
        assert plain(ours(text, passes)) == plain(expected), f"seed {seed}\n{text}"


def test_inline_meshes_get_a_symbol_each_and_equal_meshes_share_one() -> None:
    module = ours(
        """
        sdy.mesh @mesh = <["a"=2, "b"=2, "c"=4]>
        sdy.mesh @same = <["a"=2, "b"=2, "c"=4]>
        func.func @main(%x: tensor<8xf32> {sdy.sharding = #sdy.sharding<@same, [{"a"}]>},
                        %y: tensor<8xf32> {sdy.sharding = #sdy.sharding<mesh<["z"=2]>, [{"z"}]>}) {
          return
        }""",
        "sdy-lift-inlined-meshes",
    )
    assert dump(module).splitlines()[1:3] == ['  arg 0 : <@mesh, [{"a"}]>', '  arg 1 : <@mesh_0, [{"z"}]>']
    assert list(Graph(module.operation).meshes) == ["mesh", "mesh_0"]


def test_axes_of_size_one_vanish_from_shardings() -> None:
    text = """
      sdy.mesh @mesh = <["a"=2, "one"=1]>
      func.func @main(%x: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"one", "a"}, {"b", ?}p1]>}) {
        return
      }""".replace('"b", ?', "?")
    assert '[{"a"}, {?}p1]' in dump(ours(text, "sdy-remove-size-one-axes"))


NESTED_CALLS = """
func.func @main(%x: tensor<8xf32>, %n: tensor<i32>) -> tensor<8xf32> {
  %0 = call @outer(%x) : (tensor<8xf32>) -> tensor<8xf32>
  %1:2 = stablehlo.while(%p = %0, %q = %n) : tensor<8xf32>, tensor<i32>
  cond {
    %t = stablehlo.compare LT, %q, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %t : tensor<i1>
  } do {
    %r = func.call @inner(%p) : (tensor<8xf32>) -> tensor<8xf32>
    stablehlo.return %r, %q : tensor<8xf32>, tensor<i32>
  }
  return %1#0 : tensor<8xf32>
}
func.func private @outer(%x: tensor<8xf32>) -> tensor<8xf32> {
  %0 = call @inner(%x) : (tensor<8xf32>) -> tensor<8xf32>
  %1 = call @inner(%0) : (tensor<8xf32>) -> tensor<8xf32>
  return %1 : tensor<8xf32>
}
func.func private @inner(%x: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"a", ?}]>}) -> tensor<8xf32> {
  %0 = stablehlo.tanh %x : tensor<8xf32>
  return %0 : tensor<8xf32>
}
"""


def test_calls_of_calls_and_calls_in_regions_are_inlined() -> None:
    names = [op.name for op in Graph(ours(NESTED_CALLS, "inline-calls").operation).ops]
    assert names.count("stablehlo.tanh") == 3
    assert names.count("sdy.sharding_constraint") == 3, "an argument's sharding is a constraint on what is passed"
    assert "func.call" not in names
    assert names.count("func.func") == 1


def test_a_function_that_returns_its_argument_inlines_to_the_operand() -> None:
    module = ours(
        """
        func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> {
          %0 = call @same(%x) : (tensor<8xf32>) -> tensor<8xf32>
          return %0 : tensor<8xf32>
        }
        func.func private @same(%x: tensor<8xf32>) -> tensor<8xf32> {
          return %x : tensor<8xf32>
        }""",
        "inline-calls",
    )
    graph = Graph(module.operation)
    assert graph.outputs == graph.arguments


def test_recursion_is_an_error() -> None:
    with pytest.raises(ShardingError, match="calls itself"):
        ours(
            """
            func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> {
              %0 = call @f(%x) : (tensor<8xf32>) -> tensor<8xf32>
              return %0 : tensor<8xf32>
            }
            func.func private @f(%x: tensor<8xf32>) -> tensor<8xf32> {
              %0 = call @f(%x) : (tensor<8xf32>) -> tensor<8xf32>
              return %0 : tensor<8xf32>
            }""",
            "inline-calls",
        )


def test_group_members_of_different_shapes_are_an_error() -> None:
    with pytest.raises(ShardingError, match="same shape"):
        ours(
            """
            func.func @main(%x: tensor<8xf32>, %y: tensor<4xf32>) {
              sdy.sharding_group %x group_id=3 : tensor<8xf32>
              sdy.sharding_group %y group_id=3 : tensor<4xf32>
              return
            }""",
            "sdy-sharding-group-import",
        )


def test_group_members_that_disagree_keep_their_shardings() -> None:
    text = """
      func.func @main(%x: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"a", ?}]>},
                      %y: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"b", ?}]>}) -> tensor<8xf32> {
        sdy.sharding_group %x group_id=0 : tensor<8xf32>
        sdy.sharding_group %y group_id=0 : tensor<8xf32>
        %0 = stablehlo.add %x, %y : tensor<8xf32>
        return %0 : tensor<8xf32>
      }"""
    expected = parse(text)
    run_oracle(expected, "sdy-op-priority-propagate")
    with pytest.warns(UserWarning, match="sharding group 0"):
        module = ours(text, "sdy-op-priority-propagate")
    assert dump(module) == dump(expected)


def test_both_branches_of_if_are_sharded_alike_unless_compatible_with_shardy() -> None:
    text = """
      func.func @main(%x: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"a"}]>}, %y: tensor<8xf32>,
                      %p: tensor<i1>) -> tensor<8xf32> {
        %0 = "stablehlo.if"(%p) ({ stablehlo.return %x : tensor<8xf32> }, { stablehlo.return %y : tensor<8xf32> })
          : (tensor<i1>) -> tensor<8xf32>
        return %0 : tensor<8xf32>
      }"""
    assert 'stablehlo.if : <@mesh, [{"a"}]>' in dump(ours(text, "sdy-propagation-pipeline"))
    assert "stablehlo.if : (none)" in dump(ours(text, "sdy-propagation-pipeline{compat=shardy}"))


def test_import_propagate_export_is_the_pipeline() -> None:
    text = RandomProgram(4, FEATURES).text
    module = parse(text)
    with module.context, ir.Location.unknown(module.context):
        import_module(module.operation)
        propagate(Graph(module.operation))
        export_module(module.operation, sub_axes=False)
        module.operation.verify()
    closed = dump(module)
    assert "?" not in closed
    assert closed.splitlines()[:3] == dump(ours(text, "sdy-propagation-pipeline")).splitlines()[:3]


def test_pass_lists_are_read_with_options_and_nesting() -> None:
    assert list(parse_passes("close-shardings, func.func(sdy-sink-data-flow-edges),basic-propagate{a-b=true c=3}")) == [
        ("sdy-close-shardings", {}),
        ("sdy-sink-data-flow-edges", {}),
        ("sdy-basic-propagate", {"a_b": True, "c": 3}),
    ]


def test_an_unknown_pass_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ParseError, match=r"no pass is called 'nope'.*sdy-close-shardings"):
        full_name("nope")


@pytest.mark.parametrize("element", ["f32", "complex<f32>", "i1", "bf16"])
def test_constants_of_every_kind_become_sdy_constants(element: str) -> None:
    value = {"complex<f32>": "(1.0, 2.0)", "i1": "true"}.get(element, "1.0")
    module = ours(
        f"""
        func.func @main() -> tensor<4x{element}> {{
          %0 = stablehlo.constant dense<{value}> : tensor<4x{element}>
          return %0 : tensor<4x{element}>
        }}""",
        "sdy-constant-or-scalar-splitter",
    )
    assert "sdy.constant dense<" in str(module)
