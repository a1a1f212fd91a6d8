"""The Python functions of the mesh and shard dialects: where they work, what they refuse, how shardings convert."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax.shard import Sharding


def body(x):  # (2, 3) per device
    y = sdy.shard.all_gather(x, grid_axes="model", gather_axis=1)  # (2, 12)
    return sdy.shard.reduce_scatter(y, grid_axes=("model",), scatter_axis=1, reduction="max")


def traced(function, mesh, shape=(4, 12), spec=P("data", "model"), **options):
    """The error of a call in a `shard_map` body, or its results' shapes."""
    mapped = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=P(mesh.axis_names), **options)
    return jax.eval_shape(mapped, jax.ShapeDtypeStruct(shape, jnp.float32))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            partial(sdy.shard.all_slice, grid_axes="model", slice_axis=0),
            "shard.all_slice: dimension 0 of size 2 does not split into 4 equal pieces (grid axes ['model'])",
        ),
        (partial(sdy.shard.reduce_scatter, grid_axes=1, scatter_axis=0), "does not split into 4 equal pieces"),
        (
            partial(sdy.shard.all_to_all, grid_axes=1, split_axis=1, concat_axis=1),
            "dimension 1 of size 3 does not split",
        ),
        (partial(sdy.shard.all_gather, grid_axes=2, gather_axis=0), "grid_axes contains 2, but the grid has axes 0..1"),
        (
            partial(sdy.shard.all_gather, grid_axes=-1, gather_axis=0),
            "grid_axes contains -1, but the grid has axes 0..1",
        ),
        (partial(sdy.shard.all_gather, grid_axes="x", gather_axis=0), "the axes of the grid are data, model"),
        (
            partial(sdy.shard.all_reduce, grid_axes=[1, 0, 1]),
            "grid_axes = ['model', 'data', 'model'] repeats axis 'model'",
        ),
        (partial(sdy.shard.all_gather, grid_axes=0, gather_axis=2), "gather_axis = 2 is outside 0..1"),
        (partial(sdy.shard.all_gather, grid_axes=0, gather_axis=-3), "gather_axis = -3 is outside 0..1"),
        (partial(sdy.shard.broadcast, grid_axes=(0, 1), root=3), "root has 1 coordinates for 2 grid axes"),
        (
            partial(sdy.shard.broadcast, grid_axes=0, root=2),
            "root[0] = 2 is outside 0..1, the range of grid axis 'data'",
        ),
        (
            partial(sdy.shard.reduce, grid_axes=(1, 0), root=(1, 2)),
            "root[1] = 2 is outside 0..1, the range of grid axis",
        ),
        (partial(sdy.shard.gather, grid_axes=0, gather_axis=0, root=-1), "root[0] = -1 is outside 0..1"),
        (partial(sdy.shard.send_recv, grid_axes=0, source=None, destination=0), "recv needs a source"),
        (partial(sdy.shard.send_recv, grid_axes=0, source=0, destination=5), "destination[0] = 5 is outside 0..1"),
        (partial(sdy.shard.send_recv, grid_axes=0, source=5, destination=0), "source[0] = 5 is outside 0..1"),
        (
            partial(sdy.shard.shift, grid_axes="data", shift_axis="model", offset=1),
            "shard.shift: shift_axis = 'model' is not among grid_axes = ['data']",
        ),
        (partial(sdy.shard.all_reduce, grid_axes=0, reduction="median"), "attribute reduction must be one of sum, max"),
        (partial(sdy.shard.all_reduce, grid_axes=0, reduction="generic"), "generic names no computation"),
        (
            partial(sdy.shard.all_reduce, grid_axes=0, reduction="bitwise_or"),
            "reduction = bitwise_or needs integers, got f32",
        ),
        (partial(sdy.shard.all_reduce, grid_axes=0, dtype=jnp.float64), "result element type f64 needs jax_enable_x64"),
        (
            partial(sdy.shard.reduce_scatter, grid_axes=0, scatter_axis=0, dtype=np.int64),
            "type i64 needs jax_enable_x64",
        ),
        (partial(sdy.shard.all_reduce, grid_axes=0, reduction="average", dtype=bool), "average needs numbers, got i1"),
        (
            partial(sdy.shard.update_halo, split_axes=[[0], [1]], halo_sizes=[1, 1]),
            "2 halo sizes for 2 split dimensions",
        ),
        (
            partial(sdy.shard.update_halo, split_axes=[[0]], halo_sizes=[2, 1]),
            "leaves a core of -1, smaller than halo size 2",
        ),
        (partial(sdy.shard.update_halo, split_axes=[[0]], halo_sizes=[-1, 1]), "halo size -1 is negative"),
        (
            partial(sdy.shard.update_halo, split_axes=[[0], [0]], halo_sizes=[]),
            "split_axes = [['data'], ['data']] repeats axis",
        ),
        (
            partial(sdy.shard.update_halo, split_axes=[[], [], [1]], halo_sizes=[0, 0]),
            "3 lists, the tensor 2 dimensions",
        ),
        (partial(sdy.shard.all_gather, grid_axes=0, gather_axis="x"), "gather_axis is 'x', expected an integer"),
        (partial(sdy.shard.shift, shift_axis=0, offset=1.5), "shard.shift: offset is 1.5, expected an integer"),
        (partial(sdy.shard.broadcast, grid_axes=0, root=None), "shard.broadcast: root is None, expected an integer"),
        (partial(sdy.shard.update_halo, split_axes=[[0]], halo_sizes=[1.0, 1]), "a halo size is 1.0, expected"),
        (partial(sdy.shard.all_reduce, grid_axes=[1.5]), "shard.all_reduce: an entry of grid_axes is 1.5"),
        (lambda x: sdy.shard.shift(x, shift_axis=0, offset=x[0, 0]), "known while tracing"),
        (lambda x: sdy.shard.shard(x, P("data")), "shard.shard: got P('data',), expected a sdy_jax.shard.Sharding"),
        (partial(sdy.shard.all_reduce, grid_axes=0, mesh_axes=0), "shard.all_reduce: got both grid_axes and mesh_axes"),
        (lambda x: sdy.shard.all_gather(x[0, 0], grid_axes=0, gather_axis=0), "rank at least 1, got float32[]"),
        (lambda x: sdy.shard.neighbors_linear_indices((0,), split_axes=0), "1 device coordinates for a grid of rank 2"),
        (lambda x: sdy.shard.neighbors_linear_indices(split_axes=()), "split_axes is empty"),
        (
            lambda x: sdy.shard.all_reduce(x + 1j, grid_axes=0, reduction="max"),
            "max needs ordered values, got complex<f32>",
        ),
        (
            lambda x: sdy.shard.all_reduce(x + 1j, grid_axes=0, dtype=jnp.float32),
            "complex<f32> does not convert to f32",
        ),
    ],
)
def test_what_is_refused(mesh, call, message):
    with pytest.raises(sdy.SdyError) as error:
        traced(call, mesh)
    assert str(error.value).startswith("shard.")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (partial(sdy.shard.all_reduce, grid_axes=None), "got None for grid axes, expected names or positions of axes"),
        (partial(sdy.shard.all_reduce, grid_axes=0, grid=3), "grid is 3, expected a jax.sharding.Mesh or AbstractMesh"),
    ],
)
def test_grids_and_axes_that_are_none(mesh, call, message):
    with pytest.raises(sdy.SdyError, match=message):
        traced(call, mesh)


