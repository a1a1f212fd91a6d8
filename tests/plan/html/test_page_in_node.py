"""A page of many layers, as its scripts make it, run by node where that is installed: what is alike is one, names keep
both ends, results are results, reasons are there, and it opens soon."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest
from page_in_node import NODE, opened
from places import ROOT
from timed_plans import H100, MANY, ROWS, SPREAD, layer, many_layers, step_of_layers

from sdy_jax.plan.page.html import page
from sdy_jax.plan.record.record import PlanRecord

in_node = pytest.mark.skipif(NODE is None, reason="there is no node")


@pytest.fixture(scope="module")
def record() -> PlanRecord:
    return many_layers()


@in_node
def test_a_page_of_many_layers_opens_soon_and_draws_time_fast(record: PlanRecord) -> None:
    body = """(() => { const opening = performance.now() - begun; openTab("time"); const took = [];
      for (let n = 0; n < 31; n += 1) {
        const [from, to] = n % 2 ? [0, timeView.timing.end] : [0, timeView.timing.end / 9];
        [timeView.from, timeView.to] = [from, to];
        const start = performance.now(); timeView._draw(1400); took.push(performance.now() - start); }
      return [opening, took.sort((a, b) => a - b)[15]]; })()"""
    opening, frame = opened(record, body, "const begun = performance.now();")
    assert opening < 1000 and frame < 33  # milliseconds; 200 to 350 and 3 on two cores
    assert len(page(record)) < 2e6  # bytes; 1.1 million


@in_node
def test_layers_are_one_scope_that_opens(record: PlanRecord) -> None:
    body = """(() => { const { root, all } = app.scopes; const rows = app.scopes.visible().map((s) => s.label);
      const layers = root.children.find((s) => s.kind === "layers"); setOpen(layers, true);
      const inside = app.scopes.visible().filter((s) => s.parent === layers).map((s) => s.label);
      const sums = (scopes) => scopes.reduce((sum, s) => sum + s.sums.flops, 0);
      selectScope(layers); const boxes = graphOf(root, root.children).nodes.filter((n) => n.scope).length;
      return [rows, inside, boxes, layers.sums.flops, sums(layers.children), layers.ops.length,
        byId("details").text, all.filter((s) => s.kind === "layers").length]; })()"""
    rows, inside, boxes, flops, parts, ops, details, count = opened(record, body)
    assert f"layer_* × {MANY}" in rows and not any(re.search(r"layer_\d", row) for row in rows)
    assert inside == [f"layer_{n}" for n in range(MANY)] and boxes == len(rows) - 1 < 8
    assert flops == parts > 0 and ops > MANY and "name scopes that are alike" in details
    assert count == 2  # those of the backward pass, too


@in_node
def test_search_finds_what_is_alike_once_and_one_of_them_by_its_number(record: PlanRecord) -> None:
    once, numbered = opened(
        record, "['up', '[7] up'].map((q) => foldedFound(q).map(([e, count]) => [e.kind, e.label, count]))"
    )
    counts = {kind: count for kind, label, count in once if label.endswith("['up']")}
    assert counts == {"argument": MANY, "result": MANY}
    assert ["argument", "weights[7]['up']", 1] in numbered and ["result", "result[7]['up']", 1] in numbered


@in_node
def test_arguments_and_results_of_layers_are_one_row_each_which_opens(record: PlanRecord) -> None:
    body = """(() => { openTab("border"); const box = byId("view").children[1]; const folded = box.text;
      const rows = box.querySelectorAll("[role=row]").filter((row) => row.text.includes("×64"));
      const first = rows[0].text; const before = box.querySelectorAll("[role=row]").length; rows[0].click();
      return [rows.length, first, before, box.querySelectorAll("[role=row]").length, box.text, folded]; })()"""
    rows, first, before, after, text, folded = opened(record, body)
    assert rows == 4 and "weights[*]['" in first.replace(" ", "") and before == 1 + 4 + 1  # the head, and the batch
    text = text.replace(" ", "")
    assert after > before and "weights[0]['down']" in text and folded.count("result ") == 2


@in_node
def test_a_result_is_a_result_wherever_it_is_asked_for(record: PlanRecord) -> None:
    body = """(() => { selectName("result[3]['up']"); const result = byId("details").text;
      selectName("weights[3]['up']"); return [result, byId("details").text]; })()"""
    result, argument = opened(record, body)
    assert result.split()[0] == "result" and argument.split()[0] == "argument"


@in_node
def test_names_are_cut_in_the_middle(record: PlanRecord) -> None:
    long = "params['decoder']['layers'][3]['attention']['out']['kernel']"
    texts = f'[clipped({long!r}, 24), clipped("up", 24), clipped("dot_general", 6), clipped("layer_17", 5)]'
    cut, short, *tight = opened(record, texts)
    assert len(cut) == 24 and cut.startswith("params['dec") and cut.endswith("['kernel']") and "…" in cut
    assert short == "up" and tight == ["dot_g…", "la…17"]


@in_node
def test_of_names_that_end_alike_the_entries_before_are_shown(record: PlanRecord) -> None:
    names = [f"state['momentum']['layers'][*]['{each}_norm']['bias']" for each in ("attention", "mlp")]
    names += ["layer_*/attention/convert_element_type#*", "layer_*/mlp/sub#*", "a short name"]
    parts = opened(record, f"{names}.map((name) => abbreviated(name).children.map((part) => part.text))")
    assert ["".join(each) for each in parts] == names
    assert parts[0] == ["state['momentum']['layers']", "[*]['attention_no", "rm']['bias']"]
    assert parts[1] == ["state['momentum']['layers']", "[*]['mlp_no", "rm']['bias']"]
    assert parts[2] == ["layer_*/attention", "/convert_el", "ement_type#*"]
    assert parts[3:] == [["layer", "_*/mlp/sub#*"], ["a short name"]]


@in_node
def test_edges_of_a_graph_go_down_whatever_comes_first_in_the_program(record: PlanRecord) -> None:
    """Ops that the planner moves ahead are of a box that takes what later boxes make."""
    body = """(() => { const nodes = [0, 1, 2, 3].map(() => ({ width: 10, height: 10 }));
      const edges = [[1, 2], [2, 3], [3, 0], [0, 3]].map(([from, to]) => ({ from, to }));
      const free = edges.slice(0, 3); layOut(nodes, free); const down = nodes.map((node) => node.layer);
      const all = free.every((e) => e.points);
      layOut(nodes, edges); return [down, all, edges.filter((e) => !e.points).length]; })()"""
    down, drawn, back = opened(record, body)
    assert down == [3, 0, 1, 2] and drawn and back == 1


@in_node
def test_the_planner_s_changes_of_layers_are_one_row_which_opens() -> None:
    record = step_of_layers(SPREAD, 2 * ROWS).record()
    body = """(() => { openTab("changes"); const box = byId("view").children[1];
      const rows = () => box.querySelectorAll("[role=row]").map((row) => row.text); const before = rows();
      const folded = before.findIndex((row) => row.includes("▸")); box.querySelectorAll("[role=row]")[folded].click();
      return [before, folded, rows()]; })()"""
    before, folded, after = opened(record, body)
    assert folded > 0 and "×" in before[folded] and "*" in before[folded]
    assert "▾" in after[folded] and "▸" not in after[folded + 1] and "layer_" in after[folded + 1]
    assert "*" not in after[folded + 1].split("bf16")[0]


@in_node
def test_runs_of_layers_that_are_too_narrow_for_names_have_one(record: PlanRecord) -> None:
    body = """(() => { openTab("time"); drawn.texts = []; timeView._draw(1000); const all = drawn.texts.map(([t]) => t);
      const { boxes } = timeView.timing.rows[1]; timeView._show(boxes[3].start, boxes[6].end); drawn.texts = [];
      timeView._draw(1000); return [all, drawn.texts.map(([t]) => t)]; })()"""
    whole, near = opened(record, body)
    assert f"layer_* × {MANY}" in whole and not any(re.fullmatch(r"layer_\d+", text) for text in whole)
    assert any(re.fullmatch(r"layer_\d+", text) for text in near)
    assert not any(len(text) < 4 and text.endswith("…") for text in [*whole, *near])  # `d…` says nothing


@in_node
def test_the_reason_of_a_layout_is_on_the_page() -> None:
    plan = step_of_layers(SPREAD, 2 * ROWS)
    record = plan.record(steps=True)
    assert record.reasons and not plan.record().reasons
    body = """(() => { const changed = [...Array(app.plan.valueCount).keys()].filter((v) => app.plan.isChanged(v));
      const known = changed.filter((v) => app.plan.reasonOf(v)); selectValue(known[0]);
      return [changed.length, known.length, app.plan.names[known[0]], byId("details").text]; })()"""
    changed, known, name, text = opened(record, body)
    assert known >= 0.5 * changed > 0
    saves = {str(reason.saves) for reason in plan.why(f"timed_plans.py:{layer.__code__.co_firstlineno + 2}").instead}
    assert name and any(f"this saves {each}." in " ".join(text.split()) for each in saves) and "plan.why" not in text
    without = opened(
        plan.record(), "savings([...Array(app.plan.valueCount).keys()].find((v) => app.plan.isChanged(v)))"
    )
    assert without and without[0].startswith("All layouts together: ")


def test_a_phone_has_one_column_and_nothing_that_is_wider_than_it(record: PlanRecord) -> None:
    text = page(record)
    narrow = text[text.index("@media (max-width: 820px)") :]
    narrow = narrow[: narrow.index("@media (prefers-reduced-motion")]
    wide = [int(found) for found in re.findall(r"(?<!max-)width: (\d+)px", narrow)]
    assert 'name="viewport" content="width=device-width' in text
    assert [size for size in wide if size > 360] == [640]  # rows of tables, in a box that scrolls by itself
    for each in (
        "overflow: hidden auto",
        "main { display: flex; flex-direction: column; }",
        ".view-bar { flex-wrap: wrap; }",
        "overflow-wrap",
    ):
        assert each in narrow


@pytest.mark.parametrize("picture", sorted((ROOT / "docs" / "images").glob("time-*.svg")), ids=lambda path: path.stem)
def test_pictures_of_the_view_are_small_drawings_that_a_page_shows(picture: Path) -> None:
    drawing = ElementTree.parse(picture).getroot()
    assert drawing.tag.endswith("svg") and picture.stat().st_size < 150_000
    said = "".join(drawing.itertext())
    assert "forward" in said and "backward" in said and "peak" in said and "links: " in said
    assert f"](../images/{picture.name})" in (ROOT / "docs" / "howto" / "profile.md").read_text()


@pytest.mark.parametrize("name", ["gpt", "experts", "pipeline"])
def test_pages_before_and_now_are_small_pictures_that_a_page_shows(name: str) -> None:
    text = (ROOT / "docs" / "guide" / "plans_time.md").read_text()
    for picture in (f"page-{name}-before.png", f"page-{name}.png"):
        assert (ROOT / "docs" / "images" / picture).stat().st_size < 150_000 and f"](../images/{picture})" in text
    assert {"gpt", "experts", "pipeline"} == set(runpy.run_path(str(ROOT / "scripts" / "timelines"))["PROGRAMS"])


@in_node
def test_a_picture_is_what_the_view_draws() -> None:
    timelines = runpy.run_path(str(ROOT / "scripts" / "timelines"))
    drawing = ElementTree.fromstring(timelines["picture"](step_of_layers(H100)))
    texts = [each.text for each in drawing.iter() if each.tag.endswith("text")]
    paths = [each for each in drawing.iter() if each.tag.endswith("path")]
    assert {"compute", "forward", "backward", "update"} <= set(texts) and len(paths) > 8
    assert any(str(text).startswith("links: ") for text in texts)
    assert {"time-gpt", "time-experts", "time-pipeline"} == {f"time-{name}" for name in timelines["PROGRAMS"]}
