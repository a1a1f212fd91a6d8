"""Every verification rule with an input that breaks it, ours beside jaxlib's."""

from __future__ import annotations

import random

import pytest
from sdy_oracle import parse_modules

from sdy_jax.errors import ParseError, ShardingError
from sdy_jax.ir.meshes import Mesh, MeshAxis
from sdy_jax.ir.parsers import parse_mesh, parse_propagation_edges, parse_rule, parse_sharding
from sdy_jax.ir.shardings import DimensionSharding, TensorSharding
from sdy_jax.ir.validity import verify_axis_list, verify_mesh, verify_propagation_edges, verify_rule, verify_sharding

OK = None

# Rule of the specification, text, what our message says (OK: accepted).
MESHES = [
    ("M1", '<["a"=0]>', "size 0"),
    ("M1", '<["a"=-2]>', "size -2"),
    ("M1", '<["a"=1]>', OK),
    ("M2", '<["a"=2, "a"=2]>', "occurs twice"),
    ("M3", '<["a"=2], device_ids=[-1, 0]>', "negative"),
    ("M3", "<[], device_ids=[-1]>", "negative"),
    ("M4", "<[], device_ids=[0, 1]>", "no axes"),
    ("M4", "<[], device_ids=[5]>", OK),
    ("M4", "<[]>", OK),
    ("M5", '<["a"=4], device_ids=[1, 0]>', "2 device ids for 4"),
    ("M6", '<["a"=2], device_ids=[0, 2]>', "permutation"),
    ("M6", '<["a"=2], device_ids=[1, 1]>', "permutation"),
    ("M6", '<["a"=2], device_ids=[1, 0]>', OK),
    ("M7", '<["a"=2], device_ids=[0, 1]>', OK),
    ("M7", '<["a"=2, "b"=3], device_ids=[0, 1, 2, 3, 4, 5]>', OK),
]

NAMED = {
    "m": Mesh.of(a=2, b=4, c=16, d=12, one=1),
    "max": Mesh((), (0,)),
    "empty": Mesh(()),
}

