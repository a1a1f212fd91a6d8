"""Differences between plans: the edited line comes first; edits that change nothing are none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plan_edits import MLP, planned

import sdy_jax as sdy
from sdy_jax.plan.record.differences import PlanDiff

SECOND = '    x = layer(x, params["second"]'
CONSTRAINED = MLP.replace(SECOND, f"    x = sdy.sharding_constraint(x, P())\n{SECOND}")
TRAINED = MLP.replace(
    "def step(params, x):",
    """def sgd(w, g):
    return w - 0.1 * g


def momentum(w, g):
    return w - 0.1 * (g + 0.9 * jnp.sign(g) * jnp.abs(g))


def forward(params, x):""",
).replace(
    "SPECS =",
    """def loss(params, x):
    return jnp.mean(forward(params, x) ** 2)


def step(params, x):
    gradient = jax.grad(loss)(params, x)
    return jax.tree.map(sgd, params, gradient)


SPECS =""",
)


def difference(before: str, after: str, folder: Path, **options: Any) -> PlanDiff:
    """Between the plans of two texts, of which the first was in a file."""
    planned(before, folder).save(folder / "before.json")
    return planned(after, folder, **options).diff(sdy.load_plan(folder / "before.json"))


def line_of(text: str, part: str) -> str:
    """The line with a part of the text as the plan calls it, without folders."""
    (number,) = [n for n, line in enumerate(text.splitlines(), 1) if part in line]
    return f"model.py:{number}"


def first_line(found: PlanDiff) -> str:
    return Path(found.causes[0].line).name


def test_a_removed_constraint_is_named_by_its_line(tmp_path: Path) -> None:
    found = difference(CONSTRAINED, MLP, tmp_path, layouts="global")
    assert first_line(found) == line_of(CONSTRAINED, "sharding_constraint")
    assert found.causes[0].what == "sharding_constraint P() removed" and len(found.causes) == 1
    assert found.amounts[0].after < found.amounts[0].before
    assert sum(change.bytes for change in found.collectives) == found.amounts[0].after - found.amounts[0].before


def test_a_removed_sharding_of_an_argument_is_named(tmp_path: Path) -> None:
    after = MLP.replace('"down": P("model")', '"down": None')
    found = difference(MLP, after, tmp_path)
    paths = ", ".join(f"params['{name}']['down']" for name in ("first", "out", "second"))
    assert found.causes[0].what == f"in_shardings of {paths}: P('model') -> nothing"
    assert "plan_edits.py" in found.causes[0].line  # where `partition` was called
    assert {change.path for change in found.border} >= {"params['out']['down']"}


def test_another_mesh_is_named_first(tmp_path: Path) -> None:
    before = planned(MLP, tmp_path).record()
    found = planned(MLP, tmp_path, mesh={"data": 4, "model": 2}).diff(before)
    assert found.causes[0].what == "mesh data=2, model=4 -> data=4, model=2"
    assert len(found.causes) == 1 and found.collectives and "plan_edits.py" in found.causes[0].line


def test_an_added_layer_is_named_by_its_line(tmp_path: Path) -> None:
    after = MLP.replace("    return x\n", '    x = layer(x, params["out"], "out")\n    return x\n')
    found = difference(MLP, after, tmp_path)
    assert first_line(found) == line_of(after, '["out"]')
    assert found.causes[0].what == "added, with 2 dot_general, tanh, add"
    (added,) = [change for change in found.collectives if change.bytes]
    assert added.before is None and added.after is not None and added.after.kind == "all_reduce"
    assert added.after.place.scope == "out"


def test_an_inserted_transpose_is_named_by_its_line(tmp_path: Path) -> None:
    before = MLP.replace('params["first"], "first")\n', 'params["first"], "first")\n    x = x * 2\n')
    after = before.replace("    x = x * 2\n", "    x = x * 2\n    x = jnp.transpose(x).reshape(8, 16)\n")
    found = difference(before, after, tmp_path)
    assert first_line(found) == line_of(after, "transpose") and "transpose" in found.causes[0].what
    assert found.collectives


def test_another_optimizer_is_named_by_its_line(tmp_path: Path) -> None:
    after = TRAINED.replace("map(sgd,", "map(momentum,").replace(
        "return jax.tree.map(momentum, params, gradient)",
        "return jax.tree.map(momentum, params, gradient), jax.tree.map(jnp.abs, gradient)",
    )
    found = difference(TRAINED, after, tmp_path)
    assert first_line(found) == line_of(after, "map(momentum")
    assert found.causes[0].what.startswith("changed from `return jax.tree.map(sgd")


def test_an_optimizer_of_a_library_is_named_by_the_line_that_calls_it(tmp_path: Path) -> None:
    pytest.importorskip("optax")
    text = TRAINED.replace("import jax, jax", "import optax\nimport jax, jax").replace(
        "    return jax.tree.map(sgd, params, gradient)\n",
        "    updates, state = OPTIMIZER.update(gradient, OPTIMIZER.init(params), params)\n"
        "    return optax.apply_updates(params, updates), state\n",
    )
    before, after = (text + f"OPTIMIZER = optax.{name}(0.1)\n" for name in ("sgd", "adam"))
    found = difference(before, after, tmp_path)
    assert first_line(found) == line_of(after, "OPTIMIZER.update(")


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: f"# The model.\n\n\n{text}",
        lambda text: text.replace("hidden", "inner"),
        lambda text: text.replace("params", "weights"),
        lambda text: text.replace("def step", "def unused(x):\n    return x + 1\n\n\ndef step"),
    ],
)
def test_what_changes_nothing_is_no_difference(edit: Callable[[str], str], tmp_path: Path) -> None:
    found = difference(CONSTRAINED, edit(CONSTRAINED), tmp_path)
    assert not found and str(found) == "plan of step: no differences", str(found)


def test_the_text_has_causes_costs_and_collectives(tmp_path: Path) -> None:
    text = str(difference(MLP, CONSTRAINED, tmp_path))
    caused, costs, collectives = (text.index(title) for title in ("caused by", "costs per device", "collectives"))
    assert caused < costs < collectives
    assert "sharding_constraint P() added: x = sdy.sharding_constraint(x, P())" in text
    assert "on the wire (+" in text


def test_options_are_causes(tmp_path: Path) -> None:
    found = difference(TRAINED, TRAINED, tmp_path, layouts="propagated")
    assert found and [cause.what for cause in found.causes] == ["layouts='propagated' added"]


def test_what_is_no_plan_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(sdy.SdyError, match=r"a str was given to compare with, expected a plan; .*load_plan"):
        planned(MLP, tmp_path).diff("before.json")  # type: ignore[arg-type]
