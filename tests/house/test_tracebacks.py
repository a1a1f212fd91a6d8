"""What an error shows: the user's frames and the message, without ours; and where our mistakes are reported, all."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import traceback
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from places import ROOT

import sdy_jax as sdy
from sdy_jax.cli.main import main

X = jnp.ones((8, 8))


def wrong(x):
    return x @ jnp.ones((3, 3))


def constrained(x):
    return sdy.sharding_constraint(x, P("rows"))


def frames(raises, *args):
    """The names of the functions in the traceback, and the exception."""
    with pytest.raises(Exception) as caught:
        raises(*args)
    found = traceback.extract_tb(caught.value.__traceback__)
    assert not [frame for frame in found if "/sdy_jax/" in frame.filename or "/lowering/" in frame.filename], found
    return [frame.name for frame in found if frame.filename == __file__]


@pytest.mark.parametrize("method", ["__call__", "plan", "lower", "trace", "eval_shape"])
def test_an_error_while_tracing_shows_the_users_frames_alone(mesh, method):
    assert frames(getattr(sdy.partition(wrong, mesh=mesh), method), X) == ["frames", "wrong"]


def test_a_wrong_sharding_shows_the_call_alone(mesh):
    assert frames(sdy.partition(jnp.sin, mesh=mesh, in_shardings=P("rows")), X) == ["frames"]
    assert frames(sdy.partition(constrained, mesh=mesh), X) == ["frames", "constrained"]
    assert frames(sdy.partition(constrained, mesh=mesh).plan, X) == ["frames", "constrained"]


def test_derivatives_and_outer_functions_of_jax_show_the_users_frames(mesh):
    partitioned = sdy.partition(wrong, mesh=mesh)
    assert frames(jax.grad(lambda x: partitioned(x).sum()), X) == ["frames", "<lambda>", "wrong"]
    assert frames(jax.jit(lambda x: partitioned(x)), X) == ["frames", "<lambda>", "wrong"]


def test_a_compiled_program_that_is_called_with_others_shows_the_call_alone(mesh):
    compiled = sdy.partition(jnp.sin, mesh=mesh, in_shardings=P("data")).lower(X).compile()
    assert frames(compiled, X[0]) == ["frames"]
    assert frames(compiled, X, X) == ["frames"]


DOORS = {
    "partition": lambda: sdy.partition(3),
    "options": lambda: sdy.partition(wrong, uneven="no"),
    "decorator": lambda: sdy.partition(static_argnums=9)(wrong),
    "load": lambda: sdy.load(3),
    "loads": lambda: sdy.loads("func.func @main(%x: tensor<"),
    "load_plan": lambda: sdy.load_plan("there is no such file"),
    "of_machine": lambda: sdy.CostModel.of_machine("abacus", ["x"]),
    "budget": lambda: sdy.Budget(wire_bytes="much"),
    "passes": lambda: sdy.passes.run("func.func @main() { return }", "no-such-pass"),
    "show": lambda: sdy.show(3),
    "verify": lambda: sdy.verify(3),
    "fsdp": lambda: sdy.fsdp(3)(X),
    "rules": lambda: sdy.rules(3),
    "assert_plan": lambda: sdy.testing.assert_plan(3, "x"),
    "assert_same": lambda: sdy.testing.assert_same(3),
    "sharding_constraint": lambda: sdy.sharding_constraint(X, 3),
    "all_gather": lambda: sdy.all_gather(X, 3),
    "with_sharding_rule": lambda: sdy.with_sharding_rule(3, ""),
}


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_an_error_of_a_public_function_shows_its_call_alone(door):
    assert frames(door) == ["frames", "<lambda>"]


@pytest.mark.parametrize(
    "ask",
    [
        lambda plan: plan.why("nothing"),
        lambda plan: plan.why_not("nothing", "data"),
        lambda plan: plan.table("nothing"),
        lambda plan: plan.draw("nothing"),
        lambda plan: plan.save("/no/such/folder/x.json"),
        lambda plan: plan.to_html("/no/such/folder/x.html"),
        lambda plan: plan.to_trace("/no/such/folder/x.json"),
        lambda plan: plan.to_python("/no/such/folder/x.py"),
        lambda plan: plan.assert_collectives(all_gather=99),
    ],
)
def test_an_error_of_a_question_shows_it_alone(mesh, ask):
    assert frames(ask, sdy.partition(lambda x: x @ x, mesh=mesh).plan(X)) == ["frames", "<lambda>"]


def test_jaxs_setting_shows_all_frames(mesh):
    partitioned = sdy.partition(wrong, mesh=mesh)
    jax.config.update("jax_traceback_filtering", "off")
    try:
        with pytest.raises(TypeError) as caught:
            partitioned(X)
    finally:
        jax.config.update("jax_traceback_filtering", "auto")
    assert any("/sdy_jax/" in frame.filename for frame in traceback.extract_tb(caught.value.__traceback__))


def test_the_report_of_a_bug_has_all_frames(capsys, monkeypatch, tmp_path):
    from sdy_jax.calls import planned_function

    def broken(*_):
        raise sdy.InternalError("an axis is lost")

    monkeypatch.setattr(planned_function.PlannedFunction, "planned", broken)
    (tmp_path / "m.mlir").write_text(
        "func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> { return %x : tensor<8xf32> }"
    )
    assert main(["plan", str(tmp_path / "m.mlir")]) == 1
    kept = re.search(r"the traceback is in (\S+)", capsys.readouterr().err)[1]
    with open(kept) as report:
        assert "partitioned_function.py" in report.read()


def test_warnings_and_plans_name_the_users_line_through_a_boundary(mesh):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan = sdy.partition(lambda x: jnp.linalg.eigh(x)[0], mesh=mesh, in_shardings=P("data")).plan(X)
    assert plan.source.startswith(__file__)
    assert {warning.filename for warning in caught} == {__file__}


@pytest.mark.more("a process of its own")
def test_a_traceback_on_the_screen_is_short(tmp_path):
    (tmp_path / "user.py").write_text(
        "import jax.numpy as jnp, sdy_jax as sdy\n"
        "from jax.sharding import PartitionSpec as P\n"
        "f = sdy.partition(lambda x: x, mesh=sdy.Mesh.of(x=1), in_shardings=P('y'))\n"
        "f.plan(jnp.ones(3))\n"
    )
    where = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(ROOT)}}
    done = subprocess.run([sys.executable, "user.py"], capture_output=True, text=True, **where)
    assert done.stderr.count("  File ") == 1 and 'user.py", line 4' in done.stderr
    assert "ShardingError: in_shardings for `x`" in done.stderr
