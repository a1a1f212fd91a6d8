"""Fix-its save what they say: each is applied to the code by hand, and the plan of that is compared."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy


def of(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@pytest.fixture(scope="module")
def line():
    return jax.make_mesh((8,), ("s",))


def saved(before, after):
    return before.wire_bytes - after.wire_bytes, before.memory.peak - after.memory.peak


def only(plan, kind, word=""):
    """The one fix-it of a kind that says a word."""
    (fix,) = [fix for fix in plan.fixes if fix.kind == kind and word in fix.text]
    return fix


def assert_saves(fix, before, after):
    sent, held = saved(before, after)
    assert (fix.wire_bytes, fix.memory) == (max(0.0, sent), max(0.0, held)) and fix.wire_bytes + fix.memory > 0
    assert fix.share == pytest.approx(sent / before.wire_bytes)


WEIGHTS = {"up": of(128, 512), "down": of(512, 128)}
SPECS = {"up": P(None, "model"), "down": P("model")}


def train_step(params, momentum, x):
    gradients = jax.grad(lambda p: jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"] - x) ** 2))(params)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum


def test_optimizer_state_that_is_replicated_beside_split_parameters(mesh):
    def planned(state):
        made = sdy.partition(
            train_step, mesh=mesh, in_shardings=(SPECS, state, P("data")), out_shardings=(SPECS, state)
        )
        return made.plan(WEIGHTS, WEIGHTS, of(64, 128))

    before, after = planned(P()), planned(sdy.like(WEIGHTS, SPECS))
    fix = before.fixes[0]
    assert fix.kind == "state" and "`momentum['down']` and 1 more" in fix.text and "sdy.like" in fix.text
    assert fix.line == before.source
    assert_saves(fix, before, after)
    assert "state" not in {fix.kind for fix in after.fixes}


def attended(x, q, k, v):
    q, k, v = (jnp.einsum("bsd,dhe->bshe", x, w) for w in (q, k, v))
    weights = jax.nn.softmax(jnp.einsum("bshe,bthe->bhst", q, k))
    return jnp.einsum("bhst,bthe->bshe", weights, v)


def attended_split(x, q, k, v):
    split = lambda x: sdy.sharding_constraint(x, P("s"))  # noqa: E731
    q, k, v = (split(jnp.einsum("bsd,dhe->bshe", x, w)) for w in (q, k, v))
    weights = jax.nn.softmax(jnp.einsum("bshe,bthe->bhst", q, k))
    return jnp.einsum("bhst,bthe->bshe", weights, v)


ATTENTION = of(8, 16, 32), of(32, 8, 4), of(32, 8, 4), of(32, 8, 4)


def attention(line, function=attended, x=None, **options):
    specs = x or P(None, "s"), P(), P(), P()
    return sdy.partition(function, mesh=line, in_shardings=specs, **options).plan(*ATTENTION)


def test_an_argument_that_moves_where_it_enters(line):
    before = attention(line)
    fix = only(before, "argument")
    assert fix.text == "in_shardings of `x`: P('s') instead of P(None, 's')"
    assert_saves(fix, before, attention(line, x=P("s")))
    assert str(before.fixes).splitlines()[0] == str(fix)  # it saves most


def test_a_result_that_moves_where_it_leaves(line):
    before = attention(line, out_shardings=P(None, "s"))
    fix = only(before, "result")
    assert fix.text == "out_shardings of `result`: P('s') instead of P(None, 's')"
    assert_saves(fix, before, attention(line, out_shardings=P("s")))


def test_layouts_of_the_whole_program_and_a_missing_constraint(line):
    before = attention(line, layouts="local")
    assert_saves(only(before, "option"), before, attention(line))
    first_line = attended.__code__.co_firstlineno + 1
    fix = next(fix for fix in before.fixes if fix.kind == "constraint" and fix.line.endswith(f":{first_line}"))
    assert "sdy.sharding_constraint(..., P('s')) around what dot_general makes" in fix.text
    assert_saves(fix, before, attention(line, attended_split, layouts="local"))


def gathered(x):
    return jnp.tanh(jax.lax.with_sharding_constraint(jnp.sin(x), P()))


def test_a_gather_for_a_constraint_behind_which_it_is_sliced_again(line):
    def planned(function):
        made = sdy.partition(function, mesh=line, in_shardings=P("s"), out_shardings=P("s"), layouts="propagated")
        return made.plan(of(64, 8))

    before = planned(gathered)
    assert {"all_gather", "all_slice"} <= {record.kind for record in before.collectives}
    fix = only(before, "constraint", "leave out the constraint P()")
    assert_saves(fix, before, planned(lambda x: jnp.tanh(jnp.sin(x))))


def by_heads(x, q, k, v):
    q, k, v = (jnp.einsum("bsd,dhe->bshe", x, w) for w in (q, k, v))
    q, k, v = (jax.lax.with_sharding_constraint(y, P(None, None, "s")) for y in (q, k, v))
    weights = jax.nn.softmax(jnp.einsum("bshe,bthe->bhst", q, k))
    return jnp.einsum("bhst,bthe->bshe", weights, v)


def test_constraints_that_cost_much(line):
    before, after = attention(line, by_heads), attention(line)
    assert before.wire_bytes > after.wire_bytes
    fix = only(before, "constraint")
    assert fix.text == "leave out the constraint P(None, None, 's') (in 3 places)"
    assert fix.line.endswith(f"test_fixes.py:{by_heads.__code__.co_firstlineno + 2}")
    assert_saves(fix, before, after)
    hints = only(before, "option")
    assert hints.text == 'partition(..., constraints="hints")'
    assert_saves(hints, before, attention(line, by_heads, constraints="hints"))


def exchanged(x):
    whole = sdy.all_gather(sdy.reshard(x, P("s")), [["s"], []])
    return sdy.reshard(jnp.tanh(whole), P("s"))


def test_a_gather_that_the_user_wrote_and_that_is_sliced_again(line):
    def planned(**options):
        return sdy.partition(exchanged, mesh=line, in_shardings=P("s"), out_shardings=P("s"), **options).plan(of(64, 8))

    before = planned()
    fix = only(before, "option")
    assert fix.text == "partition(..., optimize_collectives=True)"
    assert_saves(fix, before, planned(optimize_collectives=True))


def test_a_size_that_its_axes_do_not_divide(line):
    def planned(size):
        made = sdy.partition(
            lambda embedding, x: jax.nn.softmax(x @ embedding.T),
            mesh=line,
            in_shardings=(P("s"), P()),
            out_shardings=P(None, "s"),
            on_unknown="ignore",
        )
        return made.plan(of(size, 64), of(16, 64))

    before, after = planned(1001), planned(1008)
    fix = only(before, "size")
    assert fix.text == "a multiple of 8: 1008 instead of 1001 in `embedding`"
    assert_saves(fix, before, after)
    assert not after.fixes


def test_a_function_that_takes_no_other_size_gets_no_such_fix(line):
    fixed = sdy.partition(lambda x: x + jnp.ones((1001, 8)), mesh=line, in_shardings=P("s"), on_unknown="ignore")
    assert not fixed.plan(of(1001, 8)).fixes


def test_weights_that_are_gathered_layer_by_layer_are_left_split(mesh):
    """What saves bytes on the wire by holding more is no fix-it."""
    specs = {"up": P("data", "model"), "down": P("model", "data")}
    step = sdy.partition(train_step, mesh=mesh, in_shardings=(specs, specs, P("data")), out_shardings=(specs, specs))
    plan = step.plan(WEIGHTS, WEIGHTS, of(64, 128))
    assert plan.wire_bytes and not any("params" in fix.text for fix in plan.fixes)


def test_nothing_is_found_where_nothing_is_sent(mesh):
    plan = sdy.partition(lambda x: x * 2, mesh=mesh, in_shardings=P("data")).plan(of(8, 16))
    assert not plan.fixes and str(plan.fixes) == "no fix-its"


def test_trials_are_not_dumped(line, tmp_path, monkeypatch):
    monkeypatch.setenv("SDY_JAX_DUMP_TO", str(tmp_path))
    assert attention(line).fixes
    assert len(list(tmp_path.iterdir())) == 1


def test_programs_on_local_arrays_have_none():
    plan = sdy.shard.run_local(
        """mesh.mesh @m(shape = 2x4)
        func.func @main(%x: tensor<3xf32>) -> tensor<3xf32> {
          %0 = mesh.all_reduce %x on @m mesh_axes = [0] : tensor<3xf32> -> tensor<3xf32>
          return %0 : tensor<3xf32>
        }"""
    ).plan(jnp.ones((8, 3)))
    assert not plan.fixes
