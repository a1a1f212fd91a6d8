"""How mesh axes lie along the dimensions of a torus, and what collectives take there."""

import itertools
import math

import numpy as np
import pytest
from jax.sharding import AbstractMesh

from sdy_jax import AxisRef, CostModel, Mesh
from sdy_jax.calls.options import Options
from sdy_jax.lowering.targets.rates import Link
from sdy_jax.lowering.targets.torus import Line, Torus, cut_lines, lines_of_axes
from sdy_jax.plan.digests import target_from
from sdy_jax.plan.record.recorded_plan import RecordedLine, RecordedTarget

FLAT, CUBES = Torus(2, around=16, as_rings=16), Torus(3, around=4, in_cubes=True)


@pytest.mark.parametrize(
    ("torus", "chips", "sizes", "rings"),
    [
        (FLAT, 32, (4, 8), (False, False)),
        (FLAT, 128, (8, 16), (False, True)),
        (FLAT, 256, (16, 16), (True, True)),
        (CUBES, 16, (2, 2, 4), (False, False, False)),
        (CUBES, 128, (4, 4, 8), (True, True, True)),
        (CUBES, 96, (4, 4, 6), (False, False, False)),
    ],
)
def test_slices_are_as_compact_as_they_can_be(torus, chips, sizes, rings):
    assert torus.sizes(chips) == sizes and torus.rings(sizes) == rings


@pytest.mark.parametrize(
    ("torus", "sizes", "lines"),
    [
        (FLAT, (256,), [[(0, 16, 1, 16), (1, 16, 1, 16)]]),
        (FLAT, (16, 16), [[(1, 16, 1, 16)], [(0, 16, 1, 16)]]),
        (FLAT, (64, 4), [[(0, 4, 4, 16), (1, 16, 1, 16)], [(0, 4, 1, 16)]]),
        (FLAT, (8, 8), [[(1, 8, 1, 0)], [(0, 8, 1, 0)]]),
        (FLAT, (2, 4), [[(0, 2, 1, 2)], [(0, 4, 1, 4)]]),
        (CUBES, (8, 64), [[(2, 8, 1, 8)], [(0, 8, 1, 8), (1, 8, 1, 8)]]),
        (None, (8, 4), [[(0, 8, 1, 8)], [(1, 4, 1, 4)]]),
    ],
)
def test_axes_take_whole_dimensions_where_these_make_them_up(torus, sizes, lines):
    assert [sorted(map(tuple, found)) for found in lines_of_axes(sizes, torus)] == lines


@pytest.mark.parametrize("torus", [FLAT, CUBES])
def test_axes_fill_the_slice(torus):
    """Whatever they are: their sizes are those of their lines, and all together are all dimensions, without gaps."""
    for sizes in itertools.product((1, 2, 3, 4, 8, 12, 16), repeat=3):
        chips = math.prod(sizes)
        if chips <= torus.as_rings:
            continue
        found = lines_of_axes(sizes, torus)
        assert [math.prod([line.size for line in lines]) for lines in found] == list(sizes)
        filled = [1] * torus.dimensions
        for line in sorted((line for lines in found for line in lines), key=lambda line: line.far):
            assert line.far == filled[line.dimension]
            filled[line.dimension] *= line.size
        assert tuple(filled) == torus.sizes(chips)


def test_parts_of_axes_are_parts_of_their_lines():
    whole = lines_of_axes((256,), FLAT)[0]
    major, minor = cut_lines(whole, [4, 64])
    assert math.prod([line.size for line in minor]) == 64 and [line.size for line in major] == [4]
    assert [line for line in minor if line.is_ring] == [whole[1]] and major[0].far == 4


def rates(model, axes, mesh):
    refs = tuple(map(AxisRef, axes))
    return {
        kind: (round(1e6 * found.fixed, 3), round(1e-9 / found.per_byte, 3))
        for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
        for found in [model.rate(kind, refs, mesh)]
    }


def bare(mesh):
    """A v5e of which only links count."""
    model = CostModel.of_machine("tpu v5e", mesh)
    return CostModel(latency=1e-6, bandwidth=dict(model.bandwidth), torus=model.torus, machine="tpu v5e")


def test_an_axis_over_two_dimensions_uses_both_and_waits_for_the_hops_of_each():
    """By hand: 2 x 90 GB/s, and 2 x 7.5 hops; a block of an all_to_all passes four links in each on average."""
    mesh = Mesh.of(x=256)
    assert rates(bare(mesh), ["x"], mesh) == {
        "all_gather": (15, 180),
        "reduce_scatter": (15, 180),
        "all_reduce": (30, 180),
        "all_to_all": (15, round(90 / 4 * 255 / 256, 3)),
    }


def test_of_several_axes_the_slowest_decides():
    mesh = Mesh.of(x=16, y=16)
    assert rates(bare(mesh), ["x"], mesh)["all_gather"] == (7.5, 90)
    assert rates(bare(mesh), ["x", "y"], mesh)["all_gather"] == (15, 90)
    assert rates(bare(mesh), ["x", "y"], mesh)["all_to_all"] == (15, round(90 / 4 * 255 / 256, 3))


