"""Programs with calls and named computations: every pass makes of them what jaxlib's pass of that name makes."""

from __future__ import annotations

import re
import warnings
from functools import cache
from pathlib import Path

import pytest
from jax.extend.mlir import ir, passmanager
from random_call_programs import RandomCallProgram
from sdy_oracle import oracle_text, run_each, run_passes
from sharding_dump import parse, plain_text

from sdy_jax.errors import ShardingError, UnsupportedError
from sdy_jax.ir.graph import Graph
from sdy_jax.shardy.passes.pipelines import Passes, export_pipeline, import_pipeline, propagation_pipeline, run_pipeline
from sdy_jax.shardy.passes.registry import Pass, written_passes
from sdy_jax.shardy.propagation.data_flow import calls_by_callee

EXPECTED = Path(__file__).parent / "call_programs.txt"
"""What jaxlib 0.12 makes of the programs here, for tests with older ones."""

DEFAULT = propagation_pipeline()
DEDUP = propagation_pipeline(dedup_functions_fully=True)
_CALLS = ("sdy-flatten-call-graph", "sdy-import-func-calls")
NAMED = tuple(step for step in DEFAULT if step.name not in _CALLS)
"""For named computations of the user: jaxlib's `sdy-import-func-calls` gives these a second set of edges, and fails."""
_NEWEST = propagation_pipeline(compat="shardy-0.12")
NEWEST = {
    DEFAULT: _NEWEST,
    DEDUP: propagation_pipeline(compat="shardy-0.12", dedup_functions_fully=True),
    NAMED: tuple(step for step in _NEWEST if step.name not in _CALLS),
}
"""The same in the order of jaxlib 0.12."""

X = "tensor<8x8xf32>"


def sharded(dims: str) -> str:
    return f"{{sdy.sharding = #sdy.sharding<@mesh, [{dims}]>}}"


def given(*dims: str) -> str:
    return f"{{sdy.sharding = #sdy.sharding_per_value<[{', '.join(f'<@mesh, [{d}]>' for d in dims)}]>}}"


F = f"""
func.func private @f(%p: {X}) -> {X} {{
  %0 = stablehlo.tanh %p : {X}
  return %0 : {X}
}}"""

