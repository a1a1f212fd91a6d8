"""What users demand of plans: numbers of collectives, budgets, and axes along which nothing moves unasked."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy

MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
X, W, V = jnp.ones((8, 16)), jnp.ones((16, 32)), jnp.ones((32, 16))
MLP: dict[str, Any] = {"mesh": MESH, "in_shardings": (P("data"), P(None, "model"), P("model"))}

HERE = "tests/plan/test_contracts.py"


def mlp(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w) @ v


def refused(fun: Any = mlp, **options: Any) -> str:
    """The error of a function that is called."""
    with pytest.raises(sdy.ContractError) as error:
        sdy.partition(fun, **{**MLP, **options})(X, W, V)
    assert isinstance(error.value.plan, sdy.Plan)
    return str(error.value)


# Numbers of collectives.


def test_collectives_are_counted_by_kind() -> None:
    plan = sdy.partition(mlp, **MLP).plan(X, W, V)
    plan.assert_collectives(all_reduce=1, all_gather=0)
    with pytest.raises(AssertionError) as error:
        plan.assert_collectives(all_reduce=4, all_gather=0)
    assert "all_reduce: 1 per call, expected 4" in str(error.value)
    assert "test_contracts.py:" in str(error.value) and "384 B" in str(error.value)


def test_loops_count_once_per_trip(tmp_path: Any) -> None:
    def layers(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, _: (mlp(x, w, v), None), x, None, length=3)[0]

    plan = sdy.partition(layers, layouts="local", **MLP).plan(X, W, V)
    plan.assert_collectives(all_reduce=3)
    plan.save(tmp_path / "plan.json")
    sdy.load_plan(tmp_path / "plan.json").assert_collectives(all_reduce=3)


def test_kinds_that_do_not_exist_are_errors() -> None:
    plan = sdy.partition(mlp, **MLP).plan(X, W, V)
    with pytest.raises(sdy.SdyError, match=r"no collective is called 'all_redcue'; did you mean all_reduce\?"):
        plan.assert_collectives(all_redcue=1)
    with pytest.raises(sdy.SdyError, match=r"'psum'; did you mean all_reduce\?"):
        plan.assert_collectives(psum=1)


# Budgets.


def test_a_plan_within_its_budget_runs() -> None:
    axes = {"model": ("all_reduce",), "data": ()}
    budget = sdy.Budget(wire_bytes="1KiB", memory="1MiB", forbid="all_gather", axes=axes)
    ours = sdy.partition(mlp, budget=budget, **MLP)
    np.testing.assert_allclose(ours(X, W, V), mlp(X, W, V), rtol=1e-6)


def test_too_many_bytes_are_refused_with_the_lines() -> None:
    text = refused(budget=sdy.Budget(wire_bytes=100))
    assert "384 B on the wire per device, 100 B are allowed" in text
    assert "return jnp.tanh(x @ w) @ v" not in text and 'all_reduce {"model"} of f32[8@data,16], 384 B' in text
    assert text.startswith("mlp on mesh data=2, model=4:\n")


def test_a_refusal_offers_what_saves_bytes() -> None:
    whole = {"in_shardings": (P("data"), P(), P()), "out_shardings": P()}
    text = refused(budget=sdy.Budget(wire_bytes=0), **whole)
    fix = text.partition("to fix:\n")[2]
    assert "out_shardings of" in fix and "saves 448 B on the wire (100%)" in fix, text


def test_a_budget_of_bytes_that_no_layouts_meet_says_so() -> None:
    mesh = jax.make_mesh((8,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = (P(), P(None, "model"), P("model"))
    text = refused(mesh=mesh, in_shardings=specs, out_shardings=P(), budget=sdy.Budget(wire_bytes=1))
    assert "no layouts meet that: with these shardings all send" in text


def test_too_much_memory_is_refused() -> None:
    text = refused(budget=sdy.Budget(memory="1KiB"))
    assert "of memory per device, 1.0 KiB are allowed" in text
    assert "no plan meets that: arguments and results alone take" in text
    near = sdy.partition(mlp, **MLP).plan(X, W, V).memory
    text = refused(budget=sdy.Budget(memory=(near.border + near.peak) / 2))
    assert "no plan meets that" not in text and "of temporaries the largest are" in text


def test_forbidden_kinds_and_axes_are_refused() -> None:
    assert "all_reduce is forbidden" in refused(budget=sdy.Budget(forbid=("all_reduce",)))
    text = refused(budget=sdy.Budget(axes={"model": ("all_gather",)}))
    assert "along 'model' only all_gather may send" in text and "all_reduce" in text
    sdy.partition(mlp, budget=sdy.Budget(axes={"data": ()}), **MLP).plan(X, W, V)


def test_derivatives_have_the_budget_too() -> None:
    strict = sdy.partition(mlp, budget=sdy.Budget(axes={"data": ()}), **MLP)
    with pytest.raises(sdy.ContractError, match=r"mlp \(backward\).*\n *along 'data' only nothing may send"):
        jax.grad(lambda w: strict(X, w, V).sum())(W)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"wire_bytes": "lots"},
            r"wire_bytes='lots'; expected a number of bytes .*, or a text such as '10MiB'",
        ),
        ({"memory": -1}, r"memory=-1; expected"),
        ({"forbid": ("all_gathr",)}, r"Budget: forbid: .*'all_gathr'; did you mean all_gather\?"),
        ({"axes": {"model": ("psum",)}}, r"Budget: axes\['model'\]: .*did you mean all_reduce\?"),
        ({"axes": ["model"]}, r"axes=\['model'\]; expected a dict"),
    ],
)
def test_budgets_that_make_no_sense_are_errors(given: dict[str, Any], message: str) -> None:
    with pytest.raises(sdy.SdyError, match=message):
        sdy.Budget(**given)


def test_axes_and_types_that_do_not_fit_are_errors() -> None:
    with pytest.raises(sdy.SdyError, match="Budget: axes has 'modle', the mesh of mlp has 'data', 'model'"):
        sdy.partition(mlp, budget=sdy.Budget(axes={"modle": ()}), **MLP).plan(X, W, V)
    with pytest.raises(sdy.SdyError, match=r"budget is a str; expected a sdy_jax\.Budget"):
        sdy.partition(mlp, budget="10MiB", **MLP)  # type: ignore[call-overload]


def test_budgets_are_pickled_with_their_functions() -> None:
    budget = sdy.Budget(wire_bytes="1MiB", axes={"model": ("all_reduce",)})
    assert pickle.loads(pickle.dumps(budget)) == budget


# Strict axes.


def unasked(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    with sdy.strict("model"):
        return mlp(x, w, v)


def asked(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    with sdy.strict("model"):
        return sdy.reshard(mlp(x, w, v), P("data"))


def test_in_a_strict_region_nothing_moves_unasked() -> None:
    text = refused(unasked)
    assert "strict('model'): bytes move along it unasked" in text
    assert f"write sdy.reshard(x, P('data')) around the result of dot_general at {HERE}:" in text


def test_what_the_error_says_to_write_is_allowed() -> None:
    np.testing.assert_allclose(sdy.partition(asked, **MLP)(X, W, V), mlp(X, W, V), rtol=1e-6)


def test_along_other_axes_things_move_as_they_like() -> None:
    def other(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        with sdy.strict("data"):
            return mlp(x, w, v)

    assert sdy.partition(other, **MLP).plan(X, W, V).collectives


def test_outside_of_the_region_things_move_as_they_like() -> None:
    def half(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        with sdy.strict("model"):
            y = x @ w
        return jnp.tanh(y) @ v

    sdy.partition(half, **MLP).plan(X, W, V).assert_collectives(all_reduce=1)


def test_operands_that_are_gathered_unasked_are_refused() -> None:
    def gathered(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        with sdy.strict("model"):
            return jnp.sort(x + v[0, 0] + w[0, 0], axis=1)

    specs = (P("data", "model"), P(), P())
    text = refused(gathered, in_shardings=specs, out_shardings=P("data", "model"))
    assert "around the operand of sort, f32[8, 16]" in text


def test_constraints_written_collectives_and_out_shardings_ask() -> None:
    def constrained(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.tanh(sdy.sharding_constraint(mlp(x, w, v) + 1, P("data")))

    def written(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        return sdy.all_gather(sdy.reshard(x, P("data", "model")), ((), ("model",)))

    stated = {"out_shardings": P("data")}
    for fun, options in ((constrained, {}), (written, stated), (mlp, stated)):
        plan = sdy.partition(fun, strict="model", **MLP, **options).plan(X, W, V)
        assert plan.wire_bytes > 0


def test_the_whole_function_may_be_strict() -> None:
    assert "strict('model')" in refused(strict=("data", "model"))


def test_a_strict_function_is_strict_inside_of_another_one() -> None:
    inner = sdy.partition(mlp, strict="model", **MLP)
    text = refused(lambda x, w, v: inner(x, w, v) * 2)
    assert "strict('model')" in text and f"around the result of dot_general at {HERE}:" in text
    outer = sdy.partition(asked, strict="model", **MLP)
    doubled = sdy.partition(lambda x, w, v: outer(x, w, v) * 2, **MLP)
    np.testing.assert_allclose(doubled(X, W, V), 2 * mlp(X, W, V), rtol=1e-6)


def test_a_strict_region_may_warn() -> None:
    def warned(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        with sdy.strict("model", on_move="warn"):
            return mlp(x, w, v)

    with pytest.warns(sdy.PartitionWarning, match=r"strict\('model'\): bytes move along it unasked"):
        sdy.partition(warned, **MLP).plan(X, W, V)


def test_regions_last_through_loops_and_derivatives() -> None:
    def loop(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        with sdy.strict("model"):
            return jax.lax.scan(lambda x, _: (jnp.tanh(mlp(x, w, v)), None), x, None, length=3)[0]

    assert "strict('model')" in refused(loop)
    backward = jax.grad(lambda w, x, v: asked(x, w, v).sum(), argnums=1)
    with pytest.raises(sdy.ContractError, match=r"strict\('model'\)"):
        sdy.partition(lambda x, w, v: backward(w, x, v), **MLP).plan(X, W, V)


def test_scopes_and_numbers_are_those_without_the_region() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_allclose(jax.jit(unasked)(X, W, V), mlp(X, W, V), rtol=1e-6)
    plan = sdy.partition(asked, **MLP).plan(X, W, V)
    assert {each.scope for each in plan.collectives} == {""}


def test_axes_that_do_not_exist_are_errors() -> None:
    def misspelt(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        with sdy.strict("modle"):
            return x

    with pytest.raises(sdy.ShardingError, match="the mesh has no axis 'modle'; expected one of 'data', 'model'"):
        sdy.partition(misspelt, **MLP).plan(X, W, V)
    with pytest.raises(sdy.ShardingError, match="the mesh has no axis 'modle'"):
        sdy.partition(mlp, strict="modle", **MLP).plan(X, W, V)
    with pytest.raises(sdy.SdyError, match="expected axes, and 'error' or 'warn'"), sdy.strict():
        pass
    with pytest.raises(sdy.SdyError, match="strict=3; expected the name of a mesh axis"):
        sdy.partition(mlp, strict=3, **MLP)  # type: ignore[call-overload]
