"""Manual and named computations: what `jax.shard_map` lowers to inside a partitioned function, and the same as text."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharding_dump import parse

import sdy_jax as sdy
from sdy_jax.ir.graph import Graph
from sdy_jax.ir.meshes import AxisRef, Mesh
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.lowering.ops.collectives import movement
from sdy_jax.lowering.ops.collectives.movement import permutation_pairs
from sdy_jax.lowering.ops.collectives.written import axes_of_groups, groups_of_axes, spans
from sdy_jax.lowering.ops.control_flow import apart_along
from sdy_jax.lowering.ops.emit import local_function, used_axes
from sdy_jax.lowering.planner.placement.program_placement import partition_locally
from sdy_jax.lowering.planner.setting import Setting
from sdy_jax.lowering.targets.cost_model import CostModel
from sdy_jax.runtime.meshes import RefinedMesh
from sdy_jax.shardy.passes.pipelines import PLAN_EXPORT, plan_import, run_pipeline
from sdy_jax.shardy.passes.propagation import user_priority_propagate
from sdy_jax.testing import assert_same

RNG = np.random.default_rng(7)
X = RNG.standard_normal((8, 16)).astype(np.float32)
W = RNG.standard_normal((16, 16)).astype(np.float32)
BOTH = P("data", "model")


def weighted(x):
    """Tells every element of every shard from the others."""
    return (x * (1 + jnp.arange(x.size, dtype=x.dtype).reshape(x.shape))).sum()


# Collectives, each on a 4 x 4 block, over axis `model`, `data`, or both.
COLLECTIVES = {
    "psum": lambda x: lax.psum(x, "model"),
    "psum of two axes": lambda x: lax.psum(x, ("model", "data")),
    "pmean": lambda x: lax.pmean(x, "data"),
    "pmax": lambda x: lax.pmax(x, ("data", "model")),
    "pmin": lambda x: lax.pmin(x, "model"),
    "psum of booleans": lambda x: lax.psum(x > 0, "model").astype(jnp.float32),
    "all_gather tiled": lambda x: lax.all_gather(x, "model", axis=0, tiled=True),
    "all_gather untiled": lambda x: lax.all_gather(x, "data", axis=1),
    "all_gather of two axes": lambda x: lax.all_gather(x, ("model", "data"), axis=1, tiled=True),
    "psum_scatter tiled": lambda x: lax.psum_scatter(x, "model", scatter_dimension=1, tiled=True),
    "psum_scatter untiled": lambda x: lax.psum_scatter(x, "model", scatter_dimension=0),
    "psum_scatter of two axes": lambda x: lax.psum_scatter(x.reshape(16), ("model", "data"), tiled=True),
    "all_to_all tiled": lambda x: lax.all_to_all(x, "model", 0, 1, tiled=True),
    "all_to_all untiled": lambda x: lax.all_to_all(x, "model", 1, 0),
    "all_to_all of two axes": lambda x: lax.all_to_all(x.reshape(8, 2), ("model", "data"), 0, 1, tiled=True),
    "ppermute": lambda x: lax.ppermute(x, "model", [(0, 1), (1, 2), (3, 0)]),
    "ppermute of two axes": lambda x: lax.ppermute(x, ("data", "model"), [(i, (i + 3) % 8) for i in range(8)]),
    "axis_index": lambda x: x * (1 + lax.axis_index("model")),
    "axis_index of two axes": lambda x: x * (1 + lax.axis_index(("model", "data"))),
    "pshuffle": lambda x: lax.pshuffle(x, "model", [2, 0, 3, 1]),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_that_jax_writes(mesh, name):
    def on_blocks(x):
        y = COLLECTIVES[name](x)
        return weighted(y)[None, None], jnp.tanh(x)

    f = jax.shard_map(on_blocks, mesh=mesh, in_specs=BOTH, out_specs=BOTH, check_vma=False)
    plan = assert_same(f, X, mesh=mesh, in_shardings=P(("model", "data")), atol=1e-4)
    assert "manual_computation" in plan.mlir()


@pytest.mark.parametrize("check_vma", [True, False])
def test_varying_and_invariant_values(mesh, check_vma):
    def on_blocks(x, w):
        y = lax.pcast(lax.psum(x @ w, "model"), ("model",), to="varying")
        return y + lax.pmax(x.sum(), "data"), lax.pmean(y, ("data", "model"))

    f = jax.shard_map(
        on_blocks,
        mesh=mesh,
        in_specs=(BOTH, P("model")),
        out_specs=(P("data", "model"), P()),
        check_vma=check_vma,
    )
    assert_same(f, X, W, mesh=mesh, in_shardings=(P("data"), None), atol=1e-4)


# Bodies that are manual along `data` (2 devices) only; blocks of 4 x 16, to be split further along `model`.
PARTLY_MANUAL = {
    "element-wise collectives": lambda x: (lax.psum(jnp.sin(x), "data"), lax.pmax(x, "data"), lax.pmean(x.T, "data")),
    "all_gather": lambda x: (lax.all_gather(x, "data", axis=0, tiled=True), lax.all_gather(x, "data", axis=1)),
    "psum_scatter": lambda x: (
        lax.psum_scatter(x, "data", scatter_dimension=0, tiled=True),
        lax.psum_scatter(x, "data", scatter_dimension=1, tiled=True),
    ),
    "all_to_all": lambda x: (lax.all_to_all(x, "data", 0, 1, tiled=True), lax.all_to_all(x, "data", 1, 0, tiled=True)),
    "ppermute": lambda x: (lax.ppermute(x, "data", [(0, 1), (1, 0)]), lax.ppermute(x @ x.T, "data", [(1, 0)])),
    "axis_index": lambda x: (x * (1 + lax.axis_index("data")), x @ x.T * lax.axis_index("data")),
    "products": lambda x: (jnp.tanh(x @ x.T) @ x, lax.psum((x[:, :, None] * x[:, None, :]).sum(0), "data")),
    "reductions": lambda x: (x.sum(1), x.max(0), x.argmax(1), jnp.cumsum(x, 1), jnp.sort(x, 1), x.sum()[None]),
}
SPECS = [P(None, "model"), P("model", "data"), P(("model", "data"))]


@pytest.mark.dear
@pytest.mark.parametrize("name", PARTLY_MANUAL)
def test_free_axes_are_partitioned_inside(mesh, name):
    f = jax.shard_map(
        PARTLY_MANUAL[name], mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}, check_vma=False
    )
    for spec in SPECS:
        assert_same(f, X, mesh=mesh, in_shardings=(spec,), atol=1e-4)


def test_an_elementwise_collective_leaves_free_axes_where_they_are(mesh):
    f = jax.shard_map(
        lambda x: lax.psum(jnp.sin(x), "data"), mesh=mesh, in_specs=P("data"), out_specs=P(), axis_names={"data"}
    )
    plan = assert_same(f, X, mesh=mesh, in_shardings=(BOTH,))
    assert [c.origin for c in plan.collectives] == ["user"] and plan.results[0].type == "f32[4,16@model]"


def test_a_collective_gathers_its_own_dimension_along_free_axes_first(mesh):
    f = jax.shard_map(
        lambda x: lax.all_gather(x, "data", axis=1, tiled=True),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
        axis_names={"data"},
        check_vma=False,
    )
    plan = assert_same(f, X, mesh=mesh, in_shardings=(BOTH,))
    inserted = [c.kind for c in plan.collectives if c.origin == "partitioner"]
    assert inserted in (["all_gather"], ["all_to_all"], ["all_to_all", "all_gather"])


def test_constraints_over_free_axes_inside(mesh):
    def constrained(x, *spec):
        return lax.with_sharding_constraint(x, NamedSharding(jax.sharding.get_abstract_mesh(), P(*spec)))

    def on_blocks(x, w):
        h = constrained(jnp.tanh(x @ w), None, "model")
        h = constrained(h * 2 + lax.psum(h, "data"), "model", None)
        return constrained(h @ w, None, "model") + lax.axis_index("data")

    f = jax.shard_map(on_blocks, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"), axis_names={"data"})
    for specs in [(None, None), (P("model"), P("data", "model"))]:
        plan = assert_same(f, X, W, mesh=mesh, in_shardings=specs, atol=1e-4)
        assert any("test_manual.py" in c.source for c in plan.collectives)


def test_nested_manual_computations_over_different_axes(mesh_xyz):
    def inner(x):
        return lax.psum(x, "y") + lax.axis_index("y") + lax.ppermute(jnp.sin(x), "y", [(0, 1), (1, 0)])

    def outer(x):
        y = jax.shard_map(inner, in_specs=P(None, "y"), out_specs=P(None, "y"), axis_names={"y"})(x)
        z = jax.shard_map(
            lambda a: lax.all_gather(a, "z", tiled=True) * lax.axis_index("z"),
            in_specs=P("z"), out_specs=P(None, "z"), axis_names={"z"}, check_vma=False,
        )(y @ y.T)  # fmt: skip
        return lax.psum(y, "x") * lax.axis_index("x"), z

    def f(x):
        return jax.shard_map(
            outer, mesh=mesh_xyz, in_specs=P("x"), out_specs=P("x"), axis_names={"x"}, check_vma=False
        )(x)

    for spec in [P(("z", "x"), "y"), P("y", "z")]:
        assert_same(f, X, mesh=mesh_xyz, in_shardings=(spec,), atol=1e-4)


def ring_product(x, w):
    """`x @ w` with the rows of w travelling around `model`; x split by rows along data, by columns along model."""

    def on_blocks(x, w):
        me, count = lax.axis_index("model"), lax.axis_size("model")
        whole = lax.all_gather(x, "model", axis=1, tiled=True)

        def step(i, carry):
            total, part = carry
            rows = part.shape[0]
            block = lax.dynamic_slice_in_dim(whole, ((me + i) % count) * rows, rows, 1)
            return total + block @ part, lax.ppermute(part, "model", [((j + 1) % count, j) for j in range(count)])

        start = jnp.zeros((x.shape[0], w.shape[1]), x.dtype)
        return lax.fori_loop(0, count, step, (start, w))[0]

    return jax.shard_map(
        on_blocks, mesh=MESH, in_specs=(BOTH, P("model")), out_specs=P("data"), check_vma=False
    )(x, w)  # fmt: skip


def ring_attention(q, k, v):
    """Softmax attention with keys and values travelling around `model`."""

    def on_blocks(q, k, v):
        count = lax.axis_size("model")
        turn = functools.partial(lax.ppermute, axis_name="model", perm=[(j, (j + 1) % count) for j in range(count)])

        def step(carry, _):
            top, bottom, peak, k, v = carry
            scores = q @ k.T
            highest = jnp.maximum(peak, scores.max(1))
            scale, weights = jnp.exp(peak - highest), jnp.exp(scores - highest[:, None])
            top = top * scale[:, None] + weights @ v
            return (top, bottom * scale + weights.sum(1), highest, turn(k), turn(v)), highest.mean()

        start = (jnp.zeros_like(q), jnp.zeros(q.shape[0]), jnp.full(q.shape[0], -1e30), k, v)
        (top, bottom, *_), peaks = lax.scan(step, start, None, length=count)
        return top / bottom[:, None], peaks[None]

    spec = P("model")
    return jax.shard_map(on_blocks, mesh=MESH, in_specs=spec, out_specs=(spec, spec), axis_names={"model"},
                         check_vma=False)(q, k, v)  # fmt: skip


MESH = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"))


def test_ring_product(mesh):
    for specs in [(None, None), (P("model"), P("data", "model"))]:
        assert_same(ring_product, X, W, mesh=mesh, in_shardings=specs, atol=1e-4)
    np.testing.assert_allclose(sdy.partition(ring_product, mesh=mesh)(X, W), X @ W, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("spec", [P("model", "data"), P("data")])
def test_ring_attention_with_a_free_axis(mesh, spec):
    q, k, v = (RNG.standard_normal((16, 8)).astype(np.float32) for _ in range(3))
    assert_same(ring_attention, q, k, v, mesh=mesh, in_shardings=(spec, spec, spec), atol=1e-4)


def loss(x, w):
    def on_blocks(x, w):
        h = jnp.tanh(x @ w)
        return lax.pmean((lax.all_gather(h, "data", tiled=True) * 0.1 + lax.psum(h, "data").mean()).sum(), "data")

    f = jax.shard_map(on_blocks, mesh=MESH, in_specs=(P("data"), P()), out_specs=P(), axis_names={"data"},
                      check_vma=False)  # fmt: skip
    return f(jnp.sin(x), w * 2) + (x @ w).sum()


@pytest.mark.parametrize("specs", [(BOTH, P(None, "model")), (P("model"), P("data"))])
def test_derivatives(mesh, specs):
    both = jax.value_and_grad(loss, (0, 1))
    assert_same(both, X, W, mesh=mesh, in_shardings=specs, atol=1e-4)


def test_derivatives_of_checked_and_fully_manual_code(mesh):
    def f(x, w):
        def on_blocks(x, w):
            return lax.psum(jnp.tanh(x @ w), "model")

        y = jax.shard_map(on_blocks, mesh=mesh, in_specs=(BOTH, P("model")), out_specs=P("data"))(x, w)
        return (y**2).sum()

    assert_same(jax.grad(f, (0, 1)), X, W, mesh=mesh, in_shardings=(P("data"), P("model")), atol=1e-4)
    assert_same(lambda x, w: ring_product(x, w).sum() + jax.grad(lambda y: ring_product(y, w).sum())(x), X, W,
                mesh=mesh, in_shardings=(BOTH, None), atol=1e-3)  # fmt: skip


def test_control_flow_around_and_inside(mesh):
    def on_blocks(x, row):
        def branch(y):
            return lax.psum(y, "data")

        y = lax.cond(row.sum() > 0, branch, lambda y: -y, x @ x.T @ x)
        y = lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1]) + lax.axis_index("data")), (0, y))[1]
        return y + lax.ppermute(y, "data", [(0, 1), (1, 0)])

    manual = jax.shard_map(
        on_blocks, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"), axis_names={"data"}, check_vma=False
    )

    def f(x, w):
        x, ys = lax.scan(lambda carry, row: (manual(carry, row), row.sum()), x, w[:3])
        x = lax.cond(ys.sum() > 0, lambda y: manual(y, ys), lambda y: manual(2 * y, -ys), x)
        return lax.fori_loop(0, 2, lambda i, y: manual(y, ys) * i, x)

    for specs in [(BOTH, None), (P(None, ("model", "data")), P("model"))]:
        assert_same(f, X, W, mesh=mesh, in_shardings=specs, atol=1e-4)


def test_devices_along_manual_axes_may_take_different_branches_and_trips(mesh):
    def on_blocks(x):
        trips = 1 + lax.axis_index("data") * 2
        y = lax.fori_loop(0, trips, lambda i, y: jnp.tanh(y @ y.T * 0.05) @ y, x)
        return lax.switch(lax.axis_index("data"), [jnp.cos, lambda z: (z @ x.T) @ x * 0.05], y)

    f = jax.shard_map(on_blocks, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
    for spec in [None, P("data", "model"), P(("data", "model"))]:
        assert_same(f, X, mesh=mesh, in_shardings=(spec,), atol=1e-4)


def test_a_loop_invariant_is_not_moved_out_of_the_body(mesh):
    """What is the same in every trip still differs between devices along the manual axis."""

    def on_blocks(x):
        other = x.T * (1 + lax.axis_index("data"))
        return lax.scan(lambda c, _: (jnp.tanh(c @ other @ x), c.sum()), x, None, length=3)

    f = jax.shard_map(
        on_blocks, mesh=mesh, in_specs=P("data"), out_specs=(P("data"), P("data")), axis_names={"data"}, check_vma=False
    )

    def g(x):
        y, sums = f(x)
        return y, sums.reshape(2, 3)

    for spec in [P("data", "model"), P("data"), P("model", "data")]:
        assert_same(g, X, mesh=mesh, in_shardings=(spec,), atol=1e-4)


def test_trees_scalars_integers_and_no_operands(mesh):
    def on_blocks(tree, scale):
        ids = lax.axis_index(("data", "model"))
        return {"a": tree["a"] * scale, "b": (tree["b"] + ids, lax.psum(tree["b"], "data"))}, ids[None]

    def f(tree, scale):
        out, ids = jax.shard_map(
            on_blocks,
            mesh=mesh,
            in_specs=({"a": P("data"), "b": P("model")}, P()),
            out_specs=({"a": P("data"), "b": (P(("data", "model")), P("model"))}, P(("data", "model"))),
            check_vma=False,
        )(tree, scale)
        alone = jax.shard_map(
            lambda: lax.axis_index("model")[None] * 3, mesh=mesh, in_specs=(), out_specs=P("model"), check_vma=False
        )()
        return out, ids, alone

    tree = {"a": X.astype(jnp.bfloat16), "b": np.arange(16, dtype=np.int32)}
    assert_same(f, tree, np.float32(3), mesh=mesh, in_shardings=({"a": P("model"), "b": P("data")}, None))


def test_meshes_with_explicit_axes_and_other_device_orders():
    devices = np.array(jax.devices()[:8])
    for order in (devices[::-1], devices[[3, 1, 4, 0, 5, 2, 7, 6]]):
        mesh = jax.sharding.Mesh(order.reshape(4, 2), ("a", "b"))

        def f(x, mesh=mesh):
            return jax.shard_map(
                lambda y: lax.ppermute(y, "a", [(i, (i + 1) % 4) for i in range(4)]) * lax.axis_index(("b", "a")),
                mesh=mesh, in_specs=P("a", "b"), out_specs=P("a", "b"),
            )(x)  # fmt: skip

        assert_same(f, X, mesh=mesh, in_shardings=(P("b"),))


def test_groups_within_an_axis(mesh):
    groups = [[0, 1], [2, 3]]

    def on_blocks(x):
        return (
            lax.psum(x, "model", axis_index_groups=groups),
            lax.pmax(x, "model", axis_index_groups=[[0, 3], [2, 1]]),
            lax.all_gather(x, "model", axis_index_groups=[[3, 0], [1, 2]], axis=1, tiled=True),
            lax.psum_scatter(x, "model", axis_index_groups=[[0, 3], [1, 2]], scatter_dimension=1, tiled=True),
            lax.all_to_all(x, "model", 0, 1, axis_index_groups=groups, tiled=True),
        )

    f = jax.shard_map(on_blocks, mesh=mesh, in_specs=BOTH, out_specs=BOTH, check_vma=False)
    assert_same(f, X, mesh=mesh, in_shardings=(P("data"),))


def test_written_collectives_are_the_users(mesh):
    f = jax.shard_map(lambda x: lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P(), axis_names={"data"})
    plan = sdy.partition(f, mesh=mesh, in_shardings=P("data")).plan(X)
    assert [(c.kind, c.origin) for c in plan.collectives] == [("all_reduce", "user")] and plan.wire_bytes > 0
    text = sdy.partition(f, mesh=mesh, in_shardings=P("data")).lower(X).compile().as_text()
    assert "sdy.all_reduce[data] test_manual.py" in text


@pytest.mark.parametrize(
    ("specs", "axes", "message"),
    [
        (
            P("data"),
            {"data"},
            "in_shardings for `x`: dimension 0 of size 7 does not split into 2 equal blocks along data",
        ),
        (
            P(None, ("model", "data")),
            {"data", "model"},
            "of size 4 does not split into 8 equal blocks along model, data",
        ),
        (P(None, None, "data"), {"data"}, "has 3 entries for a value of rank 2"),
    ],
)
def test_arguments_that_have_no_equal_blocks_are_named(mesh, specs, axes, message):
    f = sdy.manual_computation(lambda x: x, in_shardings=specs, out_shardings=specs, manual_axes=axes)
    with pytest.raises(sdy.ShardingError, match=message):
        sdy.partition(lambda x: f(x), mesh=mesh)(X[:7, :4])


def test_axes_are_manual_once(mesh):
    manual = functools.partial(sdy.manual_computation, in_shardings=P("data"), out_shardings=P("data"))
    inner = manual(lambda x: x * 2, manual_axes="data")
    with pytest.raises(sdy.ShardingError, match="names 'data', on which the code around is manual"):
        sdy.partition(lambda x: manual(inner, manual_axes="data")(x), mesh=mesh)(X)


# Groups of devices.

X2Y4 = Mesh.of(x=2, y=4)
LISTS = [
    [],
    [AxisRef("x")],
    [AxisRef("y")],
    [AxisRef("x"), AxisRef("y")],
    [AxisRef("y"), AxisRef("x")],
    [AxisRef.sub("y", 2, 2)],
    [AxisRef.sub("y", 1, 2), AxisRef("x")],
    [AxisRef.sub("y", 2, 2), AxisRef("x"), AxisRef.sub("y", 1, 2)],
]


def test_groups_of_axes():
    assert groups_of_axes(LISTS[2], X2Y4) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert groups_of_axes(LISTS[4], X2Y4) == ((0, 4, 1, 5, 2, 6, 3, 7),)
    assert groups_of_axes(LISTS[6], X2Y4) == ((0, 4, 2, 6), (1, 5, 3, 7))


@pytest.mark.parametrize("axes", LISTS, ids=lambda axes: " ".join(map(str, axes)) or "none")
def test_axes_of_groups_finds_the_list_again(axes):
    refined = RefinedMesh.of(X2Y4, axes)
    groups = groups_of_axes(axes, X2Y4)
    assert axes_of_groups(groups, refined.all_atoms, X2Y4) == refined.atoms(axes)
    assert axes_of_groups(groups[::-1], refined.all_atoms, X2Y4) == refined.atoms(axes)


@pytest.mark.parametrize(
    "groups",
    [
        ((0, 1), (2, 3), (4, 5), (6, 7)),  # half of y, which this mesh does not cut
        ((0, 4), (5, 1), (2, 6), (3, 7)),
        ((0, 1, 3, 2), (4, 5, 7, 6)),
        ((0, 5), (1, 4), (2, 7), (3, 6)),
        ((0, 4, 2, 6, 1, 5, 3, 7),),
    ],
)
def test_groups_that_no_axes_make(groups):
    assert axes_of_groups(groups, RefinedMesh.of(X2Y4).all_atoms, X2Y4) is None


def test_groups_span_the_axes_along_which_members_differ():
    groups = groups_of_axes(LISTS[5], X2Y4)
    assert spans(groups, [AxisRef("y")], X2Y4) and not spans(groups, [AxisRef("x")], X2Y4)


def test_a_permutation_sends_nothing_along_manual_axes():
    """Without keeping them apart, (a, z, b) = (0, 0, 2) would send its block to (1, 1, 0)."""
    mesh = Mesh.of(a=3, z=2, b=3)
    source, target = (TensorSharding.closed("mesh", [[AxisRef(name)]]) for name in "ab")
    apart = [apart_along(s, [AxisRef("z")]) for s in (source, target)]
    refined = RefinedMesh.of(mesh)

    def z(position):
        return position // 3 % 2

    assert any(z(a) != z(b) for a, b in permutation_pairs(source, target, refined))
    assert all(z(a) == z(b) for a, b in permutation_pairs(*apart, refined))


def test_permutations_inside_are_told_the_manual_axes(mesh_xyz, monkeypatch):
    seen = []
    plain = movement.collective_permute

    def recording(x, source, target, mesh):
        seen.append((str(source), str(target)))
        return plain(x, source, target, mesh)

    monkeypatch.setattr(movement, "collective_permute", recording)

    def on_blocks(x):
        mesh = jax.sharding.get_abstract_mesh()
        y = lax.with_sharding_constraint(jnp.sin(x), NamedSharding(mesh, P("x")))
        return lax.with_sharding_constraint(y * 2, NamedSharding(mesh, P("z")))

    f = jax.shard_map(on_blocks, mesh=mesh_xyz, in_specs=P(None, "y"), out_specs=P(None, "y"), axis_names={"y"})
    assert_same(f, X, mesh=mesh_xyz, in_shardings=(P("x", "y"),))
    assert seen and all('unreduced={"y"}' in s and 'unreduced={"y"}' in t for s, t in seen)


# Text.

TEXT_MESH = 'sdy.mesh @mesh = <["x"=2, "y"=4]>\n'


def planned(text):
    """A module through import, propagation, export and partitioning, and the report."""
    module = parse(TEXT_MESH + text)
    run_pipeline(module.operation, plan_import())
    user_priority_propagate(module.operation)
    run_pipeline(module.operation, PLAN_EXPORT)
    report = partition_locally(module.operation, Setting("mesh", CostModel()))
    assert module.operation.verify()
    return module, report


def run_text(text, *arguments):
    """What the main function of a text returns after all stages."""
    return run(planned(text)[0], *arguments)


def run_partitioned(module, *arguments):
    """What a module that no pass has seen returns, partitioned as it is."""
    partition_locally(module.operation, Setting("mesh", CostModel()))
    return run(module, *arguments)


def run(module, *arguments):
    """What a partitioned module's main function returns on eight devices."""
    graph = Graph(module.operation)
    refined = RefinedMesh.of(graph.meshes["mesh"], used_axes(graph))
    mesh = refined.to_jax(np.array(jax.devices()[:8]).reshape(2, 4))
    function = jax.shard_map(
        local_function(graph, refined),
        mesh=mesh,
        in_specs=tuple(refined.spec(v.sharding) for v in graph.arguments),
        out_specs=tuple(map(refined.spec, graph.result_shardings(graph.main))),
        check_vma=False,
    )
    return [np.asarray(y) for y in jax.jit(function)(*arguments)]


