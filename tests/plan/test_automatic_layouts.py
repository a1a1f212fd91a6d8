"""`AUTO`: layouts of arguments and results that the planner chooses."""

import math
import pickle
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from partitioned_ops import LINE, PLANE
from sharding_dump import parse

import sdy_jax as sdy
from sdy_jax.ir.graph import Graph
from sdy_jax.ir.jax_shardings import bytes_text
from sdy_jax.lowering.planner.search.memory_search import GivenUp
from sdy_jax.lowering.targets import target
from sdy_jax.plan import auto_layouts, build
from sdy_jax.plan.border import pasted
from sdy_jax.plan.usual_layouts import UsualLayouts, expert_parallel, tensor_parallel_dims
from sdy_jax.shardy.rules import RuleBook

AXES = {"line": LINE, "plane": PLANE}
OPTIMIZER = optax.adamw(1e-2)


def forward(weights, x):
    for layer in weights:
        x = x + jnp.tanh(x @ layer["up"] + layer["bias"]) @ layer["down"]
    return x


def loss(weights, x, y):
    return jnp.mean((forward(weights, x) - y) ** 2)


def step(state, x, y):
    value, gradients = jax.value_and_grad(loss)(state["weights"], x, y)
    updates, optimizer = OPTIMIZER.update(gradients, state["optimizer"], state["weights"])
    return {"weights": optax.apply_updates(state["weights"], updates), "optimizer": optimizer}, value


def arguments(batch=32, width=32, layers=2):
    keys = iter(jax.random.split(jax.random.key(0), 3 * layers + 2))

    def normal(*shape):
        return jax.random.normal(next(keys), shape) / np.sqrt(shape[0])

    weights = [
        {"up": normal(width, 4 * width), "bias": jnp.zeros(4 * width), "down": normal(4 * width, width)}
        for _ in range(layers)
    ]
    return {"weights": weights, "optimizer": OPTIMIZER.init(weights)}, normal(batch, width), normal(batch, width)


def assert_close(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


def spec_leaves(tree):
    return jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, P))


def test_there_is_one_auto():
    assert type(sdy.AUTO)() is sdy.AUTO
    assert pickle.loads(pickle.dumps(sdy.AUTO)) is sdy.AUTO
    assert repr(sdy.AUTO) == "AUTO"


@pytest.mark.dear
@pytest.mark.parametrize("mesh", AXES)
@pytest.mark.parametrize("batch", [32, 512])
def test_a_training_step_is_as_plain_and_as_cheap_as_the_usual_layouts(mesh, batch):
    args = arguments(batch)
    auto = sdy.partition(step, mesh=AXES[mesh], in_shardings=sdy.AUTO, out_shardings=sdy.AUTO, on_unknown="ignore")
    plan = auto.plan(*args)
    assert plan.automatic is not None
    costs = [each.cost for each in plan.automatic.usual.values()]
    assert len(costs) == (5 if mesh == "line" else 6)
    assert plan.automatic.chosen.cost <= 1.0001 * min(costs)
    assert_close(auto(*args), step(*args))


@pytest.mark.dear
@pytest.mark.parametrize("mesh", AXES)
def test_what_was_chosen_gives_the_same_plan_when_it_is_stated(mesh):
    args = arguments()
    plan = sdy.partition(step, mesh=AXES[mesh], in_shardings=sdy.AUTO, out_shardings=sdy.AUTO).plan(*args)
    given, named = plan.input_specs
    assert not named
    again = sdy.partition(step, mesh=AXES[mesh], in_shardings=given, out_shardings=plan.output_specs).plan(*args)
    assert again.automatic is None
    assert again.mlir() == plan.mlir()
    assert again.layouts.cost == plan.automatic.chosen.cost


