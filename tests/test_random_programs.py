"""Random programs on random meshes and shardings: the same numbers partitioned as on one device."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from sdy_jax.testing import assert_same

pytestmark = pytest.mark.usefixtures("poisoned_padding")

MESHES = [((2, 4), "xy"), ((2, 2, 2), "xyz"), ((8,), "x")]

# Functions of two 8x8 matrices and a dimension, with results of about the same magnitude.
OPS = [
    lambda a, b, d: jnp.tanh(a) + b,
    lambda a, b, d: a @ b / 8,
    lambda a, b, d: a.T * b,
    lambda a, b, d: jnp.einsum("ij,kj->ik", a, b) / 8,
    lambda a, b, d: jax.nn.softmax(a, axis=d),
    lambda a, b, d: a - a.mean(d, keepdims=True),
    lambda a, b, d: jnp.outer(a.sum(0), b.max(1)) / 8,
    lambda a, b, d: jnp.concatenate([a[:4], b[4:]], 0),
    lambda a, b, d: a.reshape(4, 2, 8).transpose(1, 0, 2).reshape(8, 8),
    lambda a, b, d: jnp.where(a > b, a, 0.5 * b),
    lambda a, b, d: jnp.roll(a[::-1], 3, d),
    lambda a, b, d: jnp.pad(a, 1)[1:-1, :-2] + b,
    lambda a, b, d: jnp.cumsum(a, d) / 8,
    lambda a, b, d: jnp.sort(a, d),
    lambda a, b, d: a * jnp.arange(8.0)[:, None] / 8,
    lambda a, b, d: a[jnp.argsort(b[:, 0])],
    lambda a, b, d: a.at[jnp.array([1, 1, 6])].add(b[:3]),
    lambda a, b, d: jax.lax.dynamic_update_slice(a, b[:2], (3, 0)),
    lambda a, b, d: jax.lax.dynamic_slice(a.repeat(2, 0), (3, 0), (8, 8)),
    lambda a, b, d: jax.lax.scan(lambda c, r: (c * 0.5 + r, c + r), a[0], b)[1],
    lambda a, b, d: jax.lax.fori_loop(0, 3, lambda i, c: c * 0.9 + b, a),
    lambda a, b, d: jax.lax.cond(a.sum() > 0, jnp.add, jnp.subtract, a, b),
]


def random_program(rng):
    """A function of three matrices: a chain of ops on what is there, or its gradient."""
    steps = [(rng.choice(OPS), rng.random(), rng.random(), rng.randrange(2)) for _ in range(rng.randrange(3, 9))]

    def forward(*matrices):
        values = list(matrices)
        for op, first, second, dim in steps:
            values.append(op(values[int(first * len(values))], values[int(second * len(values))], dim))
        return values[-1], values[-2].sum()

    def loss(*matrices):
        last, total = forward(*matrices)
        return (last**2).sum() + total

    return forward if rng.random() < 0.5 else jax.grad(loss, (0, 1))


def random_spec(rng, axes):
    dims = ([], [])
    for axis in rng.sample(axes, len(axes)):
        choice = rng.randrange(3)
        if choice < 2:
            dims[choice].append(axis)
    return P(*(tuple(dim) or None for dim in dims)) if rng.random() < 0.8 else None


def check(seed, count):
    rng = random.Random(seed)
    for number in range(count):
        shape, axes = rng.choice(MESHES)
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(shape), tuple(axes))
        program, specs = random_program(rng), tuple(random_spec(rng, axes) for _ in range(3))
        matrices = np.random.default_rng([seed, number]).standard_normal((3, 8, 8)).astype(np.float32)
        try:
            assert_same(program, *matrices, mesh=mesh, in_shardings=specs, rtol=1e-3, atol=1e-4)
        except Exception as error:
            raise AssertionError(f"seed {seed}, program {number}, mesh {dict(mesh.shape)}, {specs}") from error


def fuzz(seed):
    check(seed, 3)


def test_random_programs():
    check(0, 12)


@pytest.mark.slow
def test_many_random_programs():
    check(1, 300)