def manual(body, result="8x16", inside="4x16", given='[{"x"}, {?}]', out=None, axes='"x"', argument='[{"x"}, {"y"}]'):
    """A function with one manual computation of one 8 x 16 operand %p."""
    inner = inside if out is None else out[1]
    return f"""
    func.func @main(%a: tensor<8x16xf32> {{sdy.sharding = #sdy.sharding<@mesh, {argument}>}}) -> tensor<{result}xf32> {{
      %0 = sdy.manual_computation(%a) in_shardings=[<@mesh, {given}>]
        out_shardings=[<@mesh, {out[0] if out else given}>] manual_axes={{{axes}}} (%p: tensor<{inside}xf32>) {{
        {body}
        sdy.return %r : tensor<{inner}xf32>
      }} : (tensor<8x16xf32>) -> tensor<{result}xf32>
      return %0 : tensor<{result}xf32>
    }}"""


CHANNEL = "channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>"
X_GROUPS = "replica_groups = dense<[[0, 4], [1, 5], [2, 6], [3, 7]]> : tensor<4x2xi64>"


def all_reduce(groups, body, attributes=f"{CHANNEL}, use_global_device_ids"):
    return f"""%r = "stablehlo.all_reduce"(%p) ({{
        ^bb0(%l: tensor<f32>, %m: tensor<f32>):
          {body}
          stablehlo.return %s : tensor<f32>
        }}) {{{attributes}, {groups}}} : (tensor<4x16xf32>) -> tensor<4x16xf32>"""


