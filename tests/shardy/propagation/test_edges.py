"""Data-flow edges written by hand: sinking leaves none, and what was sharded itself stays as open as its edge."""

from __future__ import annotations

import itertools

import pytest
from jax.extend.mlir import ir
from sdy_oracle import run_passes
from sharding_dump import parse, plain_text

from sdy_jax.shardy.passes.pipelines import run_pipeline

V = "tensor<8xf32>"
MESHES = """
sdy.mesh @mesh = <["a"=2, "b"=2, "c"=4]>
sdy.mesh @other = <["a"=2, "z"=2]>
"""
SINK, SINK_FUNC = "func.func(sdy-sink-data-flow-edges)", "func.func(sdy-sink-func-data-flow-edges)"
APPLY = "sdy-apply-sharding-constraints"


def ours(text: str, passes: str) -> str:
    module = parse(text)
    with module.context, ir.Location.unknown(module.context):
        run_pipeline(module.operation, passes)
        module.operation.verify()
    return plain_text(module)


def assert_equal(texts: list[str], passes: str) -> None:
    for text, expected in zip(texts, run_passes((text, passes) for text in texts), strict=True):
        assert expected is not None, text
        assert ours(text, passes) == expected, text


def computation(name: str, attributes: str, inner: str, edge: str) -> str:
    return f"""func.func @main(%x: {V}) -> {V} {{
      %0 = sdy.{name}(%x) {attributes} (%p: {inner}) {{
        {edge.replace("%VALUE", "%p").replace(V, inner)}
        %r = stablehlo.tanh %e : {inner}
        sdy.return %r : {inner}
      }} : ({V}) -> {V}
      return %0 : {V}
    }}"""


def programs(edge: str) -> dict[str, str]:
    """One edge each; `%VALUE` is what it is of."""
    given = 'in_shardings=[<@mesh, [{"b"}]>] out_shardings=[<@mesh, [{"b"}]>]'
    return {
        "argument of a loop": f"""func.func @main(%x: {V}, %n: tensor<i32>) -> {V} {{
          %0:2 = stablehlo.while(%p = %x, %q = %n) : {V}, tensor<i32>
          cond {{
            %t = stablehlo.compare LT, %q, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
            stablehlo.return %t : tensor<i1>
          }} do {{
            {edge.replace("%VALUE", "%p")}
            stablehlo.return %e, %q : {V}, tensor<i32>
          }}
          return %0#0 : {V}
        }}""",
        "argument of a function": f"""func.func @main(%x: {V}) -> {V} {{
          {edge.replace("%VALUE", "%x")}
          return %e : {V}
        }}""",
        "inside a branch": f"""func.func @main(%x: {V}, %i: tensor<i32>) -> {V} {{
          %0 = "stablehlo.case"(%i) ({{
            {edge.replace("%VALUE", "%x")}
            stablehlo.return %e : {V}
          }}) : (tensor<i32>) -> {V}
          return %0 : {V}
        }}""",
        "result of another op": f"""func.func @main(%x: {V}) -> {V} {{
          %0 = stablehlo.tanh %x : {V}
          {edge.replace("%VALUE", "%0")}
          return %e : {V}
        }}""",
        "argument of a named computation": computation('named_computation<"f">', "", V, edge),
        "argument of a named computation with shardings": computation('named_computation<"f">', given, V, edge),
        "argument of a manual computation": computation(
            "manual_computation", f'{given} manual_axes={{"b"}}', "tensor<4xf32>", edge
        ),
    }


@pytest.mark.parametrize("sharding", ["", 'sharding=<@mesh, [{"a", ?}]>'])
def test_sinking_leaves_no_edge_as_in_the_oracle(sharding: str) -> None:
    texts = [MESHES + text for text in programs(f"%e = sdy.data_flow_edge %VALUE {sharding} : {V}").values()]
    assert_equal(texts, SINK)
    assert not any("data_flow_edge" in ours(text, SINK) for text in texts)


def per_value(*dims: str) -> str:
    return f" {{sdy.sharding = #sdy.sharding_per_value<[{', '.join(dims)}]>}}" if dims else ""


