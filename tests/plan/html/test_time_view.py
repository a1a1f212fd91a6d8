"""The time view of a page, as its scripts make it, run by node where that is installed."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
from page_in_node import NODE, shown
from timed_plans import H100, LAYERS, TIMED, offloading, ran, step_of_layers

import sdy_jax as sdy
from sdy_jax.plan.page.html import columns, page
from sdy_jax.plan.record.record import PlanRecord

in_node = pytest.mark.skipif(NODE is None, reason="there is no node")


@cache
def record_of(name: str) -> PlanRecord:
    return TIMED[name]().record()


@in_node
def test_rows_are_phases_scopes_compute_and_links() -> None:
    record = record_of("layers on TPUs")
    rows = shown(
        record, "timeView.timing.rows.map((row) => [row.name, row.boxes.map((b) => [b.label, b.start, b.end])])"
    )
    names = [name for name, _ in rows]
    assert names[0] == "phases" and "compute" in names
    assert [name for name in names if name.startswith("links")] == [
        f"links: {lane.name}" for lane in record.timeline.lanes[1:]
    ]
    phases, layers = ([label for label, *_ in boxes] for _, boxes in rows[:2])
    assert list(dict.fromkeys(phases)) == ["forward", "backward", "update"]
    assert {f"layer_{n}" for n in range(LAYERS)} <= set(layers)
    for _, boxes in rows:
        assert all(end >= start for _, start, end in boxes)
        assert all(a[2] <= b[1] * (1 + 1e-9) + 1e-15 for a, b in pairwise(boxes))
    (work,) = (boxes for name, boxes in rows if name == "compute")
    assert work[-1][2] == pytest.approx(record.time.total) and sum(e - s for _, s, e in work) == pytest.approx(
        work[-1][2]
    )


@in_node
def test_what_is_hidden_is_told_from_what_is_waited_for() -> None:
    record = record_of("layers, over a network")
    rows = shown(
        record,
        "timeView.timing.rows.filter((r) => r.name.startsWith('links') || !r.name).flatMap((r) => r.boxes)"
        ".filter((b) => b.slice).map((b) => [b.kind, b.end - b.start])",
    )
    hidden = sum(time for kind, time in rows if kind == "hidden")
    exposed = sum(time for kind, time in rows if kind == "exposed")
    assert hidden == pytest.approx(record.time.hidden) and hidden > 0
    assert exposed == pytest.approx(record.time.communication - record.time.hidden)
    drawn = shown(record, "drawn.boxes.map((box) => box[0])")
    assert {"--time-hidden", "--time-exposed", "--time-compute", "--time-forward", "--time-backward"} <= set(drawn)


@in_node
def test_a_loop_is_one_trip_with_a_multiplier() -> None:
    labels = shown(
        record_of("a loop"), "timeView.timing.rows.flatMap((r) => r.boxes).filter((b) => b.trips).map((b) => b.label)"
    )
    assert labels == [f"while × {LAYERS}"] * 2


@in_node
def test_memory_is_on_the_axis_of_time_with_the_limit() -> None:
    record = record_of("layers on TPUs")
    assert record.memory is not None
    body = "[timeView.held.points.map((p) => [p.at, p.sizes]), drawn.texts.map(([text]) => text)]"
    points, texts = shown(record, body)
    assert max(sum(sizes) for _, sizes in points) == pytest.approx(record.memory.peak)
    assert [at for at, _ in points] == sorted(at for at, _ in points)
    assert points[0][0] >= 0 and points[-1][0] <= record.time.total * (1 + 1e-9)
    assert any(text.startswith("peak ") for text in texts) and any(text.startswith("of ") for text in texts)


@in_node
@pytest.mark.parametrize("by", ["kind", "scope"])
def test_layers_of_memory_add_up_to_what_the_record_says_is_held(by: str) -> None:
    record = record_of("a loop")
    memory = record.memory
    assert memory is not None
    body = f"(({{ layers, points }}) => [layers, points.map((p) => [p.op, p.sizes])])(new Held(app.plan, '{by}'))"
    layers, points = shown(record, body)
    border = [held.kind for held in memory.border_by_kind]
    assert layers[: len(border)] == border and len(points) > 1
    for op, sizes in points:
        assert sum(sizes) == pytest.approx(memory.held_at(op))
        if by == "kind":
            own = memory.temporaries_by(lambda buffer: buffer.kind)
            assert dict(zip(layers[len(border) :], sizes[len(border) :], strict=True)) == pytest.approx(
                {kind: found[op] for kind, found in own.items()}
            )


@in_node
def test_layers_of_a_model_are_one_layer_of_memory_by_scope() -> None:
    layers = shown(record_of("layers on TPUs"), "new Held(app.plan, 'scope').layers")
    assert "layer_*/mlp" in layers and not any("layer_0" in name for name in layers)


@in_node
def test_pointing_at_memory_says_what_is_held_and_by_scope_it_is_drawn_anew() -> None:
    body = """(() => { const t = timeView; const { memory } = t._layout();
      t._move({ offsetX: t._x(t.held.most.at) + 1, offsetY: memory + 50, buttons: 0 }); const said = t.tip.text;
      const bar = t.memoryBar(); drawn.boxes = []; bar.children.find((e) => e.text === "by scope").listeners.click();
      return [said, bar.text, drawn.boxes.map((box) => box[0])]; })()"""
    said, bar, colours = shown(record_of("layers on TPUs"), body)
    assert "MiB held" in said and "activations" in said and "weights" in said and "while" in said
    assert "At the peak:" in bar and "layer_*/mlp" in bar and "--held-0" in colours


@in_node
def test_a_limit_that_is_near_is_a_line() -> None:
    plan = step_of_layers(sdy.CostModel.of_machine("tpu v5e", ("data", "model")))
    tight = step_of_layers(sdy.CostModel.of_machine("tpu v5e", ("data", "model")), memory=int(1.2 * plan.memory.peak))
    assert "limit" in shown(tight.record(), "drawn.texts.map(([text]) => text)")


@in_node
def test_figures_are_those_of_the_plan() -> None:
    record = record_of("layers, over a network")
    said, below = shown(record, "[timeView.summary(), timeView.below().text]")
    assert said.startswith("418 us: 166 us compute, ")
    roofline = record.roofline
    assert roofline is not None and roofline.bound is not None
    assert f"bound by {roofline.bound.name}" in below and "compute (MFU" in below and "Waited for longest" in below


@in_node
def test_zooming_shows_less_and_pointing_says_what_a_box_is() -> None:
    body = """(() => { const t = timeView; const { total } = t.timing; t._zoom(0.25, 0); const zoomed = [t.from, t.to];
      t._show(0, total); const { top } = t._layout().rows.find(({ row }) => row.name === "compute");
      const { start, end } = t.timing.critical[3];
      t._move({ offsetX: t._x((start + end) / 2), offsetY: top + 3, buttons: 0 });
      return [zoomed, total, t.tip.hidden, t.tip.text]; })()"""
    zoomed, total, is_hidden, text = shown(record_of("layers, over a network"), body)
    assert zoomed == [0, pytest.approx(total / 4)] and not is_hidden
    assert "of the step" in text and "timed_plans.py:" in text


@in_node
def test_a_frame_draws_as_much_as_the_view_is_wide_however_many_ops_there_are() -> None:
    body = """(() => { const row = timeView.timing.rows.at(-1); const step = timeView.timing.total / 100000;
      row.boxes = Array.from({ length: 100000 }, (_, n) => ({ ...row.boxes[0], start: n * step, end: (n + 1) * step }));
      drawn.boxes = []; timeView._draw(1000); return drawn.boxes.length; })()"""
    assert shown(record_of("layers on TPUs"), body) < 2000


@in_node
def test_what_moves_to_the_host_is_a_lane_and_the_view_goes_on_until_it_has_moved() -> None:
    record = offloading(H100).record()
    body = """(() => { const t = timeView;
      const { row, top } = t._layout().rows.find(({ row }) => row.name === "host");
      t._move({ offsetX: t._x((row.boxes[0].start + row.boxes[0].end) / 2), offsetY: top + 3, buttons: 0 });
      const moving = t.timing.rows.flatMap((each) => each.boxes).filter((box) => box.kind === "host");
      return [moving.map((box) => box.end - box.start), t.to, t.tip.text]; })()"""
    times, to, text = shown(record, body)
    assert sum(times) == pytest.approx(record.timeline.host)
    assert to == pytest.approx(max(each.end for each in record.timeline.slices)) and to > record.time.total
    assert "moves" in text and "bf16[" in text and "timed_plans.py:" in text


@in_node
def test_what_was_measured_is_a_second_row_of_each_lane() -> None:
    record = ran(record_of("layers, over a network"))
    assert record.run is not None
    body = """(() => { const t = timeView; const { rows } = t._layout();
      const { row, top } = rows.filter(({ row }) => row.name === "measured")[1];
      const { start, end } = row.boxes[0]; t._move({ offsetX: t._x((start + end) / 2), offsetY: top + 3, buttons: 0 });
      const boxes = t.timing.measured.flatMap((each) => each.boxes).map((box) => [box.kind, box.end - box.start]);
      return [t.timing.rows.map((each) => [each.name, each.lane ?? ""]), boxes, t.to, t.summary(), t.tip.text]; })()"""
    rows, boxes, to, summary, text = shown(record, body)
    named = [(name, lane) for name, lane in rows if name and lane]
    lanes = ["compute", "links: data", "links: model"]
    for lane in lanes:
        assert named.index(("measured", lane)) == named.index((lane, lane)) + 1
    assert sum(time for _, time in boxes) == pytest.approx(sum(each.duration for each in record.run.slices))
    sent = sum(each.duration for each in record.run.slices if each.collective is not None)
    assert sum(time for kind, time in boxes if kind == "measured-sent") == pytest.approx(sent)
    assert to == pytest.approx(max(each.end for each in record.run.slices))
    assert "measured on cpu" in summary and "3.0 times that" in summary
    assert "took" in text and "for" in text and "timed_plans.py:" in text


def test_a_page_in_bytes_has_no_view_of_time() -> None:
    data = columns(record_of("layers in bytes"))
    assert data["timeline"] is None and data["roofline"] is None


def test_a_page_has_the_view(tmp_path) -> None:
    text = page(record_of("a loop"))
    assert "class TimeView" in text and "--time-hidden" in text