ADD = "%s = stablehlo.add %l, %m : tensor<f32>"
LOG_ADD_EXP = """%e = stablehlo.exponential %l : tensor<f32>
          %f = stablehlo.exponential %m : tensor<f32>
          %g = stablehlo.add %e, %f : tensor<f32>
          %s = stablehlo.log %g : tensor<f32>"""


def summed(x):
    return np.tile(x[:4] + x[4:], (2, 1))


def test_all_reduce_by_any_region():
    (found,) = run_text(manual(all_reduce(X_GROUPS, LOG_ADD_EXP)), X)
    np.testing.assert_allclose(found, np.tile(np.logaddexp(X[:4], X[4:]), (2, 1)), rtol=1e-5)
    (found,) = run_text(manual(all_reduce(X_GROUPS, ADD.replace("add", "multiply"))), X)
    np.testing.assert_allclose(found, np.tile(X[:4] * X[4:], (2, 1)), rtol=1e-5)
    # irregular groups, each within one coordinate of y
    (found,) = run_text(manual(all_reduce(X_GROUPS.replace("[1, 5]", "[5, 1]"), LOG_ADD_EXP)), X)
    np.testing.assert_allclose(found, np.tile(np.logaddexp(X[:4], X[4:]), (2, 1)), rtol=1e-5)