def test_what_is_no_program():
    with pytest.raises(sdy.SdyError, match="run_local got a NoneType; expected a program's text"):
        sdy.shard.run_local(None)


def test_outside_of_shard_map(mesh):
    x = jnp.ones(4)
    with pytest.raises(sdy.SdyError, match=r"^shard\.all_gather: grid axis 'model' is not manual here; call it inside"):
        sdy.shard.all_gather(x, grid_axes="model", gather_axis=0)
    with pytest.raises(sdy.SdyError, match="grid axis 'model' is not manual here"):
        sdy.shard.all_gather(x, grid_axes=1, gather_axis=0, grid=mesh)
    with pytest.raises(sdy.SdyError, match="the grid is not manual here"):
        sdy.shard.process_linear_index()
    with pytest.raises(sdy.SdyError, match="grid axis 'model' is not manual here"):
        mapped = jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
        jax.eval_shape(mapped, x)


def test_axes_that_the_body_is_manual_on_are_enough(mesh):
    def partly(x):
        return sdy.shard.shift(x, shift_axis="data", offset=1), sdy.shard.all_reduce(x, grid_axes="data")

    x = jnp.arange(4.0)
    mapped = jax.shard_map(partly, mesh=mesh, in_specs=P("data"), out_specs=(P("data"), P()), axis_names={"data"})
    shifted, total = jax.jit(mapped)(x)
    assert (shifted.tolist(), total.tolist()) == ([0, 0, 0, 1], [2, 4])


