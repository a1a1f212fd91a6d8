"""Differences between plans: the edited line comes first; edits that change nothing are none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from partitioned_ops import PLANE
from plan_edits import MLP, planned

import sdy_jax as sdy
from sdy_jax.plan.record.differences import Amount, PlanDiff, _amount

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


def test_arguments_and_collectives_of_layers_are_one_line_and_figures_are_rounded() -> None:
    def of_layers(up: P) -> sdy.Plan:
        def step(layers: Any, x: jax.Array) -> jax.Array:
            for number, w in enumerate(layers):
                with jax.named_scope(f"layer_{number}"):
                    x = jnp.tanh(x @ w["up"]) @ w["down"]
            return x

        specs = [{"up": up, "down": P()}] * 12
        f = sdy.partition(step, mesh=PLANE, in_shardings=(specs, P("x")), out_shardings=P("x"))
        layers = [{"up": jnp.ones((32, 64)), "down": jnp.ones((64, 32))}] * 12
        return f.plan(layers, jnp.ones((16, 32)))

    found = of_layers(P(None, "y")).diff(of_layers(P()))
    assert len(found.border) == 12  # as data one by one
    text = str(found)
    assert "  ~ argument layers[*]['up'] x 12  f32[32,64] -> f32[32,64@y]" in text and "layers[3]" not in text
    assert "in_shardings of layers[*]['up'] x 12: P() -> P(None, 'y')" in text
    lines = text.partition("\ncollectives\n")[2].partition("\nvalues\n")[0].splitlines()
    assert 0 < len(lines) < 12 and any(" in layer_*" in line for line in lines)


def test_shares_are_rounded_as_people_do() -> None:
    def said(before: float, after: float, unit: str = "bytes") -> str:
        return _amount(Amount("of memory", before, after, unit))

    assert said(1000, 1000) == "1000 B of memory, as before"
    assert said(1e9, 1e9 + 4) == said(1e9, 1e9 - 4) == "953.7 MiB of memory, within a percent of before"
    assert said(1024, 1536) == "1.0 KiB -> 1.5 KiB of memory (+512 B, +50%)"
    assert said(1024, 512).endswith("(-512 B, -50%)") and said(0, 8) == "0 B -> 8 B of memory (+8 B)"
    assert said(1024, 2560).endswith(", 2.5 times)") and said(1, 1234, "transfers").endswith(", 1,234 times)")