EDGES = {"missing": None, "open": "", "a": per_value('<@mesh, [{"a", ?}]>'), "z": per_value('<@other, [{"z"}]>')}
OF_CALLS = ("", per_value('<@mesh, [{"b"}]>', '<@mesh, [{"c"}]>'), per_value('<@other, [{"z"}]>', '<@mesh, [{"c"}]>'))
OF_ARGUMENTS = ("", "<@mesh, [{?}]>", '<@mesh, [{"b"}]>', '<@other, [{"z"}]>')


def with_func_edges(call: str, results: tuple[str, str], given: tuple[str, str], arguments: tuple[str, str]) -> str:
    def edges(names: list[str], kinds: tuple[str, str]) -> tuple[str, str]:
        lines = [
            f"%e{i} = sdy.func_data_flow_edge {names[i]}{EDGES[kind]} : {V}\n"
            for i, kind in enumerate(kinds)
            if EDGES[kind] is not None
        ]
        left = [
            name if EDGES[kind] is None else f"%e{i}" for i, (name, kind) in enumerate(zip(names, kinds, strict=True))
        ]
        return "".join(lines), f"return {', '.join(left)} : {V}, {V}"

    outside, returned = edges(["%0#0", "%0#1"], results)
    inside, passed = edges(["%p", "%q"], arguments)
    head = ", ".join(
        f"{name}: {V}{f' {{sdy.sharding = #sdy.sharding{s}}}' if s else ''}"
        for name, s in zip(("%p", "%q"), given, strict=True)
    )
    return f"""{MESHES}
    func.func @main(%x: {V}) -> ({V}, {V}) {{
      %0:2 = call @f(%x, %x){call} : ({V}, {V}) -> ({V}, {V})
      {outside}{returned}
    }}
    func.func private @f({head}) -> ({V}, {V}) {{
      {inside}{passed}
    }}"""


def test_calls_and_arguments_become_as_open_as_their_edges() -> None:
    none = ("missing", "missing")
    texts = [with_func_edges(c, kinds, ("", ""), none) for c in OF_CALLS for kinds in itertools.product(EDGES, EDGES)]
    texts += [
        with_func_edges("", none, given, kinds)
        for given in itertools.product(OF_ARGUMENTS, OF_ARGUMENTS[:3])
        for kinds in itertools.product(EDGES, EDGES)
    ]
    assert_equal(texts, SINK_FUNC)


def test_a_call_whose_edge_has_no_sharding_becomes_open() -> None:
    text = with_func_edges(OF_CALLS[1], ("open", "missing"), ("", ""), ("missing", "missing"))
    assert per_value("<@mesh, [{?}]>", '<@mesh, [{"c"}]>') in ours(text, SINK_FUNC)


SHARDINGS = ("", "[{?}]", '[{?}], replicated={"c"}', '[{?}], unreduced={"c"}', "[{?}p1]", '[{"a", ?}]', "[{}]")
CONSTRAINTS = ('[{"b"}]', '[{"b", ?}]', "[{}]", '[{"b"}], unreduced={"c"}', '[{}], replicated={"b"}')


def constrained(sharding: str, constraint: str) -> list[str]:
    """A constraint on the result of an op, on an argument, on edges of both kinds, and one by a manual computation."""
    one = f"#sdy.sharding<@mesh, {sharding}>"
    attribute = per_value(f"<@mesh, {sharding}>") if sharding else ""
    on_edge = f"sharding=<@mesh, {sharding}>" if sharding else ""
    use = f"%1 = sdy.sharding_constraint %0 <@mesh, {constraint}> : {V}\n return %1, %0 : {V}, {V}"
    manual = f"""%1 = sdy.manual_computation(%0) in_shardings=[<@mesh, {constraint}>]
      out_shardings=[<@mesh, {constraint}>] manual_axes={{}} (%p: {V}) {{
        sdy.return %p : {V}
      }} : ({V}) -> {V}
      return %1, %0 : {V}, {V}"""
    head = f"{MESHES} func.func @main(%x: {V}) -> ({V}, {V}) {{\n"
    barrier = f"%b = stablehlo.optimization_barrier %x : {V}\n %0 = sdy.data_flow_edge %b {on_edge} : {V}\n"
    call = f"%b = call @f(%x){attribute} : ({V}) -> {V}\n %0 = sdy.func_data_flow_edge %b{attribute} : {V}\n"
    callee = f"\nfunc.func private @f(%0: {V}) -> {V} {{ return %0 : {V} }}"
    return [
        f"{head} %0 = stablehlo.tanh %x{attribute} : {V}\n {use} }}",
        f"{head} %0 = stablehlo.tanh %x{attribute} : {V}\n {manual} }}",
        f"{head} {barrier} {use} }}",
        f"{head} {call} {use} }}{callee}",
        head.replace("%x", "%0").replace(V, f"{V} {{sdy.sharding = {one}}}" if sharding else V, 1) + f"{use} }}",
    ]


