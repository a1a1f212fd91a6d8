"""Small programs in which devices differ: types, extremes with NaNs, layouts, exchanges, libraries' kernels.

As a script it runs all of them on the devices at hand and prints a line of JSON for each: its name, the collectives of
its plan, the seconds it took, and what is wrong, if anything is.

    scripts/accelerator_cases.py DATA MODEL [NAMES]
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from sdy_jax.testing import assert_same


class Case(NamedTuple):
    """A function, its arguments, and the shardings of these and of its results."""

    fun: Callable[..., Any]
    arguments: tuple[Any, ...]
    in_shardings: Any
    out_shardings: Any = None


def normal(*shape: int, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape), dtype)


def with_nans(*shape: int, dtype: str = "float32") -> jax.Array:
    x = np.random.default_rng(0).standard_normal(shape)
    x.flat[:: x.size // 5] = np.nan
    x.flat[3 :: x.size // 4] = -np.inf
    return jnp.asarray(x, dtype)


def training(x: jax.Array, weights: Mapping[str, jax.Array]) -> Any:
    def loss(weights: Mapping[str, jax.Array]) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ weights["up"]) @ weights["down"]) ** 2)

    value, slopes = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - g, weights, slopes), value


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 8
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(causal, scores, -jnp.inf)), v)


def scanned(weights: jax.Array, x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights)[0]


def smoothed(x: jax.Array, kernel: jax.Array) -> jax.Array:
    dims = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=dims)


BOTH = P("data", "model")
WEIGHTS = {"up": P("data", "model"), "down": P("model", "data")}
MATRICES = {"up": normal(32, 64), "down": normal(64, 32)}

CASES: Mapping[str, Callable[[], Case]] = {
    "training step": lambda: Case(training, (normal(16, 32), MATRICES), (P("data"), WEIGHTS), (WEIGHTS, P())),
    "training step, bfloat16": lambda: Case(
        training,
        (normal(16, 32, dtype="bfloat16"), jax.tree.map(lambda w: w.astype("bfloat16"), MATRICES)),
        (P("data"), WEIGHTS),
        (WEIGHTS, P()),
    ),
    "causal attention by heads": lambda: Case(
        attention, tuple(normal(4, 16, 8, 8) for _ in range(3)), P("data", None, "model")
    ),
    "layers in a scan": lambda: Case(scanned, (normal(4, 32, 32), normal(16, 32)), (P(None, "data", "model"), P())),
    "sizes that do not divide": lambda: Case(lambda x, w: jnp.tanh(x @ w).sum(0), (normal(13, 7), normal(7, 11)), BOTH),
    **{
        f"sums, {dtype}": lambda dtype=dtype: Case(lambda x: x.sum(0), (normal(16, 24, dtype=dtype),), BOTH, P())
        for dtype in ("float16", "bfloat16", "int8", "uint32", "complex64")
    },
    **{
        f"maxima with NaNs, {dtype}": lambda dtype=dtype: Case(
            lambda x: (x.max(0), x.min(), x.argmax(0)), (with_nans(16, 24, dtype=dtype),), BOTH, P()
        )
        for dtype in ("float32", "bfloat16", "float16")
    },
    "running sums": lambda: Case(lambda x: jnp.cumsum(x, 0), (normal(32, 8),), BOTH),
    "sorting along a split dimension": lambda: Case(lambda x: jnp.sort(x, 0), (normal(64, 4),), BOTH),
    "lookups and their gradients": lambda: Case(
        lambda t, i: (t[i], jnp.zeros_like(t).at[i].add(1.0)), (normal(40, 8), jnp.arange(12) * 3), (BOTH, P("data"))
    ),
    "a convolution split in space": lambda: Case(
        smoothed, (normal(2, 16, 16, 4), normal(3, 3, 4, 8)), (P(None, "data", "model"), P())
    ),
    "a transform along a split dimension": lambda: Case(
        lambda x: jnp.fft.rfft(x, axis=0).real, (normal(128, 2),), BOTH
    ),
    "a Cholesky decomposition": lambda: Case(
        lambda x: jnp.linalg.cholesky(x @ x.T + 64 * jnp.eye(32)), (normal(32, 32),), BOTH
    ),
    "shifts and slices": lambda: Case(
        lambda x: (jnp.roll(x, 3, 0), x[5:21, ::2], jnp.flip(x, 0)), (normal(32, 8),), BOTH
    ),
    "random numbers": lambda: Case(
        lambda key: jax.random.normal(key, (16, 24)) + 0, (jax.random.key(0),), P(), P("data", "model")
    ),
    "products of int8": lambda: Case(
        lambda x, w: jax.lax.dot(x, w, preferred_element_type=jnp.int32),
        ((10 * normal(16, 32)).astype("int8"), (10 * normal(32, 16)).astype("int8")),
        (P("data", "model"), P("model")),
    ),
}


def run(mesh: Mesh, names: list[str]) -> Iterator[dict[str, Any]]:
    """A row for each case."""
    for name in names:
        start, found = time.perf_counter(), {"name": name, "collectives": "", "problem": ""}
        try:
            case = CASES[name]()
            plan = assert_same(
                case.fun, *case.arguments, mesh=mesh, in_shardings=case.in_shardings, out_shardings=case.out_shardings
            )
            kinds = dict.fromkeys(record.kind for record in plan.collectives if record.wire_bytes)
            found["collectives"] = ", ".join(kinds)
        except Exception as error:  # a row says so, and the other cases run
            found["problem"] = f"{type(error).__name__}: {error}".splitlines()[0]
        yield {**found, "seconds": time.perf_counter() - start}


def main() -> None:
    data, model, *names = sys.argv[1:]
    jax.config.update("jax_default_matmul_precision", "highest")  # sums in other orders are to be the only difference
    count = int(data) * int(model)
    mesh = Mesh(np.array(jax.devices()[:count]).reshape(int(data), int(model)), ("data", "model"))
    for row in run(mesh, names or list(CASES)):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