# The tensor is 8x8.
SHARDINGS = [
    ("A1", '@m, [{"x"}, {}]', "unknown axis"),
    ("A1", '@m, [{}, {}], replicated={"x"}', "unknown axis"),
    ("A1", '@m, [{}, {}], unreduced={"x"}', "unknown axis"),
    ("A2", '@m, [{"a"}, {"a"}]', "used twice"),
    ("A2", '@m, [{"a", "a"}, {}]', "used twice"),
    ("A2", '@m, [{"a"}, {}], replicated={"a"}', "used twice"),
    ("A2", '@m, [{}, {}], replicated={"a"}, unreduced={"a"}', "used twice"),
    ("A3", '@m, [{"b"}, {"b":(1)2}]', "overlap"),
    ("A3", '@m, [{"b":(2)2}, {}], unreduced={"b"}', "overlap"),
    ("A4", '@m, [{"c":(1)2, "c":(2)2}, {}]', 'write "c":\\(1\\)4'),
    ("A4", '@m, [{"b":(1)2, "b":(2)2}, {}]', 'write "b"'),
    ("A4", '@m, [{}, {}], replicated={"c":(1)2, "c":(2)2}', "can be merged"),
    ("A4", '@m, [{"c":(1)2, "a", "c":(2)2}, {}]', OK),
    ("A4", '@m, [{"c":(2)2, "c":(1)2}, {}]', OK),
    ("A4", '@m, [{"c":(1)2}, {"c":(2)2}]', OK),
    ("A5", '@m, [{"b":(0)2}, {}]', "pre-size 0"),
    ("A6", '@m, [{"b":(1)1}, {}]', "size 1"),
    ("A6", '@m, [{"b":(2)0}, {}]', "size 0"),
    ("A7", '@m, [{"b":(4)2}, {}]', "does not fit"),
    ("A7", '@m, [{"b":(1)3}, {}]', "does not fit"),
    ("A7", '@m, [{"d":(3)8}, {}]', "does not fit"),
    ("A8", '@m, [{"b":(1)4}, {}]', 'write "b"'),
    ("A9", '@m, [{"c":(1)4}, {"c":(2)4}]', "overlap"),
    ("A9", '@m, [{"c":(2)8}, {}], replicated={"c":(4)2}', "overlap"),
    ("A10", '@m, [{"c":(1)2}, {"c":(8)2}]', OK),
    ("A10", '@m, [{"d":(1)2}, {"d":(3)4}]', OK),
    ("A11", '@m, [{}, {}], replicated={"b", "a"}', "not in mesh order"),
    ("A11", '@m, [{}, {}], replicated={"c":(2)2, "c":(1)2}', "not in mesh order"),
    ("A11", '@m, [{}, {}], replicated={"a", "b"}', OK),
    ("A12", '@m, [{}, {}], unreduced={"c", "b"}', "not in mesh order"),
    ("A12", '@m, [{}, {}], unreduced={"b", "c"}', OK),
    ("A", '@m, [{"one", "b"}, {}]', OK),
    ("S1", '@m, [{"a"}]', "1 dimension shardings for a tensor of rank 2"),
    ("S1", "@m, [{}, {}, {}]", "rank 2"),
    ("S2", "@none, [{}, {}]", "unknown mesh @none; the meshes are: @m"),
    ("S3", "@max, []", OK),
    ("S3", "@max, [{}, {}]", "single device"),
    ("S3", '@max, [], replicated={"a"}', "single device"),
    ("S", "@empty, [{}, {?}]", OK),
    ("S6", "@m, [{}p1, {}]", "empty closed"),
    ("S6", "@m, [{?}p1, {}]", OK),
    ("S6", '@m, [{"a"}p0, {"b", ?}p3]', OK),
    ("S7", '@m, [{"d"}, {"c"}]', OK),
    ("S", 'mesh<["q"=2]>, [{"q"}, {}]', OK),
    ("M2", 'mesh<["q"=2, "q"=2]>, [{"q"}, {}]', "occurs twice"),
]

# Operands 8x16 and 16x4, result 8x4.
RULES = [
    ("R", "([i, k], [k, j])->([i, j]) {i=8, j=4, k=16} reduction={k}", OK),
    ("R1", "([i, k])->([i, j]) {i=8, j=4, k=16}", "1 operand mappings for 2 operands"),
    ("R1", "([i, k], [k, j])->() {i=8, j=4, k=16}", "0 result mappings for 1 results"),
    ("R2", "([i, k], [k, j])->([i]) {i=8, j=4, k=16}", "1 dimension mappings for a tensor of rank 2"),
    ("R4", "([i, k], [k, j])->([i, j]) {i=8, j=4}", "unknown factor k"),
    ("R5", "([i, i], [k, j])->([i, j]) {i=8, j=4, k=16}", "factor i occurs twice"),
    ("R5", "([ik, k], [k, j])->([i, j]) {i=8, j=4, k=16}", "factor k occurs twice"),
    ("R6", "([il, k], [k, j])->([i, j]) {i=8, j=4, k=16, l=1}", "factor l of size 1"),
    ("R6", "([l, k], [k, j])->([i, j]) {i=8, j=4, k=16, l=1}", OK),
    ("R7", "([i, k], [k, j])->([i, j]) {i=8, j=4, k=16, l=2}", "factor l occurs in no tensor"),
    ("R8", "([i, k], [k, j])->([i, j]) {i=8, j=4, k=16} reduction={l}", "unknown factor l"),
    ("R8", "([i, k], [k, j])->([i, j]) {i=8, j=4, k=16} permutation={j, i}", "ascending"),
    ("R8", "([i, k], [k, j])->([i, j]) {i=8, j=4, k=16} need_replication={i, i}", "ascending"),
    ("R8", "([i, k], [k, j])->([i, j]) {i=8, j=4, k=16} blocked_propagation={l}", "unknown factor l"),
    ("R9", "([i, k], [k, j])->([i, j]) {i=8, j=4, k=16} need_replication={i} permutation={i}", "both a"),
    ("R9", "([i, k], [k, j])->([i, j]) {i=8, j=4, k=16} permutation={i} blocked_propagation={i}", OK),
    ("R10", "([i, k], [k, j])->([i, j]) {i=8, j=4, k=16} reduction={i}", "reduction factor i occurs in result 0"),
    ("R11", "([i, k], [k, j])->([i, j]) {i=3, j=5, k=7}, custom", OK),
    ("R12", "([i, k], [k, j])->([i, j]) {i=8, k=16, j=4}", "in that order"),
]


