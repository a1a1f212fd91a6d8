"""Dimensions that a reshape merges stay split along a minor one, where no one can see in which order they are."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from partitioned_ops import CUBE, LINE, PLANE, check

BATCH, PAGES, TOKENS, HEADS, WIDTH = 4, 3, 8, 2, 4


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def attention(q: Any, k: Any, v: Any, table: Any, lengths: Any) -> Any:
    """Of one query to a row's tokens, which lie in pages."""
    k, v = (x[table].reshape(BATCH, PAGES * TOKENS, HEADS, WIDTH) for x in (k, v))
    scores = jnp.einsum("bhe,bthe->bht", q, k)
    seen = jnp.arange(PAGES * TOKENS) < lengths[:, None]
    return jnp.einsum("bht,bthe->bhe", jax.nn.softmax(jnp.where(seen[:, None], scores, -1e9), -1), v)


def test_tokens_of_pages_that_are_split_stay_where_they_are() -> None:
    """Only what softmax and products sum up is sent; a mask by position is put in the same order."""
    pool = drawn(64, TOKENS, HEADS, WIDTH, seed=1)
    table = np.random.default_rng(2).permutation(64)[: BATCH * PAGES].reshape(BATCH, PAGES)
    args = drawn(BATCH, HEADS, WIDTH), pool, drawn(*pool.shape, seed=3), table, np.array([5, 24, 17, 9])
    shardings = P(), P(None, "x"), P(None, "x"), P(), P()
    check(attention, args, shardings, P(), mesh=LINE, layouts="global", kinds="all_reduce all_reduce all_reduce")


def mlp(x: Any, up: Any, down: Any) -> Any:
    """Of tokens in one dimension, as many models write it."""
    flat = x.reshape(-1, x.shape[-1])
    return (flat + jax.nn.gelu(flat @ up) @ down).reshape(x.shape)


ACTIVATIONS, UP, DOWN = drawn(4, 16, 8), drawn(8, 16, seed=1), drawn(16, 8, seed=2)


@pytest.mark.parametrize("split", [P("x", "y"), P(None, ("x", "y")), P(None, "y"), P("x", "y", None)])
def test_tokens_of_split_sequences_are_flattened_and_back_for_nothing(split: P) -> None:
    """The batch, the sequence, or both are split."""
    check(mlp, (ACTIVATIONS, UP, DOWN), (split, P(), P()), split, layouts="global", kinds="")


def test_gradients_are_sums_over_both_dimensions() -> None:
    def loss(up: Any, down: Any, x: Any) -> Any:
        return jnp.mean(mlp(x, up, down) ** 2)

    args, shardings = (UP, DOWN, ACTIVATIONS), (P(), P(), P("x", "y"))
    check(jax.grad(loss, (0, 1)), args, shardings, P(), layouts="global", wire_bytes=2 * (UP.nbytes + DOWN.nbytes))


def test_losses_and_layers_of_flattened_tokens_send_sums_alone() -> None:
    """What a scan stacks for the backward pass is in the same order, and so is what is looked up and scattered."""

    def loss(weights: Any, x: Any, labels: Any) -> Any:
        x = jax.lax.scan(lambda h, w: (mlp(h, w, w.T), None), x, weights)[0]
        scores = jax.nn.log_softmax(x.reshape(-1, 8) @ weights[0])
        return -jnp.mean(jnp.take_along_axis(scores, labels.reshape(-1, 1), 1))

    weights, labels = drawn(3, 8, 16), np.random.default_rng(4).integers(0, 16, (4, 16))
    args, shardings = (weights, ACTIVATIONS, labels), (P(), P("x", "y"), P("x", "y"))
    sums = "all_reduce all_reduce all_reduce"
    check(jax.value_and_grad(loss), args, shardings, P(), layouts="global", kinds=sums)


def layers_of_tokens(x: Any, weights: Any) -> Any:
    """A loop carries the tokens in one dimension."""
    flat = x.reshape(-1, x.shape[-1])
    return jax.lax.scan(lambda h, w: (h + jax.nn.gelu(h @ w) @ w.T, None), flat, weights)[0].reshape(x.shape)