def test_the_documented_example(mesh):
    x = jnp.arange(48.0).reshape(4, 12)
    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("data", "model"), out_specs=P("data", "model"))
    np.testing.assert_array_equal(jax.jit(mapped)(x), x)


def test_mesh_terms_and_grids_in_another_order(mesh):
    turned = jax.sharding.AbstractMesh((4, 2), ("model", "data"))

    def shifted(x):
        one = sdy.shard.send_recv(x, mesh_axes=[0, 1], source=[3, 0], destination=[0, 1], mesh=turned)
        with sdy.shard.with_grid(turned):
            return one, sdy.shard.process_linear_index()[None]

    mapped = jax.shard_map(shifted, mesh=mesh, in_specs=P(("data", "model")), out_specs=P(("data", "model")))
    one, place = jax.jit(mapped)(jnp.arange(1, 9))
    assert one.tolist() == [0, 0, 0, 0, 4, 0, 0, 0]  # from (data 0, model 3) to (data 1, model 0)
    assert place.tolist() == [0, 2, 4, 6, 1, 3, 5, 7]


def test_a_grid_of_other_sizes_is_refused(mesh):
    other = jax.sharding.AbstractMesh((4, 2), ("data", "model"))
    with pytest.raises(sdy.SdyError, match="grid axis 'data' has size 4, but 2 devices lie along it"):
        traced(partial(sdy.shard.all_reduce, grid_axes=0, grid=other), mesh)


# In partitioned functions.


def test_inside_a_partitioned_function(mesh):
    x, w = jnp.arange(48.0).reshape(4, 12) / 48, jnp.arange(36.0).reshape(12, 3) / 36

    def everything(x):
        y = sdy.shard.all_gather(x, grid_axes="model", gather_axis=1)
        y = sdy.shard.shift(y, shift_axis="data", offset=1, rotate=True)
        y = sdy.shard.all_slice(y, grid_axes="model", slice_axis=1)
        y = y + sdy.shard.broadcast(y, grid_axes=("model", "data"), root=(1, 0))
        y = sdy.shard.all_reduce(y, grid_axes="data", reduction="max")
        y = sdy.shard.reshard(y, Sharding([[], ["model"]]), Sharding([["data"], []]))
        return y + sdy.shard.process_linear_index().astype(y.dtype) * 0

    def function(x, w):
        mapped = jax.shard_map(everything, mesh=mesh, in_specs=P("data", "model"), out_specs=P("data"), check_vma=False)
        return jnp.sin(mapped(x + 1.0) @ w)

    expected = jax.jit(function)(x, w)
    partitioned = sdy.partition(function, mesh=mesh, in_shardings=(P("data", "model"), P("model")))
    np.testing.assert_allclose(partitioned(x, w), expected, rtol=1e-4, atol=1e-5)
    gradient = jax.grad(lambda x, w: function(x, w).sum())
    partitioned = sdy.partition(gradient, mesh=mesh, in_shardings=(P("data", "model"), P("model")))
    np.testing.assert_allclose(partitioned(x, w), jax.jit(gradient)(x, w), rtol=1e-3, atol=1e-4)


def test_inside_a_manual_computation(mesh):
    @sdy.partition(mesh=mesh, in_shardings=(P("data", "model"),), on_unknown="ignore")
    def function(x):
        manual = sdy.manual_computation(
            lambda block: sdy.shard.reduce_scatter(block, grid_axes="model", scatter_axis=0),
            in_shardings=P(None, "model"),
            out_shardings=P("model"),
            manual_axes={"model"},
        )
        return manual(x * 2.0)

    x = jnp.arange(96.0).reshape(8, 12)
    expected = (2 * x).reshape(8, 4, 3).sum(1)
    np.testing.assert_allclose(function(x), expected)


def test_plans_name_the_line_of_the_call(mesh):
    def exchange(x):
        return sdy.shard.all_gather(x, grid_axes="model", gather_axis=0)  # this line

    mapped = jax.shard_map(exchange, mesh=mesh, in_specs=P(("data", "model")), out_specs=P("data"), check_vma=False)
    traced_ = jax.jit(mapped).trace(jnp.ones(8))
    text = traced_.lower().as_text(debug_info=True)
    source = Path(__file__).read_text().splitlines()
    (line,) = [number for number, text in enumerate(source, start=1) if "# this " + "line" in text]
    assert f'test_shard_api.py":{line}' in text
    assert "sdy_jax/mesh_dialects" not in text
    assert "shard.all_gather" in text


# Shardings.


