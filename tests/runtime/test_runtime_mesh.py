"""Refined meshes: atoms, names, specs and who sits where."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from sdy_jax.ir.device_orders import block_indices, coordinates
from sdy_jax.ir.meshes import AxisRef, Mesh
from sdy_jax.ir.parsers import parse_axis, parse_sharding
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.runtime.meshes import RefinedMesh

MESH = Mesh.of(data=2, model=12)


def cut(*texts):
    return RefinedMesh.of(MESH, [parse_axis(text) for text in texts])


def test_uncut_axes_keep_their_names():
    assert cut().axis_names == ("data", "model")
    assert cut('"model"').shape == (2, 12)


@pytest.mark.parametrize(
    ("used", "names", "shape"),
    [
        (['"model":(1)2'], ("data", "model.1.2", "model.2.6"), (2, 2, 6)),
        (['"model":(2)3'], ("data", "model.1.2", "model.2.3", "model.6.2"), (2, 2, 3, 2)),
        (['"model":(1)4', '"model":(2)2'], ("data", "model.1.2", "model.2.2", "model.4.3"), (2, 2, 2, 3)),
        (['"model":(4)3', '"model":(1)4'], ("data", "model.1.4", "model.4.3"), (2, 4, 3)),
    ],
)
def test_axes_are_cut_at_the_ends_of_the_sub_axes_used(used, names, shape):
    refined = cut(*used)
    assert refined.axis_names == names
    assert refined.shape == shape


def test_a_sub_axis_is_the_product_of_its_atoms():
    refined = cut('"model":(1)4', '"model":(2)2')
    assert refined.atoms([parse_axis('"model":(1)4')]) == (parse_axis('"model":(1)2'), parse_axis('"model":(2)2'))
    assert refined.names([AxisRef("model"), AxisRef("data")]) == ("model.1.2", "model.2.2", "model.4.3", "data")
    assert refined.names([parse_axis('"model":(4)3'), parse_axis('"model":(1)2')]) == ("model.4.3", "model.1.2")


def test_axes_of_size_one_stay():
    refined = RefinedMesh.of(Mesh.of(a=1, b=2), [AxisRef("a"), AxisRef("b")])
    assert refined.axis_names == ("a", "b")
    assert refined.names([AxisRef("a")]) == ("a",)


def test_spec_names_the_atoms_of_each_dimension():
    refined = cut('"model":(1)2')
    sharding = parse_sharding('@mesh, [{"model", "data"}, {}, {?}]')
    assert refined.spec(sharding) == jax.sharding.PartitionSpec(("model.1.2", "model.2.6", "data"), None, None)
    assert refined.spec(None) == jax.sharding.PartitionSpec()


def test_coordinates_are_digits_of_the_full_coordinate():
    model = np.arange(24) % 12
    np.testing.assert_array_equal(coordinates(AxisRef("model"), MESH), model)
    np.testing.assert_array_equal(coordinates(AxisRef("data"), MESH), np.arange(24) // 12)
    np.testing.assert_array_equal(coordinates(parse_axis('"model":(1)2'), MESH), model // 6)
    np.testing.assert_array_equal(coordinates(parse_axis('"model":(2)3'), MESH), model // 2 % 3)
    np.testing.assert_array_equal(coordinates(parse_axis('"model":(6)2'), MESH), model % 2)


def test_a_list_of_all_digits_numbers_blocks_like_the_axis():
    digits = [parse_axis(text) for text in ('"model":(1)2', '"model":(2)3', '"model":(6)2')]
    np.testing.assert_array_equal(block_indices(digits, MESH), block_indices([AxisRef("model")], MESH))
    np.testing.assert_array_equal(block_indices([], MESH), np.zeros(24))
    np.testing.assert_array_equal(block_indices([AxisRef("data"), AxisRef("model")], MESH), np.arange(24))


@pytest.mark.parametrize("order", [range(8), [3, 1, 0, 2, 7, 6, 5, 4]], ids=["plain", "permuted"])
@pytest.mark.parametrize("dims", ['{"q", "p"}', '{"q":(2)2, "p"}, {"q":(1)2}', '{"p"}', '{}, {"q":(2)2}'])
def test_jax_places_blocks_where_block_indices_says(dims, order):
    mesh = Mesh.of(p=2, q=4)
    sharding = parse_sharding(f"@mesh, [{dims}]")
    refined = RefinedMesh.of(mesh, [axis for axes in sharding.axes for axis in axes])
    devices = np.array(jax.devices()[:8])[list(order)]
    placed = jax.sharding.NamedSharding(refined.to_jax(devices.reshape(2, 4)), refined.spec(sharding))
    shape = (8,) * sharding.rank
    where = placed.devices_indices_map(shape)
    local = sharding.local_shape(shape, mesh)
    for position, device in enumerate(devices):
        starts = [(index.start or 0) // n for index, n in zip(where[device], local, strict=True)]
        assert starts == [block_indices(axes, mesh)[position] for axes in sharding.axes]


def test_an_array_on_the_plain_mesh_enters_the_refined_mesh_in_place(mesh):
    refined = RefinedMesh.of(Mesh.of(data=2, model=4), [AxisRef.sub("model", 1, 2)])
    sharding = TensorSharding.closed("mesh", [[AxisRef("model")], [AxisRef("data")]])
    plain = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("model", "data"))
    finer = jax.sharding.NamedSharding(refined.to_jax(mesh.devices), refined.spec(sharding))
    assert plain.is_equivalent_to(finer, 2)