def test_the_text_of_a_plan_states_what_was_chosen():
    args = arguments()
    plan = sdy.partition(step, mesh=PLANE, in_shardings=sdy.AUTO, out_shardings=sdy.AUTO).plan(*args)
    page, text = str(plan), "\n  ".join(plan.record().automatic.stated)
    assert text.splitlines()[0] in page.partition("automatic layouts\n")[2]
    start = text.index("in_shardings=") + len("in_shardings=")
    stated = text[start : text.index("\n  out_shardings=")]
    names = {"P": P, **{name: getattr(optax, name) for name in ("ScaleByAdamState", "EmptyState")}}
    given = eval(stated, names)
    again = sdy.partition(step, mesh=PLANE, in_shardings=given, out_shardings=plan.output_specs).plan(*args)
    assert again.mlir() == plan.mlir()
    for name in ("replicated", "data", "fsdp", "fsdp-first", "megatron", "fsdp+megatron"):
        assert f"  {name} " in page
    chosen = next(line for line in page.splitlines() if line.startswith("  chosen "))
    assert chosen.split()[1:4] == ["sends", *bytes_text(plan.wire_bytes).split()]


def test_what_is_carried_comes_back_as_it_went_in():
    args = arguments()
    plan = sdy.partition(step, mesh=PLANE, in_shardings=sdy.AUTO, out_shardings=sdy.AUTO).plan(*args)
    (state, *_), _ = plan.input_specs
    assert spec_leaves(state) == spec_leaves(plan.output_specs[0])


def test_the_optimizer_is_split_as_its_parameters_are():
    args = arguments(batch=64)
    plan = sdy.partition(step, mesh=PLANE, in_shardings=sdy.AUTO, out_shardings=sdy.AUTO, memory=3e5).plan(*args)
    (state, *_), _ = plan.input_specs
    adam = state["optimizer"][0]
    assert spec_leaves(adam.mu) == spec_leaves(adam.nu) == spec_leaves(state["weights"])


@pytest.mark.more("a limit of memory")
def test_a_limit_of_memory_splits_what_it_must():
    args = arguments(batch=16, width=64)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(args[0]))
    limit = 1.2 * held  # arguments and results are twice as much where they are whole
    auto = sdy.partition(step, mesh=LINE, in_shardings=sdy.AUTO, out_shardings=sdy.AUTO, memory=limit)
    plan = auto.plan(*args)
    assert plan.memory.peak <= limit
    assert plan.automatic.usual["data"].peak > limit
    assert "too much" in str(plan)
    assert_close(auto(*args), step(*args))


def test_layouts_whose_arguments_alone_are_too_much_are_not_planned():
    args = arguments(batch=16, width=64)
    limit = 0.9 * sum(leaf.nbytes for leaf in jax.tree.leaves(args[0]))
    auto = sdy.partition(step, mesh=LINE, in_shardings=sdy.AUTO, out_shardings=sdy.AUTO, memory=limit)
    assert not {"replicated", "data"} & set(auto.plan(*args).automatic.usual)


def test_weights_are_fully_sharded_along_their_largest_dimension_or_the_first_that_divides():
    def summed(weights, x):
        return jax.tree.map(lambda w: w + x.mean(), weights), x.sum()

    weights = {
        "stack": jnp.ones((8, 16, 32)),
        "odd": jnp.ones((6, 8, 64)),
        "tall": jnp.ones((64, 8)),
        "one": jnp.ones(3),
    }
    traced = sdy.partition(summed, mesh=PLANE, in_shardings=sdy.AUTO, out_shardings=sdy.AUTO).plan(weights, jnp.ones(8))
    usual = dict(UsualLayouts(traced.program, range(5), range(4)).borders())
    paths = [argument.path.split("'")[1] for argument in traced.arguments[:4]]
    split = {
        name: {path: [dim for dim, axes in enumerate(border[i].axes) if axes] for i, path in enumerate(paths)}
        for name, border in usual.items()
    }
    assert split["fsdp"] == {"stack": [2], "odd": [2], "tall": [0], "one": []}
    assert split["fsdp-first"] == {"stack": [0], "odd": [1], "tall": [0], "one": []}


