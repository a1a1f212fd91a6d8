"""What a manual computation does first and last: it is rounded before a gather, and summed as far as it is needed."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from partitioned_ops import CUBE, PLANE, check

import sdy_jax as sdy


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


X, UP, DOWN = drawn(16, 8), drawn(8, 16, seed=1), drawn(16, 8, seed=2)


def hidden(x: Any, up: Any) -> Any:
    """One layer of tokens that are split; every device has all of the weight."""
    return jax.shard_map(lambda x, w: jnp.tanh(x @ w), mesh=PLANE, in_specs=(P("x"), P()), out_specs=P("x"))(x, up)


def loss(up: Any, x: Any) -> Any:
    return jnp.sum(hidden(x, up) ** 2)


@pytest.mark.parametrize("split", [P("x"), P(None, "x")])
def test_the_gradient_of_a_weight_that_is_given_whole_is_scattered(split: P) -> None:
    """An optimizer has a part of it: half of the bytes of the `psum` that jax writes at the end of the region."""
    check(jax.grad(loss), (UP, X), (split, P("x")), split, layouts="global", kinds="all_gather reduce_scatter")


def test_stacked_gradients_of_layers_are_scattered_in_the_loop() -> None:
    def deep(ups: Any, x: Any) -> Any:
        layer = lambda x, w: (hidden(x, w), None)  # noqa: E731
        return jnp.sum(jax.lax.scan(layer, x, ups)[0] ** 2)

    stack, split = drawn(3, 8, 8), P(None, "x")
    plan = check(jax.grad(deep), (stack, X), (split, P("x")), split, layouts="global")
    assert {c.kind for c in plan.collectives if c.wire_bytes} == {"all_gather", "reduce_scatter"}


def megatron(x: Any, up: Any, down: Any) -> Any:
    """Two products by hand, each split along the other's dimension."""

    def local(x: Any, up: Any, down: Any) -> Any:
        return jax.lax.psum(jax.nn.relu(x @ up) @ down, "y")

    specs = P("x"), P(None, "y"), P("y")
    return jax.shard_map(local, mesh=PLANE, in_specs=specs, out_specs=P("x"))(x, up, down)


def test_the_users_own_sum_is_scattered_where_the_rest_is_split() -> None:
    """Parallel sequences, without that anyone writes `psum_scatter`."""
    check(
        lambda x, up, down: jnp.sin(megatron(x, up, down)),
        (X, UP, DOWN),
        (P("x"), P(None, "y"), P("y")),
        P("x", "y"),
        layouts="global",
        kinds="reduce_scatter",
    )


def test_it_stays_the_users_where_all_of_it_is_needed() -> None:
    specs = P("x"), P(None, "y"), P("y")
    plan = check(megatron, (X, UP, DOWN), specs, P("x"), layouts="global", kinds="all_reduce")
    assert [c.origin for c in plan.collectives if c.wire_bytes] == ["user"]


def test_a_sum_for_users_that_need_all_of_it_and_a_part_is_taken_once() -> None:
    specs = P("x"), P(None, "y"), P("y")

    def both(x: Any, up: Any, down: Any) -> Any:
        made = megatron(x, up, down)
        return jnp.sin(made), jnp.cos(made)

    plan = check(both, (X, UP, DOWN), specs, (P("x", "y"), P("x")), layouts="global")
    sent = {c.kind for c in plan.collectives if c.wire_bytes}
    assert sent in ({"all_reduce"}, {"reduce_scatter", "all_gather"})


@pytest.mark.parametrize("axes", ["x", ("x", "y"), ("y", "x"), ("x", "z")])
def test_sums_over_several_axes_of_which_a_part_is_needed(axes: Any) -> None:
    def local(x: Any, w: Any) -> tuple[Any, Any]:
        return jax.lax.psum(x.T @ x, axes), jax.lax.psum(jnp.sum(x * w), axes)

    def function(x: Any, w: Any) -> Any:
        mapped = jax.shard_map(
            local, mesh=CUBE, in_specs=(P(axes), P(None)), out_specs=(P(), P()), check_vma=axes != ("y", "x")
        )
        square, scale = mapped(x, w)
        return square * scale

    check(function, (X, drawn(8)), (P(axes), P()), P("x"), mesh=CUBE, layouts="global")