def broken(check, text):
    """Our message, or None."""
    try:
        check(text)
    except (ParseError, ShardingError) as error:
        return str(error)
    return None


def check_mesh(text):
    verify_mesh(parse_mesh(text))


def check_sharding(text):
    verify_sharding(parse_sharding(text), NAMED, (8, 8), "argument `x`")


def check_rule(text):
    verify_rule(parse_rule(text), [(8, 16), (16, 4)], [(8, 4)])


def mesh_module(text):
    return f"sdy.mesh @m = {text}\n"


def sharding_module(text):
    meshes = "".join(f"sdy.mesh @{name} = {mesh}\n" for name, mesh in NAMED.items())
    argument = f"%x: tensor<8x8xf32> {{sdy.sharding = #sdy.sharding<{text}>}}"
    return f"{meshes}func.func @f({argument}) -> tensor<8x8xf32> {{ return %x : tensor<8x8xf32> }}\n"


def rule_module(text):
    types = "(tensor<8x16xf32>, tensor<16x4xf32>) -> tensor<8x4xf32>"
    op = f"stablehlo.custom_call @foo(%x, %y) {{sdy.sharding_rule = #sdy.op_sharding_rule<{text}>}} : {types}"
    head = "func.func @f(%x: tensor<8x16xf32>, %y: tensor<16x4xf32>) -> tensor<8x4xf32>"
    return f"{head} {{ %0 = {op} return %0 : tensor<8x4xf32> }}\n"


TABLES = [(MESHES, check_mesh, mesh_module), (SHARDINGS, check_sharding, sharding_module),
          (RULES, check_rule, rule_module)]  # fmt: skip


@pytest.mark.parametrize(("table", "check"), [t[:2] for t in TABLES], ids=["mesh", "sharding", "rule"])
def test_every_rule_is_checked_and_named(table, check):
    for rule, text, message in table:
        if message is OK:
            assert broken(check, text) is None, rule
            continue
        with pytest.raises((ParseError, ShardingError), match=message) as caught:
            check(text)
        assert isinstance(caught.value, ParseError) or str(caught.value).startswith(f"[{rule}] ")


@pytest.mark.parametrize(("table", "check", "module"), TABLES, ids=["mesh", "sharding", "rule"])
def test_jaxlib_accepts_and_rejects_the_same(table, check, module):
    answers = parse_modules(module(text) for _, text, _ in table)
    for (rule, text, _), answer in zip(table, answers, strict=True):
        assert (broken(check, text) is None) == (answer is not None), f"{rule}: {text}"


def random_axis(rng):
    name = rng.choice("abcd")
    if rng.random() < 0.4:
        return f'"{name}"'
    return f'"{name}":({rng.choice([1, 1, 2, 2, 3, 4, 8])}){rng.choice([2, 2, 2, 3, 4])}'


def random_sharding(rng):
    def axes(low, high):
        return [random_axis(rng) for _ in range(rng.randint(low, high))]

    dims = [
        "{" + ", ".join(axes(0, 2) + rng.choice([[], [], ["?"]])) + "}" + rng.choice(["", "", "", "p1"]) for _ in "xy"
    ]
    tails = [f", {name}={{{', '.join(axes(1, 2))}}}" for name in ("replicated", "unreduced") if rng.random() < 0.25]
    return f"@m, [{', '.join(dims)}]{''.join(tails)}"