PROGRAMS = {
    "called once": f"""
      func.func @main(%x: {X} {sharded('{"a"}, {?}')}) -> {X} {{
        %0 = call @f(%x) : ({X}) -> {X}
        return %0 : {X}
      }}{F}""",
    "called twice with equal shardings": f"""
      func.func @main(%x: {X} {sharded('{"a"}, {?}')}) -> ({X}, {X}) {{
        %0 = call @f(%x) : ({X}) -> {X}
        %1 = call @f(%x) : ({X}) -> {X}
        return %0, %1 : {X}, {X}
      }}{F}""",
    "called twice with different shardings": f"""
      func.func @main(%x: {X} {sharded('{"a"}, {?}')}, %y: {X} {sharded('{"b"}, {?}')}) -> ({X}, {X}) {{
        %0 = call @f(%x) : ({X}) -> {X}
        %1 = call @f(%y) : ({X}) -> {X}
        return %0, %1 : {X}, {X}
      }}{F}""",
    "shardings on calls and functions": f"""
      func.func @main(%x: {X}, %y: {X} {sharded('{"b"}, {?}')}) -> ({X}, {X} {sharded('{?}, {"a"}')}) {{
        %0:2 = call @g(%x, %y) {given('{"c", ?}, {?}', "{?}, {}")} : ({X}, {X}) -> ({X}, {X})
        %1:2 = call @g(%y, %0#0) {{tag = "second"}} : ({X}, {X}) -> ({X}, {X})
        return %1#0, %0#1 : {X}, {X}
      }}
      func.func private @g(%p: {X} {sharded('{"a"}, {?}')}, %q: {X}) -> ({X}, {X} {sharded('{?}, {"c", ?}')}) {{
        %0 = stablehlo.add %p, %q : {X}
        return %0, %q : {X}, {X}
      }}""",
    "calls of calls": f"""
      func.func private @g(%p: {X}) -> {X} {{
        %0 = call @f(%p) : ({X}) -> {X}
        %1 = call @f(%0) : ({X}) -> {X}
        return %1 : {X}
      }}{F}
      func.func @main(%x: {X} {sharded('{"a"}, {?}')}, %y: {X} {sharded('{?}, {"b"}')}) -> ({X}, {X}) {{
        %0 = call @g(%x) : ({X}) -> {X}
        %1 = call @g(%y) : ({X}) -> {X}
        %2 = call @f(%y) : ({X}) -> {X}
        return %0, %2 : {X}, {X}
      }}""",
    "calls in a loop": f"""
      func.func @main(%x: {X} {sharded('{"a"}, {?}')}, %n: tensor<i32>) -> {X} {{
        %0 = call @f(%x) : ({X}) -> {X}
        %1:2 = stablehlo.while(%p = %0, %q = %n) : {X}, tensor<i32>
        cond {{
          %t = stablehlo.compare LT, %q, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
          stablehlo.return %t : tensor<i1>
        }} do {{
          %r = func.call @f(%p) : ({X}) -> {X}
          %s = sdy.sharding_constraint %r <@mesh, [{{?}}, {{"b"}}]> : {X}
          stablehlo.return %s, %q : {X}, tensor<i32>
        }}
        return %1#0 : {X}
      }}{F}""",
    "calls in manual computations": f"""
      func.func @main(%x: tensor<16x8xf32> {sharded('{"a"}, {?}')}) -> tensor<16x8xf32> {{
        %0 = sdy.manual_computation(%x) in_shardings=[<@mesh, [{{"a"}}, {{?}}]>]
            out_shardings=[<@mesh, [{{"a"}}, {{?}}]>] manual_axes={{"a"}} (%p: {X}) {{
          %1 = func.call @g(%p) : ({X}) -> {X}
          %2 = func.call @g(%1) : ({X}) -> {X}
          sdy.return %2 : {X}
        }} : (tensor<16x8xf32>) -> tensor<16x8xf32>
        return %0 : tensor<16x8xf32>
      }}
      func.func private @g(%p: {X} {sharded('{?}, {"c"}')}) -> {X} {{
        %0 = stablehlo.tanh %p : {X}
        return %0 : {X}
      }}""",
    "public functions and unused ones": f"""
      func.func @other(%x: {X} {sharded('{"b"}, {?}')}) -> {X} {{
        %0 = call @f(%x) : ({X}) -> {X}
        return %0 : {X}
      }}
      func.func @main(%x: {X} {sharded('{"a"}, {?}')}) -> {X} {{
        %0 = call @other(%x) : ({X}) -> {X}
        %1 = call @other(%0) : ({X}) -> {X}
        return %1 : {X}
      }}{F}
      func.func private @unused(%x: {X}) -> {X} {{
        %0 = call @also_unused(%x) : ({X}) -> {X}
        return %0 : {X}
      }}
      func.func private @also_unused(%x: {X}) -> {X} {{
        return %x : {X}
      }}""",
    "one function of another name": f"""
      func.func @step(%x: {X} {sharded('{"a"}, {?}')}) -> {X} {{
        %0 = stablehlo.tanh %x : {X}
        return %0 : {X}
      }}""",
    "names that are taken": f"""
      func.func @main(%x: {X} {sharded('{"a"}, {?}')}, %y: {X} {sharded('{"b"}, {?}')}) -> ({X}, {X}, {X}) {{
        %0 = call @f(%x) : ({X}) -> {X}
        %1 = call @f(%y) : ({X}) -> {X}
        %2 = call @f_0(%y) : ({X}) -> {X}
        return %0, %1, %2 : {X}, {X}, {X}
      }}{F}
      func.func private @f_0(%p: {X}) -> {X} {{
        %0 = stablehlo.abs %p : {X}
        return %0 : {X}
      }}""",
    "functions of constants": f"""
      func.func @main(%x: {X} {sharded('{"a"}, {?}')}, %y: {X} {sharded('{"b"}, {?}')}) -> ({X}, {X}, {X}) {{
        %c = stablehlo.constant dense<2.0> : {X}
        %0 = call @k(%c) : ({X}) -> {X}
        %1 = stablehlo.add %0, %x : {X}
        %2 = stablehlo.add %0, %y : {X}
        %3 = call @k(%x) : ({X}) -> {X}
        return %1, %2, %3 : {X}, {X}, {X}
      }}
      func.func private @k(%p: {X}) -> {X} {{
        %c = stablehlo.constant dense<2.0> : {X}
        %0 = call @f(%c) : ({X}) -> {X}
        %1 = stablehlo.multiply %p, %0 : {X}
        return %1 : {X}
      }}{F}""",
    "a token and a maximal mesh": f"""
      sdy.mesh @one = <[], device_ids=[1]>
      func.func @main(%t: !stablehlo.token, %x: {X} {sharded('{"a"}, {?}')}) -> ({X}, !stablehlo.token) {{
        %0:2 = call @t(%t, %x) : (!stablehlo.token, {X}) -> (!stablehlo.token, {X})
        %1:2 = call @t(%0#0, %0#1) : (!stablehlo.token, {X}) -> (!stablehlo.token, {X})
        %2 = call @m(%1#1) {given("{?}, {?}")} : ({X}) -> {X}
        return %2, %1#0 : {X}, !stablehlo.token
      }}
      func.func private @t(%t: !stablehlo.token, %x: {X} {sharded('{?}, {"b", ?}')}) -> (!stablehlo.token, {X}) {{
        %0 = stablehlo.tanh %x : {X}
        return %t, %0 : !stablehlo.token, {X}
      }}
      func.func private @m(%x: {X} {{sdy.sharding = #sdy.sharding<@one, []>}}) -> {X} {{
        return %x : {X}
      }}""",
    "two meshes with equal names of axes": f"""
      sdy.mesh @mesh = <["a"=2, "b"=2, "c"=4]>
      sdy.mesh @other = <["a"=2, "z"=2]>
      func.func @main(%x: {X} {sharded('{"a"}, {?}')}) -> {X} {{
        %0 = call @g(%x) {given('{"a"}, {?}')} : ({X}) -> {X}
        return %0 : {X}
      }}
      func.func private @g(%p: {X}) -> {X} {{
        %0 = stablehlo.tanh %p {{sdy.sharding = #sdy.sharding_per_value<[<@other, [{{"a"}}, {{}}]>]>}} : {X}
        return %0 : {X}
      }}""",
    "priorities": f"""
      func.func @main(%x: {X} {sharded('{"a", ?}p1, {?}')}, %y: {X} {sharded('{"b", ?}, {"c", ?}p2')}) -> {X} {{
        %0 = call @g(%x, %y) {given('{"c", ?}p1, {?}')} : ({X}, {X}) -> {X}
        %1 = call @g(%y, %0) : ({X}, {X}) -> {X}
        return %1 : {X}
      }}
      func.func private @g(%p: {X}, %q: {X} {sharded('{?}, {"a", ?}p1')}) -> {X} {{
        %0 = stablehlo.add %p, %q : {X}
        return %0 : {X}
      }}""",
}

