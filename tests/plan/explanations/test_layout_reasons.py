"""What plans say about layouts that were chosen for the whole program: the bound, reasons with prices, constraints."""

import copy
import itertools
import re
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from drawn_functions import modelled as drawn
from jax.sharding import PartitionSpec as P
from least_cost import by_trying_everything, least_cost
from partitioned_ops import LINE, PLANE
from planned_steps import BATCH, LAYER, PROGRAMS, Program, shapes, step

import sdy_jax as sdy
from sdy_jax.ir.locations import short_source
from sdy_jax.lowering.planner.solve.certificate import _Exact, certified, clusters, compared, set_back
from sdy_jax.lowering.planner.solve.improvement import improved
from sdy_jax.lowering.planner.solve.moves import moves_of

HERE = Path(__file__).name


def attended(x, q, k, v):
    q, k, v = (jnp.einsum("bsd,dhe->bshe", x, w) for w in (q, k, v))
    weights = jax.nn.softmax(jnp.einsum("bshe,bthe->bhst", q, k))
    return jnp.einsum("bhst,bthe->bshe", weights, v)


def by_heads(x, q, k, v):
    q, k, v = (jnp.einsum("bsd,dhe->bshe", x, w) for w in (q, k, v))
    q, k, v = (sdy.sharding_constraint(a, P(None, None, "x")) for a in (q, k, v))
    weights = jax.nn.softmax(jnp.einsum("bshe,bthe->bhst", q, k))
    return sdy.sharding_constraint(jnp.einsum("bhst,bthe->bshe", weights, v), P(None, "x"))


SEQUENCE = {"mesh": LINE, "in_shardings": (P(None, "x"), P(), P(), P())}
ATTENTION = shapes((8, 16, 32), *[(32, 8, 4)] * 3)


def plan_of(function, args, **options):
    return sdy.partition(function, **{"layouts": "global", "costs": sdy.CostModel(), **options}).plan(*args)


def here(text, function):
    """A text with lines of this file counted from the first line of a function."""
    first = function.__code__.co_firstlineno
    return re.sub(rf"[\w./-]*{HERE}:(\d+)", lambda match: f"here:{int(match[1]) - first}", text)


# The bound.


def drawn_program(seed, ops, name="line"):
    """A random program, with the least cost of all its choices."""
    program = drawn(name, seed, ops)
    return program, least_cost(program.model, program.model.cost(program.modelled.start) * (1 + 1e-9))


def solved(model, start):
    """The solver's bound as it is, which may not be above what was found, but for rounding."""
    return _Exact(model, start, {n: range(len(node.candidates)) for n, node in enumerate(model.nodes)}).solved()[1]


@pytest.mark.parametrize("seed", range(30))
def test_on_one_axis_the_bound_is_the_least_cost(seed):
    program, least = drawn_program(seed, 3 + seed % 4)
    assert solved(program.model, program.modelled.start) == pytest.approx(least)
    found = certified(program.model, program.modelled.start)
    assert found.cost == pytest.approx(least) and found.bound <= found.cost


@pytest.mark.parametrize("most", [0, 3])
@pytest.mark.parametrize("seed", range(30))
def test_where_sets_of_layouts_are_left_out_there_is_still_a_bound(seed, most, monkeypatch):
    monkeypatch.setattr("sdy_jax.lowering.planner.solve.certificate.MOST_SUPPLIES", most)
    program, least = drawn_program(seed, 3 + seed % 4)
    assert 0 <= solved(program.model, program.modelled.start) <= least * (1 + 1e-9)


def both_ways(x):
    return jnp.tanh(x), jnp.sin(x), jnp.cos(x)


@pytest.mark.parametrize("most", [0, 400])
def test_a_value_may_exist_in_several_layouts_at_once(most, monkeypatch):
    """One all-to-all for two results that are split otherwise; the third takes the argument as it is."""
    monkeypatch.setattr("sdy_jax.lowering.planner.solve.certificate.MOST_SUPPLIES", most)
    columns = P(None, "x")
    program = Program(both_ways, shapes((64, 64)), LINE, (P("x"),), (P("x"), columns, columns), sdy.CostModel())
    bound, sent = solved(program.model, program.modelled.start), 64 * 64 * 4 / 8 * 7 / 8
    assert bound <= by_trying_everything(program.model) * (1 + 1e-9)
    if most:
        assert sent < bound < 1.5 * sent


