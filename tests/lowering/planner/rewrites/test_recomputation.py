"""What is held between a forward and a backward pass is computed again where memory does not suffice."""

import functools
import itertools
import math
import random
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.extend.mlir import ir
from jax.sharding import PartitionSpec as P
from partitioned_ops import LINE, PLANE

import sdy_jax as sdy
from sdy_jax.ir.graph import Graph
from sdy_jax.lowering.planner import plan_program as blocking
from sdy_jax.lowering.planner.placement.program_placement import ProgramPlacement
from sdy_jax.lowering.planner.problem.layout_plan import Rewrite
from sdy_jax.lowering.planner.problem.planning_problem import FREE, planning_problem
from sdy_jax.lowering.planner.report import Recomputed
from sdy_jax.lowering.planner.rewrites import recomputation
from sdy_jax.lowering.planner.rewrites.forward_loops import forward_loops
from sdy_jax.lowering.planner.rewrites.recomputation_prices import ops_to_run_again
from sdy_jax.lowering.planner.rewrites.segments import Segment, can_run_again
from sdy_jax.lowering.planner.search import layout_search
from sdy_jax.lowering.planner.search.memory_search import GivenUp
from sdy_jax.lowering.planner.setting import Setting
from sdy_jax.plan import build
from sdy_jax.plan.page.html import columns
from sdy_jax.testing import assert_same

LAYERS, WIDTH, HIDDEN, BATCH = 5, 32, 128, 512


def layer(h, weights):
    n = h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6)
    return h + jax.nn.silu(n @ weights["up"]) @ weights["down"]


def noisy(h, weights):
    """A layer with dropout, whose mask is drawn from a key of the layer."""
    kept = jax.random.bernoulli(jax.random.wrap_key_data(weights["key"]), 0.9, (h.shape[0], HIDDEN))
    return h + jnp.where(kept, jax.nn.silu(h @ weights["up"]), 0) @ weights["down"]


def branching(h, weights):
    return jax.lax.cond(weights["up"][0, 0] > 0, lambda h: layer(h, weights), lambda h: jnp.sin(layer(h, weights)), h)


def looping(h, weights):
    """A layer with a loop of its own."""
    return jax.lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ weights["up"] @ weights["down"]) + x, h)


def unrolled(each, weights, x):
    for number in range(LAYERS):
        x = each(x, jax.tree.map(lambda w: w[number], weights))  # noqa: B023 - used at once
    return x


def of_kinds(_, weights, x):
    """Unrolled, a layer of each kind."""
    for number, each in enumerate((noisy, branching, looping, layer)):
        x = each(x, jax.tree.map(lambda w: w[number], weights))  # noqa: B023 - used at once
    return x


def scanned(each, weights, x):
    return jax.lax.scan(lambda h, w: (each(h, w), None), x, weights)[0]


def reverse(each, weights, x):
    return jax.lax.scan(lambda h, w: (each(h, w), None), x, weights, reverse=True)[0]


def with_outputs(each, weights, x):
    """The loss takes what each layer makes."""
    return jax.lax.scan(lambda h, w: (each(h, w), jnp.sin(h)), x, weights)[1].sum(0)


@functools.cache
def step_of(stack, each):
    def step(weights, x):
        def loss(floats):
            return jnp.mean(stack(each, {**weights, **floats}, x) ** 2)

        floats = {name: weights[name] for name in ("up", "down")}
        value, gradients = jax.value_and_grad(loss)(floats)
        return jax.tree.map(lambda w, g: w - 0.1 * g, floats, gradients), value

    return step


def arguments(dtype=np.float32):
    drawn = np.random.default_rng(0)
    up, down = drawn.normal(size=(LAYERS, WIDTH, HIDDEN)) / 6, drawn.normal(size=(LAYERS, HIDDEN, WIDTH)) / 12
    keys = np.arange(2 * LAYERS, dtype=np.uint32).reshape(LAYERS, 2)
    weights = {"up": up.astype(dtype), "down": down.astype(dtype), "key": keys}
    return weights, drawn.normal(size=(BATCH, WIDTH)).astype(dtype)


def options(mesh=PLANE):
    model = "y" if mesh is PLANE else None
    specs = {"up": P(None, None, model), "down": P(None, model), "key": P()}
    weights = {name: specs[name] for name in ("up", "down")}
    return {"mesh": mesh, "in_shardings": (specs, P("x")), "out_shardings": (weights, P())}