@pytest.mark.more("several slices")
def test_state_is_split_within_slices_and_the_batch_between_them():
    costs = sdy.CostModel.of_machine("h100", ("x", "y"), bandwidth={"x": 25e9})
    auto = sdy.partition(step, mesh=PLANE, in_shardings=sdy.AUTO, out_shardings=sdy.AUTO, costs=costs)
    program, leaves = auto.plan(*arguments()).program, range(len(jax.tree.leaves(arguments())))
    assert costs.slow_axes(program.mesh) == {"x"}
    assert costs.slow_axes(sdy.Mesh.of(x=1, y=8)) == frozenset()
    border = dict(UsualLayouts(program, leaves, leaves[:-2], costs.slow_axes(program.mesh)).borders())["fsdp"]
    axes = [{axis.name for dim in border[leaf].axes for axis in dim} for leaf in leaves]
    assert axes[-2:] == [{"x", "y"}, {"x", "y"}]
    assert {"y"} in axes[:-2] and all(found <= {"y"} for found in axes[:-2])


@pytest.mark.more("several slices")
def test_layouts_that_keep_within_slices_are_tried_too(monkeypatch):
    tried = []
    monkeypatch.setattr(auto_layouts.UsualLayouts, "borders", recorded(auto_layouts.UsualLayouts.borders, tried))
    costs = sdy.CostModel.of_machine("h100", ("x", "y"), bandwidth={"x": 25e9})
    sdy.partition(step, mesh=PLANE, in_shardings=sdy.AUTO, out_shardings=sdy.AUTO, costs=costs).plan(*arguments())
    assert [usual.slow for usual in tried] == [(), {"x"}]


def recorded(function, found):
    def run(self):
        found.append(self)
        return function(self)

    return run


def not_enough(least):
    error = sdy.MemoryLimitError(f"the least that was found is {least}")
    error.least = least
    return error


@pytest.mark.more("a limit at which the search ends without a plan")
def test_where_the_search_finds_nothing_usual_layouts_that_fit_are_taken(monkeypatch):
    def found_nothing(*_):
        raise not_enough(1e12)

    monkeypatch.setattr(build, "best_border", found_nothing)
    args = arguments(batch=16, width=64)
    auto = sdy.partition(step, mesh=LINE, in_shardings=sdy.AUTO, out_shardings=sdy.AUTO, memory="300KiB")
    plan = auto.plan(*args)
    assert plan.memory.peak <= 300 * 1024
    least = min(each.peak for each in plan.automatic.usual.values())
    auto = sdy.partition(step, mesh=LINE, in_shardings=sdy.AUTO, out_shardings=sdy.AUTO, memory=0.93 * least)
    with pytest.raises(sdy.MemoryLimitError) as refused:
        auto.plan(*args)
    assert refused.value.least <= least


@pytest.mark.more("how often usual layouts are planned")
def test_usual_layouts_that_do_not_fit_are_not_planned_again_where_another_one_does(monkeypatch):
    """All of them hold more than the limit, and cost less than what is found within it."""
    args, limits, plan_of = arguments(batch=16, width=64), [], build._Making.plan

    def counted(self, program, *more, **known):
        limits.append(self.given.policy.memory)
        return plan_of(self, program, *more, **known)

    monkeypatch.setattr(build._Making, "plan", counted)
    auto = sdy.partition(step, mesh=LINE, in_shardings=sdy.AUTO, out_shardings=sdy.AUTO, memory=222_000)
    plan = auto.plan(*args)
    assert plan.memory.peak <= 222_000 < min(each.peak for each in plan.automatic.usual.values())
    assert plan.automatic.chosen.cost > min(each.cost for each in plan.automatic.usual.values())
    assert [limit for limit in limits if limit == 222_000] == [222_000]


