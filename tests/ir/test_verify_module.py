"""Each rule of the dialect with modules that break it, as text and built in Python; ours beside the one in jaxlib."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Sequence

import pytest
from dialect_breaks import BREAKS, EDGE, EDGES, MANUAL, RESULT, VALID, all_ops, broken_in_python, parsed
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy
from jax.interpreters import mlir

from sdy_jax.cli.opt import optimize
from sdy_jax.errors import ShardingError
from sdy_jax.ir.text.modules import SourceError, parse_module
from sdy_jax.ir.validity import DOCUMENTED_RULES, RULES
from sdy_jax.ir.verification import verify_module


@pytest.fixture(scope="module")
def context():
    return mlir.make_ir_context()


@pytest.mark.parametrize("text", VALID)
def test_valid_modules_are_accepted(text, context):
    verify_module(parse_module(text, context).operation)


@pytest.mark.parametrize("broken", BREAKS, ids=str)
def test_broken_text_is_rejected_by_the_name_of_the_rule(broken, context):
    with pytest.raises(SourceError, match=r"^m\.mlir:\d+:\d+: error: \[" + re.escape(f"{broken.rule}]")):
        parse_module(broken.text, context, "m.mlir")


@pytest.mark.parametrize("broken", [b for b in BREAKS if not b.text_only], ids=str)
def test_broken_modules_built_in_python_are_rejected_by_the_name_of_the_rule(broken):
    with pytest.raises(ShardingError, match="^" + re.escape(f"[{broken.rule}]")):
        verify_module(broken_in_python(broken).operation)


def test_every_rule_is_broken_somewhere():
    assert {b.rule for b in BREAKS} == set(RULES)


# The rules that jaxlib does not enforce.


def _manual(manual: str) -> str:
    shardings = '<@mesh, [{"a", "b"}]>'
    return f"""
sdy.mesh @mesh = <["a"=2, "b"=2]>
func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> {{
  %0 = sdy.manual_computation(%x) in_shardings=[{shardings}] out_shardings=[{shardings}] manual_axes={manual}
      (%y: tensor<2xf32>) {{
    sdy.return %y : tensor<2xf32>
  }} : (tensor<8xf32>) -> tensor<8xf32>
  return %0 : tensor<8xf32>
}}"""


def _split(type_: str, axes: str = '{"a"}') -> str:
    return f"""
