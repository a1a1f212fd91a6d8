"""The bytes that a plan states are those that the compiled program sends, loops, branches and the user's part included.

They are compared with those counted in optimised HLO, with the passes of XLA off that send less than the program says:
equal collectives become one (cse), several become one (the combiner and the folder), and what does not change in a loop
is moved out of it, or the loop is taken apart.
"""

import random

import jax
import jax.numpy as jnp
import pytest
import train_lm
from jax.sharding import PartitionSpec as P
from random_programs.loops import random_loops, random_spec
from wire_totals import OPTIONS, agreed, f32
from workloads import MESHES, WORKLOADS

import sdy_jax as sdy
from sdy_jax.plan.profile import collectives_in_hlo, totals


def auto(sizes, names):
    return jax.make_mesh(tuple(sizes), tuple(names), axis_types=(jax.sharding.AxisType.Auto,) * len(names))


def layers(x, weights):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]


def test_a_gather_in_a_scan_counts_once_per_step(mesh):
    specs = {"in_shardings": (P("data", "model"), P(None, None, "model")), "out_shardings": P("data")}
    plan = agreed(layers, f32(16, 64), f32(12, 64, 64), mesh=mesh, **specs)
    assert plan.wire_bytes == 12 * 1536 + 1536 == 19968
    assert [(c.kind, c.times, c.wire_bytes) for c in plan.collectives] == [
        ("all_gather", 12, 1536),
        ("all_gather", 1, 1536),
    ]
    assert " 12 trips x 1.5 KiB " in str(plan) and "19.5 KiB on the wire" in str(plan).splitlines()[0]


def test_fully_sharded_weights_are_gathered_in_every_step():
    plan = agreed(layers, f32(4096, 192), f32(8, 192, 192), mesh=auto([8], "d"), in_shardings=(P("d"), P(None, "d")))
    assert plan.wire_bytes == 1032192 == 8 * 129024


def test_nested_loops_multiply(mesh):
    def nested(x):
        def centred(c, _):
            return jnp.cos(c) - c.max(1, keepdims=True), None

        return jax.lax.fori_loop(0, 5, lambda _, c: jax.lax.scan(centred, jnp.sin(c), None, length=3)[0], x)

    specs = {"in_shardings": P("data", "model"), "out_shardings": P("data", "model")}
    plan = agreed(nested, f32(8, 16), mesh=mesh, **specs, layouts="local")
    assert [(c.times, c.depth) for c in plan.collectives] == [(15, 2)]


@pytest.mark.parametrize("bound", [6, jnp.int32(6)], ids=["static", "array"])
def test_a_loop_in_an_inlined_function_in_a_scan_multiplies(mesh, bound):
    @jax.jit
    def inner(x):
        return jax.lax.while_loop(lambda s: s[0] < bound, lambda s: (s[0] + 2, jnp.tanh(s[1].T)), (0, x))[1]

    def outer(x):
        return jax.lax.scan(lambda c, _: (inner(c), None), x, None, length=4)[0]

    specs = {"in_shardings": P("data"), "out_shardings": P("data")}
    plan = agreed(outer, f32(8, 8), mesh=mesh, **specs, layouts="local")
    assert {c.times for c in plan.collectives if c.wire_bytes} == {12}
    chosen = agreed(outer, f32(8, 8), mesh=mesh, **specs)  # what the loop carries has moved before it
    assert 1 in {c.times for c in chosen.collectives if c.wire_bytes} and chosen.wire_bytes < plan.wire_bytes


def doubled_until(limit):
    return lambda x: jax.lax.while_loop(lambda c: jnp.sum(c) < limit, lambda c: jnp.sinh(c) + c.mean(0), x)


def test_where_a_count_is_unknown_the_plan_says_at_least(mesh):
    plan = agreed(doubled_until(100.0), f32(8, 16), mesh=mesh, in_shardings=P("data", "model"))
    in_condition, in_body = plan.collectives
    assert not plan.totals.known and (in_condition.times, in_body.times) == (2, 1)
    assert "at least" in str(plan).splitlines()[0] and "at least" in plan.summary().splitlines()[0]
    assert " 2 trips x ? trips x " in str(plan) and "  ? trips x " in str(plan)


