"""Functions that slice, pad and shift."""

import jax.numpy as jnp
from jax import lax


def pad(*padding):
    return lambda x: lax.pad(x, jnp.asarray(7, x.dtype), [padding, *[(0, 0, 0)] * (x.ndim - 1)])


def stencil(x):
    return x[:-2] + 2 * x[1:-1] + 3 * x[2:]


def padded_stencil(x):
    return stencil(jnp.pad(x, ((1, 1), (0, 0))))


FUNCTIONS = {
    "shift up": lambda x: x[1:],
    "shift down": lambda x: x[:-2],
    "inner rows": lambda x: x[2:-3],
    "every second": lambda x: x[::2],
    "every third of some": lambda x: x[1:-1:3],
    "upper half": lambda x: x[: len(x) // 2],
    "lower half": lambda x: x[len(x) // 2 :],
    "edges": pad(2, 3, 0),
    "an edge longer than a shard": pad(9, 11, 0),
    "a shift by padding": pad(3, -3, 0),
    "negative edges": pad(-1, -2, 0),
    "holes": pad(0, 0, 2),
    "holes between negative edges": pad(-2, 4, 1),
    "a reversal": lambda x: x[::-1],
    "a reversal of every second": lambda x: x[::-2],
    "a reversal of both dimensions": lambda x: x[::-1, ::-1],
    "itself behind itself": lambda x: jnp.concatenate([x, x]),
    "unequal operands": lambda x: jnp.concatenate([x[:3] * 2, x, x[1:] * 3]),
    "a rotation": lambda x: jnp.roll(x, 1, 0),
    "a rotation back": lambda x: jnp.roll(x, -3, 0),
    "a rotation by more than a shard": lambda x: jnp.roll(x, 7, 0),
    "a rotation of two dimensions": lambda x: jnp.roll(x, (2, -1), (0, 1)),
    "halves exchanged": lambda x: jnp.concatenate([x[len(x) // 2 :], x[: len(x) // 2]]),
    "differences": lambda x: jnp.diff(x, axis=0),
    "second differences": lambda x: jnp.diff(x, n=2, axis=0),
    "a stencil": stencil,
    "a padded stencil": padded_stencil,
    "a periodic stencil": lambda x: jnp.roll(x, 1, 0) - 2 * x + jnp.roll(x, -1, 0),
    "a causal window": lambda x: sum(i * jnp.pad(x, ((3, 0), (0, 0)))[i : i + len(x)] for i in range(4)),
    "a box": lambda x: x[1:-1, 2:] * x[2:, :-2],
    "a wrapped edge": lambda x: jnp.pad(x, ((1, 2), (0, 0)), mode="wrap"),
    "a mirrored edge": lambda x: jnp.pad(x, ((3, 2), (0, 0)), mode="reflect"),
    "an edge mirrored with its border": lambda x: jnp.pad(x, ((2, 3), (1, 0)), mode="symmetric"),
    "a repeated edge": lambda x: jnp.pad(x, ((3, 2), (0, 0)), mode="edge"),
    "a row repeated in front": lambda x: jnp.concatenate([jnp.broadcast_to(x[1:2], (3, x.shape[1])), x]),
    "a queue": lambda x: jnp.concatenate([x[1:], x[:1] * 2]),
}