@pytest.mark.parametrize("reduced", [partial(jax.lax.pmax, axis_name="x"), partial(jax.lax.pmin, axis_name="x")])
def test_other_reductions_stay_inside(reduced: Any) -> None:
    def function(x: Any) -> Any:
        return jax.shard_map(lambda x: reduced(jnp.sin(x)), mesh=PLANE, in_specs=P("x"), out_specs=P())(x)

    plan = check(function, (X,), (P("x"),), P("x"), layouts="global", kinds="all_reduce")
    assert [c.origin for c in plan.collectives if c.wire_bytes] == ["user"]


def test_a_sum_that_devices_return_along_the_axis_that_they_summed_stays_inside() -> None:
    """Each returns all of it, as a block of its own."""

    def function(x: Any) -> Any:
        local = lambda x: jax.lax.psum(x, "x")  # noqa: E731
        return jax.shard_map(local, mesh=PLANE, in_specs=P("x"), out_specs=P("x"), check_vma=False)(x)

    plan = check(function, (drawn(4, 8),), (P("x"),), P("x"), layouts="global", kinds="all_reduce")
    assert [c.origin for c in plan.collectives if c.wire_bytes] == ["user"]


def test_integers_are_summed_outside_as_well() -> None:
    def function(x: Any) -> Any:
        local = lambda x: jax.lax.psum(jnp.sum(x, 0, keepdims=True).T, "x")  # noqa: E731
        return jax.shard_map(local, mesh=PLANE, in_specs=P("x"), out_specs=P())(x) * 2

    check(function, (np.arange(32, dtype=np.int32).reshape(4, 8),), (P("x"),), P("x"), layouts="global")


def test_another_axis_may_be_free() -> None:
    """Manual along `x` alone; `y` splits the columns, inside and outside."""

    def function(x: Any, w: Any) -> Any:
        local = lambda x, w: jax.lax.psum(x.T @ jnp.tanh(x @ w), "x")  # noqa: E731
        mapped = jax.shard_map(local, mesh=PLANE, in_specs=(P("x"), P()), out_specs=P(), axis_names={"x"})
        return jnp.sin(mapped(x, w))

    check(function, (X, UP), (P("x"), P(None, "y")), P("x", "y"), layouts="global", kinds="reduce_scatter")


def test_an_inner_region_sums_along_its_own_axes_outside() -> None:
    """Along those of the region around it the sum stays inside: there it has no axis."""

    def inner(x: Any) -> Any:
        def sums(x: Any) -> Any:
            return jax.lax.psum(x, "y"), jax.lax.psum(x, "x")

        specs = P(None, "y"), (P(), P(None, "y"))
        return jax.shard_map(sums, in_specs=specs[0], out_specs=specs[1], axis_names={"y"}, check_vma=False)(x)

    def function(x: Any) -> Any:
        options = {"mesh": PLANE, "in_specs": P("x"), "axis_names": {"x"}, "check_vma": False}
        narrow, summed = jax.shard_map(inner, out_specs=(P("x"), P()), **options)(x)
        return jnp.sin(narrow), jnp.sin(summed)

    check(function, (X,), (P("x", "y"),), (P("x"), P("x", "y")), layouts="global")


def half(x: Any) -> Any:
    return x.astype(jnp.bfloat16)


ROUNDED = {
    "once": lambda x, w: x @ half(w),
    "twice": lambda x, w: x @ half(w) + jnp.sin(half(w)).sum(0),
    "in halves": lambda x, w: x @ half(w[:, :8]).repeat(2, 1),
}


