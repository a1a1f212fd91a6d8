"""Random functions of 8x8 matrices with loops in all forms that jax writes, nested, with branches and manual parts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

Function = Callable[..., jax.Array]
"""A function of two matrices that gives a third."""

OPS: Sequence[Function] = (
    lambda a, b: jnp.tanh(a) + b,
    lambda a, b: a @ b / 8,
    lambda a, b: a.T * b,
    lambda a, b: a - b.mean(0, keepdims=True),
    lambda a, b: jnp.exp(a - a.max(1, keepdims=True)) * b,
    lambda a, b: jnp.outer(a.sum(0), b[:, 0]) / 8,
)


def random_loops(rng: random.Random, mesh: jax.sharding.Mesh) -> Function:
    """A function of two matrices: one or two steps of which one is a loop, or its gradient where it has one."""
    steps = [_step(rng, mesh, 2) for _ in range(rng.randrange(0, 2))]
    steps.insert(rng.randrange(len(steps) + 1), _loop(rng, mesh, 2))
    function = _chain(steps)
    if rng.random() < 0.7:
        return function
    gradient = jax.grad(lambda a, b: (function(a, b) ** 2).sum())
    try:
        jax.eval_shape(gradient, *(jnp.zeros((8, 8)),) * 2)
    except (NotImplementedError, ValueError):  # `pmax` has no derivative, loops with unknown counts none backwards
        return function
    return gradient


def random_spec(rng: random.Random, axes: Sequence[str]) -> P:
    """How a matrix is split: every axis along one of the dimensions, or nowhere."""
    dims: list[list[str]] = [[], [], []]
    for axis in rng.sample(axes, len(axes)):
        rng.choice(dims).append(axis)
    return P(*(tuple(dim) or None for dim in dims[:2]))


def _chain(steps: Sequence[Function]) -> Function:
    def run(a: jax.Array, b: jax.Array) -> jax.Array:
        for step in steps:
            a, b = step(a, b), a
        return a

    return run


def _step(rng: random.Random, mesh: jax.sharding.Mesh, depth: int) -> Function:
    kind = rng.random()
    if depth and kind < 0.3:
        return _loop(rng, mesh, depth)
    if depth and kind < 0.45:
        return _branches(rng, mesh, depth)
    if kind < 0.55:
        return _manual(rng, mesh)
    return rng.choice(OPS)


def _loop(rng: random.Random, mesh: jax.sharding.Mesh, depth: int) -> Function:
    body = _chain([_step(rng, mesh, depth - 1) for _ in range(rng.randrange(1, 3))])
    form: Callable[[random.Random, Function], Function] = rng.choice(FORMS)
    return form(rng, body)


def _scan(rng: random.Random, body: Function) -> Function:
    length, reverse = rng.randrange(2, 9), rng.random() < 0.3
    return lambda a, b: jax.lax.scan(lambda c, _: (body(c, b), None), a, None, length=length, reverse=reverse)[0]


def _scan_over(rng: random.Random, body: Function) -> Function:
    """The rows that come in and go out are slices of matrices."""

    def step(carry: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        carry = body(carry, carry * row)
        return carry, carry[0] + row

    return lambda a, b: jnp.add(*jax.lax.scan(step, a, b))


def _fori(rng: random.Random, body: Function) -> Function:
    start = rng.randrange(-2, 3)
    return lambda a, b: jax.lax.fori_loop(start, start + 5, lambda i, c: body(c, b), a)


def _counted_while(rng: random.Random, body: Function) -> Function:
    """Up or down, in steps, with `<`, `<=`, `>` or `>=`; the bound is carried."""
    start, step, dtype = rng.randrange(4, 8), rng.randrange(1, 4), jnp.int32
    is_down, is_closed = rng.random() < 0.5, rng.random() < 0.5

    def goes_on(state: Any) -> jax.Array:
        i, bound, _ = state
        if is_down:
            return i >= bound if is_closed else i > bound
        return i <= bound if is_closed else bound > i

    def run(a: jax.Array, b: jax.Array) -> jax.Array:
        def once(state: Any) -> Any:
            i, bound, c = state
            return (i - step if is_down else i + step).astype(dtype), bound, body(c, b)

        first = jnp.array(start, dtype)
        return jax.lax.while_loop(goes_on, once, (first, jnp.int32(3 if is_down else 17), a))[2]

    return run


def _unknown_while(rng: random.Random, body: Function) -> Function:
    """Until a sum, which has to be reduced in the condition, is large."""

    def run(a: jax.Array, b: jax.Array) -> jax.Array:
        def goes_on(state: Any) -> jax.Array:
            return (state[0] < 100) & (jnp.sum(state[1]) < 50)

        return jax.lax.while_loop(goes_on, lambda state: (state[0] + 1, body(state[1], b)), (0, a))[1]

    return run


FORMS = (_scan, _scan_over, _fori, _counted_while, _counted_while, _unknown_while)


def _branches(rng: random.Random, mesh: jax.sharding.Mesh, depth: int) -> Function:
    """Two or three, which send different amounts."""
    bodies = [_chain([_step(rng, mesh, depth - 1)]) for _ in range(rng.randrange(2, 4))]
    return lambda a, b: jax.lax.switch(jnp.int32(a[0, 0] * 3), bodies, a, b)


def _manual(rng: random.Random, mesh: jax.sharding.Mesh) -> Function:
    """A part that is written per device and communicates itself."""
    axis = rng.choice(mesh.axis_names)
    size = mesh.shape[axis]
    ring = [(i, (i + 1) % size) for i in range(size)]
    sent = rng.choice(
        (
            lambda x: jax.lax.psum(jnp.sin(x), axis),
            lambda x: jax.lax.pmax(x, axis),
            lambda x: jax.lax.ppermute(x, axis, ring),
            lambda x: jax.lax.all_gather(x, axis, tiled=True)[: x.shape[0]],
            lambda x: jax.lax.psum_scatter(jnp.tile(x, (size, 1)), axis, tiled=True),
            lambda x: (
                jax.lax.all_to_all(x.reshape(-1, 1), axis, 0, 0, tiled=True).reshape(x.shape)
                if x.size % size == 0
                else x
            ),
        )
    )
    spec = P(axis)
    part = jax.shard_map(sent, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False, axis_names={axis})
    return lambda a, b: part(a) + b
