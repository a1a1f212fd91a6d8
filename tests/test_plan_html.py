"""The page of a plan: one file that needs nothing else, and what it does in a browser."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax.commands.cli import main
from sdy_jax.errors import SdyError
from sdy_jax.plan_html.columns import columns
from sdy_jax.plan_html.page import page
from sdy_jax.plan_record.files import plan_from_json, plan_json

MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
SPECS = {"up": P(None, "model"), "down": P("model")}
W = {"up": jnp.ones((16, 32)), "down": jnp.ones((32, 16))}
HOSTILE = "</script><script>document.title='run'</script><!--<script>&amp;"


def step(w: dict[str, jax.Array], x: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    def loss(w: dict[str, jax.Array]) -> jax.Array:
        with jax.named_scope("block"):
            y = jnp.tanh(x @ w["up"]) @ w["down"]
        y, _ = jax.lax.scan(lambda carry, _: (jnp.tanh(carry @ w["up"] @ w["down"]), None), y, length=3)
        return jnp.mean(y**2)

    value, gradient = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda a, g: a - 0.1 * g, w, gradient), value


def planned(specs: dict[str, P]) -> sdy.Plan:
    borders: Any = {"in_shardings": (specs, P("data")), "out_shardings": (specs, None)}
    return sdy.partition(step, mesh=MESH, layouts="global", **borders).plan(W, jnp.ones((8, 16)))


@pytest.fixture(scope="module")
def plan() -> sdy.Plan:
    return planned(SPECS)


@pytest.fixture(scope="module")
def before() -> sdy.Plan:
    return planned({"up": P(), "down": P("model")})


@pytest.fixture(scope="module")
def written(plan: sdy.Plan, before: sdy.Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pages."""
    folder = tmp_path_factory.mktemp("pages")
    plan.to_html(folder / "plan.html")
    plan.to_html(folder / "compared.html", against=before)
    hostile = dataclasses.replace(plan.record(), name=HOSTILE, headline=HOSTILE)
    value = dataclasses.replace(hostile.values[0], name=HOSTILE)
    dataclasses.replace(hostile, values=(value, *hostile.values[1:])).to_html(folder / "hostile.html")
    with_type(plan.record(), "w['up']", "f32[16@(model:(2)2,data),32@model:(1)2]").to_html(folder / "parts.html")
    with_type(plan.record(), "w['up']", "f32[16,32@data]{U:model}").to_html(folder / "sums.html")
    (folder / "local.mlir").write_text(LOCAL)
    assert main(["plan", str(folder / "local.mlir"), "--html", str(folder / "local.html")]) == 0
    return folder


LOCAL = """mesh.mesh @m(shape = 2x4)
func.func @main(%x: tensor<8x4xf32>) -> tensor<16x4xf32> {
  %r = mesh.all_gather %x on @m mesh_axes = [0] gather_axis = 0 : tensor<8x4xf32> -> tensor<16x4xf32>
  return %r : tensor<16x4xf32>
}
"""


def with_type(record: sdy.PlanRecord, name: str, type_: str) -> sdy.PlanRecord:
    """A record in which a value has another type."""
    tensor = dataclasses.replace(record.value_of[name].tensor, type=type_)
    values = [dataclasses.replace(v, tensor=tensor) if v.name == name else v for v in record.values]
    return dataclasses.replace(record, values=tuple(values))


# The file.


