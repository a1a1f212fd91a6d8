"""The page of a plan as a file: it needs nothing else, has all of the record, and no name breaks it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from plan_pages import HOSTILE, MESH

import sdy_jax as sdy
from sdy_jax.cli.main import main
from sdy_jax.errors import SdyError
from sdy_jax.plan.page.html import columns, page
from sdy_jax.plan.record.files import plan_from_json, plan_json


def data_of(text: str) -> Any:
    """What is written in a page."""
    found = re.search(r'<script id="plans" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_a_page_needs_nothing_but_itself(pages: Path) -> None:
    text = (pages / "plan.html").read_text(encoding="utf-8")
    assert not re.search(r"https?:|//[a-z]+\.|url\(|@import|\bimport\b *[({'\"]|\bfetch\(", text.split('id="plans"')[0])
    assert set(re.findall(r'(?:src|href)="([^"]*)"', text)) == {"data:,", "#tree"}
    assert "http" not in text.replace("http-equiv", "")


def test_only_its_own_script_may_run(pages: Path) -> None:
    text = (pages / "plan.html").read_text(encoding="utf-8")
    [script] = re.findall(r'<script type="module">(.*?)</script>', text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in text


def test_names_cannot_break_a_page(pages: Path) -> None:
    text = (pages / "hostile.html").read_text(encoding="utf-8")
    assert text.lower().count("</script") == 2 and "<!--" not in text
    plan = data_of(text)["plans"][0]
    assert plan["name"] == plan["headline"] == HOSTILE and HOSTILE in plan["strings"]


def test_a_page_has_the_whole_record(paged: sdy.Plan, pages: Path) -> None:
    record = paged.record(steps=True)
    data = data_of((pages / "plan.html").read_text(encoding="utf-8"))["plans"][0]
    assert data == json.loads(json.dumps(columns(record)))
    names, text = [data["strings"][n] for n in data["names"]], data["strings"]
    assert names[: len(record.values)] == [value.name for value in record.values]
    for number, op in enumerate(record.ops):
        assert text[data["ops"]["kind"][number]] == op.kind
        assert [names[n] for n in data["ops"]["operands"][number]] == list(op.operands)
    assert sum(row[6] * row[7] for row in data["collectives"] if row[-1] & 2) == paged.wire_bytes


def test_steps_end_at_what_propagation_proposed(paged: sdy.Plan) -> None:
    record = paged.record(steps=True)
    assert record.propagation is not None and paged.record().propagation is None
    last = {start.value: start.type for start in record.propagation.starts}
    assert last["x"] == "f32[8@data,16]"
    for spread in record.propagation.spreads:
        assert f"@{spread.axis}" in spread.type or f",{spread.axis}" in spread.type
        last[spread.value] = spread.type
    proposed = {value.name: value.proposed for value in record.values if value.proposed}
    assert {name: last[name] for name in proposed if name in last} == {n: t for n, t in proposed.items() if n in last}
    assert sum("@" in proposed[name] for name in last if name in proposed) > 20


def test_every_axis_came_from_a_value_that_had_it_before(paged: sdy.Plan) -> None:
    said = paged.record(steps=True).propagation
    assert said is not None
    holds = {(s.value, axis) for s in said.starts for axis in ("data", "model") if axis in s.type}
    for spread in said.spreads:
        assert not spread.source or (spread.source, spread.axis) in holds, spread
        holds.add((spread.value, spread.axis))


def test_what_was_stated_is_not_said_to_have_come_by_propagation() -> None:
    open_: Any = ('[{"data", ?}, {?}]', P(None, "model"))
    x = jnp.ones((8, 16))
    said = sdy.partition(lambda a, b: a + b, mesh=MESH, in_shardings=open_).plan(x, x).record(steps=True).propagation
    assert said is not None
    assert [start.type for start in said.starts] == ["f32[8@data,16]", "f32[8,16@model]"]
    assert [(s.value, s.dim, s.axis, s.type) for s in said.spreads if s.value == "a"] == [
        ("a", 1, "model", "f32[8@data,16@model]")
    ]


def test_steps_are_kept_in_files(paged: sdy.Plan) -> None:
    record = paged.record(steps=True)
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


def test_a_plan_from_a_file_has_a_page_and_steps_if_they_were_saved(paged: sdy.Plan, tmp_path: Path) -> None:
    paged.save(tmp_path / "plan.json")
    sdy.load_plan(tmp_path / "plan.json").to_html(tmp_path / "plan.html")
    data = data_of((tmp_path / "plan.html").read_text(encoding="utf-8"))["plans"][0]
    assert data["steps"] is None and data["wire"] == paged.wire_bytes
    paged.save(tmp_path / "plan.json", steps=True)
    assert sdy.load_plan(tmp_path / "plan.json") == paged.record(steps=True)


def test_a_plan_from_a_file_is_compared_with_a_plan(paged: sdy.Plan, paged_before: sdy.Plan, tmp_path: Path) -> None:
    paged.save(tmp_path / "plan.json")
    read = sdy.load_plan(tmp_path / "plan.json")
    for name, other in (("plan", paged_before), ("record", paged_before.record())):
        read.to_html(tmp_path / f"{name}.html", against=other)
    assert (tmp_path / "plan.html").read_bytes() == (tmp_path / "record.html").read_bytes()
    with pytest.raises(SdyError, match="a str was given to compare with"):
        read.to_html(tmp_path / "no.html", against="old.json")


def test_a_comparison_says_what_differs(paged: sdy.Plan, paged_before: sdy.Plan, pages: Path) -> None:
    found, said = paged.diff(paged_before), data_of((pages / "compared.html").read_text(encoding="utf-8"))
    differences = said["differences"]
    assert [cause[1] for cause in differences["causes"]] == [cause.what for cause in found.causes]
    assert [change[3] for change in differences["collectives"]] == [change.bytes for change in found.collectives]
    for (old, new, _, _), change in zip(differences["collectives"], found.collectives, strict=True):
        for which, number, one in ((1, old, change.before), (0, new, change.after)):
            data = said["plans"][which]
            assert (number < 0) == (one is None)
            assert one is None or data["strings"][data["collectives"][number][0]] == one.kind


def test_a_page_that_cannot_be_written_is_an_error(paged: sdy.Plan, tmp_path: Path) -> None:
    with pytest.raises(SdyError, match=r"cannot be written to .*nowhere"):
        paged.to_html(tmp_path / "nowhere" / "plan.html")


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
    data = data_of((tmp_path / "m.html").read_text(encoding="utf-8"))["plans"][0]
    assert data["mesh"]["axes"] == [["a", 2]] and data["transfers"] == {"": [0, 0, 0]}
    said = "chosen for the whole program, which sends as much as the propagated ones op by op"
    assert data["layouts"] == said  # it sends nothing at all
