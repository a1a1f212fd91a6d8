"""How much of what is sent work hides: bytes, but for what both need more of than there is."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax.lowering.targets.target import family_of_machine

MESH = AbstractMesh((8,), ("x",))
V5E, H100 = (sdy.CostModel.of_machine(name, MESH) for name in ("tpu v5e", "h100"))


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)


def plan(costs: sdy.CostModel, rows: int, width: int, weights: int) -> sdy.Plan:
    """A product of so many rows on each device, and a gather of weights that has nothing to do with it."""
    function = sdy.partition(
        lambda x, w, other: (x @ w, other),
        mesh=MESH,
        in_shardings=(P("x"), P(), P("x")),
        out_shardings=(P("x"), P()),
        costs=costs,
        layouts="local",
    )
    return function.plan(shape(8 * rows, width), shape(width, width), shape(weights))


def sent_of(found: sdy.Plan) -> tuple[float, float]:
    """The time of the gather's bytes, and what it takes beside."""
    (record,) = found.collectives
    mesh = found.program.mesh
    bytes_time = record.bytes_time(found.costs, mesh)
    return bytes_time, record.sending_time(found.costs, mesh) - bytes_time


def test_engines_send_beside_work_and_only_the_start_is_waited_for() -> None:
    found = plan(V5E, 4096, 4096, 2**22)
    sending, around = sent_of(found)
    assert found.time.hidden == pytest.approx(sending)
    assert around > 0 and found.time.total == pytest.approx(found.time.compute + around)


def test_units_that_send_are_lacking_in_work() -> None:
    """On GPUs, whose multiprocessors send."""
    units = family_of_machine("h100").compiler.collectives.units
    found = plan(H100, 8192, 8192, 2**24)
    assert 0.1 < units < 0.2 and found.time.hidden == pytest.approx((1 - units) * sent_of(found)[0])


@pytest.mark.parametrize("costs", [V5E, H100], ids=["v5e", "h100"])
def test_what_waits_for_memory_lacks_the_rate_that_sending_takes(costs: sdy.CostModel) -> None:
    """A product of few rows reads its weights at the memory's rate; three bytes per byte sent are read and written."""
    found = plan(costs, 8, 16384, 2**20)
    (record,) = found.collectives
    sending, _ = sent_of(found)
    lacking = 3 * record.wire_bytes * costs.memory / sending
    assert 0.2 < lacking < 0.8 and found.time.hidden == pytest.approx((1 - lacking) * sending, rel=1e-2)


def test_work_that_is_too_short_hides_a_part() -> None:
    found = plan(V5E, 512, 1024, 2**24)
    sending, around = sent_of(found)
    assert 0 < found.time.hidden < found.time.compute < sending
    assert found.time.communication == pytest.approx(sending + around)


TRIPS = 6


def gradients(costs: sdy.CostModel, rows: int, width: int, *, sums: bool = False) -> sdy.Plan:
    """A loop whose trips make a product each, of which devices have terms, and stack it, or also add it up."""

    def trip(total: jax.Array, layer: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        found = layer[0].T @ layer[1]
        return total + found if sums else total, found

    function = sdy.partition(
        lambda start, x, y: jax.lax.scan(trip, start, (x, y)),
        mesh=MESH,
        in_shardings=(P("x"), P(None, "x"), P(None, "x")),
        out_shardings=(P("x"), P(None, "x")),
        costs=costs,
        layouts="local",
    )
    layers = shape(TRIPS, 8 * rows, width)
    return function.plan(shape(width, width), layers, layers)


def test_gpus_send_what_a_trip_stores_during_the_next_one() -> None:
    units = family_of_machine("h100").compiler.collectives.units
    found = gradients(H100, 8192, 4096)
    (record,) = [record for record in found.collectives if record.wire_bytes]
    assert (record.kind, record.times) == ("reduce_scatter", TRIPS)
    assert found.time.hidden == pytest.approx((1 - units) * TRIPS * sent_of(found)[0])
    assert found.time.total == pytest.approx(found.time.compute + found.time.communication - found.time.hidden)


def test_a_trip_sends_no_more_than_fits_into_one() -> None:
    """Each leaves as much to the next one as it had from the one before."""
    found = gradients(H100, 1024, 4096)
    sending, around = sent_of(found)
    assert 0 < found.time.hidden < found.time.compute < TRIPS * sending
    assert found.time.communication == pytest.approx(TRIPS * (sending + around))
    slices = [each for each in found.record().timeline.slices if each.collective is not None]
    assert sum(each.duration for each in slices) == pytest.approx(found.time.communication)


@pytest.mark.parametrize(("costs", "sums"), [(V5E, False), (H100, True)], ids=["v5e", "read by the next trip"])
def test_else_a_trip_waits_for_what_it_stores(costs: sdy.CostModel, sums: bool) -> None:
    assert gradients(costs, 8192, 4096, sums=sums).time.hidden == 0


def test_what_is_sent_inside_of_a_region_may_be_needed_outside() -> None:
    """Two gradients are scattered along one axis in a region, as one, and along the region's axis outside of it."""
    mesh = AbstractMesh((2, 4), ("stage", "x"), axis_types=(AxisType.Auto,) * 2)

    def gradients(x: jax.Array, y: jax.Array, z: jax.Array) -> list[jax.Array]:
        return [jax.lax.psum(x.T @ each, "stage") for each in (y, z)]

    region = jax.shard_map(
        gradients, mesh=mesh, in_specs=P("stage"), out_specs=P(), axis_names={"stage"}, check_vma=False
    )
    function = sdy.partition(
        region,
        mesh=mesh,
        in_shardings=P(("stage", "x")),
        out_shardings=P("x", "stage"),
        costs=sdy.CostModel.of_machine("h100", mesh),
    )
    found = function.plan(*[shape(4096, 512)] * 3)
    assert [record.kind for record in found.collectives if record.members] == ["reduce_scatter"] * 2