def data_of(text: str) -> Any:
    """What is written in a page."""
    found = re.search(r'<script id="plans" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_a_page_needs_nothing_but_itself(written: Path) -> None:
    text = (written / "plan.html").read_text(encoding="utf-8")
    assert not re.search(r"https?:|//[a-z]+\.|url\(|@import|\bimport\b *[({'\"]|\bfetch\(", text.split('id="plans"')[0])
    assert set(re.findall(r'(?:src|href)="([^"]*)"', text)) == {"data:,", "#tree"}
    assert "http" not in text.replace("http-equiv", "")


def test_only_its_own_script_may_run(written: Path) -> None:
    text = (written / "plan.html").read_text(encoding="utf-8")
    [script] = re.findall(r'<script type="module">(.*?)</script>', text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in text


def test_names_cannot_break_a_page(written: Path) -> None:
    text = (written / "hostile.html").read_text(encoding="utf-8")
    assert text.lower().count("</script") == 2 and "<!--" not in text
    plan = data_of(text)["plans"][0]
    assert plan["name"] == plan["headline"] == HOSTILE and HOSTILE in plan["strings"]


def test_a_page_has_the_whole_record(plan: sdy.Plan, written: Path) -> None:
    record = plan.record(steps=True)
    data = data_of((written / "plan.html").read_text(encoding="utf-8"))["plans"][0]
    assert data == json.loads(json.dumps(columns(record)))
    names, text = [data["strings"][n] for n in data["names"]], data["strings"]
    assert names[: len(record.values)] == [value.name for value in record.values]
    for number, op in enumerate(record.ops):
        assert text[data["ops"]["kind"][number]] == op.kind
        assert [names[n] for n in data["ops"]["operands"][number]] == list(op.operands)
    assert sum(row[6] * row[7] for row in data["collectives"] if row[-1] & 2) == plan.wire_bytes


def test_steps_end_at_what_propagation_proposed(plan: sdy.Plan) -> None:
    record = plan.record(steps=True)
    assert record.propagation is not None and plan.record().propagation is None
    last = {start.value: start.type for start in record.propagation.starts}
    assert last["x"] == "f32[8@data,16]"
    for spread in record.propagation.spreads:
        assert f"@{spread.axis}" in spread.type or f",{spread.axis}" in spread.type
        last[spread.value] = spread.type
    proposed = {value.name: value.proposed for value in record.values if value.proposed}
    assert {name: last[name] for name in proposed if name in last} == {n: t for n, t in proposed.items() if n in last}
    assert sum("@" in proposed[name] for name in last if name in proposed) > 20


def test_every_axis_came_from_a_value_that_had_it_before(plan: sdy.Plan) -> None:
    said = plan.record(steps=True).propagation
    assert said is not None
    holds = {(s.value, axis) for s in said.starts for axis in ("data", "model") if axis in s.type}
    for spread in said.spreads:
        assert not spread.source or (spread.source, spread.axis) in holds, spread
        holds.add((spread.value, spread.axis))


def test_steps_are_kept_in_files(plan: sdy.Plan) -> None:
    record = plan.record(steps=True)
    assert plan_from_json(plan_json(record)) == record


def test_a_page_grows_by_less_than_300_bytes_per_op() -> None:
    def size(layers: int) -> tuple[int, int]:
        def f(x: jax.Array) -> jax.Array:
            for n in range(layers):
                with jax.named_scope(f"layer_{n}"):
                    x = jnp.tanh(x) * 2 + jnp.sin(x)
            return x

        made = sdy.partition(f, mesh=MESH, in_shardings=P("data"), layouts="local").plan(jnp.ones((8, 16)))
        return len(page(made.record(steps=True))), len(made.record().ops)

    (few, some), (many, more) = size(2), size(20)
    assert (many - few) / (more - some) < 300


def test_a_plan_from_a_file_has_a_page_without_steps(plan: sdy.Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    sdy.load_plan(tmp_path / "plan.json").to_html(tmp_path / "plan.html")
    data = data_of((tmp_path / "plan.html").read_text(encoding="utf-8"))["plans"][0]
    assert data["steps"] is None and data["wire"] == plan.wire_bytes


def test_a_comparison_says_what_the_differences_of_plans_say(plan: sdy.Plan, before: sdy.Plan, written: Path) -> None:
    found, said = plan.diff(before), data_of((written / "compared.html").read_text(encoding="utf-8"))
    differences = said["differences"]
    assert [cause[1] for cause in differences["causes"]] == [cause.what for cause in found.causes]
    assert [change[3] for change in differences["collectives"]] == [change.bytes for change in found.collectives]
    for (old, new, _, _), change in zip(differences["collectives"], found.collectives, strict=True):
        for which, number, one in ((1, old, change.before), (0, new, change.after)):
            data = said["plans"][which]
            assert (number < 0) == (one is None)
            assert one is None or data["strings"][data["collectives"][number][0]] == one.kind


def test_a_page_that_cannot_be_written_is_an_error(plan: sdy.Plan, tmp_path: Path) -> None:
    with pytest.raises(SdyError, match=r"cannot be written to .*nowhere"):
        plan.to_html(tmp_path / "nowhere" / "plan.html")


def test_the_command_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = tmp_path / "m.mlir"
    module.write_text(
        """sdy.mesh @mesh = <["a"=2]>
        func.func @main(%x: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"a"}]>}) -> tensor<8xf32> {
          %0 = stablehlo.tanh %x : tensor<8xf32>
          return %0 : tensor<8xf32>
        }"""
    )
    assert main(["plan", str(module), "--html", str(tmp_path / "m.html")]) == 0
    assert "plan of" in capsys.readouterr().out.lower()
    assert data_of((tmp_path / "m.html").read_text(encoding="utf-8"))["plans"][0]["mesh"]["axes"] == [["a", 2]]


# In a browser.

ARGUMENTS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("there is no Chromium")
    with playwright.sync_playwright() as running:
        started = running.chromium.launch(executable_path=path, headless=True, args=ARGUMENTS.split())
        yield started
        started.close()


Opened = Callable[..., Any]


@pytest.fixture
def opened(browser: Any, written: Path) -> Iterator[Opened]:
    """Opens a page; at the end nothing may have been said on its console, and nothing may have been asked for."""
    said: list[str] = []
    asked: list[str] = []
    views: list[Any] = []

    def opens(name: str, **how: Any) -> Any:
        view = browser.new_page(viewport={"width": 1280, "height": 800}, **how)
        views.append(view)
        view.on("console", lambda message: said.append(message.text))
        view.on("pageerror", lambda error: said.append(str(error)))
        view.on("request", lambda request: asked.append(request.url))
        view.goto((written / name).as_uri())
        view.wait_for_selector("html[data-ready]")
        return view

    yield opens
    for view in views:
        view.close()
    assert said == [] and all(url.startswith(("file:", "data:")) for url in asked)


def find(view: Any, query: str) -> None:
    """Searches by the keyboard alone, and takes the first that is found."""
    view.keyboard.press("/")
    view.keyboard.press("ControlOrMeta+a")
    view.keyboard.type(query)
    view.keyboard.press("Enter")


def test_it_opens_with_the_plan_s_figures(opened: Opened, plan: sdy.Plan) -> None:
    view = opened("plan.html")
    assert view.title() == "step: plan"
    figures = view.locator("#headline").inner_text()
    assert f"{plan.wire_bytes / 1024:.1f} KiB" in figures and "at the peak" in figures
    assert view.locator("#mesh").inner_text().split() == ["data", "2", "model", "4"]
    assert view.locator("#tree [role=treeitem]").first.inner_text().startswith("step")
    assert view.locator("svg.graph .node").count() > 2


def test_what_is_searched_is_shown_with_its_layout_and_the_reasons(opened: Opened) -> None:
    view = opened("plan.html")
    find(view, "block tanh")
    assert view.locator("#details h2").inner_text() == "block/tanh"
    assert "f32[8@data,32@model]" in view.locator("#details .type-line").inner_text()
    why = view.locator("#details .chain").all_inner_texts()
    assert any("in_shardings of x: P('data')" in text for text in why)
    assert any("in_shardings of w['up']: P(None, 'model')" in text for text in why)
    assert view.locator("#tree [aria-selected=true]").inner_text().startswith("tanh")
    assert view.locator("svg.graph .node.selected").count() == 1


def test_devices_have_the_blocks_that_jax_gives_them(opened: Opened) -> None:
    view = opened("plan.html")
    for path, shape, spec in (("w['up']", (16, 32), SPECS["up"]), ("w['down']", (32, 16), SPECS["down"])):
        find(view, path)
        titles = device_titles(view)
        for device, slices in NamedSharding(MESH, spec).devices_indices_map(shape).items():
            text = ", ".join(":" if s.start is None else f"{s.start}:{s.stop}" for s in slices)
            assert f"device {device.id} has [{text}]" in titles


def device_titles(view: Any) -> list[str]:
    titles: list[str] = view.locator("#details .device").evaluate_all("cells => cells.map((cell) => cell.title)")
    return titles


def test_parts_of_axes_split_as_the_dialect_says(opened: Opened) -> None:
    view = opened("parts.html")
    find(view, "w['up']")
    for device, title in enumerate(device_titles(view)):
        data, model = divmod(device, 4)
        row, column = 2 * (model % 2) + data, model // 2  # model:(2)2 is the minor part, model:(1)2 the major one
        blocks = f"{4 * row}:{4 * row + 4}, {16 * column}:{16 * column + 16}"
        assert title == f"device {device} has [{blocks}]"


def test_partial_sums_are_drawn_as_such(opened: Opened) -> None:
    view = opened("sums.html")
    find(view, "w['up']")
    assert device_titles(view)[5] == "device 5 has terms of [:, 16:32]"
    assert view.locator("#details .device.partial").count() == 8
    assert "partial sums along model" in view.locator("#details .device-said").inner_text()


def test_a_program_on_local_arrays_has_a_page(opened: Opened) -> None:
    view = opened("local.html")
    assert "all_gather 1" in view.locator("#headline").inner_text()
    for key in "123456":
        view.keyboard.press(key)
    view.keyboard.press("3")
    view.locator("#collectives .space .row").click()
    assert view.locator("#details h2").inner_text() == "all_gather"


def test_the_graph_opens_and_its_boxes_are_chosen_by_clicks(opened: Opened) -> None:
    view = opened("plan.html")
    view.locator("svg.graph .node", has_text="block").first.click()
    assert view.locator("#details h2").inner_text() == "block"
    view.locator("svg.graph .node.selected").dblclick()
    assert view.locator(".crumbs [aria-current]").inner_text() == "block"
    view.locator(".crumbs button").first.click()
    assert view.locator("#details .kind").inner_text() == "program"


def test_collectives_are_listed_by_bytes_and_lead_to_what_they_move(opened: Opened, plan: sdy.Plan) -> None:
    view = opened("plan.html")
    view.click("#tab-collectives")
    rows = view.locator("#collectives .space .row")
    assert rows.count() >= 1
    kinds = {collective.kind for collective in plan.collectives}
    assert {rows.nth(n).inner_text().split()[0] for n in range(rows.count())} <= kinds
    rows.first.click()
    assert view.locator("#details .kind").inner_text() == "collective"
    assert view.locator("#details .devices").count() == 2


def test_steps_lead_from_the_annotations_to_the_program(opened: Opened, plan: sdy.Plan) -> None:
    view = opened("plan.html")
    find(view, "block tanh")
    types = view.locator("#details .part .type-line")
    view.click("#steps [aria-label='As annotated']")
    assert types.inner_text() == "f32[8,32]"
    said = plan.record(steps=True).propagation
    assert said is not None
    for spread in [s for s in said.spreads if s.value == "block/tanh"]:
        view.locator("#moment").fill(str(spread.step + 1))  # the moment after "as annotated" and all steps before
        assert view.locator("#tree .changed").count() > 0
        assert types.inner_text() == spread.type
    for _ in range(3):
        view.keyboard.press("]")
        assert view.locator("#tree .changed").count() > 0
        assert view.locator("#details .at-step").count() > 0
    view.click("#steps [aria-label='Partitioned']")
    find(view, "block tanh")
    assert types.inner_text() == plan.record().value_of["block/tanh"].tensor.type
    assert view.locator(".phase[aria-pressed=true]").inner_text() == "partitioned"


def test_the_keyboard_alone_reaches_everything(opened: Opened) -> None:
    view = opened("plan.html")
    focused = "document.activeElement.id || document.activeElement.getAttribute('class')"
    view.keyboard.press("t")
    assert view.evaluate(focused) == "tree"
    before = view.locator("#details h2").inner_text()
    for key in ("ArrowDown", "ArrowRight", "ArrowRight"):
        view.keyboard.press(key)
    assert view.locator("#details h2").inner_text() != before
    assert view.locator("#tree [role=treeitem].active").get_attribute("aria-level") == "3"
    view.keyboard.press("g")
    assert "node" in view.evaluate(focused)
    view.keyboard.press("m")
    now = view.locator(".chart").get_attribute("aria-valuenow")
    view.keyboard.press("ArrowRight")
    assert view.locator(".chart").get_attribute("aria-valuenow") != now
    assert "largest:" in view.locator(".chart").get_attribute("aria-valuetext")
    view.keyboard.press("Enter")
    assert view.locator("#details .kind").inner_text() != "program"
    for number, name in enumerate(("graph", "source", "collectives", "border", "changes", "notes"), 1):
        view.keyboard.press(str(number))
        assert view.locator(f"#tab-{name}").get_attribute("aria-selected") == "true"
        assert view.locator("#view").inner_text().strip() or name == "graph"
    view.keyboard.press("?")
    assert view.locator("#help").is_visible()
    view.keyboard.press("Escape")
    assert not view.locator("#help").is_visible()


def test_all_that_is_pressed_has_a_name(opened: Opened) -> None:
    view = opened("plan.html")
    nameless = "nodes => nodes.filter((n) => !(n.getAttribute('aria-label') || n.textContent.trim())).length"
    for key in "123456":
        view.keyboard.press(key)
        assert view.locator("button, [role=button], [role=slider], [role=tree]").evaluate_all(nameless) == 0


CONTRAST = """(names) => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const light = (name) => {
    const probe = document.body.appendChild(document.createElement('i'));
    probe.style.color = `var(--${name})`;
    canvas.fillStyle = getComputedStyle(probe).color;
    probe.remove();
    canvas.fillRect(0, 0, 1, 1);
    const parts = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map((part) => part / 255);
    const [r, g, b] = parts.map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  return names.map(([one, other]) => {
    const [low, high] = [light(one), light(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  });
}"""
TEXTS = [(text, on) for text in ("text", "quiet", "accent", "step", "more", "less") for on in ("panel", "raised")]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_stand_out_in_both_themes(opened: Opened, scheme: str) -> None:
    view = opened("plan.html", color_scheme=scheme)
    grounds = [("text", "chosen"), ("on-accent", "accent")]
    assert min(view.evaluate(CONTRAST, [*TEXTS, *grounds])) >= 4.5


def test_the_theme_is_the_system_s_until_it_is_chosen(opened: Opened) -> None:
    view = opened("plan.html", color_scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = view.evaluate(ground)
    view.click("#theme")
    light = view.evaluate(ground)
    view.click("#theme")
    assert view.evaluate(ground) == dark != light


def test_two_plans_are_compared(opened: Opened, plan: sdy.Plan, before: sdy.Plan) -> None:
    view = opened("compared.html")
    assert plan.diff(before).causes[0].what in view.locator(".causes li").first.inner_text()
    totals = view.locator(".totals").inner_text()
    assert f"{plan.wire_bytes / 1024:.1f} KiB" in totals and f"{before.wire_bytes / 1024:.1f} KiB" in totals
    assert view.locator(".pairs").nth(0).locator(".pair").count() == len(plan.diff(before).collectives)
    view.locator(".pair", has_text="w['up']").first.click()
    assert view.locator("#details h2").inner_text() == "w['up']"
    view.select_option("#which", "1")
    find(view, "w['up']")
    assert view.locator("#details .type-line").inner_text() == "f32[16,32]"


def test_hostile_names_are_only_text(opened: Opened) -> None:
    view = opened("hostile.html")
    assert view.title() == f"{HOSTILE}: plan" and view.locator("h1").inner_text() == HOSTILE
    find(view, "document.title=")
    assert view.locator("#details h2").inner_text() == HOSTILE