def test_shardings_print_as_the_dialect_does(mesh):
    sharding = Sharding([["data"], []], partial=("max", "model"), grid=mesh)
    assert str(sharding) == "split_axes = [[0], []] partial = max [1]"
    text = str(Sharding([[0]], halo_sizes=[1, 2]))
    assert text == "split_axes = [[0]] halo_sizes = [1, 2]"
    assert str(Sharding([[1, 0]], sharded_dims_offsets=[0, 1])) == "split_axes = [[1, 0]] sharded_dims_offsets = [0, 1]"


def test_shardings_are_equal_if_they_mean_the_same(mesh):
    same = [
        (Sharding([["data"]], grid=mesh), Sharding([[0], []], grid=mesh)),
        (Sharding([[0]], grid=mesh), Sharding([[0]], grid=mesh, halo_sizes=[0, 0])),
        (Sharding([[0]], grid=mesh), Sharding([[0]], grid=mesh, sharded_dims_offsets=[0, 3, 5])),
        (
            Sharding([[]], grid=mesh, partial=("sum", [1, 0])),
            Sharding([[]], grid=mesh, partial=("sum", ["data", "model"])),
        ),
        (Sharding([[0], []]), Sharding([[0]], halo_sizes=[0, 0])),
    ]
    for one, other in same:
        assert one == other
        assert hash(one) == hash(other)
    different = [
        (Sharding([[0]], grid=mesh), Sharding([[1]], grid=mesh)),
        (Sharding([[0, 1]], grid=mesh), Sharding([[1, 0]], grid=mesh)),
        (Sharding([[0]], grid=mesh), Sharding([[0]], grid=mesh, sharded_dims_offsets=[0, 2, 5])),
        (Sharding([[]], grid=mesh, partial=("sum", [0])), Sharding([[]], grid=mesh, partial=("max", [0]))),
        (Sharding([[0]], grid=mesh), Sharding([[0]], grid=jax.sharding.AbstractMesh((2,), ("data",)))),
        (Sharding([[0]]), "split_axes = [[0]]"),
    ]
    for one, other in different:
        assert one != other


@pytest.mark.parametrize(
    ("sharding", "text"),
    [
        (Sharding([["data"], [], ["model"]]), '[{"data"}, {}, {"model"}]'),
        (Sharding([[], [1, 0]]), '[{}, {"model", "data"}, {}]'),
        (Sharding([[0]], partial=("sum", [1])), '[{"data"}, {}, {}], unreduced={"model"}'),
        (Sharding([[]], partial=("bitwise_or", [1, 0])), '[{}, {}, {}], unreduced=or{"data", "model"}'),
    ],
)
def test_shardings_convert_to_sdy_and_back(mesh, sharding, text):
    converted = sharding.to_sdy(mesh, rank=3)
    assert str(converted) == f'mesh<["data"=2, "model"=4]>, {text}'
    assert Sharding.from_sdy(converted, mesh) == Sharding(sharding.split_axes, partial=sharding.partial, grid=mesh)


def test_what_sdy_or_the_dialect_cannot_say(mesh):
    with pytest.raises(sdy.SdyError, match="average has no counterpart"):
        Sharding([[]], partial=("average", [0]), grid=mesh).to_sdy()
    with pytest.raises(sdy.SdyError, match="split_axes has 2 lists, the tensor 1 dimensions"):
        Sharding([[], [0]], grid=mesh).to_sdy(rank=1)
    with pytest.raises(sdy.SdyError, match="names no grid"):
        Sharding([[0]]).to_sdy()
    part = sdy.TensorSharding("mesh", (sdy.DimensionSharding((sdy.AxisRef.sub("model", 1, 2),)),))
    with pytest.raises(sdy.SdyError, match=r'axis "model":\(1\)2 is a sub-axis; shard shardings have whole axes only'):
        Sharding.from_sdy(part, mesh)
    with pytest.raises(sdy.SdyError, match="has an open dimension"):
        Sharding.from_sdy(sdy.TensorSharding.fully_open("mesh", 1), mesh)


def test_shard_states_shardings_of_a_partitioned_function(mesh):
    @sdy.partition(mesh=mesh)
    def function(x, w):
        x = sdy.shard.shard(x, Sharding([["data"]]))
        return sdy.shard.shard(jnp.tanh(x @ w), Sharding([["data"], ["model"]]), annotate_for_users=True)

    x, w = jnp.ones((4, 6)), jnp.ones((6, 8))
    y = function(x, w)
    np.testing.assert_allclose(y, jnp.tanh(x @ w), rtol=1e-6)
    assert sdy.shard.get_sharding(y) == Sharding([["data"], ["model"]], grid=mesh)
    text = function.plan(x, w).mlir("propagated")
    assert '%arg0: tensor<4x6xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>}' in text
    assert sdy.shard.shard(x, Sharding([["data"]])) is not None  # outside of a partition


