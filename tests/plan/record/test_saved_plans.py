"""Plans in files: what is read is what was written; what is no plan is a clear error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from plan_edits import MLP, planned

import sdy_jax as sdy


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> sdy.Plan:
    return planned(MLP, tmp_path_factory.mktemp("mlp"))


@pytest.fixture(scope="module")
def text(plan: sdy.Plan, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("saved") / "step.json"
    plan.save(path)
    return path.read_text()


def loaded(text: str, folder: Path) -> sdy.PlanRecord:
    path = folder / "edited.json"
    path.write_text(text)
    return sdy.load_plan(path)


def test_what_is_loaded_is_what_was_saved(plan: sdy.Plan, text: str, tmp_path: Path) -> None:
    assert loaded(text, tmp_path) == plan.record()


def test_choices_are_in_the_file_and_equal_records_may_have_none(plan: sdy.Plan, text: str, tmp_path: Path) -> None:
    assert plan.record().choices is None and plan.record(choices=True) == plan.record()
    assert loaded(text, tmp_path).choices == plan.record(choices=True).choices is not None
    assert not loaded(text, tmp_path).is_edited and loaded(text.replace("stablehlo", "stable"), tmp_path).is_edited


def test_a_file_has_a_line_per_op(plan: sdy.Plan, text: str) -> None:
    lines = [line for line in text.splitlines() if '"kind": "stablehlo.' in line and '"place": ' in line]
    assert len(lines) == sum(op.kind.startswith("stablehlo.") for op in plan.record().ops)
    assert "/home/" not in text and json.loads(text)["format"] == 1


def test_plans_of_loops_branches_and_buckets_are_read_back(tmp_path: Path) -> None:
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    def fun(x: Any, w: Any) -> Any:
        x = jax.lax.fori_loop(0, jnp.int32(x[0, 0]), lambda _, x: jnp.tanh(x @ w), x)
        return jax.lax.cond(x.sum() > 0, lambda x: x @ w, lambda x: x, x)

    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    ours = sdy.partition(fun, mesh=mesh, in_shardings=(P("data"), P("model")), on_unknown="ignore")
    plan = ours.plan(jnp.ones((8, 16)), jnp.ones((16, 16)))
    assert any(op.parent is not None for op in plan.record().ops)
    plan.save(tmp_path / "loop.json")
    assert sdy.load_plan(tmp_path / "loop.json") == plan.record()


def edited(text: str, change: dict[str, Any]) -> str:
    return json.dumps({**json.loads(text), **change})


def damaged(text: str, part: str, value: Any) -> str:
    whole = json.loads(text)
    whole["plan"][part] = value
    return json.dumps(whole)


def made_by(text: str, op: int) -> str:
    """A plan whose first value another op makes."""
    first, *others = json.loads(text)["plan"]["values"]
    return damaged(text, "values", [{**first, "op": op}, *others])


def inside(text: str, number: int, parent: int) -> str:
    """A plan of which one op stands in another."""
    ops = json.loads(text)["plan"]["ops"]
    ops[number]["parent"] = parent
    return damaged(text, "ops", ops)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda text: edited(text, {"format": 7, "written_by": "sdy_jax 9.1"}),
            "is in format 7, written by sdy_jax 9.1, .* upgrade",
        ),
        (lambda text: edited(text, {"kind": "other"}), "is no plan of sdy_jax: .*to fix"),
        (lambda text: "[1, 2]", "is no plan of sdy_jax"),
        (lambda text: text[: len(text) // 2], "is no plan of sdy_jax: it is no JSON"),
        (lambda text: edited(text, {"plan": {}}), "is damaged: plan has no 'name'"),
        (lambda text: edited(text, {"tables": None}), "is damaged: tables is None, expected an object"),
        (lambda text: damaged(text, "wire_bytes", "many"), "is damaged: plan.wire_bytes is 'many', expected a number"),
        (lambda text: damaged(text, "line", 10**6), r"is damaged: plan.line is 1000000, of \d+ frames"),
        (lambda text: damaged(text, "ops", [3]), r"is damaged: plan.ops\[0\] is 3, expected an object"),
        (lambda text: made_by(text, 2**70), r"is damaged: plan.values\[0\].op is \d{22}, of \d+ ops"),
        (lambda text: made_by(text, -1), r"is damaged: plan.values\[0\].op is -1, of \d+ ops"),
        (lambda text: inside(text, 0, 0), r"is damaged: plan.ops\[0\].parent is 0, which is no op before it"),
    ],
)
def test_what_is_no_plan_is_a_clear_error(change: Any, message: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(sdy.SdyError, match=rf"edited\.json {message}"):
        loaded(change(text), tmp_path)


def test_files_that_cannot_be_read_or_written_are_clear_errors(plan: sdy.Plan, tmp_path: Path) -> None:
    with pytest.raises(sdy.SdyError, match=r"none\.json cannot be read: No such file"):
        sdy.load_plan(tmp_path / "none.json")
    with pytest.raises(sdy.SdyError, match="cannot be read: Is a directory"):
        sdy.load_plan(tmp_path)
    with pytest.raises(sdy.SdyError, match=r"cannot be written to .*: No such file.*to fix"):
        plan.save(tmp_path / "nowhere" / "step.json")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(sdy.SdyError, match="is no plan of sdy_jax: it is no text"):
        sdy.load_plan(tmp_path / "bytes")


def test_a_file_that_ends_anywhere_is_refused(text: str, tmp_path: Path) -> None:
    for end in range(0, len(text.rstrip()), max(1, len(text) // 50)):
        with pytest.raises(sdy.SdyError, match=r"edited\.json is no plan of sdy_jax: it is no JSON: .*; to fix"):
            loaded(text[:end], tmp_path)


def test_json_that_is_deeper_than_python_goes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(sdy.SdyError, match=r"edited\.json is no plan of sdy_jax: it is no JSON"):
        loaded("[" * 200_000, tmp_path)


def test_a_name_that_no_file_can_have_is_refused(plan: sdy.Plan) -> None:
    with pytest.raises(sdy.SdyError, match=r"cannot be read: .*null"):
        sdy.load_plan("a\0b")
    with pytest.raises(sdy.SdyError, match=r"cannot be written to .*null"):
        plan.save("a\0b")


def test_fields_that_a_newer_writer_added_are_left_out(plan: sdy.Plan, text: str, tmp_path: Path) -> None:
    assert loaded(damaged(text, "colour", "blue"), tmp_path) == plan.record()


@pytest.mark.parametrize("name", ["analyze", "mlir", "save", "to_python", "why", "why_not"])
def test_what_needs_the_program_says_so(plan: sdy.Plan, text: str, tmp_path: Path, name: str) -> None:
    record = loaded(text, tmp_path)
    assert hasattr(plan, name) and not hasattr(record, name)
    with pytest.raises(AttributeError, match=rf"no attribute '{name}': that needs the program.* Ask `f\.plan"):
        getattr(record, name)
    with pytest.raises(AttributeError, match=r"no attribute 'colour'$"):
        record.colour  # type: ignore[attr-defined]  # noqa: B018