@pytest.mark.more("a limit between two usual layouts")
def test_what_does_not_fit_is_not_chosen_where_a_usual_layout_fits(monkeypatch):
    """Where the limit is that of the devices, the search tells what holds least, whether it fits or not."""
    args = arguments(batch=256)
    auto = sdy.partition(step, mesh=LINE, in_shardings=sdy.AUTO, out_shardings=sdy.AUTO, on_unknown="ignore")
    plan = auto.plan(*args)
    chosen = {i: argument.sharding for i, argument in enumerate(plan.arguments)}
    limit = 1.02 * plan.automatic.usual["fsdp"].peak
    assert plan.memory.peak > limit
    auto.clear_cache()
    monkeypatch.setattr(build._Making, "_freed", lambda *_: (chosen, {}))
    monkeypatch.setattr(auto_layouts, "_time", lambda plan: 0.0)
    monkeypatch.setattr(target, "memory_of", lambda mesh: limit / 0.9)
    assert auto.plan(*args).memory.peak <= limit


def test_usual_layouts_are_compared_along_whole_axes_and_what_is_chosen_is_planned_as_it_is_stated(monkeypatch):
    settings, plan_of = [], build.partition

    def recorded(module, setting, *more):
        settings.append(setting)
        return plan_of(module, setting, *more)

    monkeypatch.setattr(build, "partition", recorded)
    sdy.partition(step, mesh=LINE, in_shardings=sdy.AUTO, out_shardings=sdy.AUTO, on_unknown="ignore").plan(
        *arguments()
    )
    assert {setting.whole_axes for setting in settings if setting.policy.effort == 1} == {True}
    assert {setting.whole_axes for setting in settings if setting.policy.effort != 1} == {False}


class Tried(NamedTuple):
    """A plan: `cost` counts what is hidden, `takes` does not; and what it takes where it is stated."""

    cost: float
    takes: float
    peak: float = 1.0
    stated: float = 0.0

    @property
    def time(self):
        return SimpleNamespace(total=self.takes)

    @property
    def memory(self):
        return SimpleNamespace(peak=self.peak)

    @property
    def layouts(self):
        return SimpleNamespace(cost=self.cost)


@pytest.mark.parametrize(
    ("usual", "tried"),
    [
        ([Tried(9, 5, stated=6), Tried(8, 7)], [6]),  # by time, not by cost; the second one cannot be better
        ([Tried(9, 5, stated=9), Tried(8, 6, stated=7), Tried(8, 7.5)], [9, 7]),  # one that does not keep its promise
        ([Tried(9, each, stated=9) for each in (5, 6, 6.5, 7)], [9, 9, 9]),  # three at most
        ([Tried(9, 5, peak=9), Tried(8, 8.1)], []),  # what does not fit is not tried where something does
        ([Tried(9, 9, stated=7.5), Tried(9, 9.1, stated=7), Tried(9, 9.3)], [7.5, 7]),  # those as fast along whole axes
        ([Tried(9, 9, peak=9, stated=7), Tried(9, 9, peak=9)], [7]),  # also within the memory, where none fits at once
        ([Tried(9, 9, peak=9), Tried(9, 9.1, stated=7)], [7]),
    ],
)
def test_usual_layouts_that_may_take_less_by_their_time_are_stated_too(usual, tried):
    search = search_with(lambda quick, _: Tried(quick.cost, quick.stated))
    found = Tried(8, 8)
    assert [plan.takes for plan in search._better_stated(usual, usual, [found])] == tried


def search_with(stated, along_parts=True):
    search = object.__new__(auto_layouts._Search)
    search._limit, search._problems, search._given_up = 2.0, [], []
    search._planners = SimpleNamespace(stated=stated, along_parts=along_parts)
    return search


def test_where_nothing_is_along_parts_slower_usual_layouts_are_not_stated():
    search = search_with(lambda quick, _: Tried(quick.cost, quick.stated), along_parts=False)
    assert not [*search._better_stated([Tried(9, 9)], [Tried(9, 9)], [Tried(8, 8)])]


