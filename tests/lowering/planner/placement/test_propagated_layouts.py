"""`layouts="propagated"`: every value is where propagation put it, with the numbers of the plain function."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from partitioned_ops import LINE
from planned_steps import PROGRAMS, shapes
from random_functions import check
from random_texts import check as check_texts

import sdy_jax as sdy
from sdy_jax.cli.main import main
from sdy_jax.ir.graph import Graph
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.lowering.planner.facts.fusion import depends_on_no_input
from sdy_jax.lowering.planner.setting import Policy
from sdy_jax.testing import assert_same


def strays(plan):
    """The results of ops that are in another layout than propagation gave them, when any op but a reshard takes them.

    Ops are found again by name, type and location; what every device can compute may be anywhere.
    """
    name = plan.program.mesh_name

    def layout(value):
        return (value.sharding or TensorSharding.replicated(name, len(value.shape))).layout

    def key(op, value):
        return op.name, str(value.type), str(op.mlir.location), value.index

    declared = collections.defaultdict(set)
    for op in Graph(plan.stages["propagated"]).ops:
        for value in op.results:
            if value.shape:
                declared[key(op, value)].add(layout(value))

    def arrives(value, wanted):
        if layout(value) in wanted:
            return True
        return all(user.name.startswith("sdy.") and arrives(user.results[0], wanted) for user, _ in value.uses)

    found = []
    for op in Graph(plan.stages["partitioned"]).ops:
        for value in op.results:
            wanted = declared.get(key(op, value))
            if not wanted or op.name.startswith("sdy.") or depends_on_no_input(value):
                continue
            if not arrives(value, wanted):
                found.append((str(op.name), str(value.type), str(value.sharding), wanted))
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_value_is_where_propagation_put_it(name):
    function, args, in_shardings, mesh = PROGRAMS[name]
    rng = np.random.default_rng(0)
    drawn = jax.tree.map(lambda a: jnp.asarray(rng.normal(0, 0.3, a.shape), a.dtype), args)
    plan = assert_same(function, *drawn, mesh=mesh, in_shardings=in_shardings, rtol=1e-4, layouts="propagated")
    assert not strays(plan)
    assert plan.layouts is None


@pytest.mark.more("more random programs")
@pytest.mark.usefixtures("poisoned_padding")
def test_random_programs():
    check(5, 10, layouts="propagated")


def test_random_programs_with_control_flow_and_all_kinds_of_ops():
    counts = check_texts(range(1060, 1075), Policy(layouts="propagated"))
    assert counts["same"] >= 7, counts


def two_terms(x, u, v):
    return x @ u + x @ v


def test_partial_sums_are_reduced_where_they_arise():
    args = shapes((16, 32), (32, 8), (32, 8))
    kinds = {
        layouts: [
            c.kind
            for c in sdy.partition(two_terms, mesh=LINE, in_shardings=(P(None, "x"), P("x"), P("x")), layouts=layouts)
            .plan(*args)
            .collectives
        ]
        for layouts in ("local", "propagated")
    }
    assert kinds == {"local": ["all_reduce"], "propagated": ["all_reduce"] * 2}


SUM_OF_TERMS = """
sdy.mesh @mesh = <["a"=2]>
func.func @main(%x: tensor<4x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"a"}]>},
    %u: tensor<8x6xf32>, %v: tensor<8x6xf32>) -> tensor<4x6xf32> {
  %0 = stablehlo.dot_general %x, %u, contracting_dims = [1] x [0]
    : (tensor<4x8xf32>, tensor<8x6xf32>) -> tensor<4x6xf32>
  %1 = stablehlo.dot_general %x, %v, contracting_dims = [1] x [0]
    : (tensor<4x8xf32>, tensor<8x6xf32>) -> tensor<4x6xf32>
  %2 = stablehlo.add %0, %1 : tensor<4x6xf32>
  return %2 : tensor<4x6xf32>
}
"""


@pytest.mark.parametrize(("layouts", "reductions"), [("local", 1), ("propagated", 2), ("global", 1)])
def test_the_command_line_says_how_layouts_are_chosen(tmp_path, capsys, layouts, reductions):
    (tmp_path / "m.mlir").write_text(SUM_OF_TERMS)
    assert main(["plan", str(tmp_path / "m.mlir"), "--layouts", layouts]) == 0
    assert f"in {reductions} all_reduce" in capsys.readouterr().out


def added_up(xs, start):
    return jax.lax.scan(lambda total, x: (total + x.T @ x, None), start, xs)[0]


def test_loops_carry_what_propagation_says():
    """A loop that adds partial sums up reduces each of them; op by op it carries the partial sum."""
    drawn = np.random.default_rng(0).normal(size=(4, 64, 16)).astype(np.float32), np.zeros((16, 16), np.float32)
    sent = {
        layouts: assert_same(added_up, *drawn, mesh=LINE, in_shardings=(P(None, "x"), P()), layouts=layouts).wire_bytes
        for layouts in ("local", "propagated")
    }
    assert sent["propagated"] == 4 * sent["local"]


def constrained(x):
    return jnp.tanh(sdy.sharding_constraint(x, P(None, "x"))).sum(0)


def test_constraints_move_values_where_they_stand():
    x = np.random.default_rng(0).normal(size=(16, 24)).astype(np.float32)
    plan = assert_same(constrained, x, mesh=LINE, in_shardings=P("x"), out_shardings=P("x"), layouts="propagated")
    assert [c.kind for c in plan.collectives] == ["all_to_all"]
    assert not strays(plan)
