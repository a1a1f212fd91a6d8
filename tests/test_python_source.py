"""Plans as Python modules: they run without us, give the same numbers, and read as people write."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from optax import EmaState
from python_modules import Modules, assert_alike

import sdy_jax as sdy

RUFF = Path(sysconfig.get_path("scripts"), "ruff")
needs_ruff = pytest.mark.skipif(not RUFF.exists() and not shutil.which("ruff"), reason="ruff is not installed")


def numbers(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def mlp(x, weights):
    h = jax.nn.gelu(x @ weights["up"])
    return h @ weights["down"]


WEIGHTS = {"up": numbers(16, 32), "down": numbers(32, 16)}
MLP_SPECS = (P("data"), {"up": P(None, "model"), "down": P("model")})


def counted(x):
    def body(i, y):
        return jnp.tanh(y @ x) + i

    return lax.fori_loop(0, 3, body, x)


def until(x):
    return lax.while_loop(lambda c: c[1].sum() < 1000.0, lambda c: (c[0] + 1, c[1] * 1.5 + 1.0), (0, x))


def branched(x):
    y = lax.cond(x.sum() > 0, lambda: x * 2.0, lambda: x @ x)
    return lax.switch(jnp.int32(2), [jnp.sin, jnp.cos, jnp.tanh], y)


def manual(x):
    def on_blocks(block):
        return lax.psum(block, "data") + lax.axis_index("model")

    return jax.shard_map(on_blocks, in_specs=P("data", "model"), out_specs=P(None, "model"))(x) * 2.0


def averaged(state, x):
    return EmaState(state.count + 1, 0.9 * state.ema + x), x.sum()


def convolved(x, kernel):
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def looked_up(table, rows, updates):
    return table[rows] + 1, table.at[rows].add(updates), jnp.take_along_axis(table, jnp.argsort(table, 1), 1)


def in_few_bits(x, y):
    product = x.astype(jnp.bfloat16) @ y.astype(jnp.bfloat16)
    return (
        product,
        (x * 100).astype(jnp.int8) // 3,
        x > y,
        lax.complex(x, y) * (2 + 1j),
        (x * 50).astype(jnp.uint8) >> 1,
    )


def solved(x):
    positive = x @ x.T + 16 * jnp.eye(16)
    return jnp.linalg.cholesky(positive), jnp.linalg.solve(positive, x), jnp.fft.fft2(x)


def noise(x):
    key = jax.random.key(7)
    return x + jax.random.normal(key, x.shape), jax.random.randint(key, (5,), 0, 9)


def with_nothing(x, unused, empty):
    return x + 1.0, empty * 2.0


X = numbers(16, 16)
CASES = {
    "mlp": (mlp, MLP_SPECS, (numbers(8, 16), WEIGHTS)),
    "gradient": (jax.grad(lambda *a: (mlp(*a) ** 2).sum(), 1), MLP_SPECS, (numbers(8, 16), WEIGHTS)),
    "uneven": (lambda x: jnp.tanh(jnp.concatenate([x, x[:1]]) @ x.T).sum(1), (P("data", "model"),), (X,)),
    "counted": (counted, (P("data", "model"),), (X,)),
    "until": (until, (P("data", "model"),), (X,)),
    "branched": (branched, (P("data", "model"),), (X,)),
    "manual": (manual, (P("data", "model"),), (X,)),
    "averaged": (averaged, (EmaState(P(), P("data")), P()), (EmaState(np.int32(3), X), X)),
    "convolved": (convolved, (P("data", "model"), P()), (numbers(4, 8, 6, 3), numbers(3, 3, 3, 5))),
    "looked_up": (looked_up, (P("data"), P(), P()), (X, np.array([1, 15, 4]), numbers(3, 16))),
    "in_few_bits": (in_few_bits, (P("data"), P(None, "model")), (X, numbers(16, 16, seed=1))),
    "solved": (solved, (P("data"),), (X,)),
    "noise": (noise, (P("data"),), (X,)),
    "with_nothing": (with_nothing, (P("data"), P(), P()), (X, X, np.zeros((0, 4), np.float32))),
    "rolled": (lambda x: jnp.roll(x, 3, 0) + jnp.cumsum(x[::-1], 0), (P("data"),), (X,)),
}
"""Functions, specifications and arguments."""


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    return Modules(tmp_path_factory.mktemp("modules"))


@pytest.fixture(scope="module")
def texts(modules, mesh):
    found = {}
    for name, (fun, specs, args) in CASES.items():
        plan = sdy.partition(fun, mesh=mesh, in_shardings=specs).plan(*args)
        found[name] = modules.add(name, plan, *args)
    return found


@pytest.fixture(scope="module")
def found(modules, texts):
    return modules.run()


@pytest.mark.parametrize("name", CASES)
def test_a_module_alone_gives_the_same_numbers(name, found, mesh):
    fun, _, args = CASES[name]
    alone = sdy.partition(fun, mesh=mesh) if name == "manual" else jax.jit(lambda *xs: fun(*xs))
    wanted = alone(*args)
    assert_alike(found[name], wanted, 2e-2 if name == "in_few_bits" else 1e-4)


@needs_ruff
def test_ruff_has_nothing_to_say(modules, texts):
    ruff = str(RUFF) if RUFF.exists() else "ruff"
    options = ["--isolated", "--line-length=120", str(modules.folder)]
    for command in (["check", "--select=E,F,I,B,UP,SIM,C4,PIE"], ["format", "--check"]):
        done = subprocess.run([ruff, *command, *options], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_it_reads_as_people_write(texts):
    text = texts["mlp"]
    assert re.search(r'# test_python_source.py:\d+: h = jax.nn.gelu\(x @ weights\["up"\]\)', text)
    assert "    product = x @ weights_up  # f32[8@data,32@model]\n" in text
    assert "    h = product * (0.5 * (1.0 + tanh))" in text
    assert "    # all_reduce over model for stablehlo.dot_general: 384 B per device\n" in text
    assert 'lax.psum(h @ weights_down, "model")' in text
    assert 'in_specs=(P("data"), P("model"), P(None, "model"))' in text
    assert '(result,) = run(x, weights["down"], weights["up"])' in text
    assert "sdy_jax" not in text.replace("as sdy_jax planned it", "")


def test_loops_and_branches_are_what_they_are(texts):
    assert "lax.fori_loop(0, 3, loop, x)" in texts["counted"]
    assert "lax.while_loop(goes_on, loop, (" in texts["until"]
    assert re.search(r"lax\.cond\(\w+ > 0\.0, when_true, when_false\)", texts["branched"])


def test_what_is_no_tuple_list_or_dictionary_is_made_like_an_argument(texts, found):
    assert "jax.tree.unflatten(jax.tree.structure(state), [" in texts["averaged"]
    assert isinstance(found["averaged"][0], EmaState)
