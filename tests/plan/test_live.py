"""What is told while a function is planned: a bar, lines of a logger, and the layouts that the function asks for."""

import io
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from partitioned_ops import PLANE

import sdy_jax as sdy
from sdy_jax.plan import notices

X, W = jnp.ones((8, 4)), jnp.ones((4, 16))
SPECS = P("x"), P(None, "y")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def layer(x, w):
    return jnp.tanh(x @ w)


# The bar.


def planned_in(stream, monkeypatch, fun=layer, specs=SPECS, quiet=0.0):
    monkeypatch.setattr(notices, "_QUIET", quiet)
    monkeypatch.setattr("sys.stderr", stream)
    sdy.partition(fun, mesh=PLANE, in_shardings=specs).plan(X, W)
    return stream.getvalue()


def test_a_bar_in_a_terminal_that_is_gone_in_the_end(monkeypatch):
    shown = planned_in(Terminal(), monkeypatch)
    assert "planning layer" in shown
    assert shown.endswith("\x1b[2K")  # the line is erased


def test_the_search_for_automatic_layouts_has_one_bar(monkeypatch):
    shown = planned_in(Terminal(), monkeypatch, specs=sdy.AUTO)
    assert shown.count("\x1b[?25h") == 1  # the cursor comes back once


def test_no_bar_where_planning_is_quick_or_nobody_looks(monkeypatch):
    assert "planning" not in planned_in(Terminal(), monkeypatch, quiet=60.0)
    assert planned_in(io.StringIO(), monkeypatch) == ""


def test_a_failure_erases_the_bar(monkeypatch):
    monkeypatch.setattr(notices, "_QUIET", 0.0)
    monkeypatch.setattr("sys.stderr", stream := Terminal())
    with pytest.raises(sdy.MemoryLimitError):
        sdy.partition(layer, mesh=PLANE, in_shardings=SPECS, memory="100B").plan(X, W)
    assert stream.getvalue().endswith("\x1b[2K")


# The log.


def test_each_plan_is_a_line_of_the_log(caplog):
    step = sdy.partition(layer, mesh=PLANE, in_shardings=SPECS)
    with caplog.at_level(logging.INFO, logger="sdy_jax"):
        plan = step.plan(X, W)
    (line,) = caplog.messages
    assert line.startswith("planned in ")
    assert plan.headline in line


def test_stages_are_lines_at_the_level_debug(caplog):
    with caplog.at_level(logging.DEBUG, logger="sdy_jax"):
        sdy.partition(layer, mesh=PLANE, in_shardings=SPECS).plan(X, W)
    stages = [line.rpartition(": ")[2] for line in caplog.messages[:-1]]
    assert stages == ["propagation", "layouts and collectives"]


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ((jnp.ones((16, 4)), W), "x: f32[16,4] for f32[8,4]"),
        ((X.astype(jnp.bfloat16), W), "x: bf16[8,4] for f32[8,4]"),
        (([X], W), "another structure of the arguments"),
    ],
)
def test_the_log_says_why_a_function_is_planned_again(args, why, caplog):
    step = sdy.partition(lambda x, w: layer(jnp.asarray(x).reshape(-1, 4), w), mesh=PLANE)
    step.plan(X, W)
    with caplog.at_level(logging.INFO, logger="sdy_jax"):
        step.plan(*args)
    assert caplog.messages[0].endswith(f"is planned again: {why}")


def test_static_arguments_and_settings_in_the_log(caplog):
    step = sdy.partition(lambda x, n: x * n, mesh=PLANE, static_argnums=1)
    step.plan(X, 2)
    with caplog.at_level(logging.INFO, logger="sdy_jax"):
        step.plan(X, 3)
        with jax.default_matmul_precision("float32"):
            step.plan(X, 3)
    again = [line.partition("planned again: ")[2] for line in caplog.messages if "again" in line]
    assert again == ["other static arguments", "jax_default_matmul_precision: float32 for None"]


# show_sharding.


def shown_by(fun, *args, specs=SPECS):
    """The lines, without the source lines."""
    lines = []

    def told(x, w):
        h = x @ w
        sdy.show_sharding(h, "h", show=lines.append)
        return fun(h)

    step = sdy.partition(told, mesh=PLANE, in_shardings=specs)
    return lines, step, told


def test_show_sharding_says_the_planned_layout_once():
    lines, step, told = shown_by(jnp.tanh)
    step.plan(X, W)
    line = told.__code__.co_firstlineno + 2
    (text,) = lines
    assert text.startswith("h at ")
    assert text.endswith(f"test_live.py:{line}: f32[8@x,16@y], f32[4,4] on each device")
    np.testing.assert_allclose(step(X, W), jnp.tanh(X @ W), rtol=1e-6)
    step(X, W)
    assert len(lines) == 1


def test_show_sharding_of_trees_without_names(capsys):
    def told(x):
        sdy.show_sharding({"a": x, "b": [x * 2]})
        return x

    sdy.partition(told, mesh=PLANE, in_shardings=P("x")).plan(X)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" at ")[0] for line in lines] == ["['a']", "['b'][0]"]
    assert all("f32[8@x,4], f32[4,4] on each device" in line for line in lines)


def test_show_sharding_in_loops_and_derivatives():
    lines, _, told = shown_by(lambda h: jnp.sum(jnp.tanh(h)))

    def loop(x, w):
        return jax.lax.scan(lambda c, _: (c + told(x, w), None), 0.0, None, length=3)[0]

    step = sdy.partition(jax.grad(loop), mesh=PLANE, in_shardings=SPECS)
    np.testing.assert_allclose(step(X, W), jax.grad(loop)(X, W), rtol=1e-6)
    assert any("f32[8@x,16@y], f32[4,4] on each device" in line for line in lines)


def test_show_sharding_changes_no_layout():
    _, with_it, _ = shown_by(jnp.tanh)
    without = sdy.partition(lambda x, w: jnp.tanh(x @ w), mesh=PLANE, in_shardings=SPECS)
    assert with_it.plan(X, W).fingerprint() == without.plan(X, W).fingerprint()


def test_show_sharding_outside_of_partitioned_functions():
    lines, _, told = shown_by(jnp.tanh)
    jax.jit(told)(X, W)
    told(X, W)
    assert len(lines) == 2
    assert all(line.startswith("h: f32[8,16] in ") for line in lines)