NAMED_PROGRAMS = {
    "named computations": f"""
      func.func @main(%x: {X} {sharded('{"a"}, {?}')}, %y: {X}) -> ({X}, {X}) {{
        %0 = sdy.named_computation<"n">(%x) (%p: {X}) {{
          %2 = stablehlo.tanh %p : {X}
          sdy.return %2 : {X}
        }} : ({X}) -> {X}
        %1:2 = sdy.named_computation<"main">(%0, %y) in_shardings=[<@mesh, [{{"a"}}, {{?}}]>, <@mesh, [{{?}}, {{"b"}}]>]
            out_shardings=[<@mesh, [{{?}}, {{"c"}}]>, <@mesh, [{{?}}, {{?}}]>] (%p: {X}, %q: {X}) {{
          %2 = sdy.named_computation<"n">(%p) (%r: {X}) {{
            %3 = stablehlo.tanh %r : {X}
            sdy.return %3 : {X}
          }} : ({X}) -> {X}
          sdy.return %2, %q : {X}, {X}
        }} {{tag = 1 : i32}} : ({X}, {X}) -> ({X}, {X})
        return %1#0, %1#1 : {X}, {X}
      }}""",
    "a named computation and a call": f"""
      func.func @main(%x: {X} {sharded('{"a"}, {?}')}) -> {X} {{
        %0 = sdy.named_computation<"f">(%x) out_shardings=[<@mesh, [{{?}}, {{"b"}}]>] (%p: {X}) {{
          %2 = func.call @f(%p) : ({X}) -> {X}
          sdy.return %2 : {X}
        }} : ({X}) -> {X}
        %1 = call @f(%0) : ({X}) -> {X}
        return %1 : {X}
      }}{F}""",
    "constants in named computations": f"""
      func.func @main(%x: {X} {sharded('{"a"}, {?}')}, %y: {X} {sharded('{"b"}, {?}')}) -> ({X}, {X}) {{
        %c = stablehlo.constant dense<2.0> : {X}
        %0 = sdy.named_computation<"n">(%c) (%p: {X}) {{
          %k = stablehlo.constant dense<1.0> : {X}
          %4 = stablehlo.add %p, %k : {X}
          %5 = stablehlo.add %4, %k : {X}
          sdy.return %5 : {X}
        }} : ({X}) -> {X}
        %1 = stablehlo.add %0, %x : {X}
        %2 = stablehlo.add %0, %y : {X}
        return %1, %2 : {X}, {X}
      }}""",
}

