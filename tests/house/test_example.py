"""The example says what it is about to do, before it takes its time."""

import re

import jax.numpy as jnp
import train_lm
from places import ROOT

PHASES = [
    "making the initial weights",
    "planning",
    "plan of train_step",
    "compiling",
    "step    1",
    "timing",
    "step time",
]


class Step:
    """A step that costs nothing."""

    def plan(self, state, window):
        return self

    def summary(self):
        return "plan of train_step"

    def __call__(self, state, window):
        return state, jnp.float32(1)


def test_every_phase_is_announced(capsys, monkeypatch):
    monkeypatch.setattr(train_lm.Job, "partitioned", lambda job: Step())
    monkeypatch.setattr(train_lm.Job, "jitted", lambda job: Step())
    monkeypatch.setattr(train_lm.Job, "initial_state", lambda job: jnp.ones(3))
    train_lm.run(train_lm.Job(train_lm.Config(layers=1), train_lm.parse_mesh("data=2,model=4"), False, 0), 1)
    said = capsys.readouterr().out
    found = [re.search(phase, said) for phase in PHASES]
    assert all(found), said
    assert sorted(found, key=lambda match: match.start()) == found


def test_the_scripts_say_that_they_install_and_import():
    scripts = ROOT / "scripts"
    for script, slow in (("run", "exec .venv"), ("environment.sh", "-m pip install")):
        before, _, _ = (scripts / script).read_text().partition(slow)
        assert re.search(r"echo .*>&2\s+(\.venv/bin/python )?$", before), script
