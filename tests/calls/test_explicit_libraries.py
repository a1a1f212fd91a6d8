"""Training of libraries on a mesh with Explicit axes: only the decorator is another than with `jax.jit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax.plan.profile import collectives_in_hlo, totals

MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
WIDTH, HEADS, VOCABULARY, LENGTH = 16, 4, 32, 8

Jit = Callable[[Callable[..., Any]], Callable[..., Any]]


class Program(NamedTuple):
    """A step, made by a decorator: from the state and a batch to the new state and the loss. And its first state."""

    step: Callable[[Jit], Callable[..., Any]]
    state: tuple[Any, ...]


def placed(seed: int, shape: tuple[int, ...], *entries: Any) -> jax.Array:
    return jax.device_put(jax.random.normal(jax.random.key(seed), shape) / 4, P(*entries))


def rows() -> jax.Array:
    return jax.device_put(np.random.default_rng(0).standard_normal((8, WIDTH), dtype=np.float32), P("data"))


def tokens() -> jax.Array:
    return jax.device_put(np.random.default_rng(1).integers(0, VOCABULARY, (8, LENGTH + 1)), P("data"))


def next_tokens(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """The loss of a language model."""
    optax = pytest.importorskip("optax")
    return optax.softmax_cross_entropy(logits, jax.nn.one_hot(tokens[:, 1:], VOCABULARY)).mean()


def attended(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = jnp.einsum("bshe,bthe->bhst", q, k) * q.shape[-1] ** -0.5
    scores = jnp.where(jnp.tri(q.shape[1], dtype=bool), scores, -1e9)
    return jnp.einsum("bhst,bthe->bshe", jax.nn.softmax(scores), v)


def normed(x: jax.Array) -> jax.Array:
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


# Parameters in a tree, with optax.


def with_optax(params: Any, loss: Callable[..., Any]) -> Program:
    """A step of AdamW that clips gradients. Leaves of the parameters that are None are left alone."""
    optax = pytest.importorskip("optax")
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))

    def make(jit: Jit) -> Callable[..., Any]:
        @jit
        def step(params, moments, batch):
            value, slopes = jax.value_and_grad(loss)(params, batch)
            updates, moments = optimizer.update(slopes, moments, params)
            return optax.apply_updates(params, updates), moments, value

        return step

    return Program(make, (params, optimizer.init(params)))


def optax_mlp() -> Program:
    params = {
        "up": placed(1, (WIDTH, 32), None, "model"),
        "down": placed(2, (32, WIDTH), "model"),
        "bias": placed(3, (32,), "model"),
    }

    def loss(params, x):
        h = jax.nn.gelu(x @ params["up"] + params["bias"])
        return ((jnp.dot(h, params["down"], out_sharding=P("data")) - x) ** 2).mean()

    return with_optax(params, loss)


def optax_transformer() -> Program:
    """Two layers in a scan, each made again in the backward pass."""
    layers = {
        "qkv": placed(1, (2, 3, WIDTH, HEADS, 4), None, None, None, "model"),
        "out": placed(2, (2, HEADS, 4, WIDTH), None, "model"),
        "up": placed(3, (2, WIDTH, 32), None, None, "model"),
        "down": placed(4, (2, 32, WIDTH), None, "model"),
    }

    @jax.checkpoint
    def layer(x, weights):
        q, k, v = (jnp.einsum("bsd,dhe->bshe", normed(x), w) for w in weights["qkv"])
        x += jnp.einsum("bshe,hed->bsd", attended(q, k, v), weights["out"], out_sharding=P("data"))
        h = jax.nn.gelu(normed(x) @ weights["up"])
        return x + jnp.dot(h, weights["down"], out_sharding=P("data")), None

    def loss(params, tokens):
        x = params["embedding"].at[tokens[:, :-1]].get(out_sharding=P("data"))
        x, _ = jax.lax.scan(layer, x, params["layers"])
        return next_tokens(normed(x) @ params["embedding"].T, tokens)

    return with_optax({"embedding": placed(5, (VOCABULARY, WIDTH)), "layers": layers}, loss)


# Equinox.


def with_equinox(model: Any, loss: Callable[..., Any]) -> Program:
    """As with optax, by the arrays of the model alone."""
    eqx = pytest.importorskip("equinox")
    arrays, rest = eqx.partition(model, eqx.is_inexact_array)
    return with_optax(arrays, lambda arrays, batch: loss(eqx.combine(arrays, rest), batch))


def equinox_mlp() -> Program:
    """Equinox's own layers see one row each; their activation is a leaf that is no array."""
    eqx = pytest.importorskip("equinox")

    class Net(eqx.Module):
        up: jax.Array
        down: eqx.nn.Linear
        activation: Callable[..., Any]

        def __call__(self, x):
            h = self.activation(self.up @ x)
            return self.down(jax.sharding.reshard(h, P()))

    net = Net(placed(1, (32, WIDTH), "model"), eqx.nn.Linear(32, WIDTH, key=jax.random.key(0)), jax.nn.relu)
    return with_equinox(net, lambda net, x: ((jax.vmap(net, spmd_axis_name="data")(x) - x) ** 2).mean())


