"""Layouts of whole programs: the model beside what is emitted, choices beside brute force, numbers on eight devices."""

import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.mlir import ir
from jax.sharding import PartitionSpec as P
from partitioned_ops import CUBE, LINE, PLANE

import sdy_jax as sdy
from sdy_jax.ir.graph import Graph
from sdy_jax.lowering.placement import whole_program
from sdy_jax.lowering.placement.partitioner import Partitioner, prepared
from sdy_jax.lowering.placement.policy import Policy
from sdy_jax.lowering.placement.whole_program import _tried, best_choice, modelled
from sdy_jax.lowering.planning.improve import improved
from sdy_jax.rules import RuleBook
from sdy_jax.testing import assert_same


class Program:
    """A function of one mesh up to the model of its layouts."""

    def __init__(self, function, args, mesh, in_shardings, out_shardings=None, costs=None):
        f = sdy.partition(function, mesh=mesh, in_shardings=in_shardings, out_shardings=out_shardings, costs=costs)
        plan = f.plan(*args)
        module = plan.stages["propagated"].clone().operation
        self.costs, rules = costs or sdy.CostModel.of_platform("cpu"), RuleBook()
        with module.context, ir.Location.unknown(module.context):
            self.graph = prepared(module, plan.program.mesh_name, rules)
            self.rules, self.mesh_name = rules, plan.program.mesh_name
            self.walk = self.walked()
            self.modelled = modelled(self.graph, self.walk, Policy())
        self.model = self.modelled.model

    def walked(self, plan=None):
        copy = Graph(self.graph.module.clone().operation)
        partitioner = Partitioner(copy, self.mesh_name, self.costs, self.rules, Policy(), (), plan)
        partitioner.run()
        return partitioner

    def walked_by_plan(self):
        module = self.graph.module
        with module.context, ir.Location.unknown(module.context):
            return self.walked(self.modelled.plan(best_choice(self.modelled)))

    def walked_by_its_own_choices(self):
        module = self.graph.module
        with module.context, ir.Location.unknown(module.context):
            return self.walked(self.modelled.plan(self.modelled.start))


def shapes(*sizes):
    return [jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes]


def step(weights, x, y):
    def loss(weights):
        h = x
        for up, down in weights:
            h = h + jax.nn.gelu(h @ up) @ down
        return jnp.mean((h - y) ** 2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value


def scanned(weights, x):
    def loss(weights):
        return jnp.sum(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights)[0] ** 2)

    return jax.grad(loss)(weights)


def attention(x, q, k, v):
    q, k, v = (jnp.einsum("bsd,dhe->bshe", x, w) for w in (q, k, v))
    scores = jax.nn.softmax(jnp.einsum("bshe,bthe->bhst", q, k))
    return jnp.einsum("bhst,bthe->bshe", scores, v)


def looked_up(table, ids):
    def loss(table):
        return jnp.sum(jax.nn.log_softmax(table[ids] @ table.T))

    return jax.grad(loss)(table)