def steps_of_a_vector(x: Any, w: Any) -> Any:
    """A solver's loop carries its state as a vector, and asks for what it is of."""

    def step(v: Any, _: Any) -> Any:
        return v + 0.1 * jnp.tanh(v.reshape(x.shape) @ w).ravel(), None

    return jax.lax.scan(step, x.ravel(), None, length=20)[0].reshape(x.shape)


def test_what_loops_carry_is_in_the_order_of_devices_where_that_is_better() -> None:
    args, split = (ACTIVATIONS, drawn(3, 8, 16)), P("x", "y")
    plan = check(layers_of_tokens, args, (split, P()), split, layouts="global", kinds="")
    assert "stablehlo.transpose" in plan.mlir("ordered")


@pytest.mark.parametrize("split", [P("x", "y"), P(None, "y"), P(None, ("x", "y"))])
def test_what_loops_carry_is_laid_out_anew_before_them_where_that_is_better(split: P) -> None:
    """Trip by trip the sums of products would be sent, or what they are of."""
    x, w = drawn(256, 64), drawn(64, 64) / 8
    plan = check(steps_of_a_vector, (x, w), (split, P("y", "x")), split, layouts="global", wire_bytes=35000)
    assert all(one.times == 1 for one in plan.collectives)


def order_is_seen(x: Any) -> Any:
    return jnp.cumsum(x.reshape(-1, x.shape[-1]), 0)


def is_stated(x: Any) -> Any:
    flat = jax.lax.with_sharding_constraint(x.reshape(-1, x.shape[-1]), NamedSharding(PLANE, P("y")))
    return jnp.sin(flat).reshape(x.shape)


def is_compared_with_itself(x: Any) -> Any:
    flat = x.reshape(-1, x.shape[-1])
    return jax.nn.softmax(flat @ flat.T, -1) @ flat


def is_seen_of_columns(x: Any) -> Any:
    flat = x.reshape(-1, x.shape[-1])
    order = flat[:, 0] + jnp.arange(64)
    return jnp.cos(flat + jnp.cumsum(order)[:, None] / 512).reshape(x.shape), order[::-1]


def is_divided_beside_one_that_is_not(x: Any) -> Any:
    flat = jnp.concatenate([x + n / 64 for n in range(128)], -1).reshape(64, 1024)
    scores = jax.nn.softmax(flat @ flat.T / 1024, -1)
    return jnp.stack([scores, scores**2], -1).reshape(4, 16, 128)


def is_counted(x: Any) -> Any:
    flat = x.reshape(-1, x.shape[-1])
    return jnp.argmax(flat, 0), jnp.take(flat, jnp.array([5, 2, 60]), 0), flat[3:9], flat[::-1]


@pytest.mark.more("what is in another order, or may not be")
@pytest.mark.parametrize(
    "function",
    [
        order_is_seen,
        is_seen_of_columns,
        is_stated,
        is_compared_with_itself,
        is_divided_beside_one_that_is_not,
        is_counted,
    ],
)
def test_numbers_are_the_plain_functions(function: Callable[..., Any]) -> None:
    check(function, (ACTIVATIONS,), (P("x", "y"),), None, layouts="global", rtol=1e-4, atol=1e-5)


ROWS = jnp.array([5, 0, 63, 9, 17])
"""Some rows of [64, 8]."""

POSITIONAL: dict[str, Callable[[Any], Any]] = {
    "updated": lambda x: jax.lax.dynamic_update_slice(x, x[:3] + 1, (9, 0)),
    "sliced": lambda x: jnp.zeros_like(x).at[:40].set(jax.lax.dynamic_slice(x, (ROWS[0], 0), (40, 8))),
    "added to": lambda x: x.at[ROWS].add(1.0),
    "looked up": lambda x: x.at[1].multiply(x[ROWS].sum()),
    "mapped": lambda x: jax.lax.map(jnp.cumsum, x),
    "changed in a loop": lambda x: jax.lax.fori_loop(0, 4, lambda i, c: c.at[7 * i].add(c[i]), x),
    "summed by segments": lambda x: jax.ops.segment_sum(x, jnp.arange(64) * 5 % 64, 64),
    "in groups": lambda x: jax.lax.ragged_dot(x, drawn(4, 8, 8, seed=4), jnp.array([9, 17, 4, 34])),
    "sorted": lambda x: jnp.sort(x, 0),
    "permuted": lambda x: x[jnp.argsort(x[:, 0])],
}
"""What depends on where in the dimension an element stands."""