@pytest.mark.parametrize("how", ROUNDED)
def test_weights_that_a_region_rounds_are_gathered_rounded(how: str) -> None:
    """Where it does so with all of them at once."""
    local = lambda x, w: jnp.tanh(ROUNDED[how](half(x), w)).astype(jnp.float32)  # noqa: E731
    function = jax.shard_map(local, mesh=PLANE, in_specs=(P("x"), P()), out_specs=P("x"))
    plan = check(function, (X, UP), (P("x"), P("x")), P("x"), layouts="global", kinds="all_gather", rtol=1e-6)
    assert {c.dtype for c in plan.collectives if c.wire_bytes} == {"f32" if how == "in halves" else "bf16"}


def test_an_argument_that_is_taken_as_it_is_too_stays() -> None:
    local = lambda x, w: (half(x) @ half(w)).astype(jnp.float32) + w.sum()  # noqa: E731
    function = jax.shard_map(local, mesh=PLANE, in_specs=(P("x"), P()), out_specs=P("x"))
    plan = check(function, (X, UP), (P("x"), P("x")), P("x"), layouts="global", rtol=1e-6)
    assert {c.dtype for c in plan.collectives if c.wire_bytes} == {"f32"}


def test_gradients_of_weights_that_a_region_rounds_are_scattered_rounded() -> None:
    """They are summed in the narrower type, as jax says, and converted behind the sum."""

    def loss(up: Any, x: Any) -> Any:
        local = lambda x, w: jnp.tanh(half(x) @ half(w)).astype(jnp.float32)  # noqa: E731
        y = jax.shard_map(local, mesh=PLANE, in_specs=(P("x"), P()), out_specs=P("x"))(x, up)
        return jnp.sum(y**2)

    args, specs = (UP, X), (P("x"), P("x"))
    plan = check(jax.grad(loss), args, specs, P("x"), layouts="global", kinds="all_gather reduce_scatter", rtol=0.02)
    assert {c.dtype for c in plan.collectives if c.wire_bytes} == {"bf16"}
    assert plan.wire_bytes == UP.size * 2


def test_what_a_region_widens_is_gathered_as_it_is() -> None:
    local = lambda x, w: jnp.tanh(x @ w.astype(jnp.float32))  # noqa: E731
    function = jax.shard_map(local, mesh=PLANE, in_specs=(P("x"), P()), out_specs=P("x"))
    plan = check(function, (X, half(UP)), (P("x"), P("x")), P("x"), layouts="global", kinds="all_gather", rtol=1e-6)
    assert {c.dtype for c in plan.collectives if c.wire_bytes} == {"bf16"}


def test_what_is_sent_behind_a_region_runs_beside_what_is_computed_in_it() -> None:
    """A region is no border in time: that of a function without one hides as much."""
    mesh = AbstractMesh((8,), ("x",), axis_types=(AxisType.Auto,))

    def local(x: Any, up: Any, down: Any) -> Any:
        return x.T @ (x @ up), (x @ down) @ down.T

    def with_region(x: Any, up: Any, down: Any) -> Any:
        body = lambda *args: (jax.lax.psum(local(*args)[0], "x"), local(*args)[1])  # noqa: E731
        specs = P("x"), P(), P()
        return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=(P(), P("x")), check_vma=False)(x, up, down)

    costs = sdy.CostModel.of_machine("h100", mesh, {"x": 50e9})
    shapes = [jax.ShapeDtypeStruct(s, "bfloat16") for s in ((65536, 4096), (4096, 4096), (4096, 32768))]
    options = {"mesh": mesh, "in_shardings": (P("x"), P(), P()), "out_shardings": (P("x"), P("x")), "costs": costs}
    region, plain = (sdy.partition(f, **options).plan(*shapes) for f in (with_region, local))
    assert region.wire_bytes == plain.wire_bytes
    assert plain.time.hidden > 0.5 * plain.time.communication
    assert region.time.hidden == pytest.approx(plain.time.hidden, rel=0.01)