def test_a_usual_layout_may_cost_what_it_promises_to_save_where_it_has_to_be_rewritten_to_fit():
    incumbents = []
    search = search_with(lambda quick, cost: incumbents.append(cost) or Tried(quick.cost, quick.stated))
    usual = [Tried(9, 5, stated=7), Tried(9, 6, stated=7), Tried(9, 6.9, stated=9)]
    assert len([*search._better_stated(usual, usual, [])]) == 3
    assert incumbents == [math.inf, 9 + 7 - 6, 0.0]  # nothing is known; what it takes; it promises little
    assert [*search._better_stated(usual, usual, [Tried(8, 5.5)])] == [Tried(9, 7)]
    assert incumbents[3:] == [9 + 5.5 - 5]


def test_what_was_given_up_is_planned_after_all_where_nothing_else_fits():
    def stated(quick, incumbent):
        if incumbent < math.inf:
            raise GivenUp
        return Tried(quick.cost, quick.stated, quick.peak)

    search = search_with(stated)
    assert [*search._within(partial(search._planned, incumbent=9.0), [Tried(8, 8, stated=7)])] == []
    assert [*search._within(search._planned, search._given_up)] == [Tried(8, 7)]


def routed(weights, x):
    """Experts, each with a part of the tokens, and weights in a loop."""

    def layer(x, w):
        sent = jnp.einsum("ecd,edf->ecf", x, w["up"].astype(jnp.float32))
        return x + jnp.einsum("ecf,efd->ecd", jax.nn.relu(sent), jnp.swapaxes(w["down"], 1, 2)) * w["scale"], None

    out, _ = jax.lax.scan(layer, x @ weights["dense"], weights["layers"])
    return {"dense": weights["dense"] + out.mean(), "layers": weights["layers"]}


@pytest.mark.dear
@pytest.mark.parametrize("mesh", AXES)
def test_experts_are_split_and_the_rest_is_whole_or_fully_sharded(mesh):
    rng = np.random.default_rng(3)
    shapes = {"up": (3, 8, 16, 32), "down": (3, 8, 16, 32), "scale": (3, 16)}
    layers = {name: rng.normal(size=shape).astype(np.float32) / 8 for name, shape in shapes.items()}
    args = {"dense": rng.normal(size=(16, 16)).astype(np.float32), "layers": layers}, np.ones((8, 4, 16), np.float32)
    auto = sdy.partition(routed, mesh=AXES[mesh], in_shardings=sdy.AUTO, out_shardings=sdy.AUTO)
    assert {"expert", "fsdp+expert"} <= set(auto.plan(*args).automatic.usual)
    assert_close(auto(*args), routed(*args))


LAYER_OF_EXPERTS = """
func.func @main(%x: tensor<8x4x16xf32>, %stack: tensor<3x8x16x32xf32>, %i: tensor<i32>, %dense: tensor<16x16xf32>)
    -> (tensor<8x4x32xf32>, tensor<8x4x16xf32>) {
  %0 = stablehlo.constant dense<0> : tensor<i32>
  %1 = stablehlo.dynamic_slice %stack, %i, %0, %0, %0, sizes = [1, 8, 16, 32]
    : (tensor<3x8x16x32xf32>, tensor<i32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x8x16x32xf32>
  %2 = stablehlo.reshape %1 : (tensor<1x8x16x32xf32>) -> tensor<8x16x32xf32>
  %3 = stablehlo.dot_general %x, %2, batching_dims = [0] x [0], contracting_dims = [2] x [1]
    : (tensor<8x4x16xf32>, tensor<8x16x32xf32>) -> tensor<8x4x32xf32>
  %4 = stablehlo.dot_general %x, %dense, contracting_dims = [2] x [0]
    : (tensor<8x4x16xf32>, tensor<16x16xf32>) -> tensor<8x4x16xf32>
  return %3, %4 : tensor<8x4x32xf32>, tensor<8x4x16xf32>
}"""


