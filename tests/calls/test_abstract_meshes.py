"""Meshes without devices: plans and lowered programs are those of a mesh that has them; calls take them from arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax.plan.profile import collectives_in_hlo, totals

SIZES, NAMES = (2, 4), ("data", "model")
AUTO = AbstractMesh(SIZES, NAMES, axis_types=(AxisType.Auto,) * 2)
SPECS = {"up": P("data", "model"), "down": P("model")}
KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])

ARRAYS = (
    {"up": np.linspace(-1, 1, 512, dtype=np.float32).reshape(16, 32), "down": np.ones((32, 8), np.float32)},
    np.linspace(0, 1, 128, dtype=np.float32).reshape(8, 16),
)
TYPES = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), ARRAYS)


def step(weights, x):
    """Where arrays have types, products say how their results lie: `data` and `model` split what is summed over."""
    explicit = bool(jax.sharding.get_abstract_mesh().explicit_axes)
    columns, rows = (P("data", "model"), P("data")) if explicit else (None, None)

    def loss(weights):
        h = jnp.tanh(jnp.dot(x, weights["up"], out_sharding=columns))
        return jnp.mean(jnp.dot(h, weights["down"], out_sharding=rows) ** 2)

    value, slopes = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda p, g: p - 0.1 * g, weights, slopes), value


def with_devices(kind=AxisType.Auto):
    return Mesh(np.array(jax.devices()[:8]).reshape(SIZES), NAMES, axis_types=(kind,) * 2)


def partitioned(mesh, **options):
    return sdy.partition(step, mesh=mesh, in_shardings=(SPECS, P("data")), out_shardings=(SPECS, P()), **options)


def placed(mesh):
    specs = (SPECS, P("data"))
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), ARRAYS, specs)


def assert_equal(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)


@KINDS
@pytest.mark.parametrize("given", [AbstractMesh(SIZES, NAMES), sdy.Mesh.of(data=2, model=4)], ids=["jax", "sdy"])
def test_the_plan_is_that_of_a_mesh_of_devices(given, kind):
    given = given.update_axis_types(dict.fromkeys(NAMES, kind)) if isinstance(given, AbstractMesh) else given
    plans = [partitioned(mesh).plan(*TYPES) for mesh in (given, with_devices(kind))]
    assert str(plans[0]) == str(plans[1]) and plans[0].mlir() == plans[1].mlir()


@KINDS
def test_the_compiled_program_is_that_of_a_mesh_of_devices(kind):
    lowered = partitioned(AbstractMesh(SIZES, NAMES, axis_types=(kind,) * 2)).lower(*TYPES)
    compiled = lowered.compile(device_assignment=tuple(jax.devices()[:8]))
    expected = partitioned(with_devices(kind)).lower(*placed(with_devices(kind))).compile()
    found = [totals(collectives_in_hlo(each.as_text())) for each in (compiled, expected)]
    assert found[0] == found[1] and found[0].count > 0
    assert compiled.memory_analysis().temp_size_in_bytes == expected.memory_analysis().temp_size_in_bytes


def test_axes_may_be_split():
    """A plan on parts of axes is lowered on a finer abstract mesh."""
    function = sdy.partition(
        lambda x: (x.reshape(2, 2, 4, 16) * 2, x.sum()),
        mesh=AbstractMesh((8,), ("x",), axis_types=(AxisType.Auto,)),
        in_shardings='[{"x":(1)4}, {}]',
        out_shardings=(None, P()),
    )
    x = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    assert "mhlo.num_partitions = 8" in function.lower(x).as_text()
    assert function.trace(x).out_info[1].shape == ()


@KINDS
def test_calls_run_on_the_devices_of_their_arguments(kind):
    mesh = with_devices(kind)
    function, arrays = partitioned(AbstractMesh(SIZES, NAMES, axis_types=(kind,) * 2)), placed(mesh)
    found, expected = function(*arrays), partitioned(mesh)(*arrays)
    assert_equal(found, step(*ARRAYS))
    assert jax.tree.map(lambda x: x.sharding, found) == jax.tree.map(lambda x: x.sharding, expected)
    other = Mesh(mesh.devices[::-1], NAMES, axis_types=(kind,) * 2)
    assert function(*placed(other))[1].sharding.mesh == other
    assert_equal(jax.jit(lambda w, x: function(w, x)[1] * 2)(*arrays), 2 * step(*ARRAYS)[1])


def test_calls_run_on_the_devices_of_the_mesh_that_is_set():
    function = partitioned(AbstractMesh(SIZES, NAMES))
    with jax.set_mesh(with_devices()):
        assert_equal(function(*ARRAYS), step(*ARRAYS))


def test_derivatives_do_as_well():
    function = sdy.partition(lambda w, x: step(w, x)[1], mesh=AUTO, in_shardings=(SPECS, P("data")))
    weights, x = placed(with_devices())
    found = jax.grad(function)(weights, x)
    assert_equal(found, jax.grad(lambda w: step(w, ARRAYS[1])[1])(ARRAYS[0]))
    assert found["up"].sharding.spec == SPECS["up"]


@pytest.mark.parametrize("arrays", [ARRAYS, jax.tree.map(jnp.asarray, ARRAYS)], ids=["numpy", "jax"])
def test_calls_without_devices_say_how_to_get_them(arrays):
    function = partitioned(AbstractMesh(SIZES, NAMES))
    with pytest.raises(sdy.ShardingError, match=r"step is partitioned on the mesh .* which has no devices.* to fix: "):
        function(*arrays)
    smaller = Mesh(np.array(jax.devices()[:4]).reshape(1, 4), NAMES)
    with pytest.raises(sdy.ShardingError, match="none of its arguments is on a mesh with these axes"):
        function(*jax.tree.map(lambda x: jax.device_put(x, NamedSharding(smaller, P())), arrays))


def test_a_mesh_without_devices_around_a_call():
    function = sdy.partition(step, in_shardings=(SPECS, P("data")))
    with jax.sharding.use_abstract_mesh(AbstractMesh(SIZES, NAMES)):
        assert function.plan(*TYPES).program.mesh == sdy.Mesh.of(data=2, model=4)


def test_so_many_devices_as_no_machine_has():
    large = sdy.partition(step, mesh=AbstractMesh((256, 256), NAMES), in_shardings=(SPECS, P("data")))
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct([256 * n for n in x.shape], x.dtype), TYPES)
    plan = large.plan(*types)
    assert "on mesh data=256, model=256 (65536 devices)" in plan.headline
    assert {record.kind for record in plan.collectives} >= {"all_gather", "reduce_scatter"}
    assert large.eval_shape(*types)[1].shape == ()


def test_what_devices_are_like_may_be_stated():
    kind = type("Kind", (), {"device_kind": "TPU v5 lite", "__hash__": lambda self: 1})()
    mesh = AbstractMesh((64, 16), NAMES, abstract_device=kind)
    plan = partitioned(mesh).plan(
        *jax.tree.map(lambda x: jax.ShapeDtypeStruct([64 * n for n in x.shape], x.dtype), TYPES)
    )
    assert plan.costs.unit == "seconds" and "tpu v5e" in plan.costs.origin
    assert plan.target.compiler.fusion.into_products


def test_keys_are_described_without_their_words():
    function = sdy.partition(lambda key: jax.random.normal(key, (16,)), mesh=AUTO, out_shardings=P("data"))
    assert "num_partitions = 8" in function.lower(jax.random.key(0)).as_text()