WHOLE = "a token and a maximal mesh"
"""jaxlib 0.12 refuses arguments of functions that are whole on one device, unless it removes the function."""
CASES = [(name, program, steps) for name, program in PROGRAMS.items() for steps in (DEFAULT, DEDUP)]
CASES.remove((WHOLE, PROGRAMS[WHOLE], DEDUP))
CASES += [(name, program, steps) for name, program in NAMED_PROGRAMS.items() for steps in (NAMED, DEDUP)]


def _id(value: object) -> str:
    named = {DEFAULT: "default", DEDUP: "dedup", NAMED: "named"}
    return named.get(value, "") if isinstance(value, tuple) else str(value).split("\n")[0]


def after_each(text: str, steps: Passes) -> list[str]:
    """The module after each step of ours, verified and read back by jaxlib each time."""
    module = parse(text)
    found = []
    for step in steps:
        _run(module, (step,))
        found.append(plain_text(parse(str(module))))
    return found


def _after_all(text: str, steps: Passes, compat: str = "shardy") -> str:
    """The module after all steps, verified after each."""
    module = parse(text)
    _run(module, steps, compat)
    return plain_text(module)


def _run(module: ir.Module, steps: Passes, compat: str = "shardy") -> None:
    with module.context, ir.Location.unknown(module.context), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        like_shardy = [step.with_options(compat=compat) for step in steps]
        run_pipeline(module.operation, like_shardy, after=lambda _, changed: changed.verify())


@cache
def expected_after_each() -> dict[tuple[str, Passes], list[str] | None]:
    """The same of the oracle, for all cases at once."""
    answers = run_each((program, list(map(oracle_text, steps))) for _, program, steps in CASES)
    return {(name, steps): answer for (name, _, steps), answer in zip(CASES, answers, strict=True)}


def _read_expected() -> dict[str, str]:
    """The final modules of all cases, as `write_expected` writes them."""
    blocks = EXPECTED.read_text().split("## ")[1:]
    return dict(block.split("\n", 1) for block in blocks)


