"""What is decided of indices before a program runs: of permutations nothing is asked, of all others what jax asks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from partitioned_ops import PLANE
from uneven_blocks import normal

import sdy_jax as sdy

N, D = 48, 8
X, Y = normal(N, D), normal(N, D)
KEYS = np.random.default_rng(0).integers(0, 7, N).astype(np.int32)
SOME = np.random.default_rng(1).integers(-N, N, N).astype(np.int32)


def lookup(x, keys):
    return x[jnp.argsort(keys)]


def filled(x, keys):
    return jnp.take(x, jnp.argsort(keys), axis=0, mode="fill")


def largest(x, keys):
    return x[jax.lax.top_k(x[:, 0], 5)[1]]


def of_a_range(x, keys):
    return x[jnp.concatenate([jnp.arange(N // 2, N), jnp.minimum(jnp.arange(N), 3)])]


@pytest.mark.parametrize("function", [lookup, filled, largest, of_a_range])
def test_indices_that_are_none_of_these_are_not_asked_for(function):
    text = checked(function, X, KEYS)
    assert "select" not in text


def at_the_end(x, keys):
    return x[jnp.argsort(keys) - 1]


def written(x, keys):
    return jnp.zeros_like(x).at[jnp.argsort(keys)].set(jnp.sin(x))


def written_twice(x, keys):
    return jnp.zeros_like(x).at[keys].set(jnp.sin(x))[keys]


def by_others(x, keys):
    order = jnp.argsort(keys)
    return jnp.zeros_like(x).at[order].set(jnp.sin(x))[order[::-1]]


def by_another_order(x, keys):
    return jnp.zeros_like(x).at[jnp.argsort(keys)].set(jnp.sin(x))[jnp.argsort(-x[:, 0])]


def partly_written(x, keys):
    order = jnp.argsort(keys)
    return jnp.zeros((N + 2, D)).at[order].set(jnp.sin(x))[order]


def added(x, keys):
    order = jnp.argsort(keys)
    return jnp.ones_like(x).at[order].add(jnp.sin(x))[order]


@pytest.mark.parametrize("function", [at_the_end, by_others, by_another_order, partly_written, added, written_twice])
@pytest.mark.parametrize("indices", [KEYS, SOME], ids=["within", "from the end"])
def test_others_are_what_they_were(function, indices):
    text = checked(function, X, indices)
    assert "scatter" in text or "select" in text


def test_what_was_written_is_what_is_read():
    def back(x, keys):
        order = jnp.argsort(keys)
        return jnp.zeros_like(x).at[order].set(jnp.sin(x))[order]

    text = checked(back, X, KEYS)
    assert "scatter" not in text and "gather" not in text


@pytest.mark.parametrize("function", [written, written_twice, lookup, at_the_end])
@pytest.mark.parametrize("indices", [KEYS, SOME], ids=["within", "from the end"])
def test_gradients(function, indices):
    def gradient(x, keys):
        return jax.grad(lambda x: (function(x, keys) * Y).sum())(x)

    text = checked(gradient, X, indices)
    assert "ui32" not in text or function is written_twice


def test_numbers_that_wrap_around_are_any():
    def wrapped(x, keys):
        return jnp.where(jnp.arange(128, dtype=jnp.int8) + jnp.int8(1) < 0, x[0, 0], x[1, 0])

    checked(wrapped, X, KEYS)


CONDITIONS = {
    "never equal": lambda i: i == N,
    "always unequal": lambda i: i != N + 1,
    "equal to itself": lambda i: i + 1 == jnp.arange(N) + 1,
    "sometimes equal": lambda i: i == N - 1,
    "sometimes unequal": lambda i: i != 0,
    "always at most": lambda i: i <= N - 1,
    "sometimes less": lambda i: i < N - 1,
    "always at least": lambda i: jnp.maximum(i, 3) >= 3,
    "sometimes more": lambda i: jnp.maximum(i, 3) > 3,
    "never more": lambda i: jnp.clip(i, 2, 5) - 2 > 3,
    "one of both": lambda i: (i >= 0) & (i < 5),
    "both": lambda i: (i >= 0) & (i < N),
}


@pytest.mark.parametrize("name", CONDITIONS)
def test_conditions(name):
    def chosen(x, keys):
        return jnp.where(CONDITIONS[name](jnp.arange(N))[:, None], x, 2 * x)

    text = checked(chosen, X, KEYS)
    assert ("select" in text) == (name.startswith("sometimes") or name == "one of both")


def doubled(x, keys):
    def numbers():
        found = jnp.arange(N)
        for _ in range(40):
            found = found + found
        return found

    return jnp.where((numbers() == numbers())[:, None], x, 2 * x)


def looked_up(x, keys):
    order = jnp.argsort(keys)
    for _ in range(600):
        x = x.at[order].get(mode="clip")
    return x


@pytest.mark.more("long programs")
@pytest.mark.parametrize("function", [doubled, looked_up])
def test_no_more_is_asked_than_an_answer_is_worth(function):
    partitioned = sdy.partition(function, mesh=PLANE, in_shardings=P(), layouts="local")
    assert not partitioned.plan(X, KEYS).wire_bytes


def checked(function, x, keys):
    """The text of what eight devices run, once its numbers are those of one."""
    f = sdy.partition(function, mesh=PLANE, in_shardings=(P("x"), P("x")), on_unknown="ignore")
    np.testing.assert_allclose(f(x, keys), function(x, keys), rtol=1e-5, atol=1e-6)
    return f.plan(x, keys).mlir()
