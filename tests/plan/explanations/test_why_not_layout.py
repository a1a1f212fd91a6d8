"""`plan.why_not(value, P(...))`: the obstacle, the annotation to add, and what it costs; values by further names."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy

X, W = jax.ShapeDtypeStruct((8, 16), jnp.float32), jax.ShapeDtypeStruct((16, 32), jnp.float32)


def layer(x, w):
    hidden = checkpoint_name(jax.nn.gelu(x @ w), "hidden")
    return hidden @ w.T, x


def layer_constrained(x, w):
    hidden = sdy.sharding_constraint(jax.nn.gelu(x @ w), P(("data", "model")))
    return hidden @ w.T, x


def planned(mesh, x=P("data"), w=P(None, "model"), out=None, function=layer):
    return sdy.partition(function, mesh=mesh, in_shardings=(x, w), out_shardings=out).plan(X, W)


@pytest.fixture(scope="module")
def plan(mesh):
    return planned(mesh)


def differences(before, after):
    return after.wire_bytes - before.wire_bytes, after.memory.peak - before.memory.peak


@pytest.mark.parametrize(("value", "spec"), [("x", P("model")), ("x", P("data", "model")), ("w", P())])
def test_an_argument_as_its_annotation_would_have_it(mesh, plan, value, spec):
    answer, after = plan.why_not(value, spec), planned(mesh, **{value: spec})
    assert (answer.wire_bytes, answer.memory) == differences(plan, after)
    assert f"in_shardings of `{value}`: P(" in answer.annotation and "test_why_not_layout.py:" in answer.annotation


def test_a_result_by_either_name(mesh, plan):
    after = planned(mesh, out=(P("data", "model"), None))
    for name in ("result[0]", "out[0]"):
        answer = plan.why_not(name, P("data", "model"))
        assert (answer.wire_bytes, answer.memory) == differences(plan, after)
        assert "out_shardings of `result[0]`: P('data', 'model')" in str(answer)
    assert str(plan.why("out[0]")) == str(plan.why("result[0]"))


def test_a_value_inside_by_its_checkpoint_name(mesh, plan):
    (named,) = plan.why("hidden").types
    assert named[1] == "f32[8@data,32@model]" and ", mul at " in named[0]  # the last op of gelu
    answer = plan.why_not("hidden", P(("data", "model")))
    line = layer.__code__.co_firstlineno + 1
    assert (
        f"sharding_constraint(..., P(('data', 'model'))) at tests/plan/explanations/test_why_not_layout.py:{line}"
        in str(answer)
    )
    assert (answer.wire_bytes, answer.memory) == differences(plan, planned(mesh, function=layer_constrained))


def test_an_argument_called_out_is_itself(mesh):
    plan = sdy.partition(lambda out: jnp.sin(out), mesh=mesh, in_shardings=P("data")).plan(X)
    assert plan.why("out").types == (("out", "f32[8@data,16]"),)


def test_what_stands_in_the_way_is_said_first(plan):
    answer = plan.why_not("x", P("data", "model"))
    assert [obstacle.reason for obstacle in answer] == ["NO_SOURCE"]
    assert str(answer).startswith("x  f32[8@data,16], as P('data', 'model')\n  no value whose dimensions")
    assert [obstacle.reason for obstacle in plan.why_not("w", P())] == ["SPLIT"]


def test_where_nobody_says_it_the_annotation_is_named(plan):
    (obstacle,) = plan.why_not("x", "model")
    assert obstacle.reason == "NO_SOURCE" and "to split it, state P('data', 'model'): asked for that" in obstacle.text


def test_a_layout_that_it_has(plan):
    answer = plan.why_not("x", P("data"))
    assert [obstacle.reason for obstacle in answer] == ["PRESENT"] and not answer.annotation


def test_a_layout_that_no_array_has(mesh, plan):
    narrow = sdy.partition(lambda x: x + 1, mesh=mesh).plan(jax.ShapeDtypeStruct((7,), jnp.float32))
    with pytest.raises(
        sdy.ShardingError, match=r"dim 0 of x, f32\[7\], cannot be split over 'data': 2 does not divide 7"
    ):
        narrow.why_not("x", P("data"))
    with pytest.raises(sdy.ShardingError, match="modl"):
        plan.why_not("x", P("modl"))
    with pytest.raises(sdy.SdyError, match="did you mean hidden"):
        plan.why_not("hiden", P("data"))
