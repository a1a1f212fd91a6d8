"""Convolutions of few batches, which TPUs take longer for: where images are split by rows, and where by batches."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy

MESH = AbstractMesh((8,), ("rows",))
ROWS = P(None, "rows")


def conv(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def kinds_of(machine: str, images: int) -> set[str]:
    """What is sent where images whose rows are split go through a hundred convolutions, and come back so."""

    def run(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 100, lambda _, x: jax.nn.relu(conv(x, kernel)), x)

    costs = sdy.CostModel.of_machine(machine, MESH)
    f = sdy.partition(run, mesh=MESH, in_shardings=(ROWS, P()), out_shardings=ROWS, costs=costs)
    types = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((images, 256, 256, 128), (3, 3, 128, 128)))
    return {record.kind for record in f.plan(*types).collectives if record.wire_bytes}


@pytest.mark.parametrize(
    ("machine", "images", "kind"),
    [
        ("v5e", 8, "collective_permute"),  # one each: rows of neighbours are sent, as dear as that is
        ("v5e", 64, "all_to_all"),  # eight each fill the rows of tiles
        ("h100", 8, "all_to_all"),
    ],
)
def test_images_are_split_by_batches_where_as_many_convolutions_take_no_longer(machine, images, kind):
    assert kinds_of(machine, images) == {kind}


def test_one_image_takes_as_long_as_any_few():
    def time_of(images: int) -> float:
        f = sdy.partition(conv, mesh=MESH, in_shardings=P(), costs=sdy.CostModel.of_machine("v5e", MESH))
        shapes = (images, 256, 256, 512), (3, 3, 512, 512)
        return f.plan(*(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)).time.compute

    assert time_of(2) == pytest.approx(2 * time_of(1), rel=0.02)
    assert time_of(8) == pytest.approx(8 / 2.5 * time_of(1), rel=0.02)


def test_gradients_of_kernels_have_features_for_batches():
    def run(x: jax.Array, kernel: jax.Array, slope: jax.Array) -> jax.Array:
        return jax.vjp(lambda kernel: conv(x, kernel), kernel)[1](slope)[0]

    def time_of(batch: int, rows: int) -> float:
        shapes = (batch, rows, 256, 128), (3, 3, 128, 128), (batch, rows, 256, 128)
        f = sdy.partition(run, mesh=MESH, in_shardings=P(), costs=sdy.CostModel.of_machine("v5e", MESH))
        return f.plan(*(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)).time.compute

    assert time_of(1, 512) == pytest.approx(time_of(8, 64), rel=0.02)