@functools.cache
def free(step):
    """The plan of a step without a limit."""
    return sdy.partition(step, **options()).plan(*arguments())


def partitioned(step, share, **more):
    """A step that may hold a share of what it holds without a limit."""
    return sdy.partition(step, **options(), memory=int(share * free(step).memory.peak), **more)


@pytest.fixture(scope="module")
def saving():
    """The plan of scanned layers that may hold half."""
    return partitioned(step_of(scanned, layer), 0.5).plan(*arguments())


def taken(function, args):
    """The temporaries of the compiled program, and its operations."""
    compiled = function.lower(*args).compile()
    return compiled.memory_analysis().temp_size_in_bytes, compiled.cost_analysis()["flops"]


STEPS = [
    (scanned, layer, 0.75),
    *((stack, layer, 0.5) for stack in (unrolled, scanned, reverse, with_outputs)),
    *((scanned, each, 0.6) for each in (noisy, branching, looping)),
    (of_kinds, None, 0.6),
]


@pytest.mark.dear
@pytest.mark.parametrize(("stack", "each", "share"), STEPS)
def test_numbers_are_those_of_the_plain_function(stack, each, share):
    args, step = arguments(), step_of(stack, each)
    function = partitioned(step, share)
    assert function.plan(*args).memory.fits
    found, plain = function(*args), jax.jit(step)(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), found, plain)


@pytest.mark.parametrize("stack", [unrolled, scanned])
@pytest.mark.more("what XLA holds, beside what the plan says")
def test_what_the_compiled_program_holds_falls_with_what_is_computed_again(stack):
    args, step = arguments(), step_of(stack, layer)
    most, operations = taken(sdy.partition(step, **options()), args)
    held, more = taken(partitioned(step, 0.4), args)
    assert held < 0.5 * most
    assert operations < more < 4 / 3 * operations


@pytest.mark.more("the order in which values are chosen")
def test_what_is_cheap_for_its_bytes_is_computed_again_first():
    args, step = arguments(), step_of(scanned, layer)
    cheap, dear = (partitioned(step, share).plan(*args).recomputed for share in (0.8, 0.3))
    assert "stablehlo.dot_general" not in {op.op for op in cheap.ops}
    (product,) = (op for op in dear.ops if op.op == "stablehlo.dot_general")
    assert product.flops == 2 * LAYERS * BATCH * WIDTH * HIDDEN / PLANE.size  # multiplications and additions
    assert sum(op.flops for op in cheap.ops) < 0.3 * sum(op.flops for op in dear.ops)


def test_nothing_is_computed_again_where_a_program_fits():
    args, step = arguments(), step_of(scanned, layer)
    assert partitioned(step, 1.0).plan(*args).recomputed is None
    assert free(step).recomputed is None


@pytest.mark.more("names of checkpoint_name")
def test_nothing_is_computed_again_where_users_say_so():
    args, step = arguments(), step_of(scanned, layer)
    with pytest.raises(sdy.MemoryLimitError, match="the least that was found"):
        partitioned(step, 0.4, recompute=False).plan(*args)
    with pytest.raises(sdy.SdyError, match="recompute='no'; expected True or False"):
        sdy.partition(step, **options(), recompute="no").plan(*args)


@pytest.mark.parametrize("stack", [pytest.param(unrolled, marks=pytest.mark.slow), scanned])
@pytest.mark.more("policies of jax.checkpoint, which the planner leaves alone")
def test_the_policy_of_a_checkpoint_holds(stack):
    """It says that products are held."""
    policy = jax.checkpoint_policies.dots_saveable
    args, step = arguments(), step_of(stack, jax.checkpoint(layer, policy=policy))
    with pytest.raises(sdy.MemoryLimitError):
        partitioned(step, 0.4).plan(*args)


def with_name(h, weights):
    hidden = checkpoint_name(h @ weights["up"], "hidden")
    return h + jax.nn.silu(hidden) @ weights["down"]


