"""Valid modules, and for each rule of the dialect the changes that break it.

A `Break` is a module and a replacement in its text. The same replacement in the module's attributes makes the broken
module without a parser: `broken_in_python`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy
from jax.interpreters import mlir

MESHES = """sdy.mesh @m = <["a"=2, "b"=4, "c"=16, "d"=12, "one"=1]>
sdy.mesh @n = <["a"=2, "b"=4]>
sdy.mesh @permuted = <["p"=4], device_ids=[1, 0, 2, 3]>
sdy.mesh @max = <[], device_ids=[0]>
sdy.mesh @empty = <[]>
"""


def function(*lines: str, arguments: str = "%x: tensor<8x8xf32>") -> str:
    return f"{MESHES}func.func @f({arguments}) {{\n" + "".join(f"  {line}\n" for line in lines) + "  return\n}\n"


def argument(sharding: str, type_: str = "tensor<8x8xf32>") -> str:
    return function(arguments=f"%x: {type_} {{sdy.sharding = #sdy.sharding<{sharding}>}}")


def custom_call(rule: str, types: str = "(tensor<8x16xf32>, tensor<16x4xf32>) -> tensor<8x4xf32>") -> str:
    inputs = types.split(" -> ")[0].strip("()").split(", ")
    names = [f"%x{i}" for i in range(len(inputs))]
    op = f"%0 = stablehlo.custom_call @foo({', '.join(names)}) {{sdy.sharding_rule = #sdy.op_sharding_rule<{rule}>}}"
    return function(f"{op} : {types}", arguments=", ".join(f"{n}: {t}" for n, t in zip(names, inputs, strict=True)))


def manual(axes: str, sharding: str, inner: str, *lines: str, outer: str = "tensor<8x8xf32>") -> str:
    """A manual computation of one value, with the same sharding outside of it before and after."""
    return function(
        f"%0 = sdy.manual_computation(%x) in_shardings=[<{sharding}>] out_shardings=[<{sharding}>]"
        f" manual_axes={{{axes}}} (%p: {inner}) {{",
        *lines,
        f"  sdy.return %p : {inner}",
        f"}} : ({outer}) -> {outer}",
        arguments=f"%x: {outer}",
    )


def edges(text: str) -> str:
    attributes = (
        'sdy.sharding = #sdy.sharding_per_value<[<@m, [{"a"}, {}]>]>, '
        f"sdy.propagation_edges = #sdy.propagation_edges<[{text}]>"
    )
    argument_sharding = '{sdy.sharding = #sdy.sharding<@m, [{"a"}, {?}]>}'
    return function(
        f"%0 = stablehlo.add %x, %x {{{attributes}}} : tensor<8x8xf32>",
        arguments=f"%x: tensor<8x8xf32> {argument_sharding}",
    )


CONSTRAINT = function("%0 = sdy.sharding_constraint %x <@m, [{}, {}]> : tensor<8x8xf32>")
RESHARD = function("%0 = sdy.reshard %x <@m, [{}, {}]> : tensor<8x8xf32>")
EDGE = function(
    "%0 = stablehlo.tanh %x : tensor<8x8xf32>",
    "%1 = sdy.data_flow_edge %0 sharding=<@m, [{}, {}]> : tensor<8x8xf32>",
)
FUNCTION_EDGE = function("%0 = sdy.func_data_flow_edge %x : tensor<8x8xf32>")
COLLECTIVE = function('%0 = sdy.all_slice [{}, {"a"}] %x out_sharding=<@m, [{}, {"a"}]> : tensor<8x8xf32>')
GATHER = function(
    '%0 = sdy.all_slice [{}, {"a", "c"}] %x out_sharding=<@m, [{}, {"a", "c"}]> : tensor<8x8xf32>',
    '%1 = sdy.all_gather [{}, {"c":(4)4}] %0 out_sharding=<@m, [{?}, {"a", "c":(1)4}]> : tensor<8x8xf32>',
    '%2 = sdy.all_gather [{}, {"c":(1)4}] %1 out_sharding=<@m, [{}, {"a"}]> : tensor<8x8xf32>',
)
EXCHANGE = function(
    '%0 = sdy.reshard %x <@m, [{"c", "b"}, {}, {}, {"a"}], replicated={"d"}> : tensor<8x8x8x8xf32>',
    '%1 = sdy.all_to_all [{"b"}: 0->1, {"a"}: 3->2] %0 out_sharding=<@m, [{"c"}, {"b"}, {"a"}, {}]>'
    " : tensor<8x8x8x8xf32>",
    arguments="%x: tensor<8x8x8x8xf32>",
)
PERMUTE = function(
    '%0 = sdy.reshard %x <@n, [{"b"}, {}]> : tensor<8x8xf32>',
    '%1 = sdy.collective_permute %0 out_sharding=<@n, [{"b":(2)2, "a"}, {}]> : tensor<8x8xf32>',
)
REDUCE = function(
    '%0 = sdy.reshard %x <@m, [{"b"}, {}], replicated={"one"}, unreduced={"a", "d"}> : tensor<8x8xf32>',
    '%1 = sdy.all_reduce {"a", "c"} %0 out_sharding=<@m, [{"b"}, {}], unreduced={"d"}> : tensor<8x8xf32>',
    '%2 = sdy.reduce_scatter [{"d"}, {}] %1 out_sharding=<@m, [{"b", "d"}, {}]> : tensor<8x8xf32>',
)
CONVERT = function(
    '%0 = sdy.reshard %x <@m, [{"b"}, {"c"}], unreduced={"d"}> : tensor<8x8xf32>',
    '%1 = sdy.replicated_to_unreduced {"a"} %0 out_sharding=<@m, [{"b"}, {"c"}], unreduced={"a", "d"}>'
    " : tensor<8x8xf32>",
    '%2 = sdy.sharded_to_unreduced [{}, {"c"}] %1 out_sharding=<@m, [{"b"}, {}], unreduced={"a", "c", "d"}>'
    " : tensor<8x8xf32>",
)
RESULT = function("%0 = stablehlo.tanh %x {sdy.sharding = #sdy.sharding_per_value<[<@m, [{}, {}]>]>} : tensor<8x8xf32>")
NO_RESULT = function(
    "stablehlo.custom_call @foo(%x) {has_side_effect = true, sdy.sharding = #sdy.sharding_per_value<[<@max, []>]>}"
    " : (tensor<8x8xf32>) -> ()"
)
FUNCTION_RESULT = (
    MESHES + "func.func @f(%x: tensor<8x8xf32>) -> (tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@m, [{}, {}]>}) {\n"
    "  return %x : tensor<8x8xf32>\n}\n"
)
ARGUMENT = argument("@m, [{}, {}]")
TOKEN = argument("@m, []", "!stablehlo.token")
NAMED = function(
    '%0 = sdy.named_computation<"foo">(%x) in_shardings=[<@m, [{}, {}]>] out_shardings=[<@m, [{"c"}, {}]>]'
    " (%p: tensor<8x8xf32>) {",
    "  sdy.return %p : tensor<8x8xf32>",
    "} : (tensor<8x8xf32>) -> tensor<8x8xf32>",
)
MANUAL = manual('"a"', '@m, [{"a"}, {}]', "tensor<4x8xf32>")
MANUAL_ODD = manual('"a"', '@m, [{"a"}, {}]', "tensor<3x8xf32>", outer="tensor<6x8xf32>")
INSIDE = manual(
    '"a"',
    '@m, [{"a"}, {}]',
    "tensor<4x8xf32>",
    "  %q = stablehlo.tanh %p {sdy.sharding = #sdy.sharding_per_value<[<@m, [{}, {}]>]>} : tensor<4x8xf32>",
    '  %r = sdy.sharding_constraint %q <@m, [{}, {}], replicated={"one"}> : tensor<4x8xf32>',
    '  %s = sdy.manual_computation(%r) in_shardings=[<@m, [{}, {"b", ?}]>] out_shardings=[<@m, [{}, {"b"}]>]'
    ' manual_axes={"b"} (%t: tensor<4x2xf32>) {',
    '    %u = sdy.sharding_constraint %t <@m, [{}, {?}], unreduced={"one"}> : tensor<4x2xf32>',
    "    sdy.return %u : tensor<4x2xf32>",
    "  } : (tensor<4x8xf32>) -> tensor<4x8xf32>",
)
RULE = custom_call("([i, k], [k, j])->([i, j]) {i=8, j=4, k=16}")
ONE_FACTOR = custom_call("([i])->([i]) {i=8}", "(tensor<8xf32>) -> tensor<8xf32>")
SPLIT_FACTOR = custom_call("([ij])->([i, j]) {i=4, j=2}", "(tensor<8xf32>) -> tensor<4x2xf32>")
EDGES = edges('{step-1 = [{"a" = operand-0 -> [result-0]}]}, {step-2 = [{"a" = result-0 -> [operand-1]}]}')
BARRIER = function("%0 = sdy.propagation_barrier %x allowed_direction=FORWARD : tensor<8x8xf32>")

VALID = (
    *(
        CONSTRAINT,
        RESHARD,
        EDGE,
        COLLECTIVE,
        RESULT,
        NO_RESULT,
        FUNCTION_RESULT,
        ARGUMENT,
        TOKEN,
        NAMED,
        MANUAL,
        INSIDE,
    ),
    *(GATHER, EXCHANGE, PERMUTE, REDUCE, CONVERT),
    *(FUNCTION_EDGE, MANUAL_ODD, RULE, ONE_FACTOR, SPLIT_FACTOR, EDGES, BARRIER),
)


@dataclass(frozen=True)
class Break:
    """A rule, a valid module, and a replacement that breaks the rule; `text_only` where no attribute says it."""

    rule: str
    module: str
    old: str
    new: str
    text_only: bool = False

    @property
    def text(self) -> str:
        assert self.old in self.module
        return self.module.replace(self.old, self.new)

    def __str__(self) -> str:
        return f"{self.rule}: {self.new}"


def _shardings(rule: str, *texts: str) -> Iterator[Break]:
    """The same mistake wherever a sharding of an 8x8 tensor on @m may stand."""
    for module in (ARGUMENT, RESULT, FUNCTION_RESULT, CONSTRAINT, RESHARD, EDGE, NAMED):
        for text in texts:
            yield Break(rule, module, "@m, [{}, {}]", text)


def _each(rule: str, module: str, old: str, *news: str) -> Iterator[Break]:
    return (Break(rule, module, old, new) for new in news)


BREAKS: tuple[Break, ...] = (
    *_each("M1", MESHES, '"a"=2, "b"=4]', '"a"=0, "b"=4]', '"a"=2, "b"=-4]'),
    *_each("M2", MESHES, '"a"=2, "b"=4]', '"a"=2, "a"=4]'),
    *_each("M3", MESHES, "[1, 0, 2, 3]", "[-1, 0, 2, 3]"),
    *_each("M3", MESHES, "<[], device_ids=[0]>", "<[], device_ids=[-1]>"),
    *_each("M4", MESHES, "<[], device_ids=[0]>", "<[], device_ids=[0, 1]>"),
    *_each("M5", MESHES, "[1, 0, 2, 3]", "[1, 0]", "[1, 0, 2, 3, 4]"),
    *_each("M6", MESHES, "[1, 0, 2, 3]", "[1, 0, 2, 4]", "[1, 1, 2, 3]"),
    *_shardings(
        "A1",
        '@m, [{"x"}, {}]',
        '@m, [{}, {"x":(1)2}]',
        '@m, [{}, {}], replicated={"x"}',
        '@m, [{}, {}], unreduced={"x"}',
        '@empty, [{"a"}, {}]',
        'mesh<["a"=2]>, [{"b"}, {}]',
    ),
    *_shardings(
        "A2",
        '@m, [{"a"}, {"a"}]',
        '@m, [{"a", "a"}, {}]',
        '@m, [{"b":(1)2}, {"b":(1)2}]',
        '@m, [{"a"}, {}], replicated={"a"}',
        '@m, [{}, {}], replicated={"a"}, unreduced={"a"}',
    ),
    *_shardings("A3", '@m, [{"b", "b":(1)2}, {}]', '@m, [{"b"}, {"b":(2)2}]'),
    *_shardings("A4", '@m, [{"c":(1)2, "c":(2)2}, {}]', '@m, [{}, {}], replicated={"c":(1)2, "c":(2)2}'),
    *_shardings("A5", '@m, [{"b":(0)2}, {}]', '@m, [{"b":(-1)2}, {}]'),
    *_shardings("A6", '@m, [{"b":(2)1}, {}]', '@m, [{"b":(2)0}, {}]', '@m, [{"b":(2)-1}, {}]'),
    *_shardings("A7", '@m, [{"b":(4)2}, {}]', '@m, [{"b":(1)3}, {}]', '@m, [{"d":(3)8}, {}]'),
    *_shardings("A8", '@m, [{"b":(1)4}, {}]'),
    *_shardings("A9", '@m, [{"c":(1)4}, {"c":(2)4}]', '@m, [{"c":(2)8}, {}], replicated={"c":(4)2}'),
    *_shardings("A11", '@m, [{}, {}], replicated={"b", "a"}', '@m, [{}, {}], replicated={"c":(2)2, "c":(1)2}'),
    *_shardings("A12", '@m, [{}, {}], unreduced={"c", "b"}'),
    *_shardings("S1", '@m, [{"a"}]', "@m, [{}, {}, {}]", "@m, []"),
    *_shardings("S2", "@none, [{}, {}]"),
    *_shardings("S3", "@max, [{}, {}]", '@max, [], replicated={"a"}', "mesh<[], device_ids=[3]>, [{}, {}]"),
    *_shardings("S6", "@m, [{}p1, {}]"),
    *_each("S4", TOKEN, "@m, []", "@m, [{}]", '@m, [], replicated={"a"}', '@m, [], unreduced={"a"}'),
    *_each("S8", INSIDE, "[<@m, [{}, {}]>]", '[<@m, [{"a"}, {}]>]', '[<@m, [{}, {}], unreduced={"a"}>]'),
    *_each("S8", INSIDE, 'replicated={"one"}', 'replicated={"a"}'),
    *_each("S8", INSIDE, '{"b", ?}', '{"b", "a"}'),
    *_each("S8", INSIDE, 'unreduced={"one"}', 'unreduced={"a"}', 'unreduced={"b"}', 'unreduced={"b":(2)2}'),
    *_each("S8", INSIDE, '<@m, [{}, {?}], unreduced={"one"}>', '<@n, [{}, {"a"}]>'),
    *_each("S9", RESULT, "#sdy.sharding_per_value<[<@m, [{}, {}]>]>", "#sdy.sharding<@m, [{}, {}]>", "3 : i32"),
    *_each("S9", RESULT, "[<@m, [{}, {}]>]", "[]", "[<@m, [{}, {}]>, <@m, [{}, {}]>]"),
    *_each("S9", ARGUMENT, "#sdy.sharding<@m, [{}, {}]>", '"x"', "#sdy.sharding_per_value<[<@m, [{}, {}]>]>"),
    *_each("S9", FUNCTION_RESULT, "#sdy.sharding<@m, [{}, {}]>", '"x"'),
    *_each("S9", NO_RESULT, "[<@max, []>]", "[<@max, []>, <@max, []>]"),
    *_each("S3", NO_RESULT, "[<@max, []>]", "[<@m, [{}]>]", '[<@m, [], replicated={"a"}>]'),
    *_each("S2", NO_RESULT, "[<@max, []>]", "[<@none, []>]"),
    *_each("A1", COLLECTIVE, "out_sharding=<@m", "out_sharding=<@permuted"),
    *_each("C3", PERMUTE, 'out_sharding=<@n, [{"b":(2)2, "a"}', 'out_sharding=<@m, [{"b"}'),
    *_each("C3", REDUCE, 'out_sharding=<@m, [{"b"}, {}], unreduced={"d"}>', 'out_sharding=<@n, [{"b"}, {}]>'),
    *_each("C4", GATHER, '[{}, {"c":(4)4}]', '[{"c":(4)4}]', '[{}, {}, {"c":(4)4}]'),
    *_each("C5", REDUCE, '{"a", "c"}', '{"c", "a"}'),
    *_each("C8", GATHER, '[{}, {"c":(4)4}]', '[{}, {"a"}]', '[{}, {"c":(1)4}]', '[{"c":(4)4}, {}]'),
    *_each("C8", EXCHANGE, '[{"b"}: 0', '[{"c"}: 0'),
    *_each("C8", CONVERT, '[{}, {"c"}]', '[{"c"}, {}]'),
    *_each("C9", GATHER, '[{?}, {"a", "c":(1)4}]', '[{"a"}, {"c":(1)4}]'),
    *_each("C9", EXCHANGE, '[{"c"}, {"b"}, {"a"}, {}]', '[{"c", "b"}, {}, {"a"}, {}]'),
    *_each("C9", REDUCE, '{"b", "d"}', '{"d", "b"}', '{"b"}'),
    *_each("C10", EXCHANGE, "0->1", "0->4", "0->2", "0->0"),
    *_each("C10", EXCHANGE, '{"b"}: 0->1, {"a"}: 3->2', '{"a"}: 3->2, {"b"}: 0->1'),
    *_each("C11", PERMUTE, '[{"b":(2)2, "a"}, {}]', '[{"a"}, {}]', '[{}, {"b"}]'),
    *_each("C12", REDUCE, '{"a", "c"}', '{"a", "b"}', '{"a", "c", "d"}', '{"a", "b":(1)2}', '{"a", "one"}'),
    *_each("C14", CONVERT, 'unreduced={"a", "c", "d"}', 'unreduced={"a", "d"}'),
    *_each("A1", MANUAL, 'in_shardings=[<@m, [{"a"}', 'in_shardings=[<@m, [{"x"}'),
    *_each("S1", MANUAL, 'out_shardings=[<@m, [{"a"}, {}]', 'out_shardings=[<@m, [{"a"}]'),
    *_each("O2b", MANUAL, 'in_shardings=[<@m, [{"a"}, {}]>]', "in_shardings=[]"),
    *_each("O2b", MANUAL, 'out_shardings=[<@m, [{"a"}, {}]>]', 'out_shardings=[<@m, [{"a"}, {}]>, <@m, [{}, {}]>]'),
    *_each("O2c", MANUAL, '<@m, [{"a"}, {}]>]', '<@m, [{"b", "a"}, {}]>]'),
    *_each("O2c", INSIDE, 'out_shardings=[<@m, [{}, {"b"}]>]', 'out_shardings=[<@m, [{}, {"c", "b"}]>]'),
    *_each("O2d", MANUAL_ODD, '{"a"}', '{"b"}'),
    *_each("O2e", MANUAL, 'out_shardings=[<@m, [{"a"}, {}]>]', 'out_shardings=[<@m, [{}, {"a"}]>]'),
    *_each("O2e", MANUAL, 'in_shardings=[<@m, [{"a"}, {}]>]', "in_shardings=[<@m, [{}, {}]>]"),
    *_each("O2e", MANUAL, 'manual_axes={"a"}', "manual_axes={}"),
    *_each("O2f", MANUAL, "out_shardings=[<@m", "out_shardings=[<@n"),
    *_each("O2g", MANUAL, 'manual_axes={"a"}', 'manual_axes={"a", "x"}'),
    *_each("O2h", INSIDE, 'manual_axes={"b"}', 'manual_axes={"b", "a"}'),
    *_each("O3", NAMED, "in_shardings=[<@m, [{}, {}]>]", "in_shardings=[]"),
    *_each("O3", NAMED, '[<@m, [{"c"}, {}]>]', '[<@m, [{"c"}, {}]>, <@m, [{}, {}]>]'),
    *_each("R1", RULE, "([i, k], [k, j])", "([i, k])"),
    *_each("R1", RULE, "->([i, j])", "->([i, j], [i, j])"),
    *_each("R1", RULE, "#sdy.op_sharding_rule<([i, k], [k, j])->([i, j]) {i=8, j=4, k=16}>", "3 : i32"),
    *_each("R2", RULE, "->([i, j])", "->([i])"),
    *_each("R2", RULE, "([i, k], [k, j])", "([i, k], [k])"),
    *_each("R3", RULE, "([i, k], [k, j])", "([, k], [k, j])"),
    *_each("R4", RULE, "{i=8, j=4, k=16}", "{i=8, j=4}"),
    *_each("R5", RULE, "([i, k], [k, j])", "([i, i], [k, j])", "([ik, k], [k, j])", "([ii, k], [k, j])"),
    *_each(
        "R6", RULE, "([i, k], [k, j])->([i, j]) {i=8, j=4, k=16}", "([il, k], [k, j])->([i, j]) {i=8, j=4, k=16, l=1}"
    ),
    *_each("R6", SPLIT_FACTOR, "{i=4, j=2}", "{i=4, j=1}"),
    *_each("R7", RULE, "{i=8, j=4, k=16}", "{i=8, j=4, k=16, l=2}"),
    *_each(
        "R8",
        RULE,
        "k=16}",
        "k=16} reduction={l}",
        "k=16} permutation={j, i}",
        "k=16} need_replication={i, i}",
        "k=16} blocked_propagation={l}",
        "k=16} blocked_propagation={k, i}",
    ),
    *_each("R9", RULE, "k=16}", "k=16} need_replication={i} permutation={i}", "k=16} reduction={k} permutation={k}"),
    *_each("R10", RULE, "k=16}", "k=16} reduction={i}"),
    *_each("O2a", MANUAL, 'out_shardings=[<@m, [{"a"}, {}]>]', "out_shardings=[<@max, []>]"),
    *_each("D1", EDGES, "-> [operand-1]", "-> [operand--1]"),
    *_each("D1", EDGES, "result-0 -> [operand-1]", "result-0 -> [operand-2]", "result-1 -> [operand-1]"),
    *_each("D1", EDGES, '{"a" = operand-0', '{"x" = operand-0'),
    *_each("D1", EDGES, '<[<@m, [{"a"}, {}]>]>', '<[<@n, [{"a"}, {}]>]>'),
    # What cannot be built from other attributes, for they do not parse, or is no attribute.
    *(
        Break(*entry, text_only=True)
        for entry in (
            ("M2", ARGUMENT, "@m, [{}, {}]", 'mesh<["q"=2, "q"=2]>, [{"q"}, {}]'),
            ("M5", RESULT, "@m, [{}, {}]", 'mesh<["q"=2], device_ids=[1]>, [{"q"}, {}]'),
            ("S4", TOKEN, "!stablehlo.token", "tensor<*xf32>"),
            ("S5", TOKEN, "!stablehlo.token", "tuple<tensor<8xf32>, tensor<8xf32>>"),
            ("S5", TOKEN, "!stablehlo.token", "tuple<>"),
            ("O1", BARRIER, "FORWARD", "BOTH"),
            ("O2b", MANUAL, "sdy.return %p : tensor<4x8xf32>", "sdy.return %p, %p : tensor<4x8xf32>, tensor<4x8xf32>"),
            ("O2b", MANUAL, "(%p: tensor<4x8xf32>)", "(%p: tensor<4x8xf32>, %q: tensor<4x8xf32>)"),
            ("O2e", MANUAL, "tensor<4x8xf32>", "tensor<4x8xf16>"),
            ("O2e", MANUAL, "tensor<4x8xf32>", "tensor<4xf32>"),
            ("O3", NAMED, "%p: tensor<8x8xf32>", "%p: tensor<8x8xf32>, %q: tensor<8x8xf32>"),
            ("O3", NAMED, "return %p : tensor<8x8xf32>", "return %p, %p : tensor<8x8xf32>, tensor<8x8xf32>"),
            (
                "O3",
                NAMED,
                "(%p: tensor<8x8xf32>) {",
                "(%q: tensor<f32>) { %p = stablehlo.constant dense<0.> : tensor<8x8xf32>",
            ),
            ("O4", EDGE, "tensor<8x8xf32>", "tensor<?x8xf32>"),
            ("O4", EDGE, "tanh %x", "tanh %x : tensor<8x8xf32>\n  %2 = stablehlo.negate %0"),
            ("O4", EDGE, "stablehlo.tanh %x", "sdy.reshard %x <@m, [{}, {}]>"),
            ("O5", FUNCTION_EDGE, "tensor<8x8xf32>", "tensor<?x8xf32>"),
            ("O5", FUNCTION_EDGE, "edge %x", "edge %x : tensor<8x8xf32>\n  %1 = stablehlo.negate %x"),
            ("O5", FUNCTION_EDGE, "  %0", "  %1 = stablehlo.negate %x : tensor<8x8xf32>\n  %0"),
            ("R1", RULE, "->([i, j])", "->()"),
            ("R1", RULE, "([i, k], [k, j])", "()"),
            ("R2", ONE_FACTOR, "tensor<8xf32>", "tensor<?xf32>"),
            ("R2", ONE_FACTOR, "tensor<8xf32>", "tensor<*xf32>"),
            ("R3", RULE, "([i, k], [k, j])", "([*, k], [k, j])"),
            ("R12", RULE, "{i=8, j=4, k=16}", "{i=8, k=16, j=4}"),
            ("C1", COLLECTIVE, "all_slice", "all_gather"),
            ("C10", EXCHANGE, '{"b"}: 0->1, {"a"}: 3->2', ""),
            ("C13", CONVERT, 'unreduced {"a"}', "unreduced {}"),
            ("C13", CONVERT, 'unreduced {"a"}', 'unreduced {"d"}'),
            ("D1", EDGES, "step-2", "step-1"),
            ("D1", EDGES, "step-2", "step--2"),
            ("D1", EDGES, "-> [operand-1]", "-> [operand-1, operand-1]"),
            ("D1", EDGES, "-> [operand-1]", "-> [operand-1, result-0]"),
        )
    ),
)


def parsed(text: str) -> ir.Module:
    context = mlir.make_ir_context()
    with context, ir.Location.unknown(context):
        return ir.Module.parse(text, context)


def broken_in_python(break_: Break) -> ir.Module:
    """The broken module, made from the valid one by changing attributes."""
    module = parsed(break_.module)
    changed = sum([_change(op, break_) for op in all_ops(module.operation)])
    assert changed, f"no attribute has {break_.old}"
    return module


def all_ops(op: ir.Operation) -> Iterator[ir.Operation]:
    yield op
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield from all_ops(inner.operation)


# How the op's text writes an attribute: without this, and after `name=`.
_WRAPPED = {
    "in_shardings": ("#sdy.sharding_per_value<", ">"),
    "out_shardings": ("#sdy.sharding_per_value<", ">"),
    "manual_axes": ("#sdy<manual_axes", ">"),
    "sharding": ("#sdy.sharding", ""),
    "out_sharding": ("#sdy.sharding", ""),
}


def _change(op: ir.Operation, break_: Break) -> int:
    count = 0
    for key in set(op.attributes) - {"sym_name", "function_type"}:
        prefix, suffix = _WRAPPED.get(key, ("", ""))
        name = f"{key}=" if prefix else ""
        text = name + str(op.attributes[key]).removeprefix(prefix).removesuffix(suffix)
        if break_.old in text:
            new = text.replace(break_.old, break_.new).removeprefix(name)
            op.attributes[key] = _attribute(prefix + new + suffix, op.context)
            count += 1
    return count


def _attribute(text: str, context: ir.Context) -> ir.Attribute:
    """Parses an attribute; meshes are built, for their parser verifies them."""
    if not text.startswith("#sdy.mesh<"):
        return ir.Attribute.parse(text, context)
    axes, _, ids = text.removeprefix("#sdy.mesh<").removesuffix(">").partition(", device_ids=")
    pairs = [pair.split("=") for pair in axes.strip("[]").split(", ") if pair]
    with context:
        built = [sdy.MeshAxisAttr.get(name.strip('"'), int(size)) for name, size in pairs]
        return sdy.MeshAttr.get(built, [int(i) for i in ids.strip("[]").split(", ") if i])
