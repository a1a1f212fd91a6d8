"""Annotations: the op inside a partitioned function, the identity outside, under every transformation of jax."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.mlir import ir
from jax.interpreters import mlir
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sdy_oracle import run_passes

import sdy_jax as sdy
from sdy_jax.annotate.arguments import abstracted, argument_leaves
from sdy_jax.annotate.program import Border, from_function
from sdy_jax.ir.locations import source_line
from sdy_jax.testing import assert_same

RNG = np.random.default_rng(11)
X = (RNG.standard_normal((8, 16)) / 4).astype(np.float32)
Y = (RNG.standard_normal((16, 8)) / 4).astype(np.float32)
DOT = "([i, k], [k, j])->([i, j]) {i=8, j=8, k=16} reduction={k}"


@pytest.fixture
def traced(mesh):
    """The text of the traced module, which verifies and reads back as it was printed."""

    def run(fun, *args, on=mesh):
        leaves = [abstracted(leaf, on) for leaf in argument_leaves(None, args, {}, ())]
        tree = jax.tree.structure((args, {}))
        module = from_function(fun, Border(leaves, tree, None), on).module
        assert module.verify()
        assert str(ir.Module.parse(str(module), mlir.make_ir_context())) == str(module)
        return str(module)

    return run


def ops(text, name):
    """What the ops of one kind say, without their operands and types."""
    found = re.findall(rf"sdy\.{name} %[\w#]+ (.*) :", text)
    return found or re.findall(rf"sdy\.{name}[<(].*", text)


# Each annotation of one array, with what it says in MLIR.

constraint = functools.partial(sdy.sharding_constraint, sharding=P("data", "model"))
IDENTITIES = {
    "sharding_constraint": (constraint, '<@mesh, [{"data"}, {"model"}]>'),
    "reshard": (lambda x: sdy.reshard(x, P(None, "data")), '<@mesh, [{}, {"data"}]>'),
    "propagation_barrier": (lambda x: sdy.propagation_barrier(x), "allowed_direction=NONE"),
    "sharding_group": (lambda x: sdy.sharding_group(x, 7), "group_id=7"),
}


@pytest.mark.parametrize("name", IDENTITIES)
def test_an_annotation_is_its_op_in_a_partitioned_function(traced, name):
    annotate, expected = IDENTITIES[name]
    assert ops(traced(lambda x: annotate(jnp.sin(x)) * 2, X), name) == [expected]


def rule(x):
    return sdy.with_sharding_rule(jnp.sin, "([i, j])->([i, j]) {i=8, j=16}")(x)


def loop_edge(x):
    return sdy.data_flow_edge(lax.fori_loop(0, 2, lambda _, s: s * 2, x), P("data"))


ANNOTATIONS = {
    **{name: annotate for name, (annotate, _) in IDENTITIES.items()},
    "shard_alike": lambda x: sdy.shard_alike(x, x + 1)[1],
    "data_flow_edge": loop_edge,
    "named_computation": sdy.named_computation("part")(lambda x: jnp.tanh(x) * x),
    "with_sharding_rule": rule,
}
PLAIN = {
    **dict.fromkeys(IDENTITIES, lambda x: x),
    "shard_alike": lambda x: x + 1,
    "data_flow_edge": lambda x: lax.fori_loop(0, 2, lambda _, s: s * 2, x),
    "named_computation": lambda x: jnp.tanh(x) * x,
    "with_sharding_rule": jnp.sin,
}


def chained(functions):
    return lambda x: functools.reduce(lambda y, f: f(y), functions.values(), x)


everything, plain = chained(ANNOTATIONS), chained(PLAIN)
TRANSFORMATIONS = {
    "jit": jax.jit,
    "grad": lambda f: jax.grad(lambda x: (f(x) ** 2).sum()),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x * x,)),
    "forward over reverse": lambda f: lambda x: jax.jvp(jax.grad(lambda y: (f(y) ** 3).sum()), (x,), (x,))[1],
    "vmap": lambda f: lambda x: jax.vmap(f, in_axes=2, out_axes=1)(jnp.stack([x, 2 * x], 2)),
    "vmap of grad": lambda f: lambda x: jax.vmap(jax.grad(lambda y: f(y).sum()))(jnp.stack([x, 2 * x])),
    "grad of scan": lambda f: jax.grad(
        lambda x: lax.scan(lambda s, _: (f(s) / 2, s.sum()), x, None, length=3)[1].sum()
    ),
    "cond": lambda f: lambda x: lax.cond(x[0, 0] > 0, f, lambda y: y - 1, x),
    "while": lambda f: lambda x: lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, f(s[1])), (0, x)),
    "grad of remat": lambda f: jax.grad(lambda x: (jax.checkpoint(f)(x) ** 2).sum()),
}


def assert_close(found, wanted):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), found, wanted)


@pytest.mark.parametrize("how", TRANSFORMATIONS)
def test_outside_of_a_partition_nothing_changes(how):
    transformed = jax.jit(TRANSFORMATIONS[how](everything))
    assert "sdy" not in transformed.lower(X).as_text()
    assert_close(transformed(X), jax.jit(TRANSFORMATIONS[how](plain))(X))


@pytest.mark.parametrize("name", ANNOTATIONS)
def test_outside_of_jit_nothing_changes(name):
    x = jnp.asarray(X)
    assert_close(ANNOTATIONS[name](x), PLAIN[name](x))
    with jax.disable_jit():
        assert_close(ANNOTATIONS[name](x), PLAIN[name](x))


def test_in_a_shard_map_nothing_changes(mesh):
    @jax.jit
    def mapped(x):
        return jax.shard_map(everything, mesh=mesh, in_specs=P("data", "model"), out_specs=P("data", "model"))(x)

    assert_close(mapped(X), plain(X))


@pytest.mark.parametrize("how", ["jit", "grad", "vmap", "grad of scan", "grad of remat"])
def test_results_are_the_same_in_a_partition(mesh, how):
    transformed = TRANSFORMATIONS[how](everything)
    assert_same(lambda x: transformed(x), X, mesh=mesh, in_shardings=P("data"))


def test_a_function_that_was_traced_outside_says_its_annotations_inside(traced):
    inner = jax.jit(lambda x: constraint(x) * 2)
    inner(X)
    assert ops(traced(lambda x: inner(inner(x)), X), "sharding_constraint")
    assert "sdy" not in inner.lower(X).as_text()


def test_annotations_in_loops_branches_and_functions_are_there(traced):
    text = traced(lambda x: lax.scan(lambda s, _: (constraint(s * 2), None), x, None, length=3)[0], X)
    assert len(ops(text, "sharding_constraint")) == 1
    text = traced(lambda x: lax.cond(x[0, 0] > 0, constraint, lambda y: y, x), X)
    assert len(ops(text, "sharding_constraint")) == 1
    text = traced(lambda x: jax.grad(lambda y: jax.checkpoint(lambda z: jnp.sin(constraint(z)))(y).sum())(x), X)
    assert len(ops(text, "sharding_constraint")) >= 2


def test_an_annotation_whose_result_is_unused_is_kept(traced):
    def dangling(x):
        constraint(x)
        sdy.sharding_group(x, 1)
        return x * 2

    text = traced(dangling, X)
    assert re.search(r"sdy.sharding_constraint %arg0", text) and re.search(r"sdy.sharding_group %arg0", text)
    assert "multiply %arg0" in text


def test_ops_carry_the_line_of_the_users_code(mesh):
    plan = sdy.partition(lambda x: constraint(jnp.sin(x)), mesh=mesh).plan(X)
    main = plan.stages["traced"].regions[0].blocks[0].operations[1].operation
    lines = {op.operation.name: source_line(op.operation.location) for op in main.regions[0].blocks[0].operations}
    assert lines["sdy.sharding_constraint"] == lines["stablehlo.sine"]
    assert lines["sdy.sharding_constraint"].startswith(__file__)


# What shardings can be said.


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (P("data"), '<@mesh, [{"data"}, {}]>'),
        (P(None, ("model", "data")), '<@mesh, [{}, {"model", "data"}]>'),
        (P(P.UNCONSTRAINED, "model"), '<@mesh, [{?}, {"model"}]>'),
        ('[{"data", ?}p1, {"model":(2)2}]', '<@mesh, [{"data", ?}p1, {"model":(2)2}]>'),
        ('[{?}, {?}], replicated={"model"}', '<@mesh, [{?}, {?}], replicated={"model"}>'),
        ('[{}, {}], unreduced={"data"}', '<@mesh, [{}, {}], unreduced={"data"}>'),
        (sdy.TensorSharding("anything", (sdy.DimensionSharding(),) * 2), "<@mesh, [{}, {}]>"),
        (sdy.TensorSharding(sdy.Mesh.of(data=2, model=4), (sdy.DimensionSharding(),) * 2), "<@mesh, [{}, {}]>"),
    ],
    ids=str,
)
def test_every_form_of_a_sharding_refers_to_the_mesh_of_the_partition(traced, spec, expected):
    assert ops(traced(lambda x: sdy.sharding_constraint(x, spec), X), "sharding_constraint") == [expected]


def test_a_named_sharding_of_the_partitions_mesh_is_on_it_and_another_mesh_is_declared(traced, mesh, mesh_xyz):
    text = traced(lambda x: sdy.sharding_constraint(x, NamedSharding(mesh, P("data"))), X)
    assert text.count("sdy.mesh @") == 1 and ops(text, "sharding_constraint") == ['<@mesh, [{"data"}, {}]>']
    text = traced(lambda x: constraint(sdy.sharding_constraint(x, NamedSharding(mesh_xyz, P("z")))), X)
    assert ops(text, "sharding_constraint") == ['<@mesh_0, [{"z"}, {}]>', '<@mesh, [{"data"}, {"model"}]>']
    assert 'sdy.mesh @mesh_0 = <["x"=2, "y"=2, "z"=2]>' in text


def test_a_single_device_is_a_maximal_mesh(traced):
    single = sdy.TensorSharding(sdy.Mesh((), (3,)), ())
    text = traced(lambda x: jax.vmap(lambda row: sdy.sharding_constraint(row, single))(x), X)
    assert "<[], device_ids=[3]>" in text and ops(text, "sharding_constraint") == ["<@mesh_0, []>"]


def test_shardings_are_prefix_trees_and_none_states_nothing(traced):
    def fun(tree):
        return sdy.sharding_constraint(tree, {"a": P("data"), "b": None})

    text = traced(fun, {"a": [X, Y], "b": X})
    assert ops(text, "sharding_constraint") == ['<@mesh, [{"data"}, {}]>'] * 2


def test_key_arrays_are_constrained_in_their_own_dimensions(traced):
    text = traced(lambda key: sdy.sharding_constraint(key, P("data")), jax.random.split(jax.random.key(0), 8))
    assert '<@mesh, [{"data"}, {}]>' in ops(text, "sharding_constraint")


def bad(*args, **kwargs):
    return lambda: sdy.sharding_constraint(*args, **kwargs)


TREE = {"w": X}
MISTAKES = {
    "unknown axis": (bad(TREE, {"w": P("dta")}), r"for `x\['w'\]`: .*'dta', which the mesh lacks.*data, model"),
    "unknown axis in text": (bad(TREE, '[{"dta"}, {}]'), r"for `x\['w'\]`, dimension 0: unknown axis \"dta\""),
    "axis twice": (bad(X, P("data", "data")), "for `x`: .*uses the axis 'data' twice"),
    "rank": (bad(TREE, P(None, None, "data")), r"for `x\['w'\]`: .* has 3 entries for a value of rank 2"),
    "rank of text": (bad(TREE, '[{"data"}]'), r"for `x\['w'\]`: 1 dimension shardings for a \w+ of rank 2"),
    "tree": (bad(TREE, {"v": P()}), r"sharding_constraint does not match `x`: it lacks \['w'\] and it has \['v'\]"),
    "no sharding": (bad(X, 3), "sharding_constraint has an int for `x`"),
    "no text of a sharding": (bad(X, "data"), "sharding_constraint for `x` is the string 'data'.*write P"),
    "direction": (lambda: sdy.propagation_barrier(X, "BOTH"), "allowed_direction='BOTH'; it is one of NONE, FORWARD"),
    "negative group": (lambda: sdy.sharding_group(X, -1), "group_id=-1; group ids count from 0"),
    "group": (lambda: sdy.sharding_group(X, "a"), "group_id='a'; expected an integer"),
    "shapes in a tree": (
        lambda: sdy.sharding_group({"a": X, "b": Y}, 0),
        r"`x\['a'\]` has shape \(8, 16\) and `x\['b'\]` shape \(16, 8\)",
    ),
    "shapes": (lambda: sdy.shard_alike(X, Y), r"`x` has shape \(8, 16\) and `y` shape \(16, 8\)"),
    "trees": (lambda: sdy.shard_alike(X, [X]), "shard_alike: x has the tree"),
    "name of a part": (lambda: sdy.named_computation(3), "got an int; expected a function or a name"),
    "specs of a part": (
        lambda: sdy.named_computation("p", in_shardings=P(None, None, "data"))(jnp.sin)(X),
        "p, in_shardings for `.*`: .*has 3 entries",
    ),
    "results of a part": (
        lambda: sdy.named_computation("p", out_shardings=(P(), P()))(jnp.sin)(X),
        "out_shardings has a tuple of 2 for `result`",
    ),
    "rule": (lambda: sdy.with_sharding_rule(jnp.sin, "([i])->"), "with_sharding_rule of `sin`: column 8"),
    "no rule": (
        lambda: sdy.with_sharding_rule(jnp.sin, P()),
        r"with_sharding_rule of `sin` got a P\w*; expected a rule",
    ),
    "no function": (lambda: sdy.with_sharding_rule(3, DOT), "got an int; expected a function"),
}
ONLY_INSIDE = ("unknown axis", "unknown axis in text")


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_reported_where_they_are_made(traced, name):
    mistake, message = MISTAKES[name]
    with pytest.raises(sdy.SdyError, match=message):
        traced(lambda _: mistake(), X)
    if name in ONLY_INSIDE:
        mistake()  # no mesh is known, so that any name may be an axis
        return
    with pytest.raises(sdy.SdyError, match=message):
        mistake()


def test_axes_are_checked_when_a_cached_trace_is_lowered(traced):
    inner = jax.jit(lambda x: sdy.sharding_constraint(x, P("rows")))
    inner(X)
    with pytest.raises(sdy.ShardingError, match="names the axis 'rows', which the mesh lacks"):
        traced(inner, X)


def test_an_axis_cannot_be_used_where_the_code_is_manual_on_it(traced):
    def fun(x, axis):
        body = functools.partial(sdy.sharding_constraint, sharding=P(None, axis))
        return jax.shard_map(body, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})(x)

    assert '<@mesh, [{}, {"model"}]>' in ops(traced(lambda x: fun(x, "model"), X), "sharding_constraint")
    with pytest.raises(sdy.ShardingError, match='uses "data" inside of a computation that is manual on it'):
        traced(lambda x: fun(x, "data"), X)


# Batching and derivatives.


def test_vmap_leaves_the_new_dimension_open_or_splits_it_along_its_axis(traced):
    for spec, rest in ((P("data"), '{"data"}'), ('[{"data", ?}p2]', '{"data", ?}p2')):
        annotate = functools.partial(sdy.sharding_constraint, sharding=spec)
        text = traced(lambda x: jax.vmap(annotate, in_axes=1, out_axes=1)(x), X)  # noqa: B023
        assert ops(text, "sharding_constraint") == [f"<@mesh, [{rest}, {{?}}]>"]
        text = traced(lambda x: jax.vmap(annotate, spmd_axis_name="model")(x), X)  # noqa: B023
        assert ops(text, "sharding_constraint") == [f'<@mesh, [{{"model"}}, {rest}]>']
    with pytest.raises(sdy.ShardingError, match="'model' twice"):
        both = functools.partial(sdy.sharding_constraint, sharding=P("model"))
        traced(lambda x: jax.vmap(both, spmd_axis_name="model")(x), X)


def test_cotangents_and_tangents_are_constrained_alike(traced):
    text = traced(lambda x: jax.grad(lambda y: (constraint(jnp.sin(y)) ** 2).sum())(x), X)
    assert ops(text, "sharding_constraint") == ['<@mesh, [{"data"}, {"model"}]>'] * 2
    text = traced(lambda x: jax.jvp(constraint, (x,), (x,)), X)
    assert len(ops(text, "sharding_constraint")) == 2


@pytest.mark.parametrize(("direction", "reverse"), [("NONE", "NONE"), ("FORWARD", "BACKWARD"), ("BACKWARD", "FORWARD")])
def test_a_barrier_for_cotangents_is_reversed(traced, direction, reverse):
    text = traced(lambda x: jax.grad(lambda y: (sdy.propagation_barrier(jnp.sin(y), direction) ** 2).sum())(x), X)
    assert ops(text, "propagation_barrier") == [f"allowed_direction={d}" for d in (direction, reverse)]
    text = traced(lambda x: jax.jvp(lambda y: sdy.propagation_barrier(y, direction), (x,), (x,)), X)
    assert ops(text, "propagation_barrier") == [f"allowed_direction={direction}"] * 2


def test_groups_and_edges_speak_of_primals_alone(traced):
    text = traced(lambda x: jax.grad(lambda y: (sdy.sharding_group(jnp.sin(y), 0) ** 2).sum())(x), X)
    assert ops(text, "sharding_group") == ["group_id=0"]
    text = traced(lambda x: jax.jvp(loop_edge, (x,), (x,)), X)
    assert text.count('{"data"}') == 1


# Groups.


def test_pairs_have_groups_of_their_own_the_same_ones_every_time(traced):
    def fun(x, y):
        x, other = sdy.shard_alike({"a": x, "b": y}, {"a": x + 1, "b": y + 1})
        return x, other, sdy.sharding_group(y, 0)

    text = traced(fun, X, Y)
    assert ops(text, "sharding_group") == [f"group_id={n}" for n in (-1, -1, -2, -2, 0)]
    assert traced(fun, X, Y) == text


def test_a_group_has_one_shape(traced):
    with pytest.raises(sdy.ShardingError, match=r"of shape \(16, 8\) is in group 3 with `x` of shape \(8, 16\)"):
        traced(lambda x, y: (sdy.sharding_group(x, 3), sdy.sharding_group(y, 3)), X, Y)


def test_a_group_without_the_mapped_dimension_is_repeated_along_it(traced):
    text = traced(lambda x, y: jax.vmap(sdy.shard_alike, in_axes=(0, None))(x, y), X, Y[:, 0])
    assert re.findall(r"sdy.sharding_group .* : (.*)", text) == ["tensor<8x16xf32>"] * 2
    text = traced(lambda x, y: jax.vmap(sdy.shard_alike, in_axes=(0, 1))(x, y)[1], X, Y)
    assert re.findall(r"sdy.sharding_group .* : (.*)", text) == ["tensor<8x16xf32>"] * 2


def test_a_group_ties_arrays_between_which_no_data_flows(mesh):
    def fun(x):
        sdy.sharding_group(x, 4)
        return sdy.sharding_group(jnp.zeros_like(x), 4)

    plan = sdy.partition(fun, mesh=mesh, in_shardings=P("data", "model")).plan(X)
    assert plan.results[0].type == "f32[8@data,16@model]"


# Effects on propagation.


def test_constraints_decide_and_barriers_stop(mesh):
    def result(fun, spec=None):
        return sdy.partition(fun, mesh=mesh, in_shardings=spec).plan(X).results[0].type

    assert result(lambda x: jnp.sin(constraint(x))) == "f32[8@data,16@model]"
    assert result(lambda x: sdy.reshard(jnp.sin(x), P("model"))) == "f32[8@model,16]"
    assert result(lambda x: jnp.sin(x), P("data")) == "f32[8@data,16]"
    for direction, expected in (("NONE", "f32[8,16]"), ("FORWARD", "f32[8@data,16]"), ("BACKWARD", "f32[8,16]")):
        barrier = functools.partial(sdy.propagation_barrier, allowed_direction=direction)
        assert result(lambda x: jnp.sin(barrier(x)), P("data")) == expected  # noqa: B023


def test_a_rule_overrides_what_is_known_of_an_op(mesh):
    def result(rule):
        fun = sdy.with_sharding_rule(jnp.sin, rule)
        run = sdy.partition(fun, mesh=mesh, in_shardings='[{"data", ?}, {"model", ?}]', on_unknown="ignore")
        return run.plan(X).results[0].type

    assert result("([i, j])->([i, j]) {i=8, j=16}") == "f32[8@data,16@model]"
    assert result("([i, k])->([i, j]) {i=8, j=16, k=16} need_replication={j, k}") == "f32[8@data,16]"


# Data-flow edges.


def test_an_edge_is_that_of_the_loop_or_branch_that_returns_the_array(mesh):
    plan = sdy.partition(loop_edge, mesh=mesh).plan(X)
    assert 'sharding_per_value<[<@mesh, []>, <@mesh, []>, <@mesh, [{"data"}, {}]>]>' in plan.mlir("traced").replace(
        "[?]", "[]"
    )
    assert '<@mesh, [{"data"}, {}]>' in " ".join(re.findall("sdy.data_flow_edge.*", plan.mlir("imported")))
    assert plan.results[0].type == "f32[8@data,16]"

    def branch(x):
        return sdy.data_flow_edge(lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), P("data"))

    plan = sdy.partition(branch, mesh=mesh, on_unknown="ignore").plan(X)
    assert plan.results[0].type == "f32[8@data,16]"


def test_an_edge_of_a_part_is_its_result(traced):
    text = traced(lambda x: sdy.data_flow_edge(sdy.named_computation("p")(jnp.sin)(x), P("data")), X)
    assert 'out_shardings=[<@mesh, [{"data"}, {}]>]' in text and "data_flow_edge" not in text


def test_an_edge_can_be_named_by_a_carry_and_through_a_call(traced):
    carry = '<@mesh, [{"data"}, {}]>]>'
    annotate = functools.partial(sdy.data_flow_edge, sharding=P("data"))
    text = traced(lambda x: lax.while_loop(lambda s: s[0, 0] < 1, lambda s: annotate(s) + 1, x), X)
    assert f"sdy.sharding = #sdy.sharding_per_value<[{carry}" in text and "sharding_constraint" not in text
    loop = jax.jit(lambda x: lax.fori_loop(0, 2, lambda _, s: s * 2, x))
    text = traced(lambda x: annotate(loop(x)), X)
    assert "call @" in text and carry in text


def test_the_array_of_an_edge_may_be_used_otherwise(mesh):
    annotate = functools.partial(sdy.data_flow_edge, sharding=P("data"))

    def twice(x):
        doubled = lax.fori_loop(0, 2, lambda _, s: s * 2, x)
        return annotate(annotate(doubled)) + annotate(doubled) * doubled

    assert_same(twice, X, mesh=mesh)
    assert_same(jax.grad(lambda x: twice(x).sum()), X, mesh=mesh)


CALLING_LOOPS = {
    "fori_loop": lambda f, x: lax.fori_loop(0, 2, lambda _, s: f(s), x),
    "scan": lambda f, x: lax.scan(lambda s, _: (f(s), s.sum()), x, None, length=2)[0],
}


@pytest.mark.parametrize("loop", CALLING_LOOPS.values(), ids=CALLING_LOOPS)
def test_an_edge_can_be_named_by_the_carry_of_a_loop_whose_body_jax_calls(mesh, loop):
    def step(s):
        s = sdy.data_flow_edge(s, P("data"))
        return jnp.sin(s) + s

    assert sdy.partition(lambda x: loop(step, x), mesh=mesh).plan(X).results[0].type == "f32[8@data,16]"
    assert_same(lambda x: loop(step, x), X, mesh=mesh)


def test_an_edge_has_one_sharding(traced):
    def twice(x):
        y = lax.fori_loop(0, 2, lambda _, s: s * 2, x)
        return sdy.data_flow_edge(sdy.data_flow_edge(y, P("data")), P("model"))

    with pytest.raises(sdy.ShardingError, match=r'its edge is to be <@mesh, \[\{"model"\}.*<@mesh, \[\{"data"\}'):
        traced(twice, X)


def test_an_edge_that_does_not_exist_is_an_error(traced):
    with pytest.raises(
        sdy.ShardingError, match=r"data_flow_edge at .*a result of stablehlo.sine; .*sharding_constraint"
    ):
        traced(lambda x: sdy.data_flow_edge(jnp.sin(x), P("data")), X)
    with pytest.raises(sdy.ShardingError, match=r"argument 0 of a func\.func"):
        traced(lambda x: sdy.data_flow_edge(x, P("data")), X)


# Named computations.


def test_a_named_computation_is_a_region_that_sees_nothing_from_outside(traced):
    captured = jnp.asarray(Y)

    def fun(x, y):
        part = sdy.named_computation(lambda a: (a @ y + captured[:8, :8], a.sum()), name="part")
        return part(x)

    text = traced(fun, X, Y)
    [line] = ops(text, "named_computation")
    assert line.startswith('sdy.named_computation<"part">(%arg0, %arg2, %arg1) (%arg3:')
    assert text.count("dense<") == 1  # the sum's zero: the captured array is an argument, not a constant


def test_shardings_at_the_border_of_a_named_computation(traced):
    part = sdy.named_computation(
        "part", in_shardings=({"a": P("data"), "b": None},), out_shardings=['[{"model", ?}, {?}]', None]
    )(lambda tree: [jnp.sin(tree["a"]), tree["b"]])
    text = traced(lambda x, y: part({"a": x, "b": y}), X, Y)
    assert 'in_shardings=[<@mesh, [{"data"}, {}]>, <@mesh, [{?}, {?}]>]' in text
    assert 'out_shardings=[<@mesh, [{"model", ?}, {?}]>, <@mesh, [{?}, {?}]>]' in text
    text = traced(lambda x: jax.vmap(lambda row: part({"a": row[None], "b": x}), in_axes=1)(x), X)
    assert 'in_shardings=[<@mesh, [{?}, {"data"}, {}]>, <@mesh, [{?}, {?}]>]' in text


def test_derivatives_of_a_named_computation_are_named_and_sharded_like_it(traced):
    part = sdy.named_computation("part", in_shardings=(P("data"), None), out_shardings=P(None, "model"))(
        lambda x, y: jnp.exp(x @ y)
    )
    text = traced(lambda x, y: jax.grad(lambda a, b: part(a, b).sum(), (0, 1))(x, y), X, Y)
    forward, backward = ops(text, "named_computation")
    assert forward.startswith('sdy.named_computation<"part">') and '("part")' not in backward
    assert backward.startswith('sdy.named_computation<"transpose(jvp(part))">(%arg1, %arg0, %0, ')
    assert 'out_shardings=[<@mesh, [{"data"}, {}]>, <@mesh, [{?}, {?}]>]' in backward
    assert text.count("stablehlo.exponential") == 1 and text.count("stablehlo.dot_general") == 3


@jax.custom_vjp
def doubled_in_reverse(x):
    return jnp.sin(x)


doubled_in_reverse.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (2 * ct * jnp.cos(x),))


@pytest.mark.parametrize(
    "fun",
    [
        lambda x, y: doubled_in_reverse(x @ y) * 2,
        lambda x, y: jax.nn.relu(x) @ y,
        lambda x, y: {"a": (x @ y).astype(jnp.int32).astype(jnp.float32) + x.sum(), "n": x.shape[0]}["a"],
        lambda x, y: sdy.named_computation("inner")(jnp.tanh)(x) @ sdy.named_computation("other")(jnp.sin)(y),
        lambda x, y: lax.scan(lambda s, row: (jnp.tanh(s @ y @ x), row.sum()), x, y)[0],
        lambda x, y: jax.vmap(lambda row: lax.pmean(jnp.cos(row), "i"), axis_name="i")(x) @ y,
    ],
    ids=["custom_vjp", "relu", "integers", "nested", "scan", "collective"],
)
def test_a_named_computation_has_the_functions_own_gradient(mesh, fun):
    part = sdy.named_computation("part")(fun)
    for how in (jax.value_and_grad, lambda f: jax.jit(jax.value_and_grad(f)), lambda f: jax.grad(jax.checkpoint(f))):
        found, wanted = (how(lambda x, f=f: (f(x, Y) ** 2).sum())(X) for f in (part, fun))
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), found, wanted)
    assert_same(jax.grad(lambda x: (part(x, Y) ** 2).sum()), X, mesh=mesh, in_shardings=P("data"))


def test_a_named_computation_may_name_the_axis_that_it_is_mapped_over():
    part = sdy.named_computation("part")(lambda x: lax.psum(x, "rows"))
    np.testing.assert_allclose(jax.vmap(part, axis_name="rows")(X), np.tile(X.sum(0), (8, 1)), rtol=1e-5, atol=1e-6)
    unmapped = jax.vmap(lambda _: part(1.0), axis_name="rows")(X)
    np.testing.assert_allclose(unmapped, np.full(8, 8.0))


# Manual computations.


def block_mean(x):
    return lax.pmean(x.mean(0), "data")


mean = sdy.manual_computation(
    block_mean, in_shardings='[{"data"}, {"model", ?}]', out_shardings='[{"model", ?}]', manual_axes={"data"}
)


def test_a_manual_computation_has_the_shardings_that_were_said(traced):
    text = traced(mean, X)
    [line] = ops(text, "manual_computation")
    assert 'in_shardings=[<@mesh, [{"data"}, {"model", ?}]>] out_shardings=[<@mesh, [{"model", ?}]>]' in line
    assert 'manual_axes={"data"}' in line and "border" not in text and "sharding_constraint %arg0" not in text


def test_a_partition_spec_leaves_a_manual_computation_open_to_free_axes(traced):
    double = functools.partial(sdy.manual_computation, lambda x: x * 2, manual_axes="data", out_shardings=P("data"))
    text = traced(double(in_shardings=P(("data", "model"))), X)
    assert 'in_shardings=[<@mesh, [{"data", "model", ?}, {?}]>] out_shardings=[<@mesh, [{"data", ?}, {?}]>]' in text
    text = traced(double(in_shardings=None), X)
    assert "in_shardings=[<@mesh, [{?}, {?}]>]" in text


def test_a_manual_computation_may_have_no_manual_axes(mesh):
    text = """