@pytest.mark.parametrize(
    ("stack", "share", "is_held"), [(unrolled, 0.6, True), (scanned, 0.6, True), (scanned, 0.35, False)]
)
@pytest.mark.more("names of checkpoint_name")
def test_values_with_a_name_are_computed_again_last(stack, share, is_held):
    args = arguments()
    plan = partitioned(step_of(stack, with_name), share).plan(*args)
    assert plan.recomputed and plan.memory.fits
    assert is_held is not bool(plan.why("hidden").again)


@pytest.mark.more("what plans print")
def test_plans_say_what_is_computed_again(saving):
    plan, without = saving, free(step_of(scanned, layer))
    found = plan.recomputed
    assert found.bytes == without.memory.peak - plan.memory.peak
    again = sum(op.flops for op in found.ops)
    assert 0 < again < 1.01 * (plan.record().flops - 0.95 * without.record().flops)
    (section,) = [part for part in str(plan).split("\n\n") if part.startswith("computed again (per device, ")]
    assert "not held" in section and f"f32[{LAYERS},{BATCH},{HIDDEN}]" in section and "test_recomputation.py" in section
    largest = max(found.values, key=lambda value: value.bytes)
    assert "not held for the backward pass" in str(plan.why(largest.source))
    assert "recomputed" in plan.stages and plan.layouts.sent <= 1.5 * plan.bound


@pytest.mark.more("records")
def test_records_keep_what_is_computed_again(saving, tmp_path):
    plan = saving
    plan.save(tmp_path / "step.plan.json")
    record = sdy.load_plan(tmp_path / "step.plan.json")
    assert record.recomputed == plan.record().recomputed
    assert "computed again (per device" in str(record)
    values, ops, size = columns(plan.record())["recomputed"]
    assert (len(values), len(ops), size) == (*map(len, plan.recomputed[:2]), plan.recomputed.bytes)


def test_stacks_that_are_not_written_yet_have_no_price(saving):
    """A rewrite makes them: the planner may take them in any layout."""
    plan = saving
    module = plan.stages["recomputed"].clone().operation
    with module.context, ir.Location.unknown(module.context):
        graph, setting = Graph(module), Setting(plan.program.mesh_name, plan.costs)
        placed = ProgramPlacement(Graph(module.clone().operation), setting).run()
        atoms = placed.layouts.atoms(placed.mesh, {})
        problem = planning_problem(graph, placed, setting, atoms)
    stacks = [op.results[0] for op in graph.ops if op.name == "stablehlo.constant" and op.results[0].rank]
    assert stacks and {problem.values[stack] for stack in stacks} == {FREE}


def test_one_device_computes_again_as_well():
    alone = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    args, step = arguments(), step_of(scanned, layer)
    most = sdy.partition(step, mesh=alone).plan(*args).memory.peak
    plan = assert_same(step, *args, mesh=alone, memory=int(0.5 * most), atol=2e-5)
    assert plan.recomputed is not None and plan.memory.fits


def graph_of(function, *args):
    plan = sdy.partition(function, mesh=LINE).plan(*args)
    return Graph(plan.stages["propagated"])


def test_ops_that_may_not_run_twice_are_known():
    def function(x):
        jax.debug.print("{}", x.sum())
        return jnp.tanh(x) + jax.pure_callback(lambda x: x, x, x)

    graph = graph_of(function, np.ones(8, np.float32))
    allowed = {op.title: can_run_again(op) for op in graph.main.blocks[0].ops}
    assert allowed["stablehlo.tanh"]
    assert not any(can_run for title, can_run in allowed.items() if not title.startswith(("stablehlo", "sdy")))


def test_loops_with_stacks_that_are_read_whole_are_left_alone():
    def function(x):
        _, outs = jax.lax.scan(lambda h, _: (jnp.sin(h), h), x, length=4)
        return outs

    assert not list(forward_loops(graph_of(function, np.ones(8, np.float32))))