def test_jaxlib_agrees_on_random_shardings():
    rng = random.Random(7)
    texts = [random_sharding(rng) for _ in range(600)]
    verdicts = [broken(check_sharding, text) for text in texts]
    assert 80 < verdicts.count(None) < 520
    for text, ours, theirs in zip(texts, verdicts, parse_modules(map(sharding_module, texts)), strict=True):
        assert (ours is None) == (theirs is not None), f"{text}: {ours}"
        assert theirs is None or f"#sdy.sharding<{parse_sharding(text)}>" in theirs


def test_messages_name_the_place():
    with pytest.raises(ShardingError, match="argument `x`, dimension 1: unknown axis"):
        check_sharding('@m, [{}, {"x"}]')
    with pytest.raises(ShardingError, match="argument `x`, replicated axes: "):
        check_sharding('@m, [{}, {}], replicated={"b", "a"}')
    with pytest.raises(ShardingError, match="sharding rule, operand 1, dimension 0: unknown factor k"):
        check_rule("([i, j], [k, j])->([i, j]) {i=8, j=4}")


def test_what_text_cannot_say_is_checked_too():
    with pytest.raises(ShardingError, match="priority -1 is negative"):
        verify_sharding(TensorSharding("m", (DimensionSharding((), False, -1),)), NAMED, 1)
    with pytest.raises(ShardingError, match="unknown reduction"):
        verify_sharding(TensorSharding("m", (), reduction="mean"), NAMED, 0)
    with pytest.raises(ShardingError, match="no factor"):
        verify_rule(parse_rule("([i])->([i]) {i=8}").__class__((8,), (((),),), (((0,),),)), [(8,)], [(8,)])
    with pytest.raises(ShardingError, match="not static"):
        verify_rule(parse_rule("([i])->([i]) {i=8}"), [(-1,)], [(8,)])
    with pytest.raises(ShardingError, match="not static"):
        verify_rule(parse_rule("([i])->([i]) {i=8}"), [None], [(8,)])
    with pytest.raises(ShardingError, match="occurs twice"):
        verify_mesh(Mesh((MeshAxis("a", 2), MeshAxis("a", 2))))


def test_a_value_that_is_no_tensor_has_no_axes():
    verify_sharding(parse_sharding("@m, []"), NAMED, None)
    for text in ("@m, [{}]", '@m, [], replicated={"a"}'):
        with pytest.raises(ShardingError, match="no tensor"):
            verify_sharding(parse_sharding(text), NAMED, None)


def test_an_axis_list_alone():
    verify_axis_list(parse_sharding('@m, [{"b":(2)2, "a"}]').axes[0], NAMED["m"])
    with pytest.raises(ShardingError, match="slicing axes: unknown axis"):
        verify_axis_list(parse_sharding('@m, [{"x"}]').axes[0], NAMED["m"], "slicing axes")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{step-0 = [{"a" = operand-0 -> [result-0]}]}, {step-2 = [{"a" = result-0 -> [operand-0]}]}]', OK),
        ('[{step--1 = [{"a" = operand-0 -> [result-0]}]}]', "step -1 is negative"),
        (
            '[{step-3 = [{"a" = operand-0 -> [result-0]}]}, {step-3 = [{"a" = operand-0 -> [result-0]}]}]',
            "step 3 occurs twice",
        ),
        ('[{step-0 = [{"a" = operand-0 -> [result-0, operand-0]}]}]', "names a tensor twice"),
        ('[{step-0 = [{"a" = operand-0 -> [result-0, result-0]}]}]', "names a tensor twice"),
    ],
)
def test_records_of_propagation(text, message):
    edges = parse_propagation_edges(text)
    if message is OK:
        return verify_propagation_edges(edges)
    with pytest.raises(ShardingError, match=rf"^\[D1\] propagation edges: .*{message}"):
        verify_propagation_edges(edges)