def test_the_known_factor_is_printed_beside_the_unknown_one(mesh):
    def loop(x):
        return jax.lax.scan(lambda c, _: (doubled_until(9.0)(c), None), x, None, length=12)[0]

    assert " 12 trips x ? trips x " in str(agreed(loop, f32(256, 256), mesh=mesh, in_shardings=P("data", "model")))


def test_a_conditional_counts_as_its_largest_branch(mesh):
    def branches(i, x, y):
        little = lambda x, y: jnp.tanh(x + y.sum())  # noqa: E731
        much = lambda x, y: jnp.sort(jnp.sort(x * y, 0), 1)  # noqa: E731
        return jax.lax.scan(lambda c, _: (jax.lax.switch(i, [little, much], c, y), None), x, None, length=3)[0]

    specs = {"in_shardings": (None, *(P("data", "model"),) * 2), "out_shardings": P("data", "model")}
    plan = agreed(branches, jax.ShapeDtypeStruct((), "int32"), f32(8, 16), f32(8, 16), mesh=mesh, **specs)
    outside, smaller, larger = (
        sum(c.total_wire_bytes for c in plan.collectives if c.branches == branches)
        for branches in [(), ((0, 0),), ((0, 1),)]
    )
    assert 0 < smaller < larger and plan.wire_bytes == outside + larger
    assert " in a smaller branch " in str(plan)


def test_what_nobody_uses_is_not_sent(mesh):
    def step(x):
        unused, used = jax.lax.fori_loop(0, 4, lambda _, c: (c[0] @ c[0].T, jnp.sin(c[1])), (x, x))
        jax.shard_map(lambda x: jax.lax.psum(x, "model"), mesh=mesh, in_specs=P("model"), out_specs=P())(unused)
        return used

    assert agreed(step, f32(8, 8), mesh=mesh, in_shardings=P("data", "model")).wire_bytes == 0


# What the user wrote.


def on_devices(mesh):
    def body(x, w):
        h = jax.lax.scan(lambda h, _: (jax.lax.psum(h, "model") / 4, None), jnp.tanh(x @ w), None, length=5)[0]
        return jax.lax.ppermute(h, "model", [(i, (i + 1) % 4) for i in range(4)])

    return jax.shard_map(
        body, mesh=mesh, in_specs=(P("data"), P(None, "model")), out_specs=P("data", "model"), check_vma=False
    )


def test_collectives_in_shard_map_are_the_users(mesh):
    plan = agreed(on_devices(mesh), f32(8, 16), f32(16, 16), mesh=mesh, in_shardings=(P("data"), P(None, "model")))
    assert [(c.kind, c.detail, c.times, c.wire_bytes, c.origin) for c in plan.collectives] == [
        ("all_reduce", '{"model"}', 5, 2 * 3 / 4 * 64, "user"),
        ("collective_permute", '{"model"}', 1, 64, "user"),
    ]
    lines = [line for line in str(plan).splitlines() if "test_totals.py" in line]
    # jax 0.12 adds a scope of its own, `in eval_jaxpr`.
    assert len(lines) == 2 and all(line.removesuffix(" in eval_jaxpr").endswith("the user's") for line in lines)


def test_so_are_those_that_derivatives_add_there(mesh):
    gradient = jax.grad(lambda x, w: (on_devices(mesh)(x, w) ** 2).sum(), (0, 1))
    plan = agreed(gradient, f32(8, 16), f32(16, 16), mesh=mesh, in_shardings=(P("data"), P(None, "model")))
    assert {c.origin for c in plan.collectives} == {"user"}
    assert [c.detail for c in plan.collectives if c.kind == "all_reduce"] == [
        '{"model"}',
        '{"model"}',
        '{"model"}',
        '{"data"}',
    ]
    assert [c.times for c in plan.collectives if c.kind == "collective_permute"] == [1, 1]


def test_what_the_partitioner_inserts_is_its_own(mesh):
    plan = agreed(layers, f32(16, 64), f32(2, 64, 64), mesh=mesh, in_shardings=(P("data", "model"), None))
    assert plan.collectives and {c.origin for c in plan.collectives} == {"partitioner"}


def groups(*numbers):
    return [list(group) for group in numbers]


