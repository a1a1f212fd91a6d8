"""Values are rematerialized where that is cheaper than moving them: before a broadcast, on the narrower type, from
iotas."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh
from jax.sharding import PartitionSpec as P
from machine_models import plan_for_order
from random_programs import RandomProgram
from sharding_dump import parse

import sdy_jax as sdy
from sdy_jax.ir.graph import Graph
from sdy_jax.lowering.planner.facts.fusion import depends_on_no_input, free_values
from sdy_jax.testing import assert_same

MESH = jax.make_mesh((2, 4), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def check(function, specs, *arguments, out=P()):
    """The plan op by op, where values move or are made again; that of the whole program sends no more."""
    options = {"mesh": MESH, "in_shardings": specs, "out_shardings": out}
    plan, chosen = (assert_same(function, *arguments, **options, layouts=how) for how in ("local", "global"))
    assert plan.stages["partitioned"].verify() and chosen.stages["partitioned"].verify()
    assert chosen.wire_bytes <= plan.wire_bytes, chosen
    return plan


def moved(plan):
    return [(c.kind, c.dtype, c.shape) for c in plan.collectives if c.wire_bytes]


def test_a_mask_of_positions_is_made_of_gathered_positions():
    """By time: ops that run again are part of what reads them, so that no device writes a mask's steps."""

    def masked(positions, scores):
        rows = jnp.broadcast_to(positions[:, None], scores.shape[1:])
        return jnp.where(rows + 1 >= jnp.arange(scores.shape[2]), scores, 0.0).sum(-1)

    described = AbstractMesh((8,), ("x",), abstract_device=AbstractDevice("TPU v5 lite", 1, "tpu"))
    args = jax.ShapeDtypeStruct((1024,), jnp.int32), jax.ShapeDtypeStruct((8, 1024, 16384), jnp.float32)
    function = sdy.partition(masked, mesh=described, in_shardings=(P("x"), P("x")), layouts="local")
    assert moved(function.plan(*args)) == [("all_gather", "i32", (1024, 1))]


def test_a_value_is_gathered_before_it_is_widened():
    w = jnp.arange(64, dtype=jnp.bfloat16).reshape(16, 4)
    plan = check(lambda w: w.astype(jnp.float32), (P("y"),), w)
    assert moved(plan) == [("all_gather", "bf16", (16, 4))]


def test_a_value_is_gathered_after_it_is_narrowed():
    w = jnp.arange(64, dtype=jnp.float32).reshape(16, 4)
    plan = check(lambda w: w.astype(jnp.bfloat16), (P("y"),), w)
    assert moved(plan) == [("all_gather", "bf16", (16, 4))]


def test_a_row_is_gathered_before_it_is_broadcast():
    plan = check(lambda row: jnp.broadcast_to(row, (8, 16)), (P("y"),), jnp.arange(16.0))
    assert moved(plan) == [("all_gather", "f32", (16,))]


def test_through_several_ops():
    row = jnp.arange(16, dtype=jnp.bfloat16)
    plan = check(lambda r: -jnp.broadcast_to(r.astype(jnp.float32), (8, 16)).T, (P("y"),), row)
    assert moved(plan) == [("all_gather", "bf16", (16,))]


def test_what_is_made_of_nothing_never_moves():
    def function(a, b):
        return jnp.where(jnp.tril(jnp.ones((16, 16), bool)), a, b)

    a, b = jnp.ones((16, 16)), jnp.zeros((16, 16))
    plan = check(function, (P("y"), P(None, "y")), a, b, out=P(None, "y"))
    assert moved(plan) == [("all_to_all", "f32", (16, 16))]


def test_a_value_with_dear_origins_moves_itself():
    x = jnp.ones((16, 4))
    plan = check(lambda x: jnp.broadcast_to(x.sum(1), (2, 16)), (P(None, "y"),), x)
    assert [kind for kind, *_ in moved(plan)] == ["all_reduce"]
    two = check(lambda a, b: a + b, (P("y"), P("y")), x, x)
    assert moved(two) == [("all_gather", "f32", (16, 4))]


@pytest.mark.parametrize("target", [P(), P("x"), P(None, "y"), P(("x", "y"))])
def test_reshapes_and_transposes_are_crossed_either_way(target):
    x = jnp.arange(128.0).reshape(16, 8)
    check(lambda x: x.T.reshape(8, 4, 4), (P("y", "x"),), x, out=target)


def test_loops_find_what_is_made_before_them():
    def function(w, x):
        wide = w.astype(jnp.float32)
        return jax.lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x + wide), x)

    w = jnp.eye(16, dtype=jnp.bfloat16)
    plan = check(function, (P("y"), P("x")), w, jnp.ones((16, 16)), out=P("x"))
    assert [(c.dtype, c.depth) for c in plan.collectives if c.kind == "collective_permute"] == [("bf16", 0)]


def test_zeros_that_rows_are_added_to_cost_nothing():
    """Each device adds its rows to zeros of its own; split zeros would have to be gathered for that."""

    def function(rows, targets):
        return jax.ops.segment_sum(rows, targets, 64)

    rows = jnp.arange(512 * 16.0).reshape(512, 16) / 512
    plan = check(function, (P(("x", "y")), P(("x", "y"))), rows, jnp.arange(512) * 7 % 64, out=P(("x", "y")))
    assert moved(plan) == [("reduce_scatter", "f32", (64, 16))]