@pytest.mark.parametrize("seed", range(6))
def test_on_two_axes_the_bound_is_not_above_the_least_cost(seed):
    program, least = drawn_program(seed, 2, "plane")
    assert 0.5 * least <= solved(program.model, program.modelled.start) <= least * (1 + 1e-9)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_bound_is_not_above_what_is_found_and_meets_it_on_one_axis(name):
    function, args, in_shardings, mesh = PROGRAMS[name]
    program = Program(function, args, mesh, in_shardings)
    model, start = program.model, program.modelled.start
    chosen = improved(model, start, program.modelled.table, program.modelled.atoms)
    found = certified(model, chosen)
    assert found.bound <= found.cost <= model.cost(chosen) <= model.cost(start)
    if mesh is LINE:
        assert found.bound == pytest.approx(model.cost(chosen), rel=1e-5)


CHOSEN = "layouts: chosen for the whole program, which"


def test_plans_say_what_their_layouts_save_and_the_bound():
    plan = plan_of(attended, ATTENTION, **SEQUENCE)
    said = f"{CHOSEN} sends 11.4 KiB less than the propagated ones op by op (0.24 of that); none send less\n"
    assert said in str(plan)
    assert plan.bound == pytest.approx(plan.layouts.sent) == plan.wire_bytes
    assert plan_of(attended, ATTENTION, layouts="local", **SEQUENCE).bound is None


def test_on_several_axes_the_bound_is_for_those_who_ask():
    args = ([LAYER], *BATCH)
    plan = plan_of(step, args, mesh=PLANE, in_shardings=(P("x", "y"), P("x"), P("x")))
    assert CHOSEN in str(plan) and "none send" not in str(plan)
    assert 0 < plan.bound <= plan.layouts.sent


def test_a_plan_that_stays_as_the_baseline_says_that_too():
    plan = plan_of(jnp.sum, shapes((64, 32)), mesh=LINE, in_shardings=P("x"))
    assert f"{CHOSEN} sends as much as the propagated ones op by op; none send less" in str(plan)


def test_the_bound_counts_the_users_own_collectives():
    def function(x):
        return jax.shard_map(lambda a: jax.lax.psum(a.sum(0), "x"), mesh=LINE, in_specs=P("x"), out_specs=P())(x)

    plan = plan_of(function, shapes((64, 32)), mesh=LINE, in_shardings=P("x"))
    assert plan.bound == plan.layouts.sent == 224


def test_models_of_machines_say_times():
    costs = sdy.CostModel.of_machine("h100", LINE.axis_names)
    plan = plan_of(attended, ATTENTION, costs=costs, **SEQUENCE)
    assert re.search(rf"{CHOSEN} takes [\d.]+ us less to send than the propagated ones op by op", str(plan))


def test_plans_say_which_split_is_not_used_and_what_keeps_it():
    plan = plan_of(attended, ATTENTION, **SEQUENCE)
    found = re.search(r"along 'x' is not used as propagated in (\d+) values, the largest (\S+) at (\S+)\n", str(plan))
    assert found and int(found[1]) == sum(each.count for each in plan.record().layouts.changed if each.unused)
    assert found[2] == "f32[8,8,16@x,16]" and "partition(layouts='propagated') keeps every value" in str(plan)
    propagated = plan_of(attended, ATTENTION, layouts="propagated", **SEQUENCE).record()
    assert found[2] in [value.tensor.type for value in propagated.values]
    assert found[2] not in [value.tensor.type for value in plan.record().values]


# Reasons.


def test_why_says_what_a_choice_saves_and_costs():
    plan = plan_of(attended, ATTENTION, **SEQUENCE)
    (reason,) = plan.why(f"{HERE}:{attended.__code__.co_firstlineno + 2}").instead
    given = plan_of.__code__.co_firstlineno + 1 - attended.__code__.co_firstlineno
    assert here(str(reason), attended) == GOLDEN.strip().replace("LINE", str(given))


