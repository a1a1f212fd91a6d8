"""How much of what is sent work hides: bytes, but for what both need more of than there is."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh
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