@pytest.mark.parametrize(
    ("body", "kind", "bytes_sent"),
    [
        (lambda x: jax.lax.psum(x, ("data", "model")), "all_reduce", 2 * 7 / 8 * 128),
        (lambda x: jax.lax.psum(x, "model", axis_index_groups=groups((0, 2), (1, 3))), "all_reduce", 128),
        (lambda x: jax.lax.pmax(x, "model"), "all_reduce", 2 * 3 / 4 * 128),
        (lambda x: jax.lax.all_gather(x, "model"), "all_gather", 3 * 128),
        (lambda x: jax.lax.all_gather(x, "data", tiled=True), "all_gather", 128),
        (lambda x: jax.lax.psum_scatter(x, "model", tiled=True), "reduce_scatter", 3 / 4 * 128),
        (lambda x: jax.lax.all_to_all(x, "model", 0, 1, tiled=True), "all_to_all", 3 / 4 * 128),
        (lambda x: jax.lax.ppermute(x, "data", [(0, 1)]), "collective_permute", 128),
        (lambda x: jax.lax.ppermute(x, "data", [(0, 0), (1, 1)]), "collective_permute", 0),
        (lambda x: jax.lax.psum(x.astype(bool).astype(jnp.int8), "model"), "all_reduce", 2 * 3 / 4 * 32),
    ],
)
def test_each_kind_that_the_user_writes(mesh, body, kind, bytes_sent):
    function = jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    plan = agreed(function, f32(4, 8), mesh=mesh)
    assert [(c.kind, c.wire_bytes) for c in plan.collectives] == [(kind, bytes_sent)]


def test_free_axes_split_what_the_user_sends(mesh):
    """In a computation that is manual along one axis only, the partitioner splits along the other."""
    part = jax.shard_map(
        lambda x: jax.lax.psum(jnp.sin(x), "data"), mesh=mesh, in_specs=P("data"), out_specs=P(), axis_names={"data"}
    )
    plan = agreed(part, f32(8, 16), mesh=mesh, in_shardings=P("data", "model"))
    assert [(c.wire_bytes, c.origin) for c in plan.collectives] == [(4 * 4 * 4, "user")]


def test_collectives_in_sdys_manual_computations(mesh):
    def program(x):
        half = P("data")
        return sdy.manual_computation(
            lambda x: jax.lax.all_gather(x, "data", tiled=True)[:4] + jax.lax.psum(x, "data"),
            in_shardings=half,
            out_shardings=half,
            manual_axes={"data"},
        )(x)

    plan = agreed(program, f32(8, 16), mesh=mesh, in_shardings=P("data"))
    assert [(c.kind, c.origin, c.wire_bytes) for c in plan.collectives] == [
        ("all_gather", "user", 256),
        ("all_reduce", "user", 256),
    ]


def test_the_functions_of_the_shard_dialect_in_python(mesh):
    part = jax.shard_map(
        lambda x: sdy.shard.shift(x, grid_axes="model", shift_axis="model", offset=1, rotate=True),
        mesh=mesh,
        in_specs=P(None, "model"),
        out_specs=P(None, "model"),
        check_vma=False,
    )
    plan = agreed(part, f32(8, 16), mesh=mesh)
    assert [(c.kind, c.origin, c.wire_bytes) for c in plan.collectives] == [("collective_permute", "user", 128)]


def test_what_derivatives_send_is_in_their_plans(mesh):
    f = sdy.partition(
        lambda x, w: (jnp.tanh(layers(x, w)) ** 2).sum(), mesh=mesh, in_shardings=(P("data"), P(None, "model"))
    )
    args = f32(16, 64), f32(3, 64, 64)
    compiled = jax.jit(jax.value_and_grad(f, (0, 1))).lower(*args).compile(compiler_options=OPTIONS["compiler_options"])
    (call,) = f.plans
    forward, backward = (below.plan.wire_bytes for below in call.derivatives)
    assert backward and forward + backward == totals(collectives_in_hlo(compiled.as_text())).wire_bytes


DIALECT = """
sdy.mesh @m = <["data"=2, "model"=4]>
shard.grid @m(shape = 2x4)
func.func @main(%x: tensor<8x12xf32>) -> tensor<8x12xf32> {{
  %0 = sdy.manual_computation(%x) in_shardings=[<@m, [{{"data"}}, {{"model"}}]>]
      out_shardings=[<@m, [{{"data"}}, {{"model"}}]>] manual_axes={{"data", "model"}} (%a: tensor<4x3xf32>) {{
    {op}
    sdy.return %b : tensor<4x3xf32>
  }} : (tensor<8x12xf32>) -> tensor<8x12xf32>
  return %0 : tensor<8x12xf32>
}}"""
SAME = "tensor<4x3xf32> -> tensor<4x3xf32>"
PERMUTE, CHUNKS = ["collective_permute"], ["all_to_all", "all_gather"]