@pytest.mark.parametrize("dim", [0, 1])
def test_reduce_scatter_by_any_region(dim):
    """Also where devices 6 and 2, which hold columns 8 to 12, are joined in the other order."""
    attributes = f"{CHANNEL}, use_global_device_ids, scatter_dimension = {dim} : i64"
    result = ("2x16", "4x8")[dim]
    body = all_reduce(X_GROUPS, LOG_ADD_EXP, attributes).replace("all_reduce", "reduce_scatter")
    body = body.replace(") -> tensor<4x16", f") -> tensor<{result}")
    out = ('[{"x"}, {?}]', '[{}, {"x", ?}]')[dim]
    text = manual(body, "4x16", out=(out, result))
    whole = np.logaddexp(X[:4], X[4:])
    np.testing.assert_allclose(run_text(text, X)[0], whole, rtol=1e-5)
    (found,) = run_text(text.replace("[[0, 4], [1, 5], [2, 6], [3, 7]]", "[[4, 0], [5, 1], [6, 2], [7, 3]]"), X)
    np.testing.assert_allclose(found, np.roll(whole, whole.shape[dim] // 2, dim), rtol=1e-5)


def test_regions_with_shardings_inside_keep_their_kind():
    stated = "sdy.sharding_constraint %q <@mesh, []> : tensor<f32>"
    body = all_reduce(X_GROUPS, f"%q = stablehlo.add %l, %m : tensor<f32>\n %s = {stated}")
    (found,) = run_text(manual(body), X)
    np.testing.assert_allclose(found, summed(X), rtol=1e-5)
    body = all_reduce(X_GROUPS, LOG_ADD_EXP.replace("%s", "%q") + f"\n %s = {stated}")
    (found,) = run_text(manual(body), X)
    np.testing.assert_allclose(found, np.tile(np.logaddexp(X[:4], X[4:]), (2, 1)), rtol=1e-5)


def test_reductions_with_shardings_inside_stay_partial():
    text = """
    func.func @main(%a: tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {"y"}]>}) -> tensor<8xf32> {
      %z = stablehlo.constant dense<0.0> : tensor<f32>
      %0 = "stablehlo.reduce"(%a, %z) ({
      ^bb0(%l: tensor<f32>, %m: tensor<f32>):
        %q = stablehlo.add %l, %m : tensor<f32>
        %s = sdy.sharding_constraint %q <@mesh, []> : tensor<f32>
        stablehlo.return %s : tensor<f32>
      }) {dimensions = array<i64: 1>} : (tensor<8x16xf32>, tensor<f32>) -> tensor<8xf32>
      return %0 : tensor<8xf32>
    }"""
    _, report = planned(text)
    assert [c.kind for c in report.collectives] == ["all_reduce"]
    np.testing.assert_allclose(run_text(text, X)[0], X.sum(1), rtol=1e-4, atol=1e-5)


def test_what_groups_mean_without_channel_or_global_ids():
    replicas = "replica_groups = dense<0> : tensor<1x1xi64>"
    (found,) = run_text(manual(all_reduce(replicas, ADD, "use_replicas").replace("use_replicas, ", "")), X)
    np.testing.assert_array_equal(found, X)  # across the one replica
    everywhere = manual(
        all_reduce(replicas, ADD, CHANNEL).replace("4x16", "4x4"),
        inside="4x4", given=BOTH_TEXT, axes='"x", "y"', argument=BOTH_TEXT,
    )  # fmt: skip
    (found,) = run_text(everywhere, X)
    np.testing.assert_allclose(found[:4, :4], X.reshape(2, 4, 4, 4).sum((0, 2)), rtol=1e-5, atol=1e-5)


BOTH_TEXT = '[{"x"}, {"y"}]'


def test_collective_broadcast():
    body = f"""%r = "stablehlo.collective_broadcast"(%p) {{{CHANNEL},
      {X_GROUPS.replace("[0, 4]", "[4, 0]")}}} : (tensor<4x16xf32>) -> tensor<4x16xf32>"""
    text = manual(body, argument='[{"x"}, {}]', given='[{"x"}, {"y"}]')
    (found,) = run_text(text, X)
    wanted = np.tile(X[:4], (2, 1))
    wanted[:, :4] = np.tile(X[4:, :4], (2, 1))
    np.testing.assert_array_equal(found, wanted)


MESH_AXES = "replica_groups = #stablehlo.replica_group_mesh_axes<mesh = {}, axes = [#stablehlo.axis_ref<name = {}>]>"


def test_mesh_axes_as_groups():
    (found,) = run_text(manual(all_reduce(MESH_AXES.format("@mesh", '"x"'), ADD)), X)
    np.testing.assert_allclose(found, summed(X), rtol=1e-5)
    half = MESH_AXES.format("@mesh", '"y", sub_axis_info = (2)2')
    text = manual(all_reduce(half, ADD).replace("4x16", "4x4"), inside="4x4", given=BOTH_TEXT, axes='"x", "y"')
    (found,) = run_text(text, X)
    blocks = X.reshape(8, 2, 2, 4)
    np.testing.assert_allclose(found, np.repeat(blocks.sum(2), 2, 1).reshape(8, 16), rtol=1e-5)


def test_collectives_across_axes_that_are_not_manual_are_refused():
    message = r'all_reduce joins devices along "y".*manual'
    with pytest.raises(sdy.UnsupportedError, match=message):
        planned(manual(all_reduce("replica_groups = dense<[[0, 1, 2, 3], [4, 5, 6, 7]]> : tensor<2x4xi64>", ADD)))
    with pytest.raises(sdy.UnsupportedError, match=r"hold each of the 8 devices"):
        planned(manual(all_reduce("replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>", ADD)))
    pairs = f"""%r = "stablehlo.collective_permute"(%p) {{{CHANNEL},
      source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>}} : (tensor<4x16xf32>) -> tensor<4x16xf32>"""
    with pytest.raises(sdy.UnsupportedError, match=r'collective_permute joins devices along "y"'):
        planned(manual(pairs))


PARTITION_ID = """%i = stablehlo.partition_id : tensor<ui32>
        %f = stablehlo.convert %i : (tensor<ui32>) -> tensor<f32>
        %b = stablehlo.broadcast_in_dim %f, dims = [] : (tensor<f32>) -> tensor<4x4xf32>
        %r = stablehlo.multiply %b, %p : tensor<4x4xf32>"""


def test_partition_id_numbers_the_devices_of_the_whole_mesh():
    text = manual(PARTITION_ID, inside="4x4", given=BOTH_TEXT, axes='"x", "y"')
    (found,) = run_text(text, np.ones((8, 16), np.float32))
    np.testing.assert_array_equal(found[::4, ::4], np.arange(8).reshape(2, 4))
    with pytest.raises(sdy.UnsupportedError, match=r'partition_id is ambiguous.*along "y"'):
        planned(manual(PARTITION_ID.replace("4x4", "4x16")))


def test_partition_id_on_a_mesh_with_device_ids():
    ids = [3, 1, 4, 0, 5, 2, 7, 6]
    text = manual(PARTITION_ID, inside="4x4", given=BOTH_TEXT, axes='"x", "y"')
    module = parse(f'sdy.mesh @mesh = <["x"=2, "y"=4], device_ids={ids}>\n' + text)
    (found,) = run_partitioned(module, np.ones((8, 16), np.float32))
    np.testing.assert_array_equal(found[::4, ::4].ravel(), ids)


def test_groups_hold_device_ids():
    """The devices 3 and 5, whose ids differ along `x` only on this mesh, hold the first columns."""
    header = 'sdy.mesh @mesh = <["x"=2, "y"=4], device_ids=[3, 1, 4, 0, 5, 2, 7, 6]>\n'
    groups = "replica_groups = dense<[[3, 5], [1, 2], [4, 7], [0, 6]]> : tensor<4x2xi64>"
    module = parse(header + manual(all_reduce(groups, ADD)).replace("{?}", "{}"))
    np.testing.assert_allclose(run_partitioned(module, X)[0], summed(X), rtol=1e-5)
    pairs = f"""%r = "stablehlo.collective_permute"(%p) {{{CHANNEL}, source_target_pairs = dense<[[3, 5], [5, 3],
      [1, 2], [4, 7], [0, 6]]> : tensor<5x2xi64>}} : (tensor<4x16xf32>) -> tensor<4x16xf32>"""
    module = parse(header + manual(pairs).replace("{?}", "{}"))
    np.testing.assert_array_equal(run_partitioned(module, X)[0][4:], X[:4])


NAMED = """
    func.func @main(%a: tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {?}]>},
                    %b: tensor<8x16xf32>) -> (tensor<8x16xf32>, tensor<8xf32>) {
      %0:2 = sdy.named_computation<"layer">(%a, %b) IN OUT (%p: tensor<8x16xf32>, %q: tensor<8x16xf32>) {
        %1 = stablehlo.add %p, %q : tensor<8x16xf32>
        %z = stablehlo.constant dense<0.0> : tensor<f32>
        %2 = stablehlo.reduce(%1 init: %z) applies stablehlo.add across dimensions = [1]
          : (tensor<8x16xf32>, tensor<f32>) -> tensor<8xf32>
        sdy.return %1, %2 : tensor<8x16xf32>, tensor<8xf32>
      } : (tensor<8x16xf32>, tensor<8x16xf32>) -> (tensor<8x16xf32>, tensor<8xf32>)
      return %0#0, %0#1 : tensor<8x16xf32>, tensor<8xf32>
    }"""


@pytest.mark.parametrize(
    "stated",
    [
        ("", ""),
        ('in_shardings=[<@mesh, [{"x"}, {"y"}]>, <@mesh, [{}, {"y"}]>]', ""),
        (
            'in_shardings=[<@mesh, [{"x"}, {"y"}]>, <@mesh, [{}, {"y"}]>]',
            'out_shardings=[<@mesh, [{"y"}, {}]>, <@mesh, [{"y", "x"}]>]',
        ),
    ],
)
def test_named_computations(stated):
    text = NAMED.replace("IN", stated[0]).replace("OUT", stated[1])
    y = RNG.standard_normal((8, 16)).astype(np.float32)
    found = run_text(text, X, y)
    np.testing.assert_allclose(found[0], X + y, rtol=1e-5)
    np.testing.assert_allclose(found[1], (X + y).sum(1), rtol=1e-4, atol=1e-5)


def test_named_computations_of_sizes_that_do_not_divide():
    text = NAMED.replace("IN", 'in_shardings=[<@mesh, [{"y"}, {"x"}]>, <@mesh, [{"x"}, {"y"}]>]')
    text = text.replace("OUT", 'out_shardings=[<@mesh, [{"y"}, {"x"}]>, <@mesh, [{"y"}]>]')
    a, b = (RNG.standard_normal((6, 9)).astype(np.float32) for _ in range(2))
    found = run_text(text.replace("8x16", "6x9").replace("<8x", "<6x").replace("<8xf32", "<6xf32"), a, b)
    np.testing.assert_allclose(found[0], a + b, rtol=1e-5)
    np.testing.assert_allclose(found[1], (a + b).sum(1), rtol=1e-4, atol=1e-5)


def test_named_computations_run_in_the_shardings_of_their_border():
    text = NAMED.replace("IN", 'in_shardings=[<@mesh, [{"x"}, {}]>, <@mesh, [{"x"}, {}]>]').replace("OUT", "")
    _, report = planned(text)
    assert not [c for c in report.collectives if c.kind != "all_slice"]


ANNOTATIONS = """
    func.func @main(%a: tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {"y"}]>},
                    %b: tensor<8x16xf32>) -> tensor<8x16xf32> {
      %0 = stablehlo.sine %a : tensor<8x16xf32>
      sdy.sharding_group %0 group_id=0 : tensor<8x16xf32>
      sdy.sharding_group %b group_id=0 : tensor<8x16xf32>
      %1 = sdy.propagation_barrier %0 allowed_direction=NONE : tensor<8x16xf32>
      %2 = sdy.reshard %1 <@mesh, [{"y"}, {}]> : tensor<8x16xf32>
      %4 = stablehlo.add %2, %b : tensor<8x16xf32>
      %5 = sdy.sharding_constraint %4 <@mesh, [{}, {"y", "x"}]> : tensor<8x16xf32>
      %6 = sdy.all_gather [{}, {"x"}] %5 out_sharding=<@mesh, [{}, {"y"}]> : tensor<8x16xf32>
      return %6 : tensor<8x16xf32>
    }"""


def test_annotations_left_in_a_program_compute_nothing():
    y = RNG.standard_normal((8, 16)).astype(np.float32)
    (found,) = run_text(ANNOTATIONS, X, y)
    np.testing.assert_allclose(found, np.sin(X) + y, rtol=1e-5)
    _, report = planned(ANNOTATIONS)
    assert sum(c.wire_bytes for c in report.collectives) < 1024


def test_marks_without_a_sharding_cost_nothing():
    text = """
    func.func @main(%a: tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {"y"}]>})
        -> (tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {"y"}]>}) {
      sdy.sharding_group %a group_id=0 : tensor<8x16xf32>
      %1 = sdy.propagation_barrier %a allowed_direction=BACKWARD : tensor<8x16xf32>
      return %1 : tensor<8x16xf32>
    }"""
    module = parse(TEXT_MESH + text)
    assert not partition_locally(module.operation, Setting("mesh", CostModel())).collectives
    assert "sharding_group" not in str(module) and "propagation_barrier" not in str(module)
    np.testing.assert_array_equal(run(module, X)[0], X)


def test_a_module_that_was_not_exported_runs_too():
    y = RNG.standard_normal((8, 16)).astype(np.float32)
    module = parse(TEXT_MESH + ANNOTATIONS)
    (found,) = run_partitioned(module, X, y)
    np.testing.assert_allclose(found, np.sin(X) + y, rtol=1e-5)
    imported = parse(TEXT_MESH + NAMED.replace("IN", "").replace("OUT", ""))
    run_pipeline(imported.operation, plan_import())
    user_priority_propagate(imported.operation)  # its edges are not sunk
    np.testing.assert_allclose(run_partitioned(imported, X, y)[0], X + y, rtol=1e-5)


def test_a_call_that_was_not_inlined_is_computed_replicated_and_named():
    text = """
    func.func @main(%a: tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {"y"}]>}) -> tensor<8x16xf32> {
      %0 = func.call @f(%a) : (tensor<8x16xf32>) -> tensor<8x16xf32>
      return %0 : tensor<8x16xf32>
    }
    func.func private @f(%a: tensor<8x16xf32>) -> tensor<8x16xf32> {
      %0 = stablehlo.sine %a : tensor<8x16xf32>
      return %0 : tensor<8x16xf32>
    }"""
    module = parse(TEXT_MESH + text)
    report = partition_locally(module.operation, Setting("mesh", CostModel()))
    (note,) = report.notes
    assert note.op == "func.call"
    assert note.message.startswith(
        "has no sharding rule, so every device computes all of it; argument 0 is gathered: all"
    )
    np.testing.assert_allclose(run(module, X)[0], np.sin(X), rtol=1e-6)


def test_values_that_are_unreduced_along_manual_axes_at_the_border():
    returned = manual(
        "%r = stablehlo.sine %p : tensor<4x16xf32>",
        "4x16",
        out=('[{}, {?}], unreduced={"x"}', "4x16"),
    ).replace("return %0", "%2 = stablehlo.negate %0 : tensor<4x16xf32>\n return %2")
    np.testing.assert_allclose(run_text(returned, X)[0], -np.sin(X[:4]) - np.sin(X[4:]), rtol=1e-4, atol=1e-6)
    taken = manual(
        all_reduce(X_GROUPS, ADD).replace("4x16", "8x16"),
        inside="8x16", given='[{}, {?}], unreduced={"x"}', out=("[{}, {?}]", "8x16"),
    )  # fmt: skip
    np.testing.assert_array_equal(run_text(taken, X)[0], X)


OWN_RULES = """
    func.func @main(%a: tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {"y"}]>}) -> tensor<8x16xf32> {
      %0 = stablehlo.reverse %a, dims = [0]
        {sdy.sharding_rule = #sdy.op_sharding_rule<([i, j])->([i, j]) {i=8, j=16}, custom>} : tensor<8x16xf32>
      %1 = stablehlo.add %0, %0 {sdy.sharding_rule = #sdy.op_sharding_rule<
        ([i, j], [k, j])->([i, j]) {i=8, j=16, k=8} need_replication={j}, custom>} : tensor<8x16xf32>
      return %1 : tensor<8x16xf32>
    }"""


def test_an_own_rule_does_not_change_what_an_op_computes():
    """The first rule claims that reversing splits, the second unties dimensions that belong together."""
    np.testing.assert_array_equal(run_text(OWN_RULES, X)[0], 2 * X[::-1])


def test_an_own_rule_keeps_dimensions_whole():
    module, _ = planned(OWN_RULES)
    (add,) = (op for op in Graph(module.operation).ops if op.name == "stablehlo.add")
    assert not add.results[0].sharding.axes[1]


def test_the_rule_of_a_custom_call_says_what_stays_split():
    text = """
    func.func @main(%a: tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {"y"}]>}) -> tensor<8x16xf32> {
      %0 = stablehlo.custom_call @somebodys(%a) {sdy.sharding_rule = #sdy.op_sharding_rule<
        ([i, j])->([i, j]) {i=8, j=16} need_replication={j}, custom>} : (tensor<8x16xf32>) -> tensor<8x16xf32>
      return %0 : tensor<8x16xf32>
    }"""
    module, _ = planned(text)
    (call,) = (op for op in Graph(module.operation).ops if op.name == "stablehlo.custom_call")
    assert call.results[0].sharding.axes[0][0] == AxisRef("x") and not call.results[0].sharding.axes[1]


def test_groups_follow_a_mesh_that_is_unified_with_another():
    twice = 'sdy.mesh @mesh = <["x"=2, "y"=4]>\nsdy.mesh @again = <["x"=2, "y"=4]>\n'
    groups = (
        'replica_groups = #stablehlo.replica_group_mesh_axes<mesh = @again, axes = [#stablehlo.axis_ref<name = "x">]>'
    )
    module = parse(twice + manual(all_reduce(groups, ADD)))
    run_pipeline(module.operation, plan_import())
    assert module.operation.verify() and "@again" not in str(module)


@pytest.mark.parametrize("border", ["in", "out"])
def test_the_border_keeps_axes_free_for_dimensions_that_wait_for_their_priority(border):
    """An axis that is given to dimension 0 later does not come to dimension 1 before."""
    waiting, open_ = '[{"x", ?}p1, {?}]', "[{?}, {?}]"
    given, returned = (waiting, open_) if border == "in" else (open_, waiting)
    text = f"""func.func @main(
        %arg0: tensor<8x16xf32> {{sdy.sharding = #sdy.sharding<@mesh, [{{?}}, {{"y", "x", ?}}]>}}
      ) -> tensor<8x16xf32> {{
      %0 = stablehlo.negate %arg0 : tensor<8x16xf32>
      %1 = sdy.manual_computation(%0) in_shardings=[<@mesh, {given}>] out_shardings=[<@mesh, {returned}>]
          manual_axes={{}} (%arg1: tensor<8x16xf32>) {{
        %3 = stablehlo.tanh %arg1 : tensor<8x16xf32>
        sdy.return %3 : tensor<8x16xf32>
      }} : (tensor<8x16xf32>) -> tensor<8x16xf32>
      %2 = stablehlo.abs %1 : tensor<8x16xf32>
      return %2 : tensor<8x16xf32>
    }}"""
    module, _ = planned(text)
    assert f'{border}_shardings=[<@mesh, [{{"x"}}, {{"y"}}]>]' in str(module)
    np.testing.assert_allclose(run(module, X)[0], np.abs(np.tanh(-X)), rtol=1e-6)