def test_constraints_apply_to_what_is_open_and_to_edges_of_calls() -> None:
    texts = [t for sharding in SHARDINGS for constraint in CONSTRAINTS for t in constrained(sharding, constraint)]
    assert_equal(texts, APPLY)


def test_a_constraint_applies_to_what_is_stated_to_be_open() -> None:
    """As in jaxlib 0.12; older ones leave such an argument open."""
    text = constrained("[{?}]", '[{"b"}]')[-1]
    closed = '%arg0: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"b"}]>}'
    assert closed in ours(text, f"{APPLY}{{compat=shardy-0.12}}")
    assert closed not in ours(text, f"{APPLY}{{compat=shardy-0.10}}")


RESULTS = f"""{MESHES}
  sdy.mesh @one = <[], device_ids=[1]>
  func.func @NAME(%x: {V} {{sdy.sharding = #sdy.sharding<@mesh, [{{"a"}}]>}}, %y: {V},
      %m: {V} {{sdy.sharding = #sdy.sharding<@one, []>}}) -> ({V}, {V}, {V}, {V},
      {V} {{mhlo.tag = "t", sdy.sharding = #sdy.sharding<@mesh, [{{"b"}}]>}}) {{
    %0 = stablehlo.tanh %x : {V}
    return %x, %y, %m, %0, %x : {V}, {V}, {V}, {V}, {V}
  }}"""


@pytest.mark.parametrize("name", ["main", "f"])
def test_results_of_functions_say_what_the_returned_values_say(name: str) -> None:
    other = f"func.func @main(%x: {V}) {{ return }}" if name != "main" else ""
    assert_equal([RESULTS.replace("NAME", name) + other], "sdy-propagate-to-func-results")


def test_results_of_main_are_filled_in_where_nothing_is_stated() -> None:
    """As in jaxlib 0.12; older ones leave main as it is."""
    types = ours(RESULTS.replace("NAME", "main"), "sdy-propagate-to-func-results{compat=shardy-0.12}").split("-> (")[1]
    assert types.startswith(
        'tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"a"}]>}, tensor<8xf32>, tensor<8xf32>'
    )


def test_a_manual_axis_behind_a_free_one_does_not_enter() -> None:
    """jaxlib's propagation never ends here, nor did ours: the free axis was lost with the manual one, and found."""
    text = """
sdy.mesh @mesh = <["a"=4, "b"=2, "c"=2]>
func.func @main(%x: tensor<32xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"c", "b", ?}]>}) -> tensor<32xf32> {
  %0 = sdy.manual_computation(%x) in_shardings=[<@mesh, [{"c", ?}]>] out_shardings=[<@mesh, [{"c", ?}]>]
      manual_axes={"b"} (%y: tensor<32xf32>) {
    %1 = stablehlo.negate %y : tensor<32xf32>
    sdy.return %1 : tensor<32xf32>
  } : (tensor<32xf32>) -> tensor<32xf32>
  return %0 : tensor<32xf32>
}
"""
    found = ours(text, "add-data-flow-edges,op-priority-propagate,sink-data-flow-edges")
    assert found.count('in_shardings=[<@mesh, [{"c", ?}]>]') == 1
    assert 'stablehlo.negate %arg1 {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{"c", ?}]>]>}' in found
