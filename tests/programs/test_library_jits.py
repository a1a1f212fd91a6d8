"""The jits of libraries themselves, `nnx.jit`, `eqx.filter_jit` and `haliax.named_jit`, made of `sdy.partition`.

Their modules are given a `jax` whose `jit` is `partition`; all else is as the libraries have it.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy

pytestmark = pytest.mark.public


class PartitioningJax(types.ModuleType):
    """jax with another `jit`, which counts the functions that it is given."""

    def __init__(self, mesh: jax.sharding.Mesh):
        super().__init__("jax")
        self.functions: list[Any] = []
        self._mesh = mesh

    def jit(self, fun: Any = None, **options: Any) -> Any:
        if fun is None:
            return partial(self.jit, **options)
        self.functions.append(sdy.partition(fun, mesh=self._mesh, **options))
        return self.functions[-1]

    def __getattr__(self, name: str) -> Any:
        return getattr(jax, name)


@contextmanager
def partitioning(library: str, mesh: jax.sharding.Mesh) -> Iterator[PartitioningJax]:
    """A library whose modules have that jax."""
    modules = [
        m for name, m in list(sys.modules.items()) if name.split(".")[0] == library and vars(m).get("jax") is jax
    ]
    other = PartitioningJax(mesh)
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setattr(module, "jax", other)
        yield other


def check(program: Callable[[Callable[[Any], Any]], Any], library: str, mesh: jax.sharding.Mesh) -> None:
    def batched(x: Any) -> Any:
        return jax.device_put(x, NamedSharding(mesh, P("data")))

    expected = program(batched)
    with partitioning(library, mesh) as other:
        ours = program(batched)
    assert any(function.plans for function in other.functions)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), ours, expected)


def test_nnx_jit_updates_modules_in_place(mesh: Any) -> None:
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self, rngs: Any):
            self.up, self.down = nnx.Linear(16, 32, use_bias=False, rngs=rngs), nnx.Linear(32, 4, rngs=rngs)
            self.norm, self.dropout = nnx.BatchNorm(32, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.down(self.dropout(nnx.relu(self.norm(self.up(x)))))

    def program(batched: Any) -> Any:
        model = Model(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

        @nnx.jit
        def train_step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
            loss, gradients = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
            optimizer.update(model, gradients)
            return loss

        x = batched(jax.random.normal(jax.random.key(0), (16, 16)))
        losses = [train_step(model, optimizer, x, x[:, :4]) for _ in range(3)]
        return losses, nnx.to_pure_dict(nnx.state(model, nnx.Param)), nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))

    check(program, "flax", mesh)


def test_filter_jit_takes_whole_modules(mesh: Any) -> None:
    eqx = pytest.importorskip("equinox")

    def program(batched: Any) -> Any:
        model = eqx.nn.MLP(8, 4, 32, 2, key=jax.random.key(0))
        optimizer = optax.sgd(0.1)

        @eqx.filter_jit
        def train_step(model: Any, state: Any, x: Any, y: Any) -> Any:
            loss, gradients = eqx.filter_value_and_grad(lambda m: jnp.mean((jax.vmap(m)(x) - y) ** 2))(model)
            updates, state = optimizer.update(gradients, state, model)
            return eqx.apply_updates(model, updates), state, loss

        x, state = (
            batched(jax.random.normal(jax.random.key(1), (16, 8))),
            optimizer.init(eqx.filter(model, eqx.is_array)),
        )
        for _ in range(3):
            model, state, loss = train_step(model, state, x, x[:, :4])
        compiled = eqx.filter_jit(lambda model, x: model(x)).lower(model, jnp.ones(8)).compile()
        return loss, jax.tree.leaves(eqx.filter(model, eqx.is_array)), compiled(model, jnp.ones(8))

    check(program, "equinox", mesh)


def test_named_jit_shards_by_axes(mesh: Any) -> None:
    hax = pytest.importorskip("haliax")
    batch, embed = hax.make_axes(batch=8, embed=16)

    def program(batched: Any) -> Any:
        total = hax.named_jit(lambda x: hax.sum(x * 2, axis=embed), axis_resources={"batch": "data"})
        with jax.set_mesh(mesh):
            return total(hax.random.normal(jax.random.key(0), (batch, embed))).array

    check(program, "haliax", mesh)


def test_checks_send_a_truth_value_and_operands_only_where_they_fail(mesh: Any) -> None:
    eqx = pytest.importorskip("equinox")

    def loss(x: jax.Array) -> jax.Array:
        def checked(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
            return eqx.error_if(jnp.tanh(carry), (carry > 9).any(), "too large"), None

        return (jax.lax.scan(checked, eqx.error_if(x, (x < 0).any(), "negative"), None, length=3)[0] ** 2).sum()

    x = jnp.ones((16, 8))
    step = sdy.partition(jax.grad(loss), mesh=mesh, in_shardings=P(("data", "model")))
    sent = [(record.branches, record.shape, record.wire_bytes) for record in step.plan(x).collectives]
    assert any(branches and wire for branches, _, wire in sent)
    assert all(branches or not shape for branches, shape, wire in sent if wire)
    np.testing.assert_allclose(step(x), jax.grad(loss)(x), rtol=1e-5)