sdy.mesh @mesh = <["data"=2, "model"=4]>
func.func @main(%x: tensor<8x16xf32>) -> tensor<8x16xf32> {
  %0 = sdy.manual_computation(%x) in_shardings=[<@mesh, [{"data"}, {?}]>] out_shardings=[<@mesh, [{?}, {"model"}]>]
      manual_axes={} (%y: tensor<8x16xf32>) {
    %1 = stablehlo.sine %y : tensor<8x16xf32>
    sdy.return %1 : tensor<8x16xf32>
  } : (tensor<8x16xf32>) -> tensor<8x16xf32>
  return %0 : tensor<8x16xf32>
}"""
    sine = sdy.manual_computation(
        jnp.sin, in_shardings='[{"data"}, {?}]', out_shardings='[{?}, {"model"}]', manual_axes=()
    )
    plans = [sdy.partition(fun, mesh=mesh).plan(X) for fun in (sine, sdy.loads(text))]
    assert [str(plan.results[0].sharding) for plan in plans] == ['@mesh, [{"data"}, {"model"}]'] * 2
    for function in (sine, sdy.partition(sine, mesh=mesh), sdy.partition(jax.jit(sine), mesh=mesh)):
        np.testing.assert_allclose(function(X), np.sin(X), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(lambda x: sine(x).sum())(X), np.cos(X), rtol=1e-6)


def test_manual_computations_nest(traced):
    def inner(x):
        part = functools.partial(sdy.manual_computation, jnp.sin, manual_axes="model")
        return part(in_shardings=P(None, "model"), out_shardings=P(None, "model"))(x)

    outer = sdy.manual_computation(inner, in_shardings=P("data"), out_shardings=P("data"), manual_axes="data")
    axes = [re.search("manual_axes={.*?}", line)[0] for line in ops(traced(outer, X), "manual_computation")]
    assert axes == ['manual_axes={"data"}', 'manual_axes={"model"}']


def test_derivatives_and_batches_of_manual_computations_keep_their_shardings(traced):
    text = traced(lambda x: jax.grad(lambda y: (mean(y) ** 2).sum())(x), X)
    forward, backward = ops(text, "manual_computation")
    assert 'in_shardings=[<@mesh, [{"data"}, {"model", ?}]>]' in forward
    assert 'in_shardings=[<@mesh, [{"model", ?}]>' in backward
    assert 'out_shardings=[<@mesh, [{"data"}, {"model", ?}]>]' in backward
    [line] = ops(traced(lambda x: jax.vmap(mean)(x), np.stack([X, X, X])), "manual_computation")
    assert 'in_shardings=[<@mesh, [{?}, {"data"}, {"model", ?}]>] out_shardings=[<@mesh, [{?}, {"model", ?}]>]' in line


def test_a_result_with_several_uses_has_its_sharding_on_the_computation(traced):
    def fun(x):
        y = mean(x)
        return y, y * 2

    assert traced(fun, X).count('<@mesh, [{"model", ?}]>') == 1


def test_what_cannot_be_written_on_a_computation_stays_a_constraint(traced):
    one = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(1, 4), ("data", "model"))
    text = traced(mean, X, on=one)  # jax makes no computation where there is but one device along the manual axes
    assert "manual_computation" not in text and "border" not in text
    found = ops(text, "sharding_constraint")
    assert (found[0], found[-1]) == ('<@mesh, [{"data"}, {"model", ?}]>', '<@mesh, [{"model", ?}]>')


def test_outside_a_manual_computation_is_a_shard_map(mesh):
    expected = X.mean(0)
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(mean(X), expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(jax.jit(mean)(X), expected, rtol=1e-5, atol=1e-6)
        gradient = jax.grad(lambda x: (mean(x) ** 2).sum())(X)
    np.testing.assert_allclose(gradient, np.tile(expected / 4, (8, 1)), rtol=1e-5, atol=1e-6)
    given = sdy.manual_computation(block_mean, in_shardings=P("data"), out_shardings=P(), manual_axes="data", mesh=mesh)
    np.testing.assert_allclose(given(X), expected, rtol=1e-5, atol=1e-6)


def test_manual_computations_of_trees_and_keywords_run_in_a_partition(mesh):
    def body(tree, *, scale):
        return {"sum": lax.psum(tree["x"].sum(0), "data") * scale, "x": tree["x"]}

    part = sdy.manual_computation(
        body,
        in_shardings=({"x": '[{"data"}, {"model"}]'}, None),
        out_shardings={"sum": None, "x": P("data")},
        manual_axes="data",
    )

    def fun(x):
        return part({"x": x}, scale=jnp.float32(3))

    plan = sdy.partition(fun, mesh=mesh).plan(X)
    assert plan.results[1].type.startswith("f32[8@data")
    found = sdy.partition(fun, mesh=mesh)(X)
    np.testing.assert_allclose(found["sum"], X.sum(0) * 3, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(found["x"], X)


double = functools.partial(sdy.manual_computation, lambda x: x * 2, out_shardings=P())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: double(in_shardings=P("rows"), manual_axes="rows"),
            "names 'rows'; the axes of the mesh are: data, mod",
        ),
        (
            lambda: double(in_shardings=P(("model", "data")), manual_axes="data"),
            "in_shardings for `x`: .* has a free axis before a manual one; manual axes come first",
        ),
        (
            lambda: double(in_shardings='[{"model":(1)2}, {}]', manual_axes="model"),
            'in_shardings for `x`: .*names "model":.1.2, a part of a manual axis',
        ),
        (
            lambda: double(in_shardings='[{}, {}], unreduced={"data"}', manual_axes="data"),
            "is unreduced along a manual axis",
        ),
        (
            lambda: double(in_shardings=P("data", "columns"), manual_axes="data"),
            'in_shardings for `x`, dimension 1: unknown axis "columns"',
        ),
        (lambda: double(in_shardings=3, manual_axes="data"), "manual_computation, in_shardings is an int"),
    ],
    ids=["unknown axis", "order", "part of an axis", "unreduced", "unknown free axis", "no sharding"],
)
def test_mistakes_about_manual_computations(traced, make, message):
    with pytest.raises(sdy.SdyError, match=message):
        traced(lambda x: make()(x), X)


def test_a_manual_computation_needs_a_mesh_outside_and_has_one_inside(traced, mesh_xyz):
    with pytest.raises(
        sdy.ShardingError, match=r"the axes of the mesh are: none; pass mesh, or call it under jax\.set_m"
    ):
        mean(X)
    other = sdy.manual_computation(jnp.sin, in_shardings=P("x"), out_shardings=P("x"), manual_axes="x", mesh=mesh_xyz)
    with pytest.raises(sdy.ShardingError, match="in a function partitioned on"):
        traced(other, X)


# Sharding rules.


def rules_in(text):
    return re.findall(r"op_sharding_rule<(.*?)>}", text)


dot = sdy.with_sharding_rule(jnp.matmul, DOT)


def test_a_rule_is_on_the_op_that_the_function_is(traced):
    assert rules_in(traced(dot, X, Y)) == [DOT + ", custom"]
    call = jax.ffi.ffi_call("row_filter", jax.ShapeDtypeStruct((8, 16), jnp.float32), vmap_method="broadcast_all")
    filtered = sdy.with_sharding_rule(call, sdy.OpShardingRule((8, 16), (((0,), (1,)),), (((0,), (1,)),)))
    text = traced(lambda x: filtered(x) + dot(x, jnp.ones((16, 8)))[0, 0], X)
    assert rules_in(text) == ["([i, j])->([i, j]) {i=8, j=16}, custom", DOT + ", custom"]
    assert "custom_call @row_filter" in text
    text = traced(jax.vmap(filtered), np.stack([X, X]))
    assert rules_in(text) == ["([k, i, j])->([k, i, j]) {i=8, j=16, k=2}, custom"]


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        ((0, 0), "([l, i, k], [l, k, j])->([l, i, j])"),
        ((2, None), "([i, k, l], [k, j])->([i, l, j])"),
        ((None, 1), "([i, k], [k, l, j])->([i, l, j])"),
    ],
    ids=str,
)
def test_a_rule_under_vmap_has_a_factor_more(traced, axes, expected):
    args = [x if axis is None else np.stack([x] * 3, axis) for x, axis in zip((X, Y), axes, strict=True)]
    [found] = rules_in(traced(jax.vmap(dot, in_axes=axes), *args))
    assert found == f"{expected} {{i=8, j=8, k=16, l=3}} reduction={{k}}, custom"


def test_a_rule_stays_with_its_op_when_the_function_is_differentiated(traced):
    text = traced(lambda x, y: jax.grad(lambda a, b: dot(a, b).sum(), (0, 1))(x, y), X, Y)
    assert len(rules_in(text)) == 1 and text.count("stablehlo.dot_general") == 3
    exp = sdy.with_sharding_rule(jnp.exp, "([i, j])->([i, j]) {i=8, j=16}")
    text = traced(lambda x: jax.grad(lambda a: exp(a).sum())(x), X)
    assert len(rules_in(text)) == text.count("stablehlo.exponential") == 1


def test_a_rule_is_about_one_op_that_it_fits(traced):
    with pytest.raises(sdy.ShardingError, match=r"lowers to 3 ops \(stablehlo.sine, .*describes one op"):
        traced(sdy.with_sharding_rule(lambda x: jnp.sin(x) + 1, "([i, j])->([i, j]) {i=8, j=16}"), X)
    with pytest.raises(sdy.ShardingError, match=r"lowers to 0 ops \(nothing\)"):
        traced(sdy.with_sharding_rule(lambda x: x, "([i, j])->([i, j]) {i=8, j=16}"), X)
    with pytest.raises(sdy.ShardingError, match=r"with_sharding_rule of `sin`, stablehlo.sine, operand 0: 1 dimension"):
        traced(sdy.with_sharding_rule(jnp.sin, "([i])->([i]) {i=8}"), X)
    with pytest.raises(sdy.ShardingError, match=r"with_sharding_rule of `sin`, stablehlo.sine"):
        traced(jax.vmap(sdy.with_sharding_rule(jnp.sin, "([i], [i])->([i]) {i=16}")), X)


# jax's own annotations, and jaxlib's own pipeline.


def test_jaxs_own_annotations_are_what_they_are(traced):
    def fun(x, y):
        x = lax.with_sharding_constraint(x, P("data", P.UNCONSTRAINED))
        x = jax.shard_map(jnp.sin, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})(x)
        return jax.jit(lambda a, b: a @ b)(jax.named_call(jnp.cos, name="part")(x), y)

    text = traced(fun, X, Y)
    assert '<@mesh, [{"data"}, {?}]>' in ops(text, "sharding_constraint")
    [line] = ops(text, "manual_computation")
    assert 'in_shardings=[<@mesh, [{"data", ?}, {?}]>]' in line
    assert "call @" in text and "named_computation" not in text


def test_jaxs_shard_alike_does_not_meet_the_users_groups(traced):
    module = pytest.importorskip("jax.experimental.shard_alike")
    text = traced(lambda x, y: (module.shard_alike(x, x + 1), sdy.sharding_group(y, 0)), X, Y)
    assert ops(text, "sharding_group") == ["group_id=-1", "group_id=-1", "group_id=0"]


def test_jaxlibs_passes_take_the_traced_modules(traced):
    def fun(x, y):
        x, z = sdy.shard_alike(constraint(x), jnp.zeros_like(x))
        h = sdy.propagation_barrier(jnp.tanh(x @ y), "FORWARD") + mean(sdy.sharding_group(x, 2))[:8]
        return loop_edge(h @ dot(x, y)), sdy.sharding_group(z, 2), jax.grad(lambda a: (dot(a, y) ** 2).sum())(x)

    def named(x, y):
        part = sdy.named_computation("part", in_shardings=(P("data"), None))(lambda a, b: jnp.tanh(a @ b))
        return jax.grad(lambda a: part(a, y).sum())(x)

    # The whole pipeline makes named computations of its own, and edges for all of them: none may be there before.
    steps = "sdy-add-data-flow-edges,sdy-apply-sharding-constraints,sdy-user-priority-propagate"
    whole, parts = run_passes([(traced(fun, X, Y), "sdy-propagation-pipeline"), (traced(named, X, Y), steps)])
    assert whole is not None and "sharding_group" not in whole
    assert parts is not None and "stablehlo.tanh" in parts


def test_a_partitioned_function_that_another_one_calls_keeps_what_its_shardings_say(mesh):
    inner = sdy.partition(
        jnp.sin, mesh=mesh, in_shardings='[{"model":(1)2, ?}, {?}p1]', out_shardings='[{"data"}p2, {?}]'
    )
    plan = sdy.partition(lambda x: inner(x) * 2, mesh=mesh).plan(X)
    found = ops(plan.mlir("traced"), "sharding_constraint")
    assert found == ['<@mesh, [{"model":(1)2, ?}, {?}p1]>', '<@mesh, [{"data"}p2, {?}]>']