ROWS, COLUMNS = Sharding([["data"]]), Sharding([[], ["model"]])
UNDEFINED = {
    "two plain ones in a chain": (
        lambda x, shard: shard(shard(x, ROWS), COLUMNS),
        "shard.shard: the array is already sharded at PLACE; use annotate_for_users to reshard for its users",
    ),
    "two plain ones of one array": (
        lambda x, shard: shard(x, ROWS) + shard(x, COLUMNS),
        "shard.shard: the array has two different shardings, here and at PLACE",
    ),
    "two for users in a chain": (
        lambda x, shard: shard(shard(x, ROWS, annotate_for_users=True), COLUMNS, annotate_for_users=True),
        "shard.shard: the array is already annotated for its users at PLACE; annotate the value itself a second time"
        " for other users",
    ),
    "a plain one after one for users": (
        lambda x, shard: shard(shard(x, ROWS, annotate_for_users=True), COLUMNS),
        "shard.shard: the array is annotated for its users at PLACE and cannot be given another sharding after that",
    ),
}


@pytest.mark.parametrize("around", [lambda f: f, jax.vmap, jax.jit], ids=["plain", "vmap", "jit"])
@pytest.mark.parametrize("name", UNDEFINED)
def test_undefined_usages_of_shard_are_refused(mesh, name, around):
    function, message = UNDEFINED[name]

    def inner(x):
        return function(x, sdy.shard.shard)

    x = jnp.ones((4, 8)) if around is not jax.vmap else jnp.ones((3, 4, 8))
    with pytest.raises(sdy.SdyError) as caught:
        sdy.partition(around(inner), mesh=mesh, on_unknown="ignore").plan(x)
    place = rf"{re.escape(__file__)}:{function.__code__.co_firstlineno}"
    assert re.match(re.escape(message).replace("PLACE", place) + "(\n|$)", str(caught.value))


def test_usages_of_shard_that_are_defined(mesh):
    users = partial(sdy.shard.shard, annotate_for_users=True)

    @sdy.partition(mesh=mesh, on_unknown="ignore")
    def function(x):
        y = sdy.shard.shard(sdy.shard.shard(x, ROWS), Sharding([["data"], []]))  # the same once more
        return users(y, COLUMNS) + users(y, Sharding([["model"]])) * jnp.sin(y)

    x = jnp.arange(32.0).reshape(4, 8)
    np.testing.assert_allclose(function(x), x + x * jnp.sin(x), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        jax.grad(lambda x: function(x).sum())(x), 1 + jnp.sin(x) + x * jnp.cos(x), rtol=1e-4, atol=1e-4
    )


def test_shard_warns_of_what_it_cannot_state(mesh):
    with pytest.warns(UserWarning, match="halos and offsets are of local buffers"):
        sdy.shard.shard(jnp.ones(8), Sharding([[0]], halo_sizes=[1, 1], grid=mesh))


def test_the_sharding_of_an_array(mesh):
    x = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P(None, ("model", "data"))))
    assert sdy.shard.get_sharding(x) == Sharding([[], [1, 0]], grid=mesh)
    for unknown in (jnp.ones(8), np.ones(8)):
        with pytest.raises(sdy.SdyError, match=r"is not known here; put it on a mesh by jax\.device_put"):
            sdy.shard.get_sharding(unknown)
    with pytest.raises(sdy.SdyError, match="is not known here; ask the plan of the function"):
        jax.jit(sdy.shard.get_sharding)(x)


def test_reshard_stays_on_one_grid(mesh, mesh_xyz):
    with pytest.raises(sdy.SdyError, match="source and target are on two grids"):
        sdy.shard.reshard(jnp.ones(8), Sharding([[0]], grid=mesh), Sharding([[0]], grid=mesh_xyz))


def test_halos_of_traced_sizes():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def body(x, lo):
        return sdy.shard.update_halo(x, split_axes=["x"], halo_sizes=[lo, 1])

    mapped = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x")))
    x = jnp.arange(40.0)
    for lo in (0, 1, 2):
        fixed = jax.jit(jax.shard_map(partial(body, lo=lo), mesh=mesh, in_specs=P("x"), out_specs=P("x")))
        np.testing.assert_array_equal(mapped(x, lo), fixed(x))