def test_lines_have_half_the_rate_and_all_of_their_hops():
    mesh = Mesh.of(x=8, y=8)
    assert rates(bare(mesh), ["y"], mesh) == {
        "all_gather": (7, 45),
        "reduce_scatter": (7, 45),
        "all_reduce": (14, 45),
        "all_to_all": (7, round(45 / 2 * 7 / 8, 3)),
    }


def test_lines_side_by_side_share_links():
    mesh = Mesh.of(x=64, y=4)  # y is 4 of 16 chips, x every fourth of these and the other dimension
    assert rates(bare(mesh), ["y"], mesh)["all_gather"] == (3, 45)
    assert rates(bare(mesh), ["x"], mesh)["all_gather"] == (4 * 1.5 + 7.5, 90 + 90 / 4)


def ways(source, target, size, is_ring):
    """The shorter way from chip to chip, in which direction and how far; half of what is sent goes each of two."""
    if not is_ring:
        return [(np.sign(target - source), abs(target - source), 1.0)]
    ahead = (target - source) % size
    found = [(1, ahead), (-1, size - ahead)]
    least = min(hops for _, hops in found)
    chosen = [(step, hops) for step, hops in found if hops == least]
    return [(step, hops, 1 / len(chosen)) for step, hops in chosen]


@pytest.mark.parametrize(("size", "is_ring"), [(4, True), (16, True), (8, False)])
def test_an_all_to_all_takes_what_passes_the_busiest_link(size, is_ring):
    """Each chip sends a block to each, also to itself, by the shortest way, at half of its rate in each direction."""
    passing = np.zeros((3, size))  # by direction and the chip that the link leaves
    for source, target in itertools.permutations(range(size), 2):
        for step, hops, share in ways(source, target, size, is_ring):
            for hop in range(hops):
                passing[step, (source + step * hop) % size] += share
    line = Line(0, size, 1, size if is_ring else 0)
    assert line.turn * size == pytest.approx(passing.max() / 0.5)


def test_parts_with_rates_of_their_own_are_not_on_the_torus():
    mesh = Mesh.of(data=512)
    model = CostModel.of_machine("tpu v5e", mesh, {"data:(1)2": 3e9})
    slow, fast = (AxisRef.canonical("data", before, size, mesh) for before, size in ((1, 2), (2, 256)))
    assert not model.link(slow, mesh).lines and len(model.link(fast, mesh).lines) == 2
    assert [link.speed for link in model.links([slow, fast], mesh)] == [3e9, 180e9]
    assert [link.is_network for link in model.links([AxisRef("data")], mesh)] == [True, False]


def test_links_are_cut_with_their_lines():
    link = Link(256, bandwidth=90e9, hop=1e-6, lines=lines_of_axes((256,), FLAT)[0])
    assert [part.lines[0].dimension for part in link.cut([16, 16])] == [line.dimension for line in link.lines]


def test_make_mesh_lays_axes_as_it_is_assumed():
    """On described chips, as far as their places can be had without libtpu: by `mesh_utils` on devices of our own."""
    from types import SimpleNamespace

    from jax.experimental import mesh_utils

    chips = [
        SimpleNamespace(
            device_kind="TPU v5 lite",
            platform="tpu",
            coords=(x, y, 0),
            core_on_chip=0,
            id=8 * x + y,
            process_index=0,
            slice_index=0,
        )
        for x in range(16)
        for y in range(16)
    ]
    for sizes in ((256,), (16, 16), (64, 4), (4, 64), (2, 8, 16)):
        found = mesh_utils.create_device_mesh(sizes, chips, allow_split_physical_axes=True)
        for axis, lines in enumerate(lines_of_axes(sizes, FLAT)):
            first = np.moveaxis(found, axis, 0).reshape(sizes[axis], -1)[:, 0]
            places = np.array([chip.coords[:2] for chip in first])
            along = sorted(len(np.unique(places[:, dim])) for dim in range(2))
            assert along == sorted([line.size for line in lines] + [1] * (2 - len(lines))), (sizes, axis)


def test_plans_for_a_machine_know_where_its_chips_would_be():
    """As of described chips: what `jax.make_mesh` gives for 256 of v5e. Of eight a scatter is one, however they lie."""
    for sizes, lines in (
        ({"f": 256}, (("f", ((16, 0, 1), (16, 1, 1))),)),
        ({"f": 64, "t": 4}, (("f", ((4, 0, 4), (16, 1, 1))), ("t", ((4, 0, 1),)))),
        ({"x": 8}, ()),
    ):
        mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
        target = Options(costs=CostModel.of_machine("v5e", list(sizes))).target(mesh)
        assert target.lines == lines
    assert not Options(costs=CostModel.of_machine("h100", ["f"])).target(AbstractMesh((64,), ("f",))).lines


def test_plans_that_do_not_say_how_far_chips_are_are_read():
    """As those that were saved before they did: chips are then neighbours."""
    recorded = RecordedTarget("tpu", 0.0, (RecordedLine("f", ((4, 0), (16, 1, 4))),))
    assert target_from(recorded).lines == (("f", ((4, 0, 1), (16, 1, 4))),)