def equinox_transformer() -> Program:
    eqx = pytest.importorskip("equinox")

    class Block(eqx.Module):
        qkv: jax.Array
        out: jax.Array
        up: jax.Array
        down: jax.Array
        norm: eqx.nn.LayerNorm

        def __call__(self, x):
            h = jax.vmap(jax.vmap(self.norm), spmd_axis_name="data")(x)
            q, k, v = jnp.einsum("bsd,tdhe->tbshe", h, self.qkv)
            x += jnp.einsum("bshe,hed->bsd", attended(q, k, v), self.out, out_sharding=P("data"))
            return x + jnp.dot(jax.nn.gelu(normed(x) @ self.up), self.down, out_sharding=P("data"))

    class Net(eqx.Module):
        embedding: jax.Array
        blocks: list[Block]

        def __call__(self, tokens):
            x = self.embedding.at[tokens].get(out_sharding=P("data"))
            for block in self.blocks:
                x = block(x)
            return x @ self.embedding.T

    blocks = [
        Block(
            placed(n, (3, WIDTH, HEADS, 4), None, None, "model"),
            placed(n + 1, (HEADS, 4, WIDTH), "model"),
            placed(n + 2, (WIDTH, 32), None, "model"),
            placed(n + 3, (32, WIDTH), "model"),
            eqx.nn.LayerNorm(WIDTH),
        )
        for n in (0, 10)
    ]
    net = Net(placed(30, (VOCABULARY, WIDTH)), blocks)
    return with_equinox(net, lambda net, tokens: next_tokens(net(tokens[:, :-1]), tokens))


# Flax nnx.


def nnx_layers() -> tuple[Any, Any, Callable[..., Any]]:
    """The library, a generator of numbers, and a linear layer whose kernel is split."""
    nnx = pytest.importorskip("flax.nnx")
    rngs, kernel = nnx.Rngs(0), nnx.initializers.lecun_normal()

    def linear(inputs: int, outputs: int, *axes: str | None) -> Any:
        made = nnx.with_partitioning(kernel, axes)
        return nnx.Linear(inputs, outputs, use_bias=False, kernel_init=made, rngs=rngs)

    return nnx, rngs, linear


def with_nnx(model: Any, loss: Callable[..., Any]) -> Program:
    """As `nnx.jit` does it: the state goes in and out, and the step changes the model and its optimizer in place."""
    nnx, optax = pytest.importorskip("flax.nnx"), pytest.importorskip("optax")
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))

    def make(jit: Jit) -> Callable[..., Any]:
        @jit
        def step(state, batch):
            model, optimizer = nnx.merge(graph, state)
            value, slopes = nnx.value_and_grad(loss)(model, batch)
            optimizer.update(model, slopes)
            return nnx.state((model, optimizer)), value

        return step

    return Program(make, (state,))