def write_expected() -> None:
    """For a newer jaxlib: `python -c "import test_passes_calls as t; t.write_expected()"` in this directory."""
    blocks = [
        f"## {name}, {_id(steps)}\n{modules[-1]}" for (name, steps), modules in expected_after_each().items() if modules
    ]
    EXPECTED.write_text("".join(blocks))


@pytest.mark.parametrize(("name", "program", "steps"), CASES, ids=_id)
def test_the_pipelines_make_the_modules_that_the_newest_oracle_makes(name: str, program: str, steps: Passes) -> None:
    assert _after_all(program, NEWEST[steps], "shardy-0.12") == _read_expected()[f"{name}, {_id(steps)}"]


@pytest.mark.parametrize(("name", "program", "steps"), CASES, ids=_id)
def test_each_pass_makes_the_module_that_the_oracle_makes(name: str, program: str, steps: Passes) -> None:
    expected = expected_after_each()[name, steps]
    assert expected is not None, "the oracle fails"
    for step, ours, theirs in zip(steps, after_each(program, steps), expected, strict=True):
        assert ours == theirs, f"after {step}"


LEFT_OUT = ("sdy-save-module",)


@pytest.mark.parametrize("options", ["", "{dedup-functions-fully=true}"])
def test_the_pipelines_have_the_passes_of_the_oracle_in_its_order(options: str) -> None:
    full = bool(options)
    for name, ours in (
        ("sdy-propagation-pipeline", propagation_pipeline(dedup_functions_fully=full)),
        ("sdy-import-pipeline", import_pipeline(dedup_functions_fully=full)),
        ("sdy-export-pipeline", export_pipeline()),
    ):
        with parse("").context:
            takes_options = name != "sdy-export-pipeline"
            text = str(passmanager.PassManager.parse(f"builtin.module({name}{options if takes_options else ''})"))
        theirs = [step.name for step in written_passes(text) if step.name not in LEFT_OUT]
        assert [step.name for step in ours] == theirs


FEATURES = [
    ("while", "constant", "constraint"),
    ("priority", "constraint", "constant"),
    ("group", "while"),
    ("named", "constant", "group", "constraint"),
    ("named", "while", "priority"),
]


def _check_random(seeds: range) -> float:
    """The share of programs of which the oracle made something: it dies of priorities on dead ops."""
    cases = []
    for seed in seeds:
        features = FEATURES[seed % len(FEATURES)]
        text = RandomCallProgram(seed, features).text
        cases += [(seed, text, steps) for steps in (NAMED if "named" in features else DEFAULT, DEDUP)]
    expected = run_passes((text, ",".join(map(oracle_text, steps))) for _, text, steps in cases)
    for (seed, text, steps), theirs in zip(cases, expected, strict=True):
        if theirs is not None:
            assert _after_all(text, steps) == theirs, f"seed {seed}, {_id(steps)}\n{text}"
    return sum(text is not None for text in expected) / len(cases)


def fuzz(seed: int) -> dict[str, int]:
    _check_random(range(20 * seed, 20 * seed + 20))
    return {"oracle": 40}


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_random_programs_with_calls_become_what_the_oracle_makes_of_them(first: int) -> None:
    assert _check_random(range(first, first + 20)) > 0.9


@pytest.mark.slow
def test_many_random_programs_with_calls_become_what_the_oracle_makes_of_them() -> None:
    assert _check_random(range(1000, 2000)) > 0.9


@pytest.mark.parametrize("program", [*PROGRAMS.values(), *NAMED_PROGRAMS.values()], ids=[*PROGRAMS, *NAMED_PROGRAMS])
@pytest.mark.parametrize("steps", [DEFAULT, DEDUP], ids=_id)
def test_every_program_passes_the_pipelines_verified_after_each_pass(program: str, steps: Passes) -> None:
    """Also those of which the oracle fails, and with the oracle of any version."""
    final = after_each(program, steps)[-1]
    assert "?" not in final.replace("{?}p", "")
    assert "sdy.data_flow_edge" not in final
    assert "sharding_rule" not in final


