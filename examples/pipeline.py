"""Trains the transformer of `train_lm.py` with its layers over the stages of a pipeline, on several meshes.

    python examples/pipeline.py                                   # the three meshes below, 20 steps each
    python examples/pipeline.py --mesh stage=8 --schedule zero_bubble

The model is ordinary JAX: embeddings, a stack of layers, and a head with the loss on the last stage. What is said about
the mesh is `specs`: layers over `stage`, the batch over `data`, heads and the width of MLPs over `model`, as far as the
mesh has these axes. Losses are those of one device, up to the order of sums.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Sequence

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import train_lm
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from train_lm import Config, Tree

import sdy_jax as sdy

MESHES = ("stage=1", "stage=4,data=2", "stage=2,data=2,model=2")
MICROBATCHES = 4


def init_state(config: Config) -> Tree:
    """Weights with the layers as one stack, and the optimizer's state."""
    params = train_lm.init_params(config, jax.random.key(0))
    params["layers"] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params["layers"])
    return {"params": params, "optimizer": config.optimizer.init(params)}


@jax.checkpoint
def layer(weights: Tree, x: jax.Array) -> jax.Array:
    x = x + train_lm.attention(weights, train_lm.layer_norm(weights["attention_norm"], x))
    return x + train_lm.mlp(weights, train_lm.layer_norm(weights["mlp_norm"], x))


def loss_fn(params: Tree, window: jax.Array, schedule: str) -> jax.Array:
    """Mean cross-entropy of predicting `window[:, 1:]`; `window` is [batch, sequence + 1]."""

    def head(x: jax.Array, following: jax.Array) -> jax.Array:
        logits = train_lm.layer_norm(params["final_norm"], x) @ params["embed"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, following).mean()

    x = params["embed"][window[:, :-1]] + params["position"]
    return sdy.pipeline(
        layer, params["layers"], x, loss=head, targets=window[:, 1:], microbatches=MICROBATCHES, schedule=schedule
    )


def specs(config: Config, mesh: Mesh) -> tuple[Tree, P]:
    """How weights and batch are split: as far as the mesh has the axes."""

    def on_mesh(*axes: str | None) -> P:
        return P(*(axis if axis in mesh.axis_names else None for axis in axes))

    split = train_lm.weight_specs(config, fsdp=False)
    is_spec = lambda x: isinstance(x, P)  # noqa: E731
    stacked = jax.tree.map(lambda spec: on_mesh("stage", *spec), split["layers"][0], is_leaf=is_spec)
    rest = jax.tree.map(lambda spec: on_mesh(*spec), {**split, "layers": []}, is_leaf=is_spec)
    return rest | {"layers": stacked}, on_mesh("data")


def losses(config: Config, mesh: Mesh, schedule: str, steps: int) -> list[float]:
    """The losses of a run; prints what a step sends."""
    state = init_state(config)
    params, batch = specs(config, mesh)
    layout = {"params": params, "optimizer": sdy.like(state["params"], params)}

    @sdy.partition(mesh=mesh, in_shardings=(layout, batch), out_shardings=(layout, P()))
    def train_step(state: Tree, window: jax.Array) -> tuple[Tree, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_fn)(state["params"], window, schedule)
        updates, optimizer = config.optimizer.update(gradients, state["optimizer"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer}, loss

    found = []
    for window in itertools.islice(train_lm.windows(config, seed=0), steps):
        state, loss = train_step(state, window)
        found.append(float(loss))
    print(f"{dict(mesh.shape)}: {train_step.plans[0].plan.summary()}")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mesh", action="append", help="axes and sizes, as in stage=4,data=2; may be repeated")
    parser.add_argument("--schedule", default="1f1b", help="gpipe, 1f1b, interleaved or zero_bubble")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(arguments)
    config = Config(layers=8)
    runs = [losses(config, train_lm.parse_mesh(m), options.schedule, options.steps) for m in options.mesh or MESHES]
    for step, row in enumerate(zip(*runs, strict=True), 1):
        print(f"step {step:4}  loss", *(f"{loss:.5f}" for loss in row))
    print(f"largest relative difference: {max(np.ptp(row) / row[0] for row in zip(*runs, strict=True)):.1e}")


if __name__ == "__main__":
    main()
