"""The passes around propagation, each against jaxlib's own pass of that name, and those that only we have."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.mlir import ir, passmanager
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from random_programs import RandomProgram
from sdy_oracle import run_passes
from sharding_dump import dump, parse, run_oracle

import sdy_jax as sdy
from sdy_jax import passes
from sdy_jax.annotate.program import Program
from sdy_jax.cli.opt import optimize
from sdy_jax.errors import ParseError, ShardingError
from sdy_jax.ir.graph import Graph
from sdy_jax.ir.operations import op_names
from sdy_jax.shardy.passes.pipelines import (
    PIPELINES,
    PLAN_EXPORT,
    export_pipeline,
    import_pipeline,
    plan_import,
    propagation_pipeline,
    run_pipeline,
)
from sdy_jax.shardy.passes.registry import FLAG, PASSES, SOUGHT, Pass, declared_options, written_passes
from sdy_jax.shardy.propagation import propagate
from sdy_jax.shardy.propagation.engine import Engine

BATCHING = "sdy-explicit-gather-scatter-batching"
"""Goes further in plans than in jaxlib: `test_batching.py`."""
IN_ORDER = [each.name for each in plan_import() if each.name.startswith("sdy-") and each.name != BATCHING]
FEATURES = ("while", "barrier", "group", "manual", "constant", "priority")


def ours(text: str, passes: str) -> ir.Module:
    module = parse(text)
    with module.context, ir.Location.unknown(module.context):
        run_pipeline(module.operation, passes)
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


def test_parts_of_an_axis_with_one_of_size_one_between_them_become_the_axis() -> None:
    text = """
      sdy.mesh @mesh = <["a"=4, "one"=1]>
      func.func @main(%x: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"a":(1)2, "one", "a":(2)2}]>}) {
        return
      }"""
    assert '[{"a"}]' in dump(ours(text, "sdy-remove-size-one-axes"))


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


GROUPED = """
sdy.mesh @mesh = <["a"=2, "b"=2]>
func.func @main(%x: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"a"}]>},
                %y: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"b"}]>}) -> tensor<8xf32> {
  sdy.sharding_group %x group_id=7 : tensor<8xf32>
  sdy.sharding_group %y group_id=7 : tensor<8xf32>
  %0 = stablehlo.add %x, %y : tensor<8xf32>
  return %0 : tensor<8xf32>
}"""


def test_groups_that_disagree_are_named_as_the_user_does_at_the_users_line() -> None:
    message = (
        'the members of sharding group 7 have different shardings: <@mesh, [{{"a"}}]> at {0}:5, '
        '<@mesh, [{{"b"}}]> at {0}:6; each keeps its own up to the group'
    )
    for run_it, file in (
        (lambda: sdy.partition(sdy.loads(GROUPED), on_unknown="ignore").plan(*[np.ones(8, np.float32)] * 2), "<text>"),
        (lambda: optimize(GROUPED, "sdy-propagation-pipeline", "m.mlir"), "m.mlir"),
    ):
        with pytest.warns(UserWarning) as caught:
            run_it()
        assert [str(warning.message) for warning in caught] == [message.format(file)]
        assert caught[0].filename == __file__


def test_both_branches_of_if_are_sharded_alike() -> None:
    """As in jaxlib 0.12; older ones let no sharding through `stablehlo.if`."""
    text = """
      func.func @main(%x: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"a"}]>}, %y: tensor<8xf32>,
                      %p: tensor<i1>) -> tensor<8xf32> {
        %0 = "stablehlo.if"(%p) ({ stablehlo.return %x : tensor<8xf32> }, { stablehlo.return %y : tensor<8xf32> })
          : (tensor<i1>) -> tensor<8xf32>
        return %0 : tensor<8xf32>
      }"""
    assert 'stablehlo.if : <@mesh, [{"a"}]>' in dump(ours(text, "sdy-propagation-pipeline"))
    assert 'stablehlo.if : <@mesh, [{"a"}]>' in dump(ours(text, "sdy-propagation-pipeline{compat=shardy}"))


def test_import_propagate_export_is_the_pipeline() -> None:
    text = RandomProgram(4, FEATURES).text
    module = parse(text)
    with module.context, ir.Location.unknown(module.context):
        run_pipeline(module.operation, plan_import())
        propagate(Engine(Graph(module.operation)))
        run_pipeline(module.operation, PLAN_EXPORT)
        module.operation.verify()
    closed = dump(module)
    assert "?" not in closed
    assert closed.splitlines()[:3] == dump(ours(text, "sdy-propagation-pipeline")).splitlines()[:3]


def test_pass_lists_are_read_with_options_and_nesting() -> None:
    text = (
        " close-shardings, builtin.module(func.func(sdy-sink-data-flow-edges),any(cse)),basic-propagate{a-b=true c=3} "
    )
    assert [(step.name, step.options) for step in written_passes(text)] == [
        ("close-shardings", {}),
        ("sdy-sink-data-flow-edges", {}),
        ("cse", {}),
        ("basic-propagate", {"a-b": "true", "c": "3"}),
    ]


@pytest.mark.parametrize("text", ["", "  ", "builtin.module()", "func.func( )"])
def test_a_pipeline_may_be_empty(text: str) -> None:
    assert written_passes(text) == []


def test_option_values_may_be_quoted_or_in_braces_and_hold_commas() -> None:
    (braced,) = written_passes('p{a={"}" b//} c}')  # a brace in a string is none
    assert braced.options == {"a": '"}" b//', "c": ""}
    (step,) = written_passes("p{a=1,2,3 b='x, {y}' c=\"q r\" d={e f,{g}} h i=}")
    assert step.options == {"a": "1,2,3", "b": "x, {y}", "c": "q r", "d": "e f,{g}", "h": "", "i": ""}


@pytest.mark.parametrize(
    ("text", "column", "expected"),
    [
        ("cse,,cse", 5, "a pass name"),
        ("cse,", 5, "a pass name"),
        ("func.func(cse", 14, "closes func.func"),
        ("cse)", 4, "a comma or the end"),
        ("cse{a=1", 8, "an option name"),
        ("cse{a='1}", 7, "closes this '"),
        ("cse cse", 5, "a comma"),
    ],
)
def test_a_text_that_is_no_pipeline_is_an_error_with_its_place(text: str, column: int, expected: str) -> None:
    with pytest.raises(ParseError, match=f"column {column}: expected .*{expected}") as error:
        written_passes(text)
    assert str(error.value).splitlines()[2] == " " * (column + 1) + "^"


def _with_every_option() -> Iterator[Pass]:
    for name, function in PASSES.items():
        yield Pass(name)
        for option, allowed in declared_options(function).items():
            texts = ("", "a b", "{x} 'y'", "a,b=c", "it's", '"q"', "}{", "100%")
            values: Iterable[bool | str] = (True, False) if allowed == FLAG else allowed or texts
            yield from (Pass(name, **{option: value}) for value in values)


def test_every_pass_with_every_option_is_read_back_from_its_text() -> None:
    for each in _with_every_option():
        assert passes.parse(str(each)) == (each,)
        assert eval(repr(each)) == each and hash(eval(repr(each))) == hash(each)


@pytest.mark.parametrize("compat", ["shardy", "sdy_jax"])
def test_every_pipeline_is_read_back_from_its_text(compat: Literal["shardy", "sdy_jax"]) -> None:
    for pipeline in (
        import_pipeline(compat=compat),
        propagation_pipeline(dedup_functions_fully=True, compat=compat),
        propagation_pipeline(compat=compat),
        export_pipeline(dump_directory="a b", dump_sharding_origins=True, compat=compat),
        plan_import(compat),
        PLAN_EXPORT,
    ):
        assert passes.parse(_text(pipeline)) == pipeline
    assert passes.parse(f"propagation-pipeline{{compat={compat}}}") == propagation_pipeline(compat=compat)
    assert ("compat=sdy_jax" in _text(propagation_pipeline(compat=compat))) == (compat == "sdy_jax")
    assert propagation_pipeline() == propagation_pipeline(compat="shardy")


def test_a_pass_says_its_options_in_the_order_of_its_documentation() -> None:
    one = Pass("basic-propagate", compat="shardy", keep_sharding_rules=False)
    assert str(one) == "sdy-basic-propagate{keep-sharding-rules=false compat=shardy}"
    assert repr(one) == "Pass('sdy-basic-propagate', keep_sharding_rules=False, compat='shardy')"
    assert one == Pass("sdy-basic-propagate", keep_sharding_rules=False, compat="shardy")
    assert one != Pass("sdy-basic-propagate") == Pass("sdy-basic-propagate", compat=None)
    assert Pass("cse").with_options(compat="shardy") == Pass("cse")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("basic-propagate", {"keep_sharding_rules": 1}, "keep-sharding-rules .* cannot be 1; it may be true or false"),
        ("basic-propagate", {"keep_sharding_rules": "true"}, "cannot be 'true'; it may be true or false"),
        (
            "basic-propagate",
            {"compat": "xla"},
            "compat of pass sdy-basic-propagate cannot be 'xla'; it may be shardy or shardy-0.10 or shardy-0.12 or sdy",
        ),
        ("save-module", {"directory": Path("x")}, "directory .* cannot be .*Path.*; it may be any text"),
        ("save-module", {"name": "{'\""}, "cannot be .*; it may be any text"),
        ("cse", {"foo_bar": True}, "pass cse has no option 'foo-bar'; it has none"),
        ("propagation-pipeline", {}, "no pass is called 'propagation-pipeline'; did you mean"),
    ],
)
def test_an_option_of_another_type_is_an_error(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ParseError, match=message):
        Pass(name, **options)


def test_what_is_called_after_each_pass_sees_the_module_in_the_order_of_the_passes() -> None:
    seen: list[tuple[str, bool]] = []

    def after(done: Pass, module: ir.Operation) -> None:
        assert module.verify()
        seen.append((str(done), "?" in str(module)))

    pipeline = [Pass("cse"), Pass("basic-propagate", keep_sharding_rules=True), Pass("close-shardings")]
    passes.run(TANH, pipeline, after=after)
    assert seen == [
        ("cse", False),
        ("sdy-basic-propagate{keep-sharding-rules=true}", True),
        ("sdy-close-shardings", False),
    ]
    assert passes.run(TANH, pipeline) == passes.run(TANH, _text(pipeline))


@pytest.mark.parametrize("name", SOUGHT)
def test_a_pass_that_pipelines_leave_out_would_change_nothing(name: str) -> None:
    each = Pass(name)
    texts = [RandomProgram(seed, FEATURES[:count]).text for seed in range(12) for count in range(len(FEATURES))]
    modules = [parse(text).operation for text in texts]
    left_out = [module for module in modules if op_names(module).isdisjoint(each.seeks)]
    assert left_out
    for module in left_out:
        before = str(module)
        each(module)
        assert str(module) == before


def test_a_pass_runs_on_a_module() -> None:
    module = parse(TANH).operation
    Pass("basic-propagate")(module)
    assert str(module) == str(ours(TANH, "basic-propagate").operation)


def test_an_unknown_pass_is_an_error_that_says_what_it_may_have_been() -> None:
    with pytest.raises(
        ParseError, match="column 5: no pass is called 'close-sharding'; did you mean sdy-close-shardings"
    ):
        run_pipeline(parse("").operation, "cse,close-sharding")
    with pytest.raises(ParseError, match=r"no pass is called 'zz'; the passes are .*sdy-close-shardings"):
        Pass("zz")


def test_an_unknown_option_is_an_error_that_names_the_known_ones() -> None:
    known = "module-dump-directory"
    with pytest.raises(ParseError, match=f"basic-propagate has no option 'strategy'; its options are .*{known}"):
        run_pipeline(parse("").operation, "basic-propagate{strategy=basic}")
    with pytest.raises(ParseError, match="has no option 'a'; it has none"):
        run_pipeline(parse("").operation, "cse{a=1}")
    with pytest.raises(ParseError, match="has no option 'foo'; its options are dedup-functions-fully, compat"):
        run_pipeline(parse("").operation, "sdy-propagation-pipeline{foo=1}")


@pytest.mark.parametrize(
    ("step", "allowed"),
    [
        ("aggressive-propagate{propagation-strategy=fast}", "aggressive or basic or basic-then-aggressive"),
        ("basic-propagate{keep-sharding-rules=1}", "true or false"),
        ("import-pipeline{compat=xla}", "shardy or shardy-0.10 or shardy-0.12 or sdy_jax"),
    ],
)
def test_an_option_with_a_value_that_it_cannot_have_is_an_error(step: str, allowed: str) -> None:
    with pytest.raises(ParseError, match=f"it may be {allowed}"):
        run_pipeline(parse("").operation, step)


DEAD = """
sdy.mesh @mesh = <["a"=2, "b"=2, "c"=4]>
sdy.mesh @m = <["a"=2, "b"=4]>
func.func @main(%x: tensor<8x16xf32>) -> tensor<8x16xf32> {
  %0 = stablehlo.sine %x : tensor<8x16xf32>
  %1 = sdy.sharding_constraint %0 <@m, [{"a"}, {}]> : tensor<8x16xf32>
  %2 = sdy.sharding_constraint %0 <@m, [{"b"}, {}]> : tensor<8x16xf32>
  %3 = stablehlo.cosine %2 : tensor<8x16xf32>
  %4 = sdy.reshard %3 <@m, [{}, {"b"}]> : tensor<8x16xf32>
  %5 = sdy.reshard %0 <@m, [{}, {"b"}]> : tensor<8x16xf32>
  %6 = sdy.reshard %5 <@m, [{"a"}, {"b"}]> : tensor<8x16xf32>
  %7 = sdy.manual_computation(%6) in_shardings=[<@m, [{"a"}, {}]>] out_shardings=[<@m, [{"a"}, {}]>] manual_axes={"a"}
      (%y: tensor<4x16xf32>) {
    %8 = stablehlo.sine %y : tensor<4x16xf32>
    %9 = sdy.reshard %8 <@m, [{}, {"b"}]> : tensor<4x16xf32>
    sdy.return %y : tensor<4x16xf32>
  } : (tensor<8x16xf32>) -> tensor<8x16xf32>
  return %7 : tensor<8x16xf32>
}"""


@pytest.mark.parametrize("pipeline", ["sdy-propagation-pipeline", "sdy-export-pipeline"])
def test_what_nothing_uses_goes_as_in_the_oracle(pipeline: str) -> None:
    (expected,) = run_passes([(DEAD, pipeline)])
    assert expected is not None
    assert expected.count("sdy.reshard") == 2 and "cosine" not in expected
    # jaxlib 0.12 inlines meshes at the end of the export pipeline.
    ours = [optimize(DEAD, passes, "-").strip() for passes in (pipeline, f"{pipeline},sdy-inline-meshes")]
    assert expected.strip() in ours
    kept = optimize(DEAD, "sdy-export-pipeline{avoid-export-for-partitioning=true}", "-")
    assert kept.count("sdy.sharding_constraint") == 2 and kept.count("sdy.reshard") == 4
    plan = sdy.partition(sdy.loads(DEAD)).plan(np.ones((8, 16), np.float32))
    assert not plan.collectives


def test_nothing_runs_if_a_later_pass_is_not_known() -> None:
    module = parse("func.func private @unused() { return }")
    with pytest.raises(ParseError):
        run_pipeline(module.operation, "symbol-dce,nope")
    assert "@unused" in str(module)


NEW_OPTIONS = {
    *("partitioner-stage", "mark-partial-result-with-unreduced-axes", "rng-bit-generator-unsafe"),
    *("partition-count", "replica-count"),
}
"""Options of jaxlib 0.12."""
DEADLY = "enable-per-instruction-partitioning"
"""An option of which jaxlib 0.12 dies where no stage is given."""


def test_passes_and_pipelines_take_the_options_that_the_oracle_takes() -> None:
    with parse("").context:
        known = {name: found for name, found in {**PASSES, **PIPELINES}.items() if name.startswith("sdy-")}
        for name in filter(_is_registered, known.keys() - {"sdy-save-module"}):
            for option, allowed in declared_options(known[name]).items():
                if option in ("compat", DEADLY) or (option in NEW_OPTIONS and jax.__version_info__ < (0, 12)):
                    continue
                step = f"{name}{{{option}={'1' if allowed is None else allowed[0]}}}"
                assert any(_is_accepted(f"builtin.module({t})") for t in (step, f"func.func({step})")), step


def _is_registered(name: str) -> bool:
    """jaxlib 0.10 lacks some passes."""
    return any(_is_accepted(f"builtin.module({text})") for text in (name, f"func.func({name})"))


def _is_accepted(pipeline: str) -> bool:
    try:
        passmanager.PassManager.parse(pipeline)
    except ValueError:
        return False
    return True


TANH = """
  sdy.mesh @mesh = <["a"=2, "b"=2]>
  func.func @main(%x: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"a"}]>}) -> tensor<8xf32> {
    %0 = stablehlo.tanh %x : tensor<8xf32>
    return %0 : tensor<8xf32>
  }"""


def test_run_takes_text_and_gives_text() -> None:
    assert passes.run(TANH, "") == str(parse(TANH))
    assert 'stablehlo.tanh %arg0 {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{"a", ?}]>]>}' in passes.run(
        TANH, "builtin.module(basic-propagate)"
    )


def test_run_of_a_text_that_is_no_module_is_an_error() -> None:
    with pytest.raises(ParseError, match="expected"):
        passes.run("func.func @main(", "cse")


def test_run_gives_a_new_program_and_leaves_the_one_it_was_given() -> None:
    module = parse(TANH)
    mesh = Graph(module.operation).meshes["mesh"]
    tree = jax.tree.structure(0)
    program = Program(module.operation.clone().operation, mesh, "mesh", (), ("x",), ("result",), (), (), tree, tree)
    before = str(program.module)
    after = passes.run(program, "sdy-basic-propagate")
    assert str(program.module) == before
    assert str(after.module) == str(ours(TANH, "sdy-basic-propagate").operation)
    assert (after.mesh, after.inputs) == (mesh, ("x",))


@pytest.mark.parametrize("options", ["", "{conservative-propagation=true}"])
def test_rules_are_written_as_the_oracle_writes_them(options: str) -> None:
    for seed in range(6):
        text = RandomProgram(seed, ("constant",), without=("reshape",)).text
        expected = parse(text)
        run_oracle(expected, f"func.func(sdy-populate-op-sharding-rules{options})")
        compat = options.replace("}", " compat=shardy}") or "{compat=shardy}"
        assert _without_meshes(ours(text, f"populate-op-sharding-rules{compat}")) == _without_meshes(expected), text


@pytest.mark.parametrize("keep", ["true", "false"])
def test_propagation_keeps_rules_where_it_is_asked_to(keep: str) -> None:
    for seed in range(6):
        text = RandomProgram(seed, ("constant", "rules"), without=("reshape",)).text
        expected = parse(text)
        run_oracle(expected, f"sdy-aggressive-propagate{{keep-sharding-rules={keep}}}")
        module = ours(text, f"sdy-aggressive-propagate{{keep-sharding-rules={keep} compat=shardy}}")
        assert _without_meshes(module) == _without_meshes(expected), text


BEYOND_SHARDY = """
  sdy.mesh @mesh = <["a"=2, "b"=2]>
  func.func @main(%x: tensor<8x4x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"a"}, {}, {}]>},
                  %y: tensor<8x4x6xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}, {"b"}]>}) -> tensor<8x4x6xf32> {
    %0:2 = stablehlo.custom_call @lapack_spotrf_ffi(%x) : (tensor<8x4x4xf32>) -> (tensor<8x4x4xf32>, tensor<8xi32>)
    %1 = "stablehlo.triangular_solve"(%0#0, %y) {left_side = true, lower = true, unit_diagonal = false,
      transpose_a = #stablehlo<transpose NO_TRANSPOSE>} : (tensor<8x4x4xf32>, tensor<8x4x6xf32>) -> tensor<8x4x6xf32>
    return %1 : tensor<8x4x6xf32>
  }"""
"""Shardy has no rule for the call, and keeps the columns of linear systems whole."""


@pytest.mark.parametrize("pipeline", ["basic-propagate", "user-priority-propagate", "propagation-pipeline"])
def test_passes_with_shardys_names_give_what_shardys_passes_give(pipeline: str) -> None:
    expected = parse(BEYOND_SHARDY)
    run_oracle(expected, f"sdy-{pipeline}")
    assert plain(ours(BEYOND_SHARDY, f"sdy-{pipeline}")) == plain(expected)
    assert plain(ours(BEYOND_SHARDY, f"sdy-{pipeline}{{compat=shardy}}")) == plain(expected)
    assert plain(ours(BEYOND_SHARDY, f"sdy-{pipeline}{{compat=sdy_jax}}")) != plain(expected)


def test_plans_propagate_by_rules_that_shardy_does_not_have() -> None:
    mesh = jax.make_mesh((2, 4), ("a", "b"), (AxisType.Auto,) * 2)
    f = sdy.partition(lambda x: jax.lax.linalg.cholesky(x), mesh=mesh, in_shardings=P("a"), layouts="propagated")
    plan = f.plan(jax.ShapeDtypeStruct((8, 4, 4), "float32"))
    assert plan.results[0].type == "f32[8@a,4,4]" and not plan.collectives


def _without_meshes(module: ir.Module) -> str:
    """Without the copy of a mesh that stablehlo reads: our passes leave it out."""
    return re.sub(r" \{stablehlo\.mesh = .*", "", str(module))


def test_rules_are_dropped_but_for_custom_ones() -> None:
    text = """
      func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> {
        %0 = stablehlo.tanh %x {sdy.sharding_rule = #sdy.op_sharding_rule<([i])->([i]) {i=8}>} : tensor<8xf32>
        %1 = stablehlo.custom_call @f(%0) {
          sdy.sharding_rule = #sdy.op_sharding_rule<([i])->([i]) {i=8}, custom>} : (tensor<8xf32>) -> tensor<8xf32>
        return %1 : tensor<8xf32>
      }"""
    for pass_name in ("sdy-drop-sharding-rules", "sdy-basic-propagate"):
        assert str(ours(text, pass_name)).count("op_sharding_rule") == 1


def test_canonicalize_and_cse_are_those_of_mlir() -> None:
    text = """
      func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> {
        %dead = stablehlo.abs %x : tensor<8xf32>
        %0 = stablehlo.tanh %x : tensor<8xf32>
        %1 = stablehlo.tanh %x : tensor<8xf32>
        %2 = stablehlo.add %0, %1 : tensor<8xf32>
        return %2 : tensor<8xf32>
      }"""
    module = parse(text)
    graph = Graph(module.operation)  # handles of ops are alive while MLIR's passes run
    run_pipeline(module.operation, "canonicalize,cse")
    module.operation.verify()
    assert [op.operation.name for op in module.body.operations] == ["sdy.mesh", "func.func"]
    assert [op.name for op in Graph(module.operation).ops[1:]] == ["stablehlo.tanh", "stablehlo.add", "func.return"]
    del graph


def test_meshes_are_written_into_the_shardings_and_taken_out_again() -> None:
    inlined = passes.run(TANH, "inline-meshes")
    assert "sdy.mesh" not in inlined
    assert 'mesh<["a"=2, "b"=2]>, [{"a"}]' in inlined
    assert passes.run(inlined, "lift-inlined-meshes") == str(parse(TANH))


def test_shardings_and_meshes_are_dropped_unless_an_op_is_made_of_one() -> None:
    assert "sdy" not in str(ours(TANH, "basic-propagate,drop-sharding-and-mesh"))
    constrained = TANH.replace("stablehlo.tanh %x :", 'sdy.sharding_constraint %x <@mesh, [{"b"}]> :')
    with pytest.raises(ShardingError, match=r"sdy\.sharding_constraint at .* has sharding, which cannot be dropped"):
        ours(constrained, "drop-sharding-and-mesh")


def test_functions_that_only_a_composite_refers_to_are_not_unused() -> None:
    module = ours(
        """
        func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> {
          %0 = stablehlo.composite "a.b" %x {decomposition = @f} : (tensor<8xf32>) -> tensor<8xf32>
          return %0 : tensor<8xf32>
        }
        func.func private @f(%x: tensor<8xf32>) -> tensor<8xf32> {
          return %x : tensor<8xf32>
        }""",
        "symbol-dce",
    )
    assert list(Graph(module.operation).functions) == ["main", "f"]


def test_a_module_is_saved_only_where_that_is_asked_for(tmp_path: Path) -> None:
    ours(TANH, "sdy-save-module,export-pipeline")
    run_pipeline(parse(TANH).operation, f"export-pipeline{{dump-directory={tmp_path}/new}}")
    (file,) = (tmp_path / "new").iterdir()
    assert file.name == "00.after_propagation.mlir"
    assert "stablehlo.tanh" in file.read_text()


def _text(pipeline: Iterable[Pass]) -> str:
    return ",".join(map(str, pipeline))


def test_the_export_pipeline_leaves_out_what_its_options_say() -> None:
    assert "sdy-sharding-constraint-to-reshard" not in _text(export_pipeline(avoid_export_for_partitioning=True))
    assert "sub-axes" not in _text(export_pipeline(update_non_divisible_input_output_shardings=False))
    assert "drop-sharding-rules" not in _text(export_pipeline(keep_sharding_rules=True))
    assert "sink-debug-sharding-origins=true" in _text(export_pipeline(dump_sharding_origins=True))


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


def test_constants_of_long_chains_are_copied() -> None:
    """Of more ops than Python calls may be deep."""

    def run(x: jax.Array) -> jax.Array:
        numbers = jnp.arange(8)
        for _ in range(1100):
            numbers = numbers + 1
        return x + numbers

    plan = sdy.partition(run, mesh=jax.make_mesh((8,), ("x",)), in_shardings=P("x")).plan(jnp.ones(8))
    assert not plan.collectives
