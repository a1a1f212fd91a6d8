"""What edits of a model do to its plan where that is pinned, and where it is in the cache."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
from kept_plans import noted_searches
from plan_edits import MLP, planned

import sdy_jax as sdy
from sdy_jax.plan import digests
from sdy_jax.plan.digests import FOLDER


class Edit(NamedTuple):
    """A change of the text, of the function's options, or of the version of jax; then what a pinned plan does, runs or
    is refused, with a part of the message, and whether the cache has it."""

    text: Callable[[str], str] = lambda text: text
    options: dict[str, object] = {}  # noqa: RUF012 - never changed
    jax: str = ""
    pinned: str = "runs"
    cached: str = "found"


def replaced(old: str, new: str) -> Callable[[str], str]:
    def change(text: str) -> str:
        assert old in text
        return text.replace(old, new)

    return change


ARGUMENTS = """
def arguments():
    weights = {"up": jnp.ones((16, 32), DTYPE), "down": jnp.ones((32, 16), DTYPE)}
    return {"first": weights, "second": weights, "out": weights}, jnp.ones((ROWS, 16), DTYPE)
"""
SECOND = '    x = layer(x, params["second"], "second")\n'

EDITS = {
    # of the text alone
    "nothing": Edit(),
    "a comment": Edit(lambda text: "# a model\n\n" + text),
    "a comment between its lines": Edit(replaced("    x = layer", "    # then\n    x = layer")),
    "the name of a variable": Edit(replaced("hidden", "inner")),
    "the name of a function": Edit(replaced("layer(", "block(")),
    "the name of a scope": Edit(replaced('"first")', '"begin")')),
    "a part as a function of its own": Edit(
        lambda text: (
            replaced("hidden = jnp.tanh(hidden)", "hidden = activation(hidden)")(text)
            + "\n\ndef activation(x):\n    return jnp.tanh(x)\n"
        )
    ),
    # of the program, but of none of its layouts and collectives
    "the name of an argument": Edit(replaced("params", "weights"), cached="planned"),
    "another element-wise op": Edit(replaced("jnp.tanh", "jnp.sin"), cached="planned"),
    "a constant": Edit(replaced("x + hidden", "0.5 * x + hidden"), cached="planned"),
    # of its ops and its border
    "a layer more": Edit(
        replaced("    return x\n", '    return layer(x, params["out"], "third")\n'),
        pinned="2 dot_general",
        cached="planned",
    ),
    "a layer less": Edit(replaced(SECOND, ""), pinned="dot_general", cached="planned"),
    "another width": Edit(
        lambda text: text + ARGUMENTS.replace("32", "64").replace("DTYPE", "jnp.float32").replace("ROWS", "8"),
        pinned="argument params['first']['up']",
        cached="planned",
    ),
    "a larger batch": Edit(
        lambda text: text + ARGUMENTS.replace("DTYPE", "jnp.float32").replace("ROWS", "16"),
        pinned="argument x",
        cached="planned",
    ),
    "another element type": Edit(
        lambda text: text + ARGUMENTS.replace("DTYPE", "jnp.bfloat16").replace("ROWS", "8"),
        pinned="argument x",
        cached="planned",
    ),
    "another result": Edit(
        lambda text: replaced("    return x\n\n\nSPECS", "    return x.sum(0)\n\n\nSPECS")(text),
        pinned="result  f32[8@data,16] -> f32[16]",
        cached="planned",
    ),
    # of what is stated
    "another layout": Edit(replaced('P("data"))', 'P("model"))'), pinned="in_shardings", cached="planned"),
    "another mesh": Edit(options={"mesh": {"data": 4, "model": 2}}, pinned="a plan on the mesh", cached="planned"),
    "other costs": Edit(options={"costs": sdy.CostModel.of_machine("h100", ["data", "model"])}, cached="planned"),
    "another treatment of padding": Edit(options={"uneven": "replicate"}, pinned="uneven=", cached="planned"),
    # of what plans
    "another jax": Edit(jax="99.0", cached="planned"),
}


@pytest.fixture
def base(tmp_path):
    return planned(MLP, tmp_path)


@pytest.mark.parametrize("name", EDITS)
def test_a_pinned_plan_runs_or_says_what_differs(name, base, tmp_path):
    edit, file = EDITS[name], tmp_path / "step.plan.json"
    base.save(file)
    if edit.pinned == "runs":
        assert planned(edit.text(MLP), tmp_path, plan=file, **edit.options).fingerprint() == base.fingerprint()
        return
    with pytest.raises(sdy.PinnedPlanError) as raised:
        planned(edit.text(MLP), tmp_path, plan=file, **edit.options)
    assert edit.pinned in str(raised.value)


@pytest.mark.parametrize("name", EDITS)
def test_the_cache_has_the_plans_of_the_same_program(name, tmp_path, monkeypatch):
    edit = EDITS[name]
    monkeypatch.setenv(FOLDER, str(tmp_path / "plans"))
    base = planned(MLP, tmp_path)
    if edit.jax:
        monkeypatch.setattr(digests, "_versions", lambda: ("0.1", edit.jax, edit.jax))
    searches = noted_searches(monkeypatch)
    plan = planned(edit.text(MLP), tmp_path, **edit.options)
    assert ("planned" if searches else "found") == edit.cached
    assert searches or plan.fingerprint() == base.fingerprint()
    again = planned(edit.text(MLP), tmp_path, **edit.options)
    assert len(searches) == (edit.cached == "planned") and again.fingerprint() == plan.fingerprint()