@pytest.mark.parametrize("name", POSITIONAL)
@pytest.mark.parametrize("split", [P(None, "y"), P("x", "y")], ids=str)
def test_positions_in_a_merged_dimension_are_those_of_the_program(name: str, split: P) -> None:
    """Their gradients address it where they do not."""

    def positional(x: Any) -> Any:
        return POSITIONAL[name](x.reshape(64, 8)).reshape(x.shape)

    def gradient(x: Any) -> Any:
        return jax.grad(lambda x: jnp.sin(positional(x)).sum())(x)

    for function in (positional, gradient):
        check(function, (ACTIVATIONS,), (split,), split, layouts="global", rtol=1e-4, atol=1e-5)


def of_a_column(x: Any, order: Callable[..., Any]) -> Any:
    """Little has to be put back in order, and in order again."""
    return x + order(x[:, :1], 0) / 8


def _carried(x: Any, pick: random.Random) -> Any:
    """One op on [64, 8], whose elements along the first dimension may be treated alike, or not."""
    weights = drawn(8, 8, seed=pick.randrange(9)) / 3
    position = jnp.arange(64, dtype=x.dtype)[:, None]
    return pick.choice(
        [
            lambda: jnp.sin(x),
            lambda: x @ weights,
            lambda: x * jax.nn.softmax(x, 0),
            lambda: x - x.mean(0, keepdims=True) + x.max(1, keepdims=True),
            lambda: jnp.where(position < 40, x, 0.5),
            lambda: x + position / 64,
            lambda: (x @ x.T) @ x / 64,
            lambda: x.T.reshape(2, 4, 64).transpose(2, 0, 1).reshape(64, 8),
            lambda: jnp.cumsum(x, 0) / 8,
            lambda: x[::-1],
            lambda: jnp.concatenate([x[8:], x[:8]]),
            lambda: jnp.sort(x, 0),
            lambda: jax.lax.scan(lambda c, row: (c + row, row * 2), jnp.zeros(8, x.dtype), x)[1],
            lambda: jnp.sin(x.reshape(4, 16, 8)).reshape(64, 8),
            lambda: jnp.cos(x.reshape(16, 4, 8)).sum(1, keepdims=True).repeat(4, 1).reshape(64, 8),
            lambda: jax.lax.fori_loop(0, 2, lambda _, c: c * 0.5 + x, x),
            *(partial(of_a_column, x, order) for order in (jnp.cumsum, jnp.sort, jnp.flip)),
            lambda: x * x[5:6, :1] + jnp.argmax(x[:, 0]),
            lambda: x + jnp.take(x[:, :1], jnp.arange(64) // 3, 0),
            *(partial(positional, x) for positional in POSITIONAL.values()),
        ]
    )()


@pytest.mark.more("generated programs")
@pytest.mark.parametrize("seed", range(20))
def test_generated_programs(seed: int) -> None:
    pick = random.Random(seed)
    mesh = pick.choice([LINE, PLANE, CUBE])
    steps, state = pick.randrange(1, 5), pick.getstate()
    names = [None, *mesh.axis_names]
    split = [pick.choice(names), pick.choice(names), None]
    if split[0] == split[1]:
        split[0] = None
    returned, result = pick.choice(
        [((4, 16, 8), P(*split)), ((4, 16, 8), P(*split)), ((64, 8), P()), ((16, 4, 8), P())]
    )

    def program(x: Any) -> Any:
        again = random.Random()
        again.setstate(state)
        flat = x.reshape(64, 8)
        for _ in range(steps):
            flat = _carried(flat, again)
        return flat.reshape(returned), flat.sum(0)

    check(program, (ACTIVATIONS,), (P(*split),), (result, P()), mesh=mesh, layouts="global", rtol=1e-4, atol=1e-4)