@pytest.mark.parametrize(
    ("op", "kinds", "bytes_sent"),
    [
        (
            f"%b = shard.shift %a on @m grid_axes = [1] shift_axis = 1 offset = 1 rotate : {SAME}",
            ["collective_permute"],
            48,
        ),
        (f"%b = shard.all_reduce %a on @m grid_axes = [1] reduction = max : {SAME}", ["all_reduce"], 2 * 3 / 4 * 48),
        (
            f"%b = shard.all_reduce %a on @m grid_axes = [0, 1] reduction = product : {SAME}",
            ["all_gather"],  # of so few elements all terms
            7 * 48,
        ),
        (
            """%g = shard.all_gather %a on @m grid_axes = [1] gather_axis = 1 : tensor<4x3xf32> -> tensor<4x12xf32>
            %b = shard.reduce_scatter %g on @m grid_axes = [1] reduction = sum scatter_axis = 1
              : tensor<4x12xf32> -> tensor<4x3xf32>""",
            ["all_gather", "reduce_scatter"],
            3 * 48 + 3 * 48,
        ),
        (
            """%r = arith.constant 2 : index
            %g = shard.gather %a on @m grid_axes = [1] gather_axis = 1 root = [%r]
              : (tensor<4x3xf32>, index) -> tensor<4x12xf32>
            %b = shard.scatter %g on @m grid_axes = [1] scatter_axis = 1 root = [2]
              : (tensor<4x12xf32>) -> tensor<4x3xf32>""",
            ["all_gather", "all_to_all"],
            3 * 48 + 3 * 48,
        ),
        (
            """%s = shard.send %a on @m grid_axes = [1] destination = [3] : (tensor<4x3xf32>) -> tensor<4x3xf32>
            %b = shard.recv %a on @m grid_axes = [1] source = [0] : (tensor<4x3xf32>) -> tensor<4x3xf32>""",
            ["collective_permute"],
            48,
        ),
        (
            "%b = shard.update_halo %a on @m split_axes = [[], [1]] halo_sizes = [1, 0] : tensor<4x3xf32>",
            ["collective_permute"],
            16,
        ),
    ],
)
def test_collectives_of_the_mesh_and_shard_dialects_in_manual_computations(op, kinds, bytes_sent):
    plan = agreed(sdy.loads(DIALECT.format(op=op)), f32(8, 12), mesh=None)
    assert [c.kind for c in plan.collectives] == kinds and {c.origin for c in plan.collectives} == {"user"}
    assert plan.wire_bytes == bytes_sent


BROADCAST = """
sdy.mesh @mesh = <["data"=2, "model"=4]>
func.func @main(%x: tensor<8x8xf32>) -> tensor<8x8xf32> {
  %0 = sdy.manual_computation(%x) in_shardings=[<@mesh, [{"data"}, {"model"}]>]
      out_shardings=[<@mesh, [{"data"}, {"model"}]>] manual_axes={"data", "model"} (%a: tensor<4x2xf32>) {
    %1 = "stablehlo.collective_broadcast"(%a) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
      replica_groups = dense<[[0, 1, 2, 3], [4, 5, 6, 7]]> : tensor<2x4xi64>} : (tensor<4x2xf32>) -> tensor<4x2xf32>
    %2:2 = "stablehlo.all_reduce"(%1, %a) ({
      ^bb0(%p: tensor<f32>, %q: tensor<f32>):
        %m = stablehlo.multiply %p, %q : tensor<f32>
        stablehlo.return %m : tensor<f32>
    }) {channel_handle = #stablehlo.channel_handle<handle = 2, type = 1>, use_global_device_ids,
      replica_groups = dense<[[0, 1, 2, 3], [4, 5, 6, 7]]> : tensor<2x4xi64>}
      : (tensor<4x2xf32>, tensor<4x2xf32>) -> (tensor<4x2xf32>, tensor<4x2xf32>)
    %3 = stablehlo.add %2#0, %2#1 : tensor<4x2xf32>
    sdy.return %3 : tensor<4x2xf32>
  } : (tensor<8x8xf32>) -> tensor<8x8xf32>
  return %0 : tensor<8x8xf32>
}"""


