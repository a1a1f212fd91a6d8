"""Small programs, bound by latency, in several sizes: chains, loops, iterations of matrices, solvers, layers, tokens.

Each is an ordinary function of arrays with the layouts of its arguments on a mesh of `data` and `model`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy

MESH = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
F32 = jnp.float32


@dataclass(frozen=True)
class Small:
    """A program: its function, the types of its arguments, and how they are split (a prefix of these)."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    shardings: tuple[Any, ...]


def of(*shape: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


WEIGHT, ROWS = P("data", "model"), P("data")


def chain(size: int) -> Small:
    """Products of an activation with sixteen weights, one after the other."""

    def run(x: jax.Array, weights: list[jax.Array]) -> jax.Array:
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return x

    return Small("chain", run, (of(2 * size, size), [of(size, size)] * 16), (ROWS, WEIGHT))


def scanned(size: int) -> Small:
    """Thirty-two layers of a perceptron in a scan."""

    def run(x: jax.Array, weights: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    return Small("scanned", run, (of(2 * size, size), of(32, size, size)), (ROWS, P(None, "data", "model")))


def scanned_step(size: int) -> Small:
    """A training step of eight layers in a scan."""

    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        out = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]
        return jnp.mean(out**2)

    def step(weights: jax.Array, x: jax.Array) -> jax.Array:
        return weights - 0.1 * jax.grad(loss)(weights, x)

    return Small("scanned step", step, (of(8, size, size), of(2 * size, size)), (P(None, "data", "model"), ROWS))


def newton_schulz(size: int) -> Small:
    """Five steps of Newton-Schulz, as Muon takes them."""

    def run(g: jax.Array) -> jax.Array:
        x = g / (jnp.linalg.norm(g) + 1e-7)
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
        return x

    return Small("newton-schulz", run, (of(4 * size, 4 * size),), (WEIGHT,))


def exponential(size: int) -> Small:
    """A matrix's exponential."""
    return Small("expm", jax.scipy.linalg.expm, (of(size // 2, size // 2),), (WEIGHT,))


def perceptron(size: int) -> Small:
    """A training step of a perceptron of two layers, with momentum."""

    def loss(weights: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((jax.nn.relu(x @ weights["up"]) @ weights["down"] - y) ** 2)

    def step(weights: Any, momentum: Any, x: jax.Array, y: jax.Array) -> Any:
        grads = jax.grad(loss)(weights, x, y)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
        return jax.tree.map(lambda w, m: w - 0.1 * m, weights, momentum), momentum

    weights = {"up": of(size, 4 * size), "down": of(4 * size, size)}
    rows = of(2 * size, size)
    return Small("perceptron", step, (weights, weights, rows, rows), (WEIGHT, WEIGHT, ROWS, ROWS))


def conjugate_gradient(size: int) -> Small:
    """Twenty steps of conjugate gradients."""

    def run(a: jax.Array, b: jax.Array) -> jax.Array:
        def body(_: int, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            x, r, p = carry
            ap = a @ p
            alpha = (r @ r) / (p @ ap)
            after = r - alpha * ap
            return x + alpha * p, after, after + (after @ after) / (r @ r) * p

        return jax.lax.fori_loop(0, 20, body, (jnp.zeros_like(b), b, b))[0]

    return Small("conjugate gradient", run, (of(8 * size, 8 * size), of(8 * size)), (WEIGHT, P("data")))


def power_iteration(size: int) -> Small:
    """Sixteen steps of subspace iteration with a QR-free normalization."""

    def run(a: jax.Array, v: jax.Array) -> jax.Array:
        for _ in range(16):
            v = a @ v
            v = v / jnp.linalg.norm(v, axis=0)
        return v

    return Small("power iteration", run, (of(8 * size, 8 * size), of(8 * size, 8)), (WEIGHT, P("data")))


def decoder(size: int) -> Small:
    """A block of a decoder on whole sequences: attention and a perceptron."""
    heads, dim = 8, size // 8

    def run(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        b, t, d = x.shape
        q, k, v = ((x @ weights[n]).reshape(b, t, heads, dim) for n in "qkv")
        scores = jnp.einsum("bthd,bshd->bhts", q, k) / dim**0.5
        scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores, -1e9)
        mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)
        x = x + mixed.reshape(b, t, d) @ weights["o"]
        return x + jax.nn.gelu(x @ weights["up"]) @ weights["down"]

    square = {name: of(size, size) for name in "qkvo"}
    weights = {**square, "up": of(size, 4 * size), "down": of(4 * size, size)}
    return Small("decoder", run, (weights, of(8, 64, size)), (WEIGHT, ROWS))


def token(size: int) -> Small:
    """One token of a block of a decoder over a cache that is split by heads."""
    heads, dim = 8, size // 8

    def run(weights: dict[str, jax.Array], keys: jax.Array, values: jax.Array, x: jax.Array) -> jax.Array:
        q = (x @ weights["q"]).reshape(-1, heads, dim)
        scores = jax.nn.softmax(jnp.einsum("bhd,bhsd->bhs", q, keys))
        x = x + jnp.einsum("bhs,bhsd->bhd", scores, values).reshape(x.shape) @ weights["o"]
        return x + jax.nn.gelu(x @ weights["up"]) @ weights["down"]

    square = {name: of(size, size) for name in "qo"}
    weights = {**square, "up": of(size, 4 * size), "down": of(4 * size, size)}
    cache = of(8, heads, 256, dim)
    return Small(
        "token", run, (weights, cache, cache, of(8, size)), (WEIGHT, P("data", "model"), P("data", "model"), ROWS)
    )


def recurrent(size: int) -> Small:
    """Sixteen steps of an LSTM."""

    def run(wx: jax.Array, wh: jax.Array, xs: jax.Array) -> jax.Array:
        def cell(carry: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            h, c = carry
            i, f, g, o = jnp.split(x @ wx + h @ wh, 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        start = jnp.zeros((xs.shape[1], wh.shape[0]), xs.dtype)
        return jax.lax.scan(cell, (start, start), xs)[1]

    wide = of(size, 4 * size)
    return Small("lstm", run, (wide, wide, of(16, 32, size)), (WEIGHT, WEIGHT, P(None, "data")))


def clusters(size: int) -> Small:
    """Four steps of k-means."""

    def run(points: jax.Array, centers: jax.Array) -> jax.Array:
        for _ in range(4):
            distance = jnp.sum((points[:, None] - centers[None]) ** 2, axis=-1)
            owner = jax.nn.one_hot(jnp.argmin(distance, axis=1), centers.shape[0])
            centers = owner.T @ points / jnp.maximum(owner.sum(0), 1.0)[:, None]
        return centers

    return Small("k-means", run, (of(16 * size, 32), of(16, 32)), (P(("data", "model")), P("data")))


def kalman(size: int) -> Small:
    """Eight steps of a Kalman filter."""

    def run(a: jax.Array, q: jax.Array, observed: jax.Array) -> jax.Array:
        def step(carry: tuple[jax.Array, jax.Array], z: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            x, p = carry
            x, p = a @ x, a @ p @ a.T + q
            gain = p / (jnp.diagonal(p)[:, None] + 1.0)
            x = x + gain @ (z - x)
            return (x, p - gain @ p), x

        return jax.lax.scan(step, (jnp.zeros(a.shape[0], a.dtype), q), observed)[1]

    return Small("kalman", run, (of(size, size), of(size, size), of(8, size)), (WEIGHT, WEIGHT, P()))


def normalized(size: int) -> Small:
    """Eight residual layers with norms in front."""

    def run(x: jax.Array, weights: list[jax.Array], scales: list[jax.Array]) -> jax.Array:
        for weight, scale in zip(weights, scales, strict=True):
            x = x + jax.nn.silu((x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * scale) @ weight)
        return x

    return Small("residual", run, (of(2 * size, size), [of(size, size)] * 8, [of(size)] * 8), (ROWS, WEIGHT, P()))


MAKERS = (
    chain,
    scanned,
    scanned_step,
    newton_schulz,
    exponential,
    perceptron,
    conjugate_gradient,
    power_iteration,
    decoder,
    token,
    recurrent,
    clusters,
    kalman,
    normalized,
)
SIZES = (64, 128, 512)


def programs(sizes: tuple[int, ...] = SIZES) -> Iterator[tuple[str, Small]]:
    """All programs in some sizes, by name."""
    for make in MAKERS:
        for size in sizes:
            small = make(size)
            yield f"{small.name} {size}", small


def costs_of(name: str, mesh: AbstractMesh = MESH) -> sdy.CostModel | None:
    """The rates of a machine on a mesh; of `cpu`, the mesh's own."""
    return None if name == "cpu" else sdy.CostModel.of_machine(name, mesh)


def cost(plan: sdy.Plan) -> float:
    """What a plan costs by its own model: bytes, with the worth of work, or seconds beside what is hidden."""
    return plan.layouts.exposed if plan.layouts is not None else plan.time.total
