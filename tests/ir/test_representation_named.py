"""To and from `jax.sharding`."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sdy_jax.errors import ShardingError, UnsupportedError
from sdy_jax.ir.jax_shardings import (
    from_named_sharding,
    from_partition_spec,
    has_sub_axes,
    mesh_from_jax,
    to_partition_spec,
)
from sdy_jax.ir.meshes import AxisRef, Mesh
from sdy_jax.ir.parsers import parse_sharding
from sdy_jax.ir.shardings import TensorSharding

MESH = Mesh.of(x=2, y=2, z=2)


@pytest.mark.parametrize(
    ("spec", "rank", "text"),
    [
        (P(), 0, "@mesh, []"),
        (P(), 2, "@mesh, [{}, {}]"),
        (P("x"), 2, '@mesh, [{"x"}, {}]'),
        (P(None, "x"), 2, '@mesh, [{}, {"x"}]'),
        (P(("z", "x"), P.UNCONSTRAINED), 2, '@mesh, [{"z", "x"}, {?}]'),
        (P((), "y"), 2, '@mesh, [{}, {"y"}]'),
        (P("x", unreduced={"z", "y"}), 1, '@mesh, [{"x"}], unreduced={"y", "z"}'),
        (P("x", reduced={"z"}), 1, '@mesh, [{"x"}]'),
    ],
)
def test_partition_specs_are_read_as_jax_reads_them(spec, rank, text):
    assert from_partition_spec(spec, rank, MESH, "mesh") == parse_sharding(text)


@pytest.mark.parametrize(
    ("spec", "rank", "message"),
    [
        (P("x", "y"), 1, "argument `w`: .* has 2 entries for a value of rank 1"),
        (P("w"), 1, "names the axis 'w', which the mesh lacks; its axes are: x, y, z"),
        (P("x", unreduced={"w"}), 1, "names the axis 'w'"),
        (P("x", "x"), 2, "uses the axis 'x' twice"),
        (P("x", ("y", "x")), 2, "uses the axis 'x' twice"),
    ],
)
def test_unfit_specs_are_refused(spec, rank, message):
    with pytest.raises(ShardingError, match=message):
        from_partition_spec(spec, rank, MESH, "mesh", "argument `w`")


def test_specs_round_trip():
    for spec in (P("x", None, ("z", "y")), P(None, None), P("y", unreduced={"x", "z"})):
        rank = len(spec.partitions)
        assert to_partition_spec(from_partition_spec(spec, rank, MESH, "mesh")) == spec


def test_an_empty_dimension_that_closes_has_no_priority():
    assert parse_sharding('@mesh, [{?}p1, {"x", ?}p2]').closed_like() == parse_sharding('@mesh, [{}, {"x"}p2]')


def test_open_dimensions_close():
    assert to_partition_spec(parse_sharding('@mesh, [{"x", ?}p1, {?}], replicated={"y"}')) == P("x", None)


@pytest.mark.parametrize("text", ['@mesh, [{"x":(1)2}]', '@mesh, [{}], unreduced={"x":(1)2}'])
def test_sub_axes_have_no_spec(text):
    sharding = parse_sharding(text)
    assert has_sub_axes(sharding)
    with pytest.raises(UnsupportedError, match="part of a mesh axis"):
        to_partition_spec(sharding)


@pytest.mark.parametrize("kind", ["max", "min"])
def test_reductions_other_than_sums_where_jax_names_them(kind):
    sharding = TensorSharding.closed("mesh", [[]], [AxisRef("x")], kind)
    if not hasattr(jax.sharding, "UnreducedKind"):
        with pytest.raises(UnsupportedError, match=f"unreduced={kind}"):
            to_partition_spec(sharding)
        return
    spec = to_partition_spec(sharding)
    assert spec.unreduced_kind.name == kind
    assert from_partition_spec(spec, 1, MESH, "mesh") == sharding


def test_meshes_of_jax(mesh_xyz):
    assert mesh_from_jax(mesh_xyz) == MESH
    assert mesh_from_jax(jax.sharding.AbstractMesh((2, 4), ("a", "b"))) == Mesh.of(a=2, b=4)
    reordered = jax.sharding.Mesh(np.array(jax.devices()[:8])[::-1].reshape(2, 2, 2), ("x", "y", "z"))
    assert mesh_from_jax(reordered) == MESH


def test_named_shardings_bring_their_mesh(mesh_xyz):
    sharding = from_named_sharding(NamedSharding(mesh_xyz, P("y", ("z", "x"))), 3, "m")
    assert sharding == parse_sharding('@m, [{"y"}, {"z", "x"}, {}]')