def nnx_mlp_class() -> tuple[Any, Any]:
    nnx, _, linear = nnx_layers()

    class Net(nnx.Module):
        def __init__(self):
            self.up = linear(WIDTH, 32, None, "model")
            self.down = linear(32, WIDTH, "model", None)

        def __call__(self, x):
            return self.down(nnx.relu(self.up(x, out_sharding=P("data", "model"))), out_sharding=P("data", None))

    return nnx, Net()


def squares(net: Any, x: jax.Array) -> jax.Array:
    return ((net(x) - x) ** 2).mean()


def nnx_mlp() -> Program:
    return with_nnx(nnx_mlp_class()[1], squares)


def nnx_modules_as_trees() -> Program:
    """Modules are trees of arrays to jit: they go in, are changed there, and come out."""
    nnx, model = nnx_mlp_class()
    optax = pytest.importorskip("optax")
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    def make(jit: Jit) -> Callable[..., Any]:
        @jit
        def step(model, optimizer, x):
            value, slopes = nnx.value_and_grad(squares)(model, x)
            optimizer.update(model, slopes)
            return model, optimizer, value

        return step

    return Program(make, (model, optimizer))


def nnx_transformer() -> Program:
    nnx, rngs, linear = nnx_layers()

    class Block(nnx.Module):
        def __init__(self):
            self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
            self.qkv = nnx.List([linear(WIDTH, WIDTH, None, "model") for _ in range(3)])
            self.out, self.up = linear(WIDTH, WIDTH, "model", None), linear(WIDTH, 32, None, "model")
            self.down, self.dropout = linear(32, WIDTH, "model", None), nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, x):
            split, whole = P("data", None, "model"), P("data", None, None)
            h = self.norms[0](x)
            heads = (layer(h, out_sharding=split).reshape(*x.shape[:2], HEADS, 4) for layer in self.qkv)
            x += self.out(attended(*heads).reshape(x.shape), out_sharding=whole)
            h = nnx.gelu(self.up(self.norms[1](x), out_sharding=split))
            return x + self.dropout(self.down(h, out_sharding=whole))

    class Net(nnx.Module):
        def __init__(self):
            self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
            self.blocks = nnx.List([Block() for _ in range(2)])

        def __call__(self, tokens):
            x = self.embed(tokens, out_sharding=P("data"))
            for block in self.blocks:
                x = block(x)
            return self.embed.attend(x)

    return with_nnx(Net(), lambda net, tokens: next_tokens(net(tokens[:, :-1]), tokens))


PROGRAMS: dict[str, tuple[Callable[[], Program], Callable[[], jax.Array]]] = {
    "optax, MLP": (optax_mlp, rows),
    "optax, transformer": (optax_transformer, tokens),
    "equinox, MLP": (equinox_mlp, rows),
    "equinox, transformer": (equinox_transformer, tokens),
    "nnx, MLP": (nnx_mlp, rows),
    "nnx, modules as trees": (nnx_modules_as_trees, rows),
    "nnx, transformer": (nnx_transformer, tokens),
}


def trained(jit: Jit, program: Program, batch: jax.Array) -> tuple[Any, float]:
    """What three steps make of the first state; and the bytes that a step sends."""
    run, state = program.step(jit), program.state
    sent = totals(collectives_in_hlo(run.lower(*state, batch).compile().as_text())).wire_bytes  # type: ignore[attr-defined]
    for _ in range(3):
        *state, value = run(*state, batch)
    return jax.tree.map(jnp.copy, (state, value)), sent


@pytest.mark.dear
@pytest.mark.parametrize("name", PROGRAMS)
def test_training_is_jits_with_no_more_bytes(name: str) -> None:
    make, batch = PROGRAMS[name]
    with jax.set_mesh(MESH):
        program = make()
        (found, sent), (wanted, jits) = (trained(jit, program, batch()) for jit in (sdy.partition, jax.jit))
    assert 0 < sent <= jits + 8  # the loss, a number, may be summed over more devices, which share the work
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for own, other in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        assert str(jax.typeof(own)) == str(jax.typeof(other)) and own.sharding == other.sharding
        if not jnp.issubdtype(own.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(own, other, rtol=2e-3, atol=2e-5)