@pytest.fixture
def whole(monkeypatch):
    """Programs are for compilers that keep all of a value until a part of it is taken."""
    plan_for_order(monkeypatch, keeps_whole=True)


def of_all_and_a_part(x, w):
    """`found` is wanted whole for the product, and in parts for the result."""
    found = jnp.abs(sdy.sharding_constraint(x, P()) - jnp.mean(x, 1, keepdims=True)) * 2.0
    found = sdy.sharding_constraint(found, P())
    return found @ w, sdy.sharding_constraint(found, P("y")) * 3.0


def sliced(function, specs, *arguments, out):
    """The values of which parts are taken."""
    plan = sdy.partition(function, mesh=MESH, in_shardings=specs, out_shardings=out, layouts="local").plan(*arguments)
    ops = Graph(plan.stages["partitioned"]).ops
    return [op.operands[0] for op in ops if op.name == "sdy.all_slice"]


def slices(function, specs, *arguments, out):
    return [value.shape for value in sliced(function, specs, *arguments, out=out)]


def test_a_part_is_computed_of_parts(whole):
    x, w = jnp.arange(512.0).reshape(16, 32) % 8, jnp.ones((32, 8))
    given = (P("y"), P(None, "y")), x, w
    assert slices(of_all_and_a_part, *given, out=(P(None, "y"), P("y"))) == []
    check(of_all_and_a_part, *given, out=(P(None, "y"), P("y")))


def normalized_and_a_part(x, w):
    """What is normalized is wanted whole for the product, and in parts for the result; it is not there in parts."""
    far = x - jnp.mean(x, 1, keepdims=True)
    found = sdy.sharding_constraint(far * jax.lax.rsqrt(jnp.mean(far * far, 1, keepdims=True) + 1), P())
    return found @ w, sdy.sharding_constraint(found, P("y")) * 3.0


def test_of_a_normalized_value_the_part_is_computed(whole):
    """Of a part of what is normalized, which is as large and there anyway."""
    x, w = jnp.arange(512.0).reshape(16, 32) % 8, jnp.arange(256.0).reshape(32, 8) % 5
    given, out = ((P(), P(None, "y")), x, w), (P(None, "y"), P("y"))
    large = [value for value in sliced(normalized_and_a_part, *given, out=out) if value.shape == x.shape]
    assert [value.defining_op for value in large] == [None]
    check(normalized_and_a_part, *given, out=out)


def test_of_a_sum_of_large_values_a_part_is_taken(whole):
    """Else both of them would have to be kept."""

    def function(x, y, w):
        found = sdy.sharding_constraint(x + y, P())
        return found @ w, sdy.sharding_constraint(found, P("y")) * 3.0

    x, w = jnp.ones((16, 32)), jnp.ones((32, 8))
    found = sliced(function, (P(), P(), P(None, "y")), x, x * 2, w, out=(P(None, "y"), P("y")))
    assert [value.defining_op.name for value in found] == ["stablehlo.add"]


def test_a_part_of_a_product_is_taken(whole):
    """To compute it would be another product, and its operand is there as a whole only."""

    def function(x, w):
        made = sdy.sharding_constraint(x @ w, P())
        return made, jnp.abs(sdy.sharding_constraint(made, P("y")))

    x, w = jnp.ones((16, 8)), jnp.ones((8, 8))
    assert slices(function, (P(), P()), x, w, out=(P(), P("y"))) == [(16, 8)]


def test_parts_of_rows_that_are_looked_up_are_looked_up(whole):
    def function(tokens, table, w):
        found = jnp.abs(table[tokens])
        return sdy.sharding_constraint(sdy.sharding_constraint(found, P()) @ w, P(None, "y")), found * 2

    tokens, table, w = jnp.arange(16) % 4, jnp.arange(64.0).reshape(4, 16), jnp.ones((16, 8))
    given = (P("y"), P(), P(None, "y")), tokens, table, w
    assert all(len(shape) < 2 or shape[-1] == 1 for shape in slices(function, *given, out=(P(None, "y"), P("y"))))
    check(function, *given, out=(P(None, "y"), P("y")))


@pytest.mark.parametrize("seed", range(6))
def test_free_values_are_those_that_depend_on_no_input(seed: int) -> None:
    module = parse(RandomProgram(seed, ("while", "constant")).text)
    graph = Graph(module.operation)
    values = [result for op in graph.ops for result in op.results]
    assert free_values(graph) == {value for value in values if depends_on_no_input(value)} != set()


def test_the_end_of_a_long_chain_is_not_free() -> None:
    ops = [f"%{n + 1} = stablehlo.tanh %{n} : tensor<8xf32>" for n in range(8)]
    text = "\n".join(["%0 = stablehlo.iota dim = 0 : tensor<8xf32>", *ops, "return %8 : tensor<8xf32>"])
    module = parse(f"func.func @main() -> tensor<8xf32> {{ {text} }}")
    graph = Graph(module.operation)
    values = [op.results[0] for op in graph.ops if op.results]
    assert free_values(graph) == {value for value in values if depends_on_no_input(value)} == set(values[:6])