@pytest.mark.parametrize(("devices", "experts", "columns"), [(4, {1: 1}, {1: 3, 3: 1}), (16, {}, {1: 3, 3: 1})])
def test_layers_of_a_stack_are_weights(devices, experts, columns):
    graph = Graph(parse(LAYER_OF_EXPERTS).operation)
    assert expert_parallel(graph, [1, 3], devices, RuleBook()) == experts
    assert tensor_parallel_dims(graph, [1, 3], devices, RuleBook()) == columns


def test_what_no_layout_can_hold_is_refused():
    auto = sdy.partition(step, mesh=LINE, in_shardings=sdy.AUTO, out_shardings=sdy.AUTO, memory=1000)
    with pytest.raises(sdy.MemoryLimitError, match="memory=1000 B is not enough") as refused:
        auto.plan(*arguments())
    assert 1000 < refused.value.least < 1e6


def test_single_leaves_and_stated_ones():
    x, w = jnp.ones((64, 16)), jnp.ones((16, 32))
    auto = sdy.partition(lambda x, w: jnp.tanh(x @ w), mesh=LINE, in_shardings=(P("x"), sdy.AUTO))
    plan = auto.plan(x, w)
    (of_x, _), _ = plan.input_specs
    assert of_x == P("x")
    assert plan.automatic.arguments == {"w"} and not plan.automatic.results
    assert not plan.collectives
    assert_close(auto(x, w), jnp.tanh(x @ w))


def test_where_nothing_comes_back_the_largest_argument_has_the_layouts_of_weights():
    state, x, _ = arguments(batch=64)
    auto = sdy.partition(forward, mesh=PLANE, in_shardings=sdy.AUTO, out_shardings=sdy.AUTO)
    plan = auto.plan(state["weights"], x)
    assert set(plan.automatic.usual) >= {"data", "fsdp", "megatron"}
    assert plan.automatic.chosen.cost <= 1.05 * min(each.cost for each in plan.automatic.usual.values())
    assert plan.repeated_flops == 0
    assert_close(auto(state["weights"], x), forward(state["weights"], x))


@pytest.mark.parametrize(("sizes", "starts"), [((1024, 8), 2), ((8, 1024), 1)], ids=["weights", "cache"])
def test_where_the_weights_do_not_come_back_what_propagation_says_is_a_start_too(monkeypatch, sizes, starts):
    """Of a program that serves, usual layouts of the cache that comes back say nothing of larger weights."""
    begun, border_of = [], build.best_border
    monkeypatch.setattr(build, "best_border", lambda *args: begun.append(1) or border_of(*args))
    width, length = sizes
    weights, cache = jnp.ones((width, 64)), jnp.ones((length, 64))
    served = sdy.partition(
        lambda w, cache, x: (cache + x, (cache + x) @ w.T),
        mesh=LINE, in_shardings=sdy.AUTO, out_shardings=sdy.AUTO, on_unknown="ignore",
    )  # fmt: skip
    served.plan(weights, cache, jnp.ones(64))
    assert len(begun) == starts


def test_results_alone():
    x, w = jnp.ones((8, 512)), jnp.ones((512, 8))
    auto = sdy.partition(
        lambda x, w: x @ w, mesh=LINE, in_shardings=(P(None, "x"), P("x", None)), out_shardings=sdy.AUTO
    )
    plan = auto.plan(x, w)
    assert [record.kind for record in plan.collectives] == ["reduce_scatter"]
    assert_close(auto(x, w), x @ w)


def test_arrays_that_lie_otherwise_are_moved():
    x, w = jnp.ones((64, 16)), jnp.ones((16, 32))
    placed = jax.device_put(x, NamedSharding(LINE, P(None, "x")))
    auto = sdy.partition(
        lambda x, w: jnp.tanh(x @ w), mesh=LINE, in_shardings=(sdy.AUTO, P()), out_shardings=P("x"), on_unknown="ignore"
    )
    assert auto.plan(placed, w).input_specs[0][0] == P("x")
    assert_close(auto(placed, w), jnp.tanh(x @ w))


