"""Functions drawn at random, partitioned and run beside the plain ones."""

import random
from contextlib import nullcontext
from contextvars import ContextVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from machine_models import planned_for, small_costs

import sdy_jax as sdy

MESHES = [((2, 4), tuple("xy")), ((2, 2, 2), tuple("xyz")), ((8,), ("x",))]
SIZES = (8, 8, 3, 7, 9, 12, 17)


def like(x, shape):
    """As many of the elements of x, in their order, as a shape has; again from the first where there are too few."""
    return jnp.resize(x, shape)


def pooled(a, reduce, initial, window, strides):
    return like(lax.reduce_window(a, initial, reduce, window, strides, "SAME"), a.shape)


def convolved(a, b, strides, dilation):
    y = lax.conv_general_dilated(a[None, None], b[None, None, :3, :2], strides, ((2, 1), (0, 3)), dilation, (1, 2))
    return like(y[0, 0], a.shape) / 4


def taken(a, b, d):
    return jnp.take_along_axis(a, jnp.argsort(b, d), d)


def positive(a):
    """A positive definite matrix."""
    return a @ a.T / len(a) + 2 * jnp.eye(len(a))


# Functions of two square matrices and a dimension, with results of about the same magnitude.
OPS = [
    lambda a, b, d: jnp.tanh(a) + b,
    lambda a, b, d: a @ b / len(a),
    lambda a, b, d: a.T * b,
    lambda a, b, d: jnp.einsum("ij,kj->ik", a, b) / len(a),
    lambda a, b, d: jax.nn.softmax(a, axis=d),
    lambda a, b, d: a - a.mean(d, keepdims=True),
    lambda a, b, d: jnp.outer(a.sum(0), b.max(1)) / len(a),
    lambda a, b, d: jnp.concatenate([a[: len(a) // 2], b[len(a) // 2 :]], 0),
    lambda a, b, d: lax.slice_in_dim(jnp.concatenate([a, b, a], d), 2, 2 + len(a), axis=d),
    lambda a, b, d: a.reshape(-1, len(a), 1).swapaxes(0, 1).reshape(a.shape),
    lambda a, b, d: a.reshape(-1)[::-1].reshape(a.shape),
    lambda a, b, d: like(jnp.where(a > b, a, 0.5 * b).reshape(-1)[3:], a.shape),
    lambda a, b, d: jnp.where(a > b, a, 0.5 * b),
    lambda a, b, d: jnp.roll(a[::-1], 3, d),
    lambda a, b, d: jnp.roll(a, (-1, len(a) // 2), (0, 1)),
    lambda a, b, d: jnp.pad(a, 1)[1:-1, :-2] + b,
    lambda a, b, d: like(lax.pad(a, 0.5, ((-1, len(a), 1), (2, -2, 2))), a.shape),
    lambda a, b, d: jnp.pad(a, ((2, 1), (1, 2)), mode="wrap")[:-3, 3:],
    lambda a, b, d: like(a[1::2, ::3], a.shape),
    lambda a, b, d: jnp.diff(a, axis=d, append=b[:1] if d == 0 else b[:, :1]),
    lambda a, b, d: jnp.cumsum(a, d) / len(a),
    lambda a, b, d: lax.cummax(a, d, reverse=True),
    lambda a, b, d: lax.cumlogsumexp(a, d) / 4,
    lambda a, b, d: jnp.cumprod(jnp.tanh(a), d),
    lambda a, b, d: jnp.sort(a, d),
    lambda a, b, d: taken(a, b, d),
    lambda a, b, d: like(lax.top_k(a, 2)[0], a.shape),
    lambda a, b, d: a * (jnp.argmax(b, d) - jnp.argmin(a, d)) / len(a),
    lambda a, b, d: jnp.median(a, d, keepdims=True) + b,
    lambda a, b, d: jnp.quantile(a, 0.3, d) * b,
    lambda a, b, d: a * jnp.arange(float(len(a)))[:, None] / len(a),
    lambda a, b, d: a[jnp.argsort(b[:, 0])],
    lambda a, b, d: a.at[jnp.array([1, 1, 6])].add(b[:3]),
    lambda a, b, d: a.at[:, jnp.array([2, -1, 99])].min(b[:, :3]),
    lambda a, b, d: a.at[jnp.argsort(a[:, 0])].multiply(jnp.cos(b), unique_indices=True),
    lambda a, b, d: a.at[1:3].set(b[:2]),
    lambda a, b, d: a.at[::2, 1].max(0.1),
    lambda a, b, d: jnp.take(a, jnp.array([0, 2, 50]), d, mode="clip").sum(d, keepdims=True) + b,
    lambda a, b, d: like(jax.ops.segment_sum(a, jnp.argsort(b[:, 1]) % 3, 3), a.shape) / 2,
    lambda a, b, d: lax.dynamic_update_slice(a, b[:2], (3, 0)),
    lambda a, b, d: lax.dynamic_slice(a.repeat(2, 0), (3, 0), a.shape),
    lambda a, b, d: lax.dynamic_slice(jnp.concatenate([a, b], d), jnp.argmax(a, d)[:2], a.shape),
    lambda a, b, d: pooled(a, lax.add, 0.0, (3, 2), (1, 2)) / 6,
    lambda a, b, d: pooled(a, lax.max, -jnp.inf, (1, 5), (2, 1)),
    lambda a, b, d: convolved(a, b, (1, 1), (1, 1)),
    lambda a, b, d: convolved(a, b, (2, 1), (1, 3)),
    lambda a, b, d: jnp.fft.fft(a, axis=d).imag / 4,
    lambda a, b, d: like(jnp.fft.rfft2(a).real, a.shape) / len(a),
    lambda a, b, d: jnp.fft.irfft(a + 1j * b, len(a), axis=1) * 2,
    lambda a, b, d: jnp.tril(a) - jnp.triu(b, 1),
    lambda a, b, d: lax.scan(lambda c, r: (c * 0.5 + r, c + r), a[0], b)[1],
    lambda a, b, d: lax.fori_loop(0, 3, lambda i, c: c * 0.9 + b, a),
    lambda a, b, d: lax.cond(a.sum() > 0.1, jnp.add, jnp.subtract, a, b),  # many sums are 0 but for rounding
    lambda a, b, d: jnp.linalg.cholesky(positive(a)) + b,
    lambda a, b, d: jax.scipy.linalg.solve_triangular(jnp.linalg.cholesky(positive(b)), a, lower=True),
    lambda a, b, d: jnp.linalg.solve(positive(a), b),
    lambda a, b, d: jnp.linalg.qr(a)[1] * b,
    lambda a, b, d: lax.rsqrt(jnp.abs(a) + 1) * jax.scipy.special.erf(b),
    lambda a, b, d: jnp.where(lax.bitcast_convert_type(a, jnp.int64) < 0, a, b),
    lambda a, b, d: jnp.searchsorted(jnp.sort(a[:, 0]), b).astype(a.dtype) / len(a),
    lambda a, b, d: jax.checkpoint(lambda x, y: jnp.sin(x @ y))(a, b),
    lambda a, b, d: jax.vmap(lambda x, y: jnp.convolve(x, y, "same"))(a, b) / len(a),
    lambda a, b, d: jax.nn.one_hot(jnp.argmax(a, d), len(a), dtype=a.dtype) * b,
    lambda a, b, d: lax.associative_scan(lambda x, y: x * 0.9 + y, a, axis=d) / 2,
]
SHARDINGS = ContextVar("SHARDINGS", default=None)
"""What splits values inside of a program that is partitioned; the plain one has no mesh."""


def split(x, sharding):
    return x if SHARDINGS.get() is None or sharding is None else lax.with_sharding_constraint(x, sharding)


def random_program(rng, mesh, ops=OPS):
    """A function of three matrices: a chain of ops on what is there, some of which is split, or its gradient."""
    steps = [(rng.choice(ops), rng.random(), rng.random(), rng.randrange(2)) for _ in range(rng.randrange(3, 9))]
    shardings = [NamedSharding(mesh, random_spec(rng, mesh.axis_names)) for _ in range(len(steps) + 3)]
    shardings = [sharding if rng.random() < 0.6 else None for sharding in shardings]

    def forward(*matrices):
        values = list(map(split, matrices, shardings[:3]))
        for (op, first, second, dim), sharding in zip(steps, shardings[3:], strict=True):
            a, b = values[int(first * len(values))], values[int(second * len(values))]
            values.append(split(op(a, b, dim), sharding))
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
    return P(*(tuple(dim) or None for dim in dims))


def check(seed, count, machine=None, auto=False, ops=OPS, **options):
    """Options are those of `sdy.partition`; plans are made for virtual CPU devices or for a machine. With `auto` the
    planner chooses the layouts of arguments."""
    rng = random.Random(seed)
    for number in range(count):
        shape, axes = rng.choice(MESHES)
        mesh, size = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(shape), tuple(axes)), rng.choice(SIZES)
        program = random_program(rng, mesh, ops)
        specs = tuple(random_spec(rng, axes) if rng.random() < 0.8 and size == 8 else None for _ in range(3))
        specs = sdy.AUTO if auto else specs
        matrices = np.random.default_rng([seed, number]).standard_normal((3, size, size))
        costs = None if machine is None else small_costs(machine, axes)
        try:
            with nullcontext() if machine is None else planned_for(machine):
                assert_agreed(program, matrices, mesh, specs, costs=costs, **options)
        except Exception as error:
            where = f"mesh {dict(mesh.shape)}, {specs}, {size}, {machine or 'cpu'}"
            raise AssertionError(f"seed {seed}, program {number}, {where}") from error


def assert_agreed(program, matrices, mesh, specs, **options):
    """In double precision, so that rounding decides no order."""
    with jax.enable_x64(True):
        try:
            wanted = jax.block_until_ready(jax.jit(lambda *xs: program(*xs))(*matrices))
        except jax.errors.JaxRuntimeError as error:
            if "fft_thunk" not in str(error):
                raise
            return  # XLA's fft on CPUs takes some layouts only
        token = SHARDINGS.set(mesh)
        try:
            found = sdy.partition(program, mesh=mesh, in_shardings=specs, **options)(*matrices)
        finally:
            SHARDINGS.reset(token)
        for x, y in zip(found, wanted, strict=True):
            np.testing.assert_allclose(x, y, 1e-9, 1e-9 * np.abs(y).max(initial=1.0))