sdy.mesh @mesh = <["a"=2, "b"=2]>
func.func @main(%x: {type_} {{sdy.sharding = #sdy.sharding<@mesh, [{{}}, {axes}]>}}) -> {type_} {{
  return %x : {type_}
}}"""


REPLICATED = """
sdy.mesh @mesh = <["a"=2, "b"=2]>
func.func @main(%x: tensor<8xf32>) -> tensor<4xf32> {
  %0 = sdy.manual_computation(%x) in_shardings=[<@mesh, [{"b"}]SAID>]
      out_shardings=[<@mesh, [{}], replicated={"a", "b"}>] manual_axes={"a", "b"} (%y: tensor<4xf32>) {
    sdy.return %y : tensor<4xf32>
  } : (tensor<8xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}"""
PART = """
sdy.mesh @mesh = <["a"=4, "b"=2]>
func.func @main(%x: tensor<8xf32>) -> tensor<4xf32> {
  %0 = sdy.manual_computation(%x) in_shardings=[<@mesh, [{"a":(1)2}]>] out_shardings=[<@mesh, [{}], replicated={"a"}>]
      manual_axes={"a"} (%y: tensor<4xf32>) {
    sdy.return %y : tensor<4xf32>
  } : (tensor<8xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}"""

DOCUMENTED = [
    (
        "M8",
        'sdy.mesh @m = <["a"=2, "b"=2]>\nsdy.mesh @e = <[]>\nsdy.mesh @n = <["c"=8]>',
        'sdy.mesh @m = <["a"=2, "b"=2]>\nsdy.mesh @o = <[], device_ids=[0]>\nsdy.mesh @n = <["c"=4]>',
        "sdy.mesh @n: it has 8 devices, @m 4; the meshes of a module have one number of devices",
    ),
    (
        "S10",
        _split("tensor<8x0xf32>"),
        _split("tensor<0x8xf32>"),
        'func.func @main, argument 0, dimension 1: it has size 0 and is split along {"a"};',
    ),
    (
        "O2i",
        REPLICATED.replace("SAID", ""),
        REPLICATED.replace("SAID", ', replicated={"a"}'),
        'sdy.manual_computation, operand 0: <@mesh, [{"b"}]> does not name the manual axis "a"; the sharding of each',
    ),
    (
        "O2j",
        _manual('{"b", "a"}'),
        _manual('{"a", "b"}'),
        'sdy.manual_computation: the manual axes are {"b", "a"}; write {"a", "b"}',
    ),
    (
        "O2k",
        PART,
        PART.replace(":(1)2", "").replace('"a"=4', '"a"=2'),
        'sdy.manual_computation, operand 0: <@mesh, [{"a":(1)2}]> names "a":(1)2, a part of a manual axis;',
    ),
]


@pytest.mark.parametrize(("rule", "broken", "good", "message"), DOCUMENTED)
def test_what_is_documented_is_checked_where_checks_are_strict(rule, broken, good, message, context):
    module = parse_module(broken, context).operation
    verify_module(module)  # as jaxlib
    with pytest.raises(ShardingError, match=re.escape(f"[{rule}] {message}")):
        verify_module(module, strict=True)
    verify_module(parse_module(good, context).operation, strict=True)
    assert optimize(broken, "", "m.mlir")
    with pytest.raises(SourceError, match=r"^m\.mlir:\d+:\d+: error: " + re.escape(f"[{rule}] {message}")):
        optimize(broken, "", "m.mlir", strict=True)
    assert optimize(good, "", "m.mlir", strict=True)


@pytest.mark.parametrize(
    ("broken", "column"),
    [
        ('sdy.mesh @m = <["a"=2, "b"=2], device_ids=[0, 1, 2, 3]>', 44),
        ('sdy.mesh @"device_ids=[0]" = <["a"=1, "b"=1], device_ids=[ 0 ]>', 59),
        (_split("tensor<8x8xf32>").replace("@mesh,", 'mesh<["a"=2], device_ids=[0, 1]>,'), 93),
    ],
)
def test_device_ids_in_their_usual_order_are_not_written_where_checks_are_strict(broken, column):
    assert optimize(broken, "", "m.mlir")
    with pytest.raises(SourceError) as caught:
        optimize(broken, "", "m.mlir", strict=True)
    assert re.match(
        rf"m\.mlir:\d:{column}: error: \[M7\] sdy.mesh: its device ids are 0..\d in order;", str(caught.value)
    )
    good = 'sdy.mesh @m = <["a"=2, "b"=2], device_ids=[0, 2, 1, 3]>  // [0, 1]\nsdy.mesh @n = <[], device_ids=[0]>'
    assert optimize(good, "", "m.mlir", strict=True)


def test_what_is_no_tensor_names_no_manual_axes(context):
    text = REPLICATED.replace("SAID", ', replicated={"a"}').replace("(%x) in", "(%x, %t) in")
    text = text.replace("%x: tensor<8xf32>)", "%x: tensor<8xf32>, %t: !stablehlo.token)")
    text = text.replace('{"a"}>]\n', '{"a"}>, <@mesh, []>]\n').replace(
        "(tensor<8xf32>) ->", "(tensor<8xf32>, !stablehlo.token) ->"
    )
    text = text.replace("(%y: tensor<4xf32>)", "(%y: tensor<4xf32>, %u: !stablehlo.token)")
    verify_module(parse_module(text, context).operation, strict=True)


def test_every_documented_rule_is_broken_somewhere():
    assert {"M7", *(rule for rule, *_ in DOCUMENTED)} == set(DOCUMENTED_RULES)
    assert not set(DOCUMENTED_RULES) & set(RULES)


# Breaks that are no change of an attribute.


def ops(module: ir.Module, name: str) -> list[ir.Operation]:
    return [op for op in all_ops(module.operation) if op.name == name]


def create(name: str, operands: Sequence[ir.Value], after: ir.Operation, **attributes: ir.Attribute) -> ir.Operation:
    with after.context, ir.Location.file("model.py", 7, 1):
        created = ir.Operation.create(name, [operands[0].type], operands, attributes)
        block = after.parent.regions[0].blocks[0] if after.parent else None
        assert block is not None
        ir.InsertionPoint.at_block_terminator(block).insert(created)
    return created


def rejected(module: ir.Module) -> str:
    with pytest.raises(ShardingError) as caught:
        verify_module(module.operation)
    return str(caught.value)


def test_an_edge_is_the_only_use_of_its_input():
    module = parsed(EDGE)
    (tanh,) = ops(module, "stablehlo.tanh")
    create("stablehlo.negate", [tanh.results[0]], tanh)
    assert rejected(module).startswith(
        "[O4] sdy.data_flow_edge: expected input of sdy.data_flow_edge to have a single user; "
    )


def test_an_edge_does_not_stand_for_what_an_sdy_op_makes():
    module = parsed(EDGE)
    (edge,) = ops(module, "sdy.data_flow_edge")
    create("sdy.data_flow_edge", [edge.results[0]], edge)
    message = rejected(module)
    assert message.startswith(
        "[O4] sdy.data_flow_edge: expected input of sdy.data_flow_edge to not be defined by an Sdy"
    )
    assert message.endswith('(at "model.py":7:1)')


def test_a_functions_edge_stands_for_an_argument_or_a_calls_result():
    module = parsed(RESULT)
    (tanh,) = ops(module, "stablehlo.tanh")
    create("sdy.func_data_flow_edge", [tanh.results[0]], tanh)
    assert rejected(module).startswith("[O5] sdy.func_data_flow_edge: ")
    module = parsed(RESULT)
    (tanh,) = ops(module, "stablehlo.tanh")
    create("sdy.func_data_flow_edge", [tanh.operands[0]], tanh)
    assert rejected(module).startswith("[O5] sdy.func_data_flow_edge: ")


def test_a_barrier_stops_something():
    module = parsed(RESULT)
    (tanh,) = ops(module, "stablehlo.tanh")
    both = ir.Attribute.parse("3 : i32", module.context)
    create("sdy.propagation_barrier", [tanh.results[0]], tanh, allowed_direction=both)
    assert rejected(module).startswith("[O1] sdy.propagation_barrier")


def test_a_manual_computation_returns_as_many_values_as_it_has():
    module = parsed(MANUAL)
    (computation,) = ops(module, "sdy.manual_computation")
    body = computation.regions[0].blocks[0]
    body.add_argument(body.arguments[0].type, ir.Location.unknown(module.context))
    assert rejected(module).startswith("[O2b] sdy.manual_computation: ")


def test_what_other_dialects_demand_is_found_too():
    module = parsed(RESULT)
    (tanh,) = ops(module, "stablehlo.tanh")
    with module.context, ir.Location.file("model.py", 7, 1):
        wrong = ir.Operation.create("stablehlo.add", [tanh.results[0].type], [tanh.results[0]])
        ir.InsertionPoint(tanh.parent.regions[0].blocks[0].operations[1]).insert(wrong)
    with pytest.raises(ShardingError, match=r"'stablehlo.add' op expected 2 operands.*model\.py"):
        verify_module(module.operation)


@pytest.mark.parametrize("name", ["sdy.sharding_constraint", "sdy.manual_computation", "sdy.propagation_barrier"])
def test_an_op_without_its_attributes_is_rejected(name):
    module = parsed(RESULT)
    (tanh,) = ops(module, "stablehlo.tanh")
    create(name, [tanh.results[0]], tanh)
    with pytest.raises(ShardingError, match=name):
        verify_module(module.operation)


def test_records_of_propagation_beside_an_unknown_mesh_are_rejected():
    """jaxlib 0.10 dies of it."""
    module = parsed(EDGES)
    (add,) = ops(module, "stablehlo.add")
    unknown = '#sdy.sharding_per_value<[<@none, [{"a"}, {}]>]>'
    add.attributes["sdy.sharding"] = ir.Attribute.parse(unknown, module.context)
    assert rejected(module).startswith("[S2] stablehlo.add, propagation edges: unknown mesh @none; ")


def test_inline_meshes_built_in_python_are_verified():
    module = parsed(RESULT)
    with module.context:
        mesh = sdy.MeshAttr.get([sdy.MeshAxisAttr.get("a", 2)], [1, 1])
        dims = [sdy.DimensionShardingAttr.get([], is_closed=True)] * 2
        entry = sdy.TensorShardingAttr.get(mesh, dims)
        (tanh,) = ops(module, "stablehlo.tanh")
        tanh.attributes["sdy.sharding"] = sdy.TensorShardingPerValueAttr.get([entry])
    assert rejected(module).startswith("[M6] stablehlo.tanh, result 0, inline mesh: ")


def test_meshes_belong_to_the_nearest_module():
    text = """module { sdy.mesh @q = <["a"=2]>
      module @inner { sdy.mesh @q = <["b"=2]>
        func.func @f(%x: tensor<8xf32> {sdy.sharding = #sdy.sharding<@q, [{"b"}]>}) { return } } }"""
    verify_module(parsed(text).operation)


# On attributes changed at random.

_CHILD = """
import json, sys
sys.path.insert(0, json.loads(sys.argv[1]))
from test_verify_module import *
for line in sys.stdin:
    module = changed(json.loads(line)).operation
    try:
        ours = verify_module(module) is None
    except ShardingError as error:
        ours = str(error)
    print(json.dumps(ours), flush=True)
    try:
        theirs = module.verify()
    except ir.MLIRError as error:
        theirs = error.error_diagnostics[0].message
    print(json.dumps(theirs), flush=True)
"""


def verdicts(changes):
    """For each change True, or why it is rejected, by us and by jaxlib; None for jaxlib where it dies of it."""
    answers = []
    command = [sys.executable, "-c", _CHILD, json.dumps(os.path.dirname(__file__))]
    while len(answers) < 2 * len(changes):
        rest = "\n".join(map(json.dumps, changes[len(answers) // 2 :]))
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(command, input=rest, capture_output=True, text=True, timeout=120, env=environment)
        answers += map(json.loads, done.stdout.splitlines())
        assert done.returncode <= 0, done.stderr
        if done.returncode:
            assert len(answers) % 2, f"we let jaxlib die of {changes[len(answers) // 2]}"
            answers.append(None)
    return zip(answers[::2], answers[1::2], strict=True)


def changed(change):
    """A valid module with one attribute changed: (number of the module, number of the op, attribute, text)."""
    number, op, name, text = change
    module = parsed(VALID[number])
    target = list(all_ops(module.operation))[op]
    target.attributes[name] = ir.Attribute.parse(text, module.context)
    return module


def random_axis(rng):
    name = rng.choice(["a", "b", "c", "c", "d", "one", "x"])
    return (
        f'"{name}"' if rng.random() < 0.5 else f'"{name}":({rng.choice([0, 1, 1, 2, 4])}){rng.choice([1, 2, 2, 3, 4])}'
    )


def random_axes(rng, low=0):
    return ", ".join(random_axis(rng) for _ in range(rng.randint(low, 2)))


COUNT = int(os.environ.get("SDY_JAX_RANDOM_MODULES", "300"))

# Where to change a text, and how.
_CHANGES = [
    (r'"[a-z]+"(:\(\d\)\d)?', lambda old, rng: random_axis(rng)),
    (r"\{[^{}=]*\}", lambda old, rng: "{" + random_axes(rng) + "}" + rng.choice(["", "", "p1"])),
    (r"\}", lambda old, rng: rng.choice(["}p0", "}p3", ", ?}", "}, {}"])),
    (r"\{\}(, )?", lambda old, rng: rng.choice(["", "{?}, ", "{?}p2"])),
    (r"@\w+", lambda old, rng: rng.choice(["@m", "@n", "@max", "@empty", "@none", 'mesh<["a"=2, "b"=4]>'])),
    (r"\](?=>)", lambda old, rng: f"], {rng.choice(['replicated', 'unreduced'])}={{{random_axes(rng, 1)}}}"),
    (r"(?<=[^\w])[ijk](?=[^\w=])", lambda old, rng: rng.choice(["i", "j", "k", "l", "ij", "ki"])),
    (r"\}(?=>)", lambda old, rng: f"}} {rng.choice(['reduction', 'permutation', 'blocked_propagation'])}={{k}}"),
    (r"(?<==)\d+", lambda old, rng: rng.choice(["1", "2", "8"])),
    (
        r"(operand|result)-\d",
        lambda old, rng: rng.choice(["operand-0", "operand-1", "operand-2", "result-0", "result-1"]),
    ),
    (r"#sdy.sharding(_per_value)?", lambda old, rng: rng.choice(["#sdy.sharding", "#sdy.sharding_per_value"])),
    (r"<@\w+, [^<>]*>", lambda old, rng: f"{old}, {old}"),
]


def attributes_of_the_dialect():
    """(number of the module, number of the op, attribute, its text), of all valid modules."""
    return [
        (number, i, name, str(op.attributes[name]))
        for number, text in enumerate(VALID)
        for i, op in enumerate(all_ops(parsed(text).operation))
        for name in op.attributes
        if "#sdy" in str(op.attributes[name]) and name != "mesh"
    ]


def random_change(rng, attributes, context):
    """A change whose text parses as an attribute."""
    while True:
        number, op, name, text = rng.choice(attributes)
        for _ in range(rng.randint(1, 2)):
            pattern, new = rng.choice(_CHANGES)
            if places := list(re.finditer(pattern, text)):
                place = rng.choice(places)
                text = text[: place.start()] + new(place[0], rng) + text[place.end() :]
        try:
            ir.Attribute.parse(text, context)
        except ir.MLIRError:
            continue
        return number, op, name, text


def _check_random(seed, count):
    rng, context = random.Random(seed), mlir.make_ir_context()
    attributes = attributes_of_the_dialect()
    changes = [random_change(rng, attributes, context) for _ in range(count)]
    for change, (ours, theirs) in zip(changes, verdicts(changes), strict=True):
        said = f"seed {seed}: {change}\nours: {ours}\njaxlib: {theirs}"
        if theirs is True and re.match(r"\[A[35678]\] sdy\.all_reduce, its axes", str(ours)):
            continue  # jaxlib takes any sub-axis for the axes of an all_reduce
        assert (ours is True) == (theirs is True), said
        assert ours is True or ours.startswith("[") or "cannot add new unreduced axis" in ours, said


def fuzz(seed):
    _check_random(seed, 300)
    return {"oracle": 300}


@pytest.mark.more("every rule of jaxlib's verifier, in processes")
def test_what_jaxlib_rejects_is_rejected_by_the_name_of_the_rule_and_what_it_dies_of_too():
    _check_random(0, COUNT)
