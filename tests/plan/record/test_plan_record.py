"""Plans as plain data: complete, without MLIR, with names that edits elsewhere do not change."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from plan_edits import MLP, planned

import sdy_jax as sdy
from sdy_jax.plan.record.record import PlanRecord

MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def block(x: jax.Array, w: jax.Array) -> jax.Array:
    with jax.named_scope("block"):
        return jnp.tanh(x @ w)


def step(w: dict[str, jax.Array], x: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    def loss(w: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean(block(block(x, w["up"]), w["down"]) ** 2)

    value, gradient = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda a, g: a - 0.1 * g, w, gradient), value


W = {"up": jnp.ones((16, 32)), "down": jnp.ones((32, 16))}
SPECS = {"up": P(None, "model"), "down": P("model")}


@pytest.fixture(scope="module")
def plan() -> sdy.Plan:
    borders = {"in_shardings": (SPECS, P("data")), "out_shardings": (SPECS, None)}
    ours = sdy.partition(step, mesh=MESH, layouts="local", **borders)  # type: ignore[arg-type]
    return ours.plan(W, jnp.ones((8, 16)))


def parts(data: Any) -> Iterator[Any]:
    """Everything that a record is made of, down to strings and numbers."""
    if dataclasses.is_dataclass(data):
        for field in dataclasses.fields(data):
            yield from parts(getattr(data, field.name))
    elif isinstance(data, tuple):
        for each in data:
            yield from parts(each)
    else:
        yield data


def test_a_record_is_strings_and_numbers_alone(plan: sdy.Plan) -> None:
    assert {type(part) for part in parts(plan.record())} <= {str, int, float, bool, type(None)}


def test_its_figures_are_the_plan_s(plan: sdy.Plan) -> None:
    record, memory = plan.record(), plan.record().memory
    assert memory is not None
    assert record.headline == plan.headline and record.fingerprint == plan.fingerprint()
    assert record.wire_bytes == plan.wire_bytes == sum(c.total_wire_bytes for c in record.counted)
    assert (record.time.compute, record.time.total) == (plan.time.compute, plan.time.total)
    assert record.time.communication == pytest.approx(sum(c.time * c.times for c in record.counted))
    assert memory.peak == plan.memory.peak
    assert memory.temporaries == sum(buffer.bytes for buffer in memory.largest)
    assert [axis.size for axis in record.mesh.axes] == [2, 4] and record.mesh.device_kind == "cpu"
    assert record.flops == sum(op.flops * op.times for op in record.ops) > 0


def test_constants_come_from_the_lines_that_take_them(plan: sdy.Plan) -> None:
    constants = [op for op in plan.record().ops if op.kind == "sdy.constant"]
    assert len(constants) > 2
    assert {op.place.function for op in constants} <= {"block", "loss", "<lambda>"}


def test_it_has_the_border_as_devices_hold_it(plan: sdy.Plan) -> None:
    down = plan.record().arguments[0]
    assert (down.path, down.tensor.type, down.stated) == ("w['down']", "f32[32@model,16]", "P('model')")
    assert (down.tensor.axes, down.tensor.local_shape, down.tensor.bytes) == ((("model",), ()), (8, 16), 512.0)
    assert down.origin == "stated" and Path(down.line.rpartition(":")[0]).name == "test_plan_record.py"
    assert [(result.path, result.origin) for result in plan.record().results][-1] == ("result[1]", "propagation")


def test_a_collective_knows_its_op_what_it_moves_and_what_it_serves(plan: sdy.Plan) -> None:
    record = plan.record()
    for each in record.collectives:
        assert each.op is not None and each.serves is not None
        op = record.ops[each.op]
        assert op.kind == f"sdy.{each.kind}" and (op.operands, op.results) == ((each.value,), (each.result,))
        assert record.value_of[each.result].tensor.type == each.type
        assert record.ops[each.serves].kind == each.cause
    forward = next(each for each in record.collectives if each.kind == "all_reduce")
    assert (forward.value, forward.place.scope, forward.place.text) == (
        "block/dot_general#2",
        "block",
        "return jnp.tanh(x @ w)",
    )
    assert [frame.function for frame in forward.place.callers] == ["loss", "step"]


def test_operands_are_values_that_were_made_before(plan: sdy.Plan) -> None:
    record = plan.record()
    known = {border.path for border in record.arguments}
    for op in record.ops:
        assert known.issuperset(op.operands)
        known.update(op.results)
    assert known == record.value_of.keys()


def test_values_say_what_propagation_proposed(plan: sdy.Plan) -> None:
    values = plan.record().value_of
    assert values["block/dot_general#2"].proposed == "f32[8@data,16]"
    assert values["block/dot_general#2"].tensor.type == "f32[8@data,16]{U:model}"
    assert values["all_reduce(block/dot_general#2)"].proposed == ""


def test_live_bytes_are_those_of_the_buffers_at_every_op(plan: sdy.Plan) -> None:
    memory = plan.record().memory
    assert memory is not None and len(memory.timeline) == len(plan.record().ops)
    for op, live in enumerate(memory.timeline):
        assert sum(buffer.bytes for buffer in memory.live(op)) == live


def test_ops_in_loops_say_where_they_are() -> None:
    def layers(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    ours = sdy.partition(layers, mesh=MESH, in_shardings=(P(None, "model"), P("data")), layouts="local")
    record = ours.plan(jnp.ones((3, 16, 16)), jnp.ones((8, 16))).record()
    product = next(op for op in record.ops if op.kind == "stablehlo.dot_general")
    assert product.times == 3 and product.parent is not None
    loop = record.ops[product.parent]
    assert loop.kind == "stablehlo.while" and product.region == 1
    assert record.options == ("layouts='local'",)
    inside = [each for each in record.collectives if each.depth]
    assert inside and all(each.times == 3 for each in inside)


def test_members_of_a_bucket_are_there() -> None:
    ours = sdy.partition(
        lambda a, b, large: (a + 1, b * 2, large.sum()),
        mesh=MESH,
        in_shardings=P("data"),
        out_shardings=P(),
        combine=True,
    )
    record = ours.plan(jnp.ones((8, 4)), jnp.ones((8, 6)), jnp.ones((64, 64))).record()
    (bucket,) = (each for each in record.collectives if each.members)
    assert [member.shape for member in bucket.members] == [(8, 4), (8, 6)]
    assert all(member.op is not None for member in bucket.members)
    assert sum(each.total_wire_bytes for each in record.counted) == record.wire_bytes


def test_layouts_of_arrays_and_the_planner_s_are_told_apart() -> None:
    x = jax.device_put(jnp.ones((8, 4)), jax.sharding.NamedSharding(MESH, P("data")))
    ours = sdy.partition(lambda x, w: x @ w, mesh=MESH, in_shardings=(None, sdy.AUTO))
    record = ours.plan(x, jnp.ones((4, 16))).record()
    assert [argument.origin for argument in record.arguments] == ["passed", "planner"]
    assert record.automatic is not None and record.automatic.stated


def test_annotations_have_their_lines() -> None:
    def constrained(x: jax.Array) -> jax.Array:
        return sdy.sharding_constraint(x * 2, P("data")) + 1

    (said,) = sdy.partition(constrained, mesh=MESH).plan(jnp.ones((8, 4))).record().annotations
    assert (said.kind, said.text) == ("sharding_constraint", "P('data')")
    assert said.place.text == 'return sdy.sharding_constraint(x * 2, P("data")) + 1'


LAYER = 'x = layer(x, params["out"], "out")'
EDITS: dict[str, Callable[[str], str]] = {
    "a comment above": lambda text: "# The model.\n\n" + text,
    "a variable renamed": lambda text: text.replace("hidden", "inner"),
    "another layer at the end": lambda text: text.replace("return x\n", f"{LAYER}\n    return x\n"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_names_are_those_of_before_an_edit_elsewhere(edit: str, tmp_path: Path) -> None:
    before, after = (planned(text, tmp_path).record() for text in (MLP, EDITS[edit](MLP)))
    names = [{value.name for value in record.values} for record in (before, after)]
    assert names[0] <= names[1] if "layer" in edit else names[0] == names[1]


def test_programs_on_local_arrays_have_a_record() -> None:
    text = """
    mesh.mesh @m(shape = 2x4)
    func.func @main(%x: tensor<3xf32>) -> tensor<3xf32> {
      %0 = mesh.all_reduce %x on @m mesh_axes = [0, 1] : tensor<3xf32> -> tensor<3xf32>
      return %0 : tensor<3xf32>
    }"""
    record: PlanRecord = sdy.loads(text).run_local().plan(jnp.ones((8, 3))).record()
    assert record.memory is None and [each.kind for each in record.collectives] == ["all_reduce"]
    assert record.arguments[0].tensor.type == "f32[3]"
