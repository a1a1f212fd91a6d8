"""Layouts of whole programs under what the user states: open and closed constraints, edges, groups, manual regions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from partitioned_ops import CUBE, LINE, PLANE
from partitioned_text import partitioned
from planned_steps import Program, shapes

import sdy_jax as sdy
from sdy_jax.lowering.planner.problem import candidates as constraint_candidates
from sdy_jax.lowering.planner.search.layout_search import best_choice
from sdy_jax.lowering.planner.search.partitioned_program import plan_of
from sdy_jax.lowering.planner.setting import Policy
from sdy_jax.lowering.planner.solve.improvement import Improver
from sdy_jax.testing import assert_same

U = P.UNCONSTRAINED


def drawn(*sizes):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(0, 0.3, size), jnp.float32) for size in sizes]


def planned(function, args, mesh, in_shardings, out_shardings=None):
    """The plan for the whole program, run and compared with the plain function; it sends no more than op by op."""
    options = {"mesh": mesh, "in_shardings": in_shardings, "out_shardings": out_shardings, "rtol": 1e-4}
    local, whole = (assert_same(function, *args, layouts=layouts, **options) for layouts in ("local", "global"))
    assert whole.layouts.cost <= whole.layouts.baseline_cost
    assert whole.wire_bytes <= local.wire_bytes
    return whole


class Chosen(Program):
    """A program with the best choice for it."""

    def __init__(self, function, args, mesh, in_shardings, out_shardings=None):
        super().__init__(function, args, mesh, in_shardings, out_shardings)
        self.choice = best_choice(Improver(self.modelled))

    @property
    def cost(self):
        """Without what a reshard has to save, which is in no program."""
        self.model.charge_each_reshard(0.0)
        return self.model.cost(self.choice)

    def constraints(self):
        """Per constraint that is left after export, the layouts that it may have, the chosen one first."""
        shardings = self.modelled.table.shardings
        for node in self.modelled.constraints.values():
            candidates = self.model.nodes[node].candidates
            chosen = candidates[self.choice[node]]
            yield [
                str(shardings[candidate.layouts[0]])
                for candidate in (chosen, *(candidate for candidate in candidates if candidate != chosen))
            ]

    def layouts(self, name):
        """Per op of a name, the chosen layouts of its operands and results."""
        for number, node in self.modelled.decided.items():
            if self.graph.ops[number].name == name:
                candidate = self.model.nodes[node].candidates[self.choice[node]]
                yield [str(self.modelled.table.shardings[layout]) for layout in candidate.layouts]


# Constraints.


def layers(*spec):
    """Layers whose weights are split by columns, the activations constrained in between."""

    def function(x, weights):
        for w in weights:
            x = jnp.tanh(x @ w)
            x = jax.lax.with_sharding_constraint(x, NamedSharding(PLANE, P(*spec)))
            x = x - x.mean(-1, keepdims=True)
        return (x**2).sum()

    return function


LAYERS = (8, 64, 64), (64, 64), (64, 64), (64, 64)


def test_open_dimensions_are_filled_in_as_it_costs_least(monkeypatch):
    x, *weights = drawn(*LAYERS)
    ins = (P("x"), P(None, "y"))
    plan = planned(layers("x", U, U), (x, weights), PLANE, ins)
    stated_ones = [change for change in plan.layouts.changed if change.op == "sdy.sharding_constraint"]
    assert stated_ones and all(change.stated == '[{"x"}, {?}, {?}]' for change in stated_ones)
    assert {str(change.chosen) for change in stated_ones} == {'@mesh, [{"x"}, {"y"}, {}]'}
    assert 'stated [{"x"}, {?}, {?}]' in str(plan)
    free = Chosen(layers("x", U, U), (x, weights), PLANE, ins).cost
    monkeypatch.setattr(constraint_candidates, "stated_for", lambda value: None)
    assert free < 0.9 * Chosen(layers("x", U, U), (x, weights), PLANE, ins).cost


@pytest.mark.parametrize(
    ("spec", "allowed"),
    [
        (("x", None, U), {'[{"x"}, {}, {}]', '[{"x"}, {}, {"y"}]'}),
        (("x", U, "y"), {'[{"x"}, {}, {"y"}]'}),
        (("x", None, "y"), {'[{"x"}, {}, {"y"}]'}),
        ((("x", "y"), U, None), {'[{"x", "y"}, {}, {}]'}),
    ],
)
def test_closed_dimensions_stay_as_the_user_said(spec, allowed):
    x, *weights = shapes(*LAYERS)
    program = Chosen(layers(*spec), (x, weights), PLANE, (P("x"), P(None, "y")))
    found = list(program.constraints())
    assert len(found) == 3 and all({layout.removeprefix("@mesh, ") for layout in each} == allowed for each in found)


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ('[{"y", ?}, {}]', {'[{"y"}, {}]', '[{"y", "x"}, {}]'}),
        ('[{?}, {?}], replicated={"x"}', {"[{}, {}]", '[{"y"}, {}]', '[{}, {"y"}]'}),
        (
            '[{"y":(1)2, ?}, {}]',
            {f'[{{"y":(1)2{rest}}}, {{}}]' for rest in ("", ', "x"', ', "x", "y":(2)2')} | {'[{"y"}, {}]'},
        ),
    ],
)
def test_axes_that_are_stated_lead_and_those_that_are_ruled_out_stay_out(text, allowed):
    def function(x, w):
        return sdy.sharding_constraint(x @ w, text) @ w

    (found,) = Chosen(function, shapes((64, 64), (64, 64)), PLANE, (P("x"), P())).constraints()
    assert {layout.removeprefix("@mesh, ") for layout in found} <= allowed and len(found) > 1


def test_edges_and_computations_keep_what_is_stated():
    def function(x, w):
        looped = sdy.data_flow_edge(jax.lax.fori_loop(0, 4, lambda i, h: jnp.tanh(h @ w), x), P(None, "x"))
        named = sdy.named_computation(lambda h: h @ w, name="part", in_shardings=(P("x"),), out_shardings=P(None, "x"))
        return named(looped)

    program = Chosen(function, shapes((64, 64), (64, 64)), LINE, (P("x"), P("x")))
    edges = plan_of(program.modelled, program.choice).edges
    names = {program.graph.ops[number].name: number for number in edges}
    loop = {str(sharding) for sharding in edges[names["stablehlo.while"]] if sharding.rank}
    part = [str(sharding) for sharding in edges[names["sdy.named_computation"]] if sharding.rank]
    assert '@mesh, [{}, {"x"}]' in loop
    assert '@mesh, [{"x"}, {}]' in part and part[-1] == '@mesh, [{}, {"x"}]'
    planned(function, drawn((64, 64), (64, 64)), LINE, (P("x"), P("x")))


def test_named_computations_without_statements_are_planned_through():
    def function(x, w, v):
        return sdy.named_computation(lambda x, w: jnp.tanh(x @ w), name="part")(x, w) @ v

    x, w, v = drawn((256, 64), (64, 64), (64, 64))
    plan = planned(function, (x, w, v), LINE, (P("x"), P("x"), P("x")), P("x"))
    assert plan.wire_bytes <= 2 * 7 / 8 * 4 * 64 * 64  # the weights are gathered, once each


# Groups.


def pair(tied):
    """Two values; what makes and takes the one is split by rows, what makes and takes the other by columns."""

    def function(x, w, v):
        first, second = jnp.tanh(x @ w), jnp.sin(v @ w)
        if tied:
            first, second = sdy.shard_alike(first, second)
        return first @ w, jnp.cos(second).T @ v

    return function


PAIR = (P("x"), P(), P(None, "x")), (P("x"), P("x"))


def test_members_of_a_group_have_one_layout_where_parting_costs_less():
    sizes = (64, 64), (64, 64), (64, 64)
    alike, apart = (Chosen(pair(tied), shapes(*sizes), LINE, *PAIR) for tied in (True, False))
    assert apart.cost < alike.cost
    (first, *_), (second, *_) = alike.constraints()
    assert first == second
    sine, tanh = (next(alike.layouts(f"stablehlo.{name}"))[-1] for name in ("sine", "tanh"))
    assert sine == tanh == first
    planned(pair(True), drawn(*sizes), LINE, *PAIR)


def test_groups_move_together():
    """FSDP of the last dimension, where all values had better be split by the batch."""

    def function(x, y, weights):
        for w in weights:
            x, y = sdy.shard_alike(jnp.tanh(x @ w), jnp.sin(y @ w))
        return (x * y).sum()

    x, y, *weights = drawn((256, 64), (256, 64), (64, 64), (64, 64))
    ins = (P(), P(), P(None, "x"))
    program = Chosen(function, (x, y, weights), LINE, ins)
    assert program.cost < program.model.cost(program.modelled.start)
    found = [each[0] for each in program.constraints()]
    assert found[::2] == found[1::2] == ['@mesh, [{"x"}, {}]'] * 2
    plan = planned(function, (x, y, weights), LINE, ins)
    chosen = [change for change in plan.layouts.changed if change.op == "sdy.sharding_group"]
    assert chosen and all(change.stated == "like its group" for change in chosen)


def test_members_of_a_group_are_moved_to_its_layout_though_nobody_else_needs_it():
    def function(x, y):
        x, y = sdy.shard_alike(jnp.tanh(x), jnp.sin(y))
        return x.sum(1), y.sum(0)

    plan = planned(function, drawn((64, 64), (64, 64)), LINE, (P("x"), P(None, "x")))
    assert [each.kind for each in plan.collectives if len(each.shape) == 2] == ["all_to_all"]
    assert "sharding group" not in str(plan)


def test_groups_across_loops_and_arguments():
    def function(x, w):
        x, w = sdy.sharding_group(x, 0), w

        def body(i, h):
            return sdy.sharding_group(jnp.tanh(h @ w), 0)

        return jax.lax.fori_loop(0, 3, body, x) + x

    program = Chosen(function, shapes((64, 64), (64, 64)), LINE, (P("x"), P(None, "x")))
    assert len({each[0] for each in program.constraints()}) == 1
    planned(function, drawn((64, 64), (64, 64)), LINE, (P("x"), P(None, "x")))


# Manual regions.


def regions(inner_axes=frozenset({"x"}), spec=P("x")):
    """Layers in a region that is manual along some axes; the others are planned inside."""

    def function(x, weights):
        def body(x, weights):
            for w in weights:
                x = jnp.tanh(x @ w)
                x = x - x.mean(-1, keepdims=True)
            return jax.lax.psum((x**2).sum(), tuple(inner_axes))

        return jax.shard_map(
            body, mesh=PLANE, in_specs=(spec, P()), out_specs=P(), axis_names=set(inner_axes), check_vma=False
        )(x, weights)

    return function


def test_free_axes_are_planned_inside_of_manual_regions():
    x, *weights = drawn(*LAYERS)
    ins = (P("x"), P(None, "y"))
    plan = planned(regions(), (x, weights), PLANE, ins)
    local = sdy.partition(regions(), mesh=PLANE, in_shardings=ins, layouts="local").plan(x, weights)
    assert plan.wire_bytes < 0.7 * local.wire_bytes
    program = Chosen(regions(), (x, weights), PLANE, ins)
    assert not any('"x"' in layout for each in program.layouts("stablehlo.dot_general") for layout in each)


def test_manual_axes_at_borders_stay_and_free_ones_follow_what_is_around():
    """The weights that are taken inside and outside of the region are brought to one layout, once."""

    def function(x, w):
        inside = jax.shard_map(
            lambda x, w: jnp.tanh(x @ w), mesh=PLANE, in_specs=(P("x"), P()), out_specs=P("x"), axis_names={"x"}
        )(x, w)
        return inside + x @ w

    x, w = drawn((64, 64), (64, 64))
    program = Chosen(function, (x, w), PLANE, (P("x"), P("y")), P("x"))
    (edges,) = plan_of(program.modelled, program.choice).edges.values()
    assert all(sharding.axes[0][:1] == edges[0].axes[0][:1] for sharding in (edges[0], edges[-1]))
    assert not any("x" in axis.name for axes in edges[1].axes for axis in axes)
    assert program.placed_by_plan().cost == pytest.approx(program.cost, rel=0.02)
    planned(function, (x, w), PLANE, (P("x"), P("y")), P("x"))


def test_nested_regions_and_loops_in_regions():
    def function(x, w):
        def inner(x):
            return x * jax.lax.axis_index("y")

        def body(x, w):
            x = jax.lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ w), x)
            return jax.shard_map(inner, in_specs=P("y"), out_specs=P("y"), axis_names={"y"}, check_vma=False)(x) @ w

        return jax.shard_map(
            body, mesh=CUBE, in_specs=(P("x"), P()), out_specs=P("x"), axis_names={"x"}, check_vma=False
        )(x, w)

    planned(function, drawn((32, 64), (64, 64)), CUBE, (P("x"), P("z", "y")))


def test_results_of_computations_that_are_stated_to_be_on_one_device():
    """Such a sharding has no dimensions."""
    text = """
sdy.mesh @mesh = <["a"=2, "b"=4]>
sdy.mesh @single = <[], device_ids=[0]>
func.func @main(%x: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"a"}, {"b"}]>}) -> tensor<8x8xf32> {
  %0:2 = sdy.named_computation<"f">(%x) in_shardings=[<@mesh, [{"a", ?}, {?}]>] out_shardings=[<@mesh, [{?}, {?}]>, <@single, []>] (%y: tensor<8x8xf32>) {
    %1 = stablehlo.dot_general %y, %y, contracting_dims = [1] x [0] : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
    %2 = stablehlo.tanh %y : tensor<8x8xf32>
    sdy.return %1, %2 : tensor<8x8xf32>, tensor<8x8xf32>
  } : (tensor<8x8xf32>) -> (tensor<8x8xf32>, tensor<8x8xf32>)
  %3 = stablehlo.add %0#0, %0#1 : tensor<8x8xf32>
  return %3 : tensor<8x8xf32>
}
"""  # noqa: E501
    assert "sdy.mesh @single" in str(partitioned(text, Policy()))
