"""Partitioned functions through `jax.export`: written, read, and called on the mesh, on another, and by `load`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy

X = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
SPECS = ({"w": P("a", "b")}, P("a"))
KINDS = (AxisType.Auto, AxisType.Explicit)


def step(params, x):
    explicit = bool(jax.sharding.get_abstract_mesh().explicit_axes)
    split = P("a", "b") if explicit else None  # `a` splits what is summed over
    y = jax.nn.relu(jnp.dot(x, params["w"], out_sharding=split))
    return {"loss": (y**2).mean(), "w": params["w"] - 0.1 * jnp.dot(x.T, y, out_sharding=split)}


def mesh_of(kind, devices=None):
    return jax.sharding.Mesh(np.array(devices or jax.devices()).reshape(2, 4), ("a", "b"), axis_types=(kind,) * 2)


def arguments(mesh):
    params, x = ({"w": X}, X)
    return jax.device_put((params, x), jax.tree.map(lambda spec: NamedSharding(mesh, spec), SPECS))


def exported(kind, given=None, platforms=None, **options):
    """The function after it was written and read."""
    f = sdy.partition(step, mesh=mesh_of(kind), in_shardings=SPECS, out_shardings={"loss": P(), "w": P("a", "b")})
    given = given or arguments(mesh_of(kind))
    return export.deserialize(export.export(f, platforms=platforms)(*given).serialize(**options))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", [1, -1])
def test_an_exported_function_runs_on_its_mesh_and_on_another_of_that_shape(kind, order):
    mesh = mesh_of(kind, jax.devices()[::order])
    found = exported(kind).call(*arguments(mesh))
    assert found["w"].sharding.is_equivalent_to(NamedSharding(mesh, P("a", "b")), 2)
    expected = step({"w": X}, X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)


@pytest.mark.parametrize("placed", [True, False])
def test_what_is_exported_says_where_its_arguments_lie(placed):
    mesh = mesh_of(AxisType.Auto)
    expected = tuple(x.sharding for x in jax.tree.leaves(arguments(mesh)))
    read = exported(AxisType.Auto, arguments(mesh) if placed else ({"w": X}, X))
    assert read.nr_devices == 8 and read.fun_name == "step"
    assert read.in_shardings_jax(mesh) == expected


def test_derivatives_are_exported_too():
    mesh, read = mesh_of(AxisType.Auto), exported(AxisType.Auto, vjp_order=1)
    found = jax.jit(jax.grad(lambda params, x: read.call(params, x)["loss"]))(*arguments(mesh))
    expected = jax.grad(lambda params, x: step(params, x)["loss"])({"w": X}, X)
    np.testing.assert_allclose(found["w"], expected["w"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_one_file_for_several_platforms(kind):
    read = exported(kind, platforms=("cpu", "cuda", "tpu"))
    assert read.platforms == ("cpu", "cuda", "tpu")
    found, expected = read.call(*arguments(mesh_of(kind))), step({"w": X}, X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)


def test_an_exported_function_is_partitioned_again_when_it_is_loaded(tmp_path):
    f = sdy.partition(step, mesh=mesh_of(AxisType.Auto), in_shardings=SPECS)
    path = tmp_path / "step.bin"
    path.write_bytes(export.export(f)(*arguments(mesh_of(AxisType.Auto))).serialize())
    again = sdy.partition(sdy.load(path), mesh=mesh_of(AxisType.Auto))
    np.testing.assert_allclose(again({"w": X}, X)["w"], step({"w": X}, X)["w"], rtol=1e-5, atol=1e-6)


def test_layouts_are_constrained_in_what_runs_and_not_in_what_is_exported():
    f = sdy.partition(step, mesh=mesh_of(AxisType.Auto), in_shardings=SPECS)
    assert "LayoutConstraint" in f.lower(*arguments(mesh_of(AxisType.Auto))).as_text()
    assert "LayoutConstraint" not in export.export(f)(*arguments(mesh_of(AxisType.Auto))).mlir_module()


def test_plans_of_symbolic_sizes_are_refused_with_what_would_do():
    f = sdy.partition(lambda x: jnp.sin(x), mesh=mesh_of(AxisType.Auto))
    x = jax.ShapeDtypeStruct(export.symbolic_shape("8*b, 4"), np.float32)
    with pytest.raises(sdy.UnsupportedError, match=r"`x` has the symbolic shape \(8\*b, 4\).*load"):
        f.plan(x)


def product(x, w, *, scale):
    return {"y": jnp.tanh(x @ w) * scale, "rows": x.shape[0] * jnp.ones(())}


STATED = {"in_shardings": (P("a"), P(None, "b"), None), "out_shardings": {"y": P("a", "b"), "rows": None}}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.filterwarnings("ignore:product has arguments of symbolic sizes:sdy_jax.PartitionWarning")
def test_symbolic_sizes_are_exported_as_by_jit(kind, tmp_path):
    types = [
        jax.ShapeDtypeStruct(export.symbolic_shape("8*b, 4"), np.float32),
        jax.ShapeDtypeStruct((4, 8), np.float32),
    ]
    scale = jax.ShapeDtypeStruct((), np.float32)
    mesh = mesh_of(kind)
    ours = export.export(sdy.partition(product, mesh=mesh, **STATED))(*types, scale=scale)
    with jax.set_mesh(mesh):
        theirs = export.export(jax.jit(product, out_shardings=STATED["out_shardings"]))(*types, scale=scale)
    assert ours.out_avals == theirs.out_avals and ours.out_tree == theirs.out_tree and ours.in_tree == theirs.in_tree
    assert ours.out_shardings_jax(mesh) == theirs.out_shardings_jax(mesh)
    assert [s.spec for s in ours.in_shardings_jax(mesh)[:2]] == [P("a"), P(None, "b")]
    if kind == AxisType.Explicit:  # jax refines no types with shardings when it calls what was exported
        return
    x, w = np.tile(X, (4, 1))[:16, :4], np.tile(X, (4, 4))[:4, :8]
    placed = [
        jax.device_put(a, NamedSharding(mesh_of(AxisType.Auto), s))
        for a, s in zip((x, w), STATED["in_shardings"], strict=False)
    ]
    found = jax.jit(ours.call)(*placed, scale=jnp.float32(2))
    np.testing.assert_allclose(found["y"], np.tanh(x @ w) * 2, rtol=1e-5)
    assert found["rows"] == 16
    (tmp_path / "product.bin").write_bytes(ours.serialize())
    again = sdy.partition(sdy.load(tmp_path / "product.bin"), mesh=mesh, on_unknown="ignore")
    np.testing.assert_allclose(again(*placed, scale=jnp.float32(2))["y"], np.tanh(x @ w) * 2, rtol=1e-5)


def test_symbolic_sizes_are_told_of():
    f = sdy.partition(jnp.sin, mesh=mesh_of(AxisType.Auto), in_shardings=P("a"))
    x = jax.ShapeDtypeStruct(export.symbolic_shape("8*b, 4"), np.float32)
    with pytest.warns(sdy.PartitionWarning, match="sin has arguments of symbolic sizes, for which nothing is planned"):
        assert f.eval_shape(x).shape == x.shape
    around = export.export(jax.jit(lambda x: f(x) + 1))(x)
    placed = jax.device_put(X, NamedSharding(mesh_of(AxisType.Auto), P()))[:, :4]
    np.testing.assert_allclose(jax.jit(around.call)(placed), np.sin(X[:, :4]) + 1, rtol=1e-6)