def test_all_operands_of_collectives_in_stablehlo_count():
    plan = agreed(sdy.loads(BROADCAST), f32(8, 8), mesh=None)
    assert [(c.kind, c.detail, c.wire_bytes) for c in plan.collectives] == [
        ("collective_broadcast", '{"model"}', 3 * 32),
        ("all_reduce", '{"model"}', 3 * 32),  # of so few elements all terms are gathered
        ("all_reduce", '{"model"}', 3 * 32),
    ]


REORDERED = """
sdy.mesh @mesh = <["a"=8], device_ids=[3, 1, 0, 2, 7, 5, 6, 4]>
sdy.mesh @other = <["b"=2, "c"=4]>
func.func @main(%x: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"a"}, {}]>}) -> tensor<8x8xf32> {
  %0 = stablehlo.tanh %x {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{"a"}, {}]>]>} : tensor<8x8xf32>
  %1 = sdy.reshard %0 <@other, [{"b", "c"}, {}]> : tensor<8x8xf32>
  return %1 : tensor<8x8xf32>
}"""


def test_what_moves_to_another_order_of_the_devices():
    plan = agreed(sdy.loads(REORDERED), f32(8, 8), mesh=None)
    assert [(c.kind, c.wire_bytes) for c in plan.collectives] == [("collective_permute", 32)] * 2


# Models and random programs.


@pytest.mark.dear
@pytest.mark.parametrize(
    ("make", "mesh_name"),
    [
        pytest.param(make, name, marks=() if (number - index) % 3 == 0 else pytest.mark.slow)
        for number, make in enumerate(WORKLOADS)
        for index, name in enumerate(MESHES)
    ],
)
def test_the_models_of_the_benchmarks(make, mesh_name):
    workload, mesh = make(), auto(*MESHES[mesh_name])
    inputs, outputs = workload.shardings(mesh_name)
    step = workload.step(mesh, mesh_name)
    agreed(step, *workload.arguments, mesh=mesh, in_shardings=inputs, out_shardings=outputs)


@pytest.mark.dear
@pytest.mark.parametrize("fsdp", [False, True], ids=["", "fsdp"])
@pytest.mark.parametrize("axes", ["data=2,model=4", "data=8"])
def test_the_example(axes, fsdp):
    config = train_lm.Config(layers=1, d_model=64)
    job = train_lm.Job(config, train_lm.parse_mesh(axes), fsdp, seed=0)
    state = jax.eval_shape(lambda: train_lm.init_state(config, jax.random.key(0)))
    window = jax.eval_shape(lambda: next(job.batches(1)))
    specs = {k: v for k, v in job.keywords.items() if k != "donate_argnums"}
    agreed(job.train_step, state, window, mesh=job.mesh, **specs)


SHAPES = [((2, 4), "xy"), ((2, 2, 2), "xyz"), ((8,), "x")]


def check_random_program(seed):
    rng = random.Random(seed)
    sizes, names = rng.choice(SHAPES)
    mesh = auto(sizes, names)
    program = random_loops(rng, mesh)
    inputs, outputs = (random_spec(rng, names), random_spec(rng, names)), random_spec(rng, names)
    agreed(program, f32(8, 8), f32(8, 8), mesh=mesh, in_shardings=inputs, out_shardings=outputs)


NESTINGS = (1, 10, 18, 23, 28, 34, 38, 39, 48, 50, 58, 61, 63, 79, 80, 81, 83, 91, 103, 106, 108, 121, 123, 129, 130)
NESTINGS += (131, 135, 136, 138, 149, 160, 170, 177, 180)
"""Seeds with all that the first 200 have: which op is in which loop, branch or manual part, how these are nested, and
on which mesh."""


@pytest.mark.dear
@pytest.mark.parametrize("seed", NESTINGS)
def test_random_programs_with_loops(seed):
    check_random_program(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*sorted({*range(200)} - {*NESTINGS}), *range(1000, 2000)])
def test_more_random_programs_with_loops(seed):
    check_random_program(seed)