def test_named_computations_of_one_name_that_compute_different_things_stay_two_functions() -> None:
    text = f"""
      func.func @main(%x: {X}) -> ({X}, {X}, {X}) {{
        %0 = sdy.named_computation<"n">(%x) (%p: {X}) {{
          %3 = stablehlo.tanh %p : {X}
          sdy.return %3 : {X}
        }} : ({X}) -> {X}
        %1 = sdy.named_computation<"n">(%x) (%p: {X}) {{
          %3 = stablehlo.abs %p : {X}
          sdy.return %3 : {X}
        }} : ({X}) -> {X}
        %2 = sdy.named_computation<"n">(%x) (%p: {X}) {{
          %3 = stablehlo.tanh %p : {X}
          sdy.return %3 : {X}
        }} : ({X}) -> {X}
        return %0, %1, %2 : {X}, {X}, {X}
      }}"""
    final = after_each(text, DEFAULT)[-1]
    assert re.findall(r"call (@\w+)", final) == ["@n", "@n_0", "@n"]


def test_calls_of_a_function_are_listed_level_by_level() -> None:
    text = f"""
      func.func @main(%x: {X}, %i: tensor<i32>) -> ({X}, {X}) {{
        %0 = "stablehlo.case"(%i) ({{
          %2 = func.call @f(%x) {{at = 2 : i32}} : ({X}) -> {X}
          stablehlo.return %2 : {X}
        }}, {{
          %2 = func.call @f(%x) {{at = 3 : i32}} : ({X}) -> {X}
          stablehlo.return %2 : {X}
        }}) : (tensor<i32>) -> {X}
        %1 = call @f(%x) {{at = 0 : i32}} : ({X}) -> {X}
        return %0, %1 : {X}, {X}
      }}
      func.func private @g(%x: {X}) -> {X} {{
        %0 = call @f(%x) {{at = 1 : i32}} : ({X}) -> {X}
        return %0 : {X}
      }}{F}"""
    module = parse(text)
    assert [call.int("at") for call in calls_by_callee(Graph(module.operation))["f"]] == [0, 1, 2, 3]


@pytest.mark.dear
@pytest.mark.parametrize("strategy", ["basic", "aggressive", "op-priority", "user-priority"])
def test_propagation_ends_where_functions_return_their_arguments_to_calls_of_them(strategy: str) -> None:
    text = f"""
      func.func @main(%x: {X} {sharded('{"a"}, {?}')}) -> {X} {{
        %0 = call @same(%x) : ({X}) -> {X}
        %1 = call @same(%0) : ({X}) -> {X}
        %2 = call @same(%1) : ({X}) -> {X}
        %3 = stablehlo.tanh %2 : {X}
        return %3 : {X}
      }}
      func.func private @same(%x: {X}) -> {X} {{
        %0 = sdy.sharding_constraint %x <@mesh, [{{?}}, {{"b"}}]> : {X}
        return %x : {X}
      }}"""
    propagate = Pass(f"sdy-{strategy}-propagate")
    assert "tanh %2 : tensor" in _after_all(text, (propagate,)), "the oracle dies of this one"
    steps = (Pass("sdy-add-func-data-flow-edges"), propagate)
    assert run_passes([(text, ",".join(map(str, steps)))]) == [_after_all(text, steps)]


@pytest.mark.parametrize("steps", [DEFAULT, DEDUP], ids=_id)
def test_recursion_is_an_error(steps: Passes) -> None:
    text = f"""
      func.func @main(%x: {X}) -> {X} {{
        %0 = call @main(%x) : ({X}) -> {X}
        return %0 : {X}
      }}"""
    with pytest.raises(ShardingError, match="@main calls itself"):
        _after_all(text, steps)


def test_a_function_without_a_body_is_an_error_but_for_passes_of_mlir() -> None:
    text = f"func.func private @f({X}) -> {X}"
    run_pipeline(parse(text).operation, "cse")
    with pytest.raises(UnsupportedError, match="@f is declared without a body"):
        run_pipeline(parse(text).operation, "close-shardings")