@pytest.mark.dear
@pytest.mark.parametrize("seed", range(20))
def test_cuts_are_the_cheapest_that_there_are(seed):
    """Beside all subsets of ops of a random program."""
    drawn = random.Random(seed)

    def function(x):
        values = [x]
        for _ in range(7):
            values.append(jnp.add(drawn.choice(values), drawn.choice(values)))
        return values

    graph = graph_of(function, np.ones(8, np.float32))
    ops = tuple(op for op in graph.main.blocks[0].ops if op.name == "stablehlo.add")
    made = {op.results[0] for op in ops}
    seconds = {op: drawn.choice([0.5, 1.0, 2.0, 4.0]) for op in ops}
    size = {value: drawn.choice([1.0, 3.0]) for value in made}
    needed = {value: size[value] for value in drawn.sample(sorted(made, key=lambda v: ops.index(v.owner)), 3)}
    segment = Segment(ops, needed, lambda value: value not in made)

    def cost(again):
        return sum(seconds[op] for op in again) + sum(size[value] for value in segment.held(again))

    found = ops_to_run_again(segment, seconds.__getitem__, size.__getitem__, 1.0)
    subsets = itertools.chain.from_iterable(itertools.combinations(ops, n) for n in range(len(ops) + 1))
    assert cost(found) == pytest.approx(min(cost(set(subset)) for subset in subsets), rel=1e-6)


def twice(each, weights, x):
    """The second scan reads what the first one made, layer by layer, and so does the backward pass."""
    ends, outs = jax.lax.scan(lambda h, w: (each(h, w), jnp.tanh(h)), x, weights)
    return jax.lax.scan(lambda h, pair: (each(h, pair[0]) * jax.nn.sigmoid(pair[1]), None), ends, (weights, outs))[0]


def microbatched(each, weights, x):
    """Two loops in a loop."""
    return jax.lax.map(lambda part: scanned(each, weights, part), x.reshape(2, BATCH // 2, WIDTH))


@pytest.mark.parametrize("stack", [twice, microbatched])
@pytest.mark.more("loops that share stacks, and nested ones")
def test_loops_that_read_what_others_left_and_loops_in_loops(stack):
    args, step = arguments(), step_of(stack, layer)
    function = partitioned(step, 0.6)
    found, plain = function(*args), step(*args)
    assert function.plan(*args).recomputed is not None
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), found, plain)


@pytest.mark.parametrize(("is_dear", "tries"), [(True, 1), (False, 3)])
def test_no_more_is_computed_again_where_a_program_costs_more_than_one_that_fits(monkeypatch, is_dear, tries):
    less = SimpleNamespace(is_dear=is_dear, fits=False, too_much=1.0)
    written = SimpleNamespace(too_much=1.0, of=lambda graph: None, after=lambda rewrite: ())
    saved = (Recomputed(bytes=float(n)) for n in itertools.count(1))
    monkeypatch.setattr(recomputation, "_saving", lambda *_: (Rewrite("again"), None, next(saved)))
    monkeypatch.setattr(recomputation, "_searched", lambda *_: less)
    assert len(list(recomputation._holding_less_and_less(written, Rewrite("again"), ()))) == tries


@pytest.mark.parametrize(("fitting", "incumbent"), [([], math.inf), ([5.0, 3.0], 3.0)])
def test_other_forms_of_a_program_know_what_one_costs_that_fits(fitting, incumbent):
    trials = [SimpleNamespace(cost=cost, peak=SimpleNamespace(total=1.0)) for cost in (2.0, *fitting)]
    search = SimpleNamespace(best=lambda found: found[-1], of=lambda graph, cost: (graph, cost))
    search.allowed = search.choosable = lambda found: found[1:]
    program = recomputation.ProgramForm(search)
    program.found = trials
    assert program.of("graph") == ("graph", incumbent)


@pytest.mark.more("what AUTO knows of other layouts")
def test_what_has_to_be_rewritten_is_given_up_where_another_program_costs_less(monkeypatch):
    args, step, forms = arguments(), step_of(scanned, layer), []
    search = layout_search.LayoutSearch.__init__
    monkeypatch.setattr(layout_search.LayoutSearch, "__init__", lambda *a, **k: forms.append(1) or search(*a, **k))

    def planned(incumbent):
        monkeypatch.setattr(build, "partition", lambda *asked: blocking.partition(*asked[:-1], incumbent))
        forms.clear()
        return sdy.partition(step, **options(), memory="360KiB").plan(*args), len(forms)

    plan, tried = planned(math.inf)
    assert plan.recomputed is not None
    other, as_many = planned(1.001 * plan.layouts.cost)
    assert other.mlir() == plan.mlir() and as_many == tried
    for incumbent, most in (0.0, 1), (0.99 * plan.layouts.cost, tried):
        with pytest.raises(GivenUp):
            planned(incumbent)
        assert len(forms) <= most