GOLDEN = """
chosen for the whole program, with 5 other values
  f32[8@x,8,16,16] instead of f32[8,8@x,16,16]: dot_general at here:2
  f32[8@x,8,16] instead of f32[8,8,16@x]: reduce_max, max and reduce_sum at here:2
  f32[8@x,8,16,1] instead of f32[8,8,16@x,1]: broadcast_in_dim at here:2
  f32[8@x,8,16,16] instead of f32[8,8,16@x,16]: sub, exp and div at here:2
  propagation had it from in_shardings of x: P(None, 'x'), given at here:LINE
  saves 19.2 KiB in 5 places: all_to_all of the result of dot_general at here:2 (7.0 KiB), \
all_to_all of the result of div at here:2 (7.0 KiB), all_to_all of the result of dot_general at here:1 (5.2 KiB in 3)
  costs 1.8 KiB: all_to_all of `x` (1.8 KiB)
"""


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.more("reasons of many programs")
def test_prices_add_up(name):
    """A cluster saves and costs what the program costs more without it."""
    function, args, in_shardings, mesh = PROGRAMS[name]
    program = Program(function, args, mesh, in_shardings)
    model, start = program.model, program.modelled.start
    chosen = improved(model, start, program.modelled.table, program.modelled.atoms)
    moves = moves_of(program.modelled.table, program.modelled.atoms)
    found = clusters(model, start, chosen)
    nodes = list(itertools.chain.from_iterable(found))
    assert len(nodes) == len(set(nodes))
    for cluster in found:
        before = set_back(model, start, chosen, cluster, moves)
        assert [before[node] for node in cluster] == [start[node] for node in cluster]
        change = sum(term.change for term in compared(model, chosen, before))
        assert change == pytest.approx(model.cost(before) - model.cost(chosen), rel=1e-6, abs=1e-3)


def test_arguments_results_and_names_have_reasons():
    plan = plan_of(attended, ATTENTION, **SEQUENCE)
    text = str(plan.why("x"))
    assert "f32[8@x,16,32] instead of f32[8,16@x,32]: `x` as its users take it" in text
    assert "costs 1.8 KiB: all_to_all of `x` (1.8 KiB)" in text
    assert "transpose at" in str(plan.why("result").instead[0])
    name = re.match(r"%\d+", plan.why(f"{HERE}:{attended.__code__.co_firstlineno + 2}").types[0][0])[0]
    assert len(plan.why(name).instead) == 1
    assert plan.why("q").instead == ()


def test_a_plan_keeps_its_model_only_for_who_asks_why():
    plan = plan_of(attended, ATTENTION, **SEQUENCE)
    text = str(plan)
    assert "_reasons" not in vars(plan)
    plan.why("x")
    assert str(plan) == str(copy.copy(plan)) == text


# Constraints and the cap on repeated work.


def test_dear_constraints_are_noted():
    plan = plan_of(by_heads, ATTENTION, **SEQUENCE)
    (note,) = plan.dear_constraints
    assert here(str(note), by_heads) == (
        "here:2: sharding_constraint: the 3 constraints cost 3.5 KiB per device: "
        "all_to_all of the result of dot_general at here:1 (5.2 KiB in 3)"
    )
    assert str(replace(note, source=short_source(note.source))) in str(plan)
    free = plan_of(attended, ATTENTION, **SEQUENCE, out_shardings=P(None, "x"))
    assert plan.layouts.sent - free.layouts.sent == pytest.approx(3.5 * 1024)


def test_dear_results_are_noted():
    """One that is wanted whole is gathered; where it is left open it stays split."""

    def function(x, w):
        return jnp.tanh(x @ w), x.sum()

    args, shardings = shapes((64, 32), (32, 64)), {"mesh": LINE, "in_shardings": (P("x"), P())}
    (note,) = plan_of(function, args, out_shardings=(P(), None), **shardings).dear_constraints
    assert note.op == "out_shardings"
    assert note.message == (
        "that of `result[0]` costs 14.0 KiB per device: all_gather of the result of tanh at "
        f"tests/plan/explanations/{HERE}:{function.__code__.co_firstlineno + 1} (14.0 KiB)"
    )
    assert plan_of(function, args, **shardings).dear_constraints == ()


def test_cheap_constraints_are_not_noted():
    def function(x, w):
        return sdy.sharding_constraint(jnp.tanh(x @ w), P("x")).sum(0)

    assert plan_of(function, shapes((64, 32), (32, 16)), mesh=LINE, in_shardings=(P("x"), P())).dear_constraints == ()


def test_plans_say_where_the_cap_on_repeated_work_mattered():
    args, options = ([LAYER] * 2, *BATCH), {"mesh": LINE, "in_shardings": (P(), P("x"), P("x")), "memory": "1GiB"}
    said = "no product or convolution does more work than op by op; with CostModel(repeat_work=True)"
    text = str(plan_of(step, args, out_shardings=P(), **options))
    assert re.search(re.escape(said) + r" the program would send 2\d\d.\d KiB less for \d.\d Mflop more", text), text
    lifted = sdy.CostModel(repeat_work=True)
    assert said not in str(plan_of(step, args, out_shardings=P(), **{**options, "costs": lifted}))
    assert said not in str(plan_of(attended, ATTENTION, **SEQUENCE))
