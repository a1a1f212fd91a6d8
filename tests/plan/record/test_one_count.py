"""Each figure of a plan is defined once, in its record: headline, sections, tables, page, files, the command line and
comparisons say the same."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax.cli.main import main
from sdy_jax.ir.jax_shardings import bytes_text, flops_text, seconds_text
from sdy_jax.plan.page.html import columns
from sdy_jax.plan.record.record import PlanRecord
from sdy_jax.plan.record.transfers import Transfers, transfers_of

AXES = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
NODE = shutil.which("node")


def step(weights: list[dict[str, jax.Array]], x: jax.Array, i: jax.Array) -> tuple[Any, jax.Array]:
    """Layers whose gradients are merged, a loop that sends in each trip, branches that send more and less."""

    def loss(weights: list[dict[str, jax.Array]]) -> jax.Array:
        y = x
        for w in weights:
            y = y + jnp.tanh(y @ w["up"]) @ w["down"] * w["scale"]
        y, _ = jax.lax.scan(lambda y, _: (jnp.tanh(y @ weights[0]["up"]) @ weights[0]["down"], None), y, length=3)
        return jnp.mean(y**2)

    value, gradients = jax.value_and_grad(loss)(weights)
    little, much = lambda y: y + y.sum(), lambda y: jnp.sort(jnp.sort(y, 0), 1)
    value = value + jax.lax.switch(i, [little, much], x).mean()
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value


def planned(scale: P) -> sdy.Plan:
    """The plan of the step on H100s, with this layout of small weights."""
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    weights = [{"up": f32(64, 256), "down": f32(256, 64), "scale": f32(64)} for _ in range(4)]
    specs = [{"up": P("data", "model"), "down": P("model", "data"), "scale": scale} for _ in range(4)]
    function = sdy.partition(
        step,
        mesh=AXES,
        in_shardings=(specs, P("data"), P()),
        out_shardings=(specs, P()),
        donate_argnums=0,
        costs=sdy.CostModel.of_machine("h100", AXES),
        layouts="local",
        on_unknown="ignore",
    )
    return function.plan(weights, f32(128, 64), jax.ShapeDtypeStruct((), jnp.int32))


@pytest.fixture(scope="module")
def plan() -> sdy.Plan:
    found = planned(P())
    singles = [one for each in found.record().collectives for one in each.single]
    assert any(each.members for each in found.collectives)  # some are merged,
    assert any(not one.wire_bytes for one in singles)  # some send nothing,
    assert any(one.times > 1 for one in singles) and any(not one.counted for one in singles)  # in loops and branches
    return found


def test_a_transfer_is_one_run_of_what_sends(plan: sdy.Plan) -> None:
    sent, unmerged = 0, 0
    for each in plan.record().collectives:
        if each.counted and each.wire_bytes:
            sent += each.times
            unmerged += each.times * sum(bool(one.wire_bytes) for one in each.single)
    assert plan.record().transfers == Transfers(sent, unmerged, plan.wire_bytes)
    assert sent < unmerged
    by_kind = plan.record().transfers_by_kind.values()
    assert sum(each.count for each in by_kind) == sent and sum(each.unmerged for each in by_kind) == unmerged


def test_what_sends_nothing_is_no_collective(plan: sdy.Plan) -> None:
    silent = {one.kind for each in plan.record().collectives for one in each.single if not one.wire_bytes}
    silent -= set(plan.record().transfers_by_kind)
    assert silent
    for text in (str(plan), plan.summary(), str(plan.table("collectives"))):
        assert not any(kind in text for kind in silent)
    assert transfers_of([each for each in plan.collectives if not each.wire_bytes]) == Transfers()


def test_all_texts_say_one_count(plan: sdy.Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = plan.record()
    whole = f"{record.transfers.count} collectives ({record.transfers.unmerged} before merging)"
    plan.save(tmp_path / "plan.json")
    loaded = sdy.load_plan(tmp_path / "plan.json")
    assert main(["plan", str(tmp_path / "plan.json")]) == 0
    texts = str(plan), plan.summary(), repr(plan), str(loaded), loaded.headline, capsys.readouterr().out
    for text in (*texts, plan._repr_html_()):
        assert whole in text and f"{bytes_text(plan.wire_bytes)} on the wire" in text
    sends = next(line for line in str(plan).splitlines() if line.startswith("  sends"))
    for kind, each in record.transfers_by_kind.items():
        assert f"{bytes_text(each.bytes)} in {each.text(kind)}" in sends
        assert re.search(rf"{each.count} x {kind} +{re.escape(bytes_text(each.bytes))} ", plan.summary())
    assert loaded.transfers == record.transfers and loaded.transfers_by_kind == record.transfers_by_kind
    assert loaded.memory == record.memory and loaded.time == record.time


def test_demands_count_as_the_plan_says(plan: sdy.Plan) -> None:
    counts = {kind: each.count for kind, each in plan.record().transfers_by_kind.items()}
    plan.assert_collectives(**counts, all_slice=0)
    kind = next(kind for kind, each in plan.record().transfers_by_kind.items() if each.count != each.unmerged)
    with pytest.raises(AssertionError, match=rf"{kind}: {counts[kind]} per call \(\d+ before merging\), expected 0"):
        plan.assert_collectives(**{kind: 0})
    assert plan.totals.by_kind() == {k: (e.count, e.bytes) for k, e in plan.record().transfers_by_kind.items()}


def test_tables_sum_up_to_the_plan(plan: sdy.Plan) -> None:
    rows = [row for row in plan.table("collectives") if "smaller branch" not in row.trips]
    assert sum(row.bytes for row in rows if not row.collective.startswith(" ")) == plan.wire_bytes
    assert all(row.bytes for row in rows)
    memory = plan.memory
    assert sum(row.bytes for row in plan.table("memory")) == pytest.approx(memory.peak)
    assert memory.shared and ("results outside of donated arguments", memory.own_results) in [
        (row.value, row.bytes) for row in plan.table("memory")
    ]
    results = sum(value.tensor.bytes for value in plan.record().results)
    assert results == memory.results and f"{bytes_text(results)} of results" in str(plan)


def test_collectives_take_the_time_of_the_plan(plan: sdy.Plan) -> None:
    singles = [one for each in plan.record().collectives for one in each.single if one.counted]
    assert sum(one.total_time for one in singles) == pytest.approx(plan.time.communication)
    assert plan.record().time.total == plan.time.total and str(plan.time) in plan.headline
    assert f"{seconds_text(plan.time.total)}, estimated" in str(plan)


def test_comparisons_have_the_figures_of_both(plan: sdy.Plan) -> None:
    other = planned(P("data"))
    found = {each.name: (each.before, each.after) for each in plan.diff(other).amounts}
    assert found == {
        "on the wire": (other.wire_bytes, plan.wire_bytes),
        "of memory": (other.memory.peak, plan.memory.peak),
        "estimated": (other.time.total, plan.time.total),
        "collectives": (other.record().transfers.count, plan.record().transfers.count),
        "computed": (other.record().flops, plan.record().flops),
    }
    text = str(plan.diff(other))
    assert seconds_text(plan.time.total) in text and f"{plan.record().transfers.count} collectives" in text


# The page: its data, and what its script makes of them.


def in_page(program: str, data: Any = None) -> Any:
    """What a program makes with the page's functions and a plan's data."""
    if NODE is None:
        pytest.skip("no node")
    assets = files("sdy_jax.plan.page").joinpath("assets")
    parts = ["globalThis.document = { getElementById: () => ({ namespaceURI: '' }) };"]
    parts += [assets.joinpath(f"{name}.js").read_text() for name in ("basics", "layouts", "plans", "memory")]
    parts += [f"const data = {json.dumps(data, default=float)};", f"console.log(JSON.stringify({program}));"]
    done = subprocess.run([NODE, "--input-type=module"], input="\n".join(parts), capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return json.loads(done.stdout)


FIGURES = """(() => {
  const plan = new Plan(data);
  const sum = (name) => plan.counted.reduce((all, each) => all + each[name], 0);
  return { said: plan.transfers(), summed: plan.transfersOf(plan.counted), bytes: sum("total"), time: sum("time"),
    peak: plan.data.memory.peak, results: resultsText(plan.data.memory) };
})()"""


def test_the_page_has_the_figures_of_the_record(plan: sdy.Plan) -> None:
    record: PlanRecord = plan.record()
    assert record.memory is not None
    found = in_page(FIGURES, columns(record))
    sent = {"count": record.transfers.count, "unmerged": record.transfers.unmerged, "bytes": record.wire_bytes}
    assert found["said"] == found["summed"] == sent
    assert found["bytes"] == record.wire_bytes and found["time"] == pytest.approx(record.time.communication)
    assert found["peak"] == record.memory.peak
    held = str(plan).partition("  holds")[2].partition("\n")[0]
    results = f"{bytes_text(record.memory.results)} of results ({bytes_text(record.memory.shared)} of them in donated"
    assert results in held and found["results"] == f"results {results.replace(' of results', '')} arguments)"


AMOUNTS = (
    0.0,
    0.4,
    1.0,
    2.5,
    999.0,
    1023.5,
    1024.0,
    1280.0,
    2304.0,
    2560.0,
    3.3e5,
    1024.0**2 * 100.25,
    5e9,
    8.8e12,
    3e16,
)


def test_the_page_writes_numbers_as_texts_do() -> None:
    made = "data.map((amount) => [bytesText(amount), flopsText(amount), timeText(amount / 1e6, 'seconds')])"
    wanted = [[bytes_text(amount), flops_text(amount), seconds_text(amount / 1e6)] for amount in AMOUNTS]
    assert in_page(made, AMOUNTS) == wanted
