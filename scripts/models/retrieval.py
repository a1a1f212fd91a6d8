"""Retrieval: two towers over tables of rows so many that no device has one whole."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from models.common import Array, Layout, Program, Tree, f32, i32, names, types


@dataclass(frozen=True)
class TwoTowers:
    """A tower for what a user did, pooled over a list of items, and one for an item; each is an MLP over rows of a
    table, and the items of a batch are each other's negatives, corrected by how often they come (Yi et al. 2019,
    "Sampling-bias-corrected neural modeling for large corpus item recommendations", doi 10.1145/3298689.3346996).

    Attributes:
        users, items: rows of the tables, of `width` numbers.
        history: items of a user's list.
        hidden: widths of the layers of an MLP, the last one that of the space in which towers are compared.
    """

    users: int
    items: int
    width: int
    history: int
    hidden: tuple[int, ...]

    def tables(self) -> Tree:
        """Rows, and of each the sum of its gradients' mean squares, as row-wise Adagrad keeps it."""
        sizes = {"users": self.users, "items": self.items}
        return {
            name: {"rows": Array((size, self.width), ("rows", None)), "squares": Array((size,), ("rows",))}
            for name, size in sizes.items()
        }

    def weights(self) -> Tree:
        return {"user": self._tower(2 * self.width), "item": self._tower(self.width)}

    def _tower(self, before: int) -> Tree:
        wide = (before, *self.hidden)
        return [
            {"weights": Array(shape, ("embed", None)), "bias": Array(shape[1:], (None,))}
            for shape in zip(wide, self.hidden, strict=False)
        ]

    def flops(self, batch: int) -> float:
        """Of one step, forward and backward: towers, and the scores of all pairs."""
        products = sum(
            a * b
            for before in (2 * self.width, self.width)
            for a, b in zip((before, *self.hidden), self.hidden, strict=False)
        )
        return 6 * (batch * products + batch**2 * self.hidden[-1])

    def loss(self, weights: Tree, rows: Tree, frequencies: jax.Array, layout: Layout) -> jax.Array:
        """`rows`: those of users (batch, width), of their lists (batch, history, width), and of items."""
        user = jnp.concatenate([rows["user"], rows["history"].mean(1)], -1)
        user, item = (_through(weights[name], x) for name, x in (("user", user), ("item", rows["item"])))
        scores = layout(user @ item.T / 0.05 - jnp.log(frequencies), "batch", None)
        own = jnp.diagonal(scores)
        return jnp.mean(jax.nn.logsumexp(scores, -1) - own)


def _through(layers: list[Tree], x: jax.Array) -> jax.Array:
    for layer in layers[:-1]:
        x = jax.nn.relu(x @ layer["weights"] + layer["bias"])
    x = x @ layers[-1]["weights"] + layers[-1]["bias"]
    return x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)


def trained_towers(model: TwoTowers, layout: Layout, batch: int, rate: float = 0.01) -> Program:
    """`(weights, tables, batch) -> (weights, tables, loss)`: gradient descent for the towers, row-wise Adagrad for the
    rows that a batch has, which are all that is read and written of the tables."""

    def step(weights: Tree, tables: Tree, ids: Tree, frequencies: jax.Array) -> tuple[Tree, Tree, jax.Array]:
        table = {"user": "users", "history": "items", "item": "items"}
        rows = {name: tables[table[name]]["rows"][ids[name]] for name in ids}
        value, (slopes, of_rows) = jax.value_and_grad(partial(model.loss, layout=layout), (0, 1))(
            weights, rows, frequencies
        )
        for name, slope in of_rows.items():
            tables = tables | {table[name]: _updated(tables[table[name]], ids[name], slope, rate)}
        return jax.tree.map(lambda w, g: w - rate * g, weights, slopes), tables, value

    ids = {
        "user": Array((batch,), ("batch",), i32),
        "history": Array((batch, model.history), ("batch", None), i32),
        "item": Array((batch,), ("batch",), i32),
    }
    given = (model.weights(), model.tables(), ids, Array((batch,), (None,), f32))
    named = tuple(map(names, given))
    return Program(step, tuple(map(types, given)), named, (*named[:2], ()), (0, 1), model.flops(batch))


def _updated(table: Tree, ids: jax.Array, slopes: jax.Array, rate: float) -> Tree:
    squares = table["squares"].at[ids].add(jnp.mean(slopes * slopes, -1))
    scale = rate * jax.lax.rsqrt(squares[ids] + 1e-8)
    return {"rows": table["rows"].at[ids].add(-scale[..., None] * slopes), "squares": squares}