LAYER = shapes((64, 256), (256, 64))
BATCH = shapes((32, 64), (32, 64))
PROGRAMS = {
    "data": (step, ([LAYER] * 2, *BATCH), (P(), P("x"), P("x")), LINE),
    "fsdp": (step, ([LAYER] * 2, *BATCH), (P("x"), P("x"), P("x")), LINE),
    "fsdp of the last": (step, ([LAYER] * 2, *BATCH), (P(None, "x"), P("x"), P("x")), LINE),
    "weights of both": (step, ([LAYER] * 2, *BATCH), (P("x", "y"), P("x"), P("x")), PLANE),
    "three axes": (step, ([LAYER], *BATCH), (P("x", "y"), P("z"), P("z")), CUBE),
    "scanned": (scanned, shapes((4, 64, 64), (32, 64)), (P(None, "x"), P("x")), LINE),
    "attention": (attention, shapes((8, 16, 32), *[(32, 8, 4)] * 3), (P(None, "x"), P("x"), P("x"), P("x")), LINE),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_walk_s_own_choices_emit_no_more_than_it_did(name):
    function, args, in_shardings, mesh = PROGRAMS[name]
    program = Program(function, args, mesh, in_shardings)
    assert program.walked_by_its_own_choices().cost() <= program.walk.cost()


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_planned_is_emitted(name):
    """Up to what every device computes from constants, which the model leaves out."""
    function, args, in_shardings, mesh = PROGRAMS[name]
    program = Program(function, args, mesh, in_shardings)
    chosen = improved(program.model, program.modelled.start, program.modelled.table, program.modelled.atoms)
    assert program.walked_by_plan().cost() == pytest.approx(program.model.cost(chosen), rel=0.03)


@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_and_costs_of_whole_programs(name):
    function, args, in_shardings, mesh = PROGRAMS[name]
    rng = np.random.default_rng(0)
    drawn = jax.tree.map(lambda a: jnp.asarray(rng.normal(0, 0.3, a.shape), a.dtype), args)
    found = {
        layouts: assert_same(function, *drawn, mesh=mesh, in_shardings=in_shardings, rtol=1e-4, layouts=layouts)
        for layouts in ("local", "global")
    }
    program = Program(function, args, mesh, in_shardings)
    assert program.walked_by_plan().cost() <= program.walk.cost()
    assert found["global"].wire_bytes <= found["local"].wire_bytes


def drawn_function(seed, ops):
    """A function of random products, sums and transposes of 16x16 matrices, and how many it takes."""
    rng = np.random.default_rng(seed)
    steps = [(str(rng.choice(["@", "@", "+", "*", "tanh", "T", "sum"])), *rng.integers(0, 100, 2)) for _ in range(ops)]

    def function(*args):
        values = list(args)
        for name, i, j in steps:
            a, b = values[-1 - i % min(3, len(values))], values[j % len(values)]
            values.append(
                {
                    "@": lambda a=a, b=b: a @ b,
                    "+": lambda a=a, b=b: a + b,
                    "*": lambda a=a, b=b: a * b,
                    "tanh": lambda a=a: jnp.tanh(a),
                    "T": lambda a=a: a.T,
                    "sum": lambda a=a: jnp.broadcast_to(a.sum(0), a.shape),
                }[name]()
            )
        return values[-1]

    places = [P(), P("x"), P(None, "x")]
    return function, tuple(places[k] for k in rng.integers(0, 3, 3))


def least_cost(model):
    """The least cost over all choices."""
    return min(map(model.cost, itertools.product(*(range(len(node.ways)) for node in model.nodes))))


@pytest.mark.parametrize("seed", range(40))
def test_small_programs_cost_the_least(seed):
    function, in_shardings = drawn_function(seed, 3 + seed % 4)
    program = Program(function, shapes((16, 16), (16, 16), (16, 16)), LINE, in_shardings)
    model = program.model
    if np.prod([float(len(node.ways)) for node in model.nodes]) > 20_000:
        pytest.skip("too many choices to try them all")
    chosen = improved(model, program.modelled.start, program.modelled.table, program.modelled.atoms)
    assert model.cost(chosen) == pytest.approx(least_cost(model))
    assert model.cost(chosen) <= model.cost(program.modelled.start)


BOUNDS = {
    "replicated weights": (P(), 2),
    "fsdp of the first dimension": (P("x"), 2),
    "fsdp of the last dimension": (P(None, "x"), 2),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_bytes_of_data_parallel_steps(name):
    """2 (g - 1) / g W: weights are gathered once, or not at all, and gradients reduced once."""
    spec, times = BOUNDS[name]
    weights, batch = [shapes((64, 256), (256, 64))] * 3, shapes((256, 64), (256, 64))
    f = sdy.partition(step, mesh=LINE, in_shardings=(spec, P("x"), P("x")), out_shardings=(spec, P()), layouts="global")
    size = sum(4 * np.prod(w.shape) for w in jax.tree.leaves(weights))
    assert f.plan(weights, *batch).wire_bytes <= 1.02 * times * 7 / 8 * size


SAME_TEXT = """
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import sdy_jax as sdy
from test_whole_program import PROGRAMS
for name in ("fsdp", "weights of both", "scanned"):
    function, args, in_shardings, mesh = PROGRAMS[name]
    plan = sdy.partition(function, mesh=mesh, in_shardings=in_shardings, layouts="global").plan(*args)
    print(plan, plan.bound, *(plan.why(argument.path) for argument in plan.arguments))
"""


def test_the_plan_is_the_same_in_every_process():
    def text(seed):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", SAME_TEXT],
            cwd=Path(__file__).parent,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert text("1") == text("2")


STACK = shapes((8, 64, 256), (8, 256, 64)), *shapes((64, 64), (64, 64))


def stacked(weights, x, y):
    """A step over scanned layers."""

    def loss(weights):
        def layer(h, layer):
            up, down = layer
            return h + jnp.tanh(h @ up) @ down, None

        return jnp.mean((jax.lax.scan(layer, x, weights)[0] - y) ** 2)

    return jax.grad(loss)(weights)


def stacked_step(**options):
    spec = [P(None, "x"), P(None, None, "x")]
    step = sdy.partition(stacked, mesh=LINE, in_shardings=(spec, P("x"), P("x")), out_shardings=spec, **options)
    plan = step.plan(list(STACK[0]), *STACK[1:])
    return plan, step.lower(list(STACK[0]), *STACK[1:]).compile().memory_analysis().temp_size_in_bytes


def test_layers_are_gathered_one_by_one_where_memory_asks_for_it():
    """At most 3 (g - 1) / g W: one layer for each trip forward, one backward, and its gradient."""
    size = sum(4 * np.prod(w.shape) for w in STACK[0])
    (held, much), (freed, little) = stacked_step(layouts="global", memory="1GiB"), stacked_step(layouts="global")
    assert little < much
    assert held.wire_bytes <= freed.wire_bytes <= 1.02 * 3 * 7 / 8 * size


def test_too_little_memory_names_the_largest_values():
    with pytest.raises(sdy.SdyError, match=r"memory=1000 B is not enough.*f32.*test_whole_program"):
        stacked_step(layouts="global", memory=1000)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layouts": "all"}, "layouts='all'; expected 'local', 'propagated' or 'global'"),
        ({"layouts": "global", "memory": "much"}, "memory='much'; expected a number of bytes"),
        ({"layouts": "global", "memory": -1}, "memory=-1; expected a number of bytes"),
        ({"memory": "1GiB"}, "memory= needs layouts='global'"),
        ({"memory": 1000, "layouts": "propagated"}, "the layouts of 'propagated' do not depend on it"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(sdy.SdyError, match=message):
        sdy.partition(stacked, mesh=LINE, **options)


def test_plans_say_what_was_chosen_and_why():
    spec = P("x")
    f = sdy.partition(step, mesh=LINE, in_shardings=(spec, spec, spec), layouts="global")
    plan = f.plan([LAYER] * 2, *BATCH)
    assert plan.layouts.cost < plan.layouts.proposed_cost
    assert "layouts: global (estimated 77.0 KiB, propagated 112.0 KiB, bound 77.0 KiB)" in str(plan)
    line = next(change.source.rsplit("/")[-1] for change in plan.layouts.changed)
    assert "chosen for the whole program" in str(plan.why(line))
    assert sdy.partition(step, mesh=LINE, in_shardings=(spec, spec, spec)).plan([LAYER] * 2, *BATCH).layouts is None


def test_what_is_fused_takes_no_memory_and_its_operands_live_until_it_is_read():
    def function(x, w, v):
        h = x @ w
        return h.sum(0), jnp.tanh(h * 2 + 1) @ v

    program = Program(function, shapes((32, 64), (64, 64), (64, 64)), LINE, (P("x"), P(), P()))
    values = {value: program.model.values[n] for value, n in program.modelled._values.items() if n >= 0}
    products = [value for value in values if value.defining_op and value.defining_op.name == "stablehlo.dot_general"]
    (scaled,) = [value for value in values if value.defining_op and value.defining_op.name == "stablehlo.multiply"]
    assert values[scaled].is_at_hand and not values[products[0]].is_at_hand
    until = {use.node: end for use, (_, end) in zip(values[products[0]].uses, values[products[0]].needed, strict=True)}
    assert until[values[scaled].maker.node] == max(until.values()) > values[scaled].maker.node


class Tried:
    """A search for prices of holding, in which choice `n` costs and holds `walks[n]`."""

    def __init__(self, monkeypatch, walks):
        self.prices, self.walks, tries = [], walks, itertools.count(1)

        def improved(model, *_):
            self.prices.append(model.holding)
            return [min(next(tries), len(walks) - 1)]

        monkeypatch.setattr(whole_program, "improved", improved)
        model = SimpleNamespace(
            holding=0.0,
            cost=lambda c: walks[c[0]][0],
            held=lambda c: walks[c[0]][1],
            charge_each_reshard=lambda _: None,
        )
        self.program = SimpleNamespace(model=model, start=[0], table=None, atoms=(), plan=lambda chosen: chosen[0])

    def found(self, limit):
        return [(walk.cost, walk.peak.total) for walk in _tried(self.program, self.walk(0), limit, self.walk)]

    def walk(self, number):
        cost, held = self.walks[number]
        return SimpleNamespace(cost=cost, peak=SimpleNamespace(total=held))


def test_no_price_is_tried_where_the_best_choice_fits(monkeypatch):
    tried = Tried(monkeypatch, [(10, 5), (4, 5), (4, 5)])
    assert tried.found(limit=5) == [(10, 5), (4, 5)] and tried.prices == [0]


def test_prices_rise_until_it_fits_and_then_fall_a_little(monkeypatch):
    tried = Tried(monkeypatch, [(10, 5), (4, 9), (5, 8), (6, 5), (5.5, 6), (5.6, 5)])
    assert tried.found(limit=5)[-1] == (5.6, 5)
    first, second, *rest = tried.prices[1:]
    assert second == 4 * first and rest == [2 * first, pytest.approx(2**1.5 * first)]


def test_nothing_is_tried_beyond_what_costs_more_than_a_proposal_that_fits(monkeypatch):
    tried = Tried(monkeypatch, [(10, 5), (4, 9), (11, 8), (12, 5)])
    assert len(tried.found(limit=5)) == 3
    assert Tried(monkeypatch, [(10, 6), (4, 9), (11, 8), (12, 5)]).found(limit=5)[-1] == (12, 5)


def test_a_proposal_that_nothing_saves_beside_is_left_where_it_does_not_fit(monkeypatch):
    tried = Tried(monkeypatch, [(4, 9), (4, 9), (5, 5)])
    assert tried.found(limit=5)[-1] == (5, 5) and tried.prices[1] > 0


def nested(weights, x):
    """Loops in a loop, what the inner one makes carried on by the outer one."""

    def outer(h, _):
        return jax.lax.fori_loop(0, 3, lambda i, g: jnp.tanh(g @ weights), h) + h, None

    return jax.lax.scan(outer, x, None, length=4)[0]


@pytest.mark.parametrize("function", [nested, jax.grad(lambda w, x: jnp.sum(nested(w, x)))], ids=["plain", "gradient"])
def test_values_are_needed_after_they_are_made(function):
    program = Program(function, shapes((64, 64), (32, 64)), LINE, (P("x"), P("x")))
    needed = [(value.born, begin, end) for value in program.model.values for begin, end in value.needed]
    assert all(born <= begin <= end for born, begin, end in needed)


def test_a_program_that_holds_nothing_in_between():
    plan = assert_same(lambda x: x, np.ones((8, 4), np.float32), mesh=LINE, in_shardings=P("x"), layouts="global")
    assert not plan.layouts.changed
    with pytest.raises(sdy.SdyError, match="memory=1 B is not enough"):
        sdy.partition(lambda x: x, mesh=LINE, layouts="global", memory=1).plan(np.ones((8, 4), np.float32))
