"""`plan.why(collective)`: what it moves, for which op, and how that came to its layout."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax.plan.explanations.why import _shape


def of(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def layer(x, w):
    return jnp.tanh(x @ w) @ w.T


@pytest.fixture(scope="module")
def plan(mesh):
    return sdy.partition(layer, mesh=mesh, in_shardings=(P("data"), P(None, "model"))).plan(of(8, 16), of(16, 32))


LINE = f"test_why_collective.py:{layer.__code__.co_firstlineno + 1}"


def test_the_sum_of_a_product(plan):
    (record,) = plan.collectives
    answer = plan.why(record)
    (reason,) = answer.reasons
    assert reason.splitlines()[0] == 'all_reduce {"model"}, 384 B per device'
    assert f"for stablehlo.dot_general at tests/plan/explanations/{LINE}" in reason
    assert "brings layer/dot_general#2 from f32[8@data,16]{U:model} to f32[8@data,16]" in reason
    assert "devices along 'model' hold terms of a sum, which is taken" in reason
    assert [(chain.axis, chain.dim) for chain in answer.chains] == [("data", 0)]
    assert "in_shardings of x: P('data')" in str(answer)


def test_a_collective_by_its_name_in_the_page_and_by_that_of_its_result(plan):
    said = str(plan.why(plan.collectives[0]))
    result = plan.record().collectives[0].result
    for name in (
        f"all_reduce at {LINE}",
        f"all_reduce tests/plan/explanations/{LINE}",
        result,
        plan.record().collectives[0],
    ):
        assert str(plan.why(name)) == said, name
    (row,) = [line for line in str(plan).splitlines() if line.startswith("  all_reduce")]
    assert str(plan.why(re.match(r"  (all_reduce .*?:\d+)", row)[1])) == said


def test_of_values_that_a_library_makes_on_one_line_it_is_about_the_one_that_moves(mesh):
    optimizer, specs = optax.adam(0.1), P("model")

    def step(w, moments):
        updates, moments = optimizer.update(jnp.tanh(w), moments, w)
        return w + updates, moments

    w = jnp.ones((8, 16))
    borders = {"in_shardings": (specs, P()), "out_shardings": (specs, P())}
    plan = sdy.partition(step, mesh=mesh, **borders).plan(w, optimizer.init(w))
    gathers = [each for each in plan.record().collectives if each.kind == "all_gather"]
    assert len(gathers) == 2
    for gather in gathers:
        made = plan.record().ops[plan.record().value_of[gather.value].op]
        assert f"{made.place.primitive} at {made.place.lines}" in plan.why(gather).types[0][0]


def attended(x, q, k, v):
    q, k, v = (jnp.einsum("bsd,dhe->bshe", x, w) for w in (q, k, v))
    weights = jax.nn.softmax(jnp.einsum("bshe,bthe->bhst", q, k))
    return jnp.einsum("bhst,bthe->bshe", weights, v)


def test_the_move_of_an_argument_is_explained_by_its_annotation_and_by_what_the_layout_saves():
    line = jax.make_mesh((8,), ("s",))
    made = sdy.partition(attended, mesh=line, in_shardings=(P(None, "s"), P(), P(), P()))
    plan = made.plan(of(8, 16, 32), *[of(32, 8, 4)] * 3)
    answer = plan.why("all_to_all(x)")
    (reason,) = answer.reasons
    assert "dim 0 is split along 's'\n    dim 1 is no longer split along 's'" in reason
    assert "in_shardings of x: P(None, 's')" in str(answer)
    assert "saves 19.2 KiB in 5 places" in str(answer) and answer.instead == plan.why("x").instead


def test_members_of_buckets(mesh):
    line = jax.make_mesh((8,), ("x",))
    f = sdy.partition(lambda a, b: (a + 1, b + 1), mesh=line, in_shardings=P("x"), out_shardings=P(), combine="1MiB")
    plan = f.plan(of(16, 8), of(8, 24))
    (bucket,) = plan.collectives
    for member in bucket.members:
        assert "dim 0 is no longer split along 'x'" in plan.why(member).reasons[0]


def test_what_the_user_wrote_says_so(mesh):
    def body(x):
        return jax.lax.psum(x, "model")

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    plan = sdy.partition(mapped, mesh=mesh, in_shardings=P("data")).plan(of(8, 16))
    assert "the program holds it itself" in str(plan.why(plan.collectives[0]))


def test_an_unknown_one_lists_those_that_there_are(plan):
    named = rf"'all_gather at m.py:3'; of this plan are all_reduce at tests/plan/explanations/{LINE}"
    with pytest.raises(sdy.SdyError, match=named):
        plan.why("all_gather at m.py:3")


@pytest.mark.parametrize("text", ["f32[8@data,4]", "f32[8@(x,y),4@z:(1)2]{U:m}", "f32[8@(x:(1)2,y),4] on @m"])
def test_shapes_of_types(text):
    assert _shape(text) == (8, 4)