def test_keys_and_scalars():
    def noisy(key, x, scale):
        return x + scale * jax.random.normal(key, x.shape)

    args = jax.random.key(1), jnp.ones((32, 8)), jnp.float32(0.5)
    auto = sdy.partition(noisy, mesh=LINE, in_shardings=sdy.AUTO, out_shardings=sdy.AUTO)
    assert_close(auto(*args), noisy(*args))


def test_derivatives_of_automatic_functions():
    args = arguments()
    auto = sdy.partition(loss, mesh=LINE, in_shardings=sdy.AUTO)
    weights, x, y = args[0]["weights"], *args[1:]
    assert_close(jax.grad(auto)(weights, x, y), jax.grad(loss)(weights, x, y))


def test_within_another_function_nothing_is_stated():
    inner = sdy.partition(lambda x: x * 2, mesh=LINE, in_shardings=sdy.AUTO, out_shardings=sdy.AUTO)
    outer = sdy.partition(lambda x: inner(x) + 1, mesh=LINE, in_shardings=P("x"))
    assert outer.plan(jnp.ones(16)).results[0].type == "f32[16@x]"


def test_only_borders_can_be_automatic():
    constrained = sdy.partition(lambda x: sdy.sharding_constraint(x, sdy.AUTO), mesh=LINE)
    with pytest.raises(sdy.ShardingError, match=r"AUTO.*in_shardings"):
        constrained.plan(jnp.ones(8))


class Pair(NamedTuple):
    first: object
    second: object


@pytest.mark.parametrize(
    ("specs", "text"),
    [
        ({"a": P("x"), "b": P("x")}, "P('x')"),
        ({"a": P("x"), "b": P()}, "{'a': P('x'), 'b': P()}"),
        ((P(("x", "y")),), "P(('x', 'y'))"),
        ([P(), {"a": P(None, "x")}], "[P(), P(None, 'x')]"),
        (Pair(P("x"), P()), "Pair(first=P('x'), second=P())"),
        ((P("x"), None), "P('x')"),
    ],
)
def test_specifications_as_text(specs, text):
    assert pasted(specs) == text


def test_long_texts_have_a_line_per_entry():
    specs = {f"weight_{i}": P("data", "model") if i % 2 else P() for i in range(6)}
    text = pasted(specs, 2)
    assert text.splitlines()[0] == "{" and len(text.splitlines()) == 8
    assert eval(text, {"P": P}) == specs


def attended(weights, x):
    q, k, v = (jnp.einsum("bsd,dhe->bshe", x, weights[name]) for name in ("q", "k", "v"))
    scores = jax.nn.softmax(jnp.einsum("bshe,bthe->bhst", q, k))
    x = x + jnp.einsum("bhst,bthe,hed->bsd", scores, v, weights["out"])
    return x + jax.nn.gelu(x @ weights["up"] + weights["bias"]) @ weights["down"] + weights["last"]


@pytest.mark.dear
@pytest.mark.parametrize("with_gradient", [False, True])
def test_column_by_row(with_gradient):
    """Heads and hidden units are split; what adds to whole activations is not."""
    shapes = {"q": (16, 8, 4), "k": (16, 8, 4), "v": (16, 8, 4), "out": (8, 4, 16)}
    shapes |= {"up": (16, 64), "bias": (64,), "down": (64, 16), "last": (16,)}
    weights = {name: jnp.ones(shape) for name, shape in shapes.items()}
    function = jax.grad(lambda *args: jnp.sum(attended(*args) ** 2)) if with_gradient else attended
    plan = sdy.partition(function, mesh=LINE).plan(weights, jnp.ones((2, 8, 16)))
    graph = Graph(plan.stages["imported"])
    found = tensor_parallel_dims(graph, range(len(weights)), 8, RuleBook())
    named = {plan.arguments[number].path.split("'")[1]: dim for number, dim in found.items()}
    assert named == {"q": 1, "k": 1, "v": 1, "out": 0, "up": 1, "bias": 0, "down": 0}
