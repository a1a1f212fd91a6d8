"""Trains a byte-level transformer, stops, and goes on later on another mesh, by checkpoints of orbax.

    python examples/resume_elsewhere.py --mesh data=2,model=4 --steps 10    # trains ten steps, and saves
    python examples/resume_elsewhere.py --mesh data=8 --steps 20            # goes on with the eleventh

A checkpoint holds global arrays and nothing of a mesh. What is said of the mesh is said anew in each run, in `layout`:
weights by their paths and sizes (`sdy.tensor_parallel`, `sdy.fsdp`), the optimizer's state as its weights (`sdy.like`).
Each device then reads its own part of every array, and the losses are those of a run that was never stopped.

Needs orbax (`pip install orbax-checkpoint`). The model and its data are those of `train_lm.py`.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import orbax.checkpoint as ocp
import train_lm
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from train_lm import Config, Tree

import sdy_jax as sdy

CHECKPOINTS = Path("checkpoints")
EVERY = 5
"""Steps between two checkpoints."""


def layout(config: Config, mesh: Mesh) -> tuple[Tree, Tree]:
    """The types of the training state, and the shardings of its arrays on a mesh."""
    state = jax.eval_shape(lambda: train_lm.init_state(config, jax.random.key(0)))
    weights, specs = state["params"], P()
    if "model" in mesh.axis_names:
        patterns = {
            r"qkv$": P(None, None, "model"),
            r"/up$": P(None, "model"),
            r"/(up_bias|out|down)$|^embed$": P("model"),
        }
        specs = sdy.tensor_parallel(weights, patterns, mesh=mesh)
    if "data" in mesh.axis_names:
        specs = sdy.fsdp(weights, axis="data", specs=specs, mesh=mesh)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), sdy.like(weights, specs)(state))
    return state, shardings


def batch(config: Config, seed: int, step: int) -> np.ndarray:
    """The windows [batch, sequence + 1] of a step: the same in every run that comes to it."""
    return next(train_lm.windows(config, 1_000_003 * seed + step))


def initial(config: Config, mesh: Mesh, shardings: Tree, seed: int) -> Tree:
    """The state before the first step, each array made where it is used."""
    init = sdy.partition(lambda key: train_lm.init_state(config, key), mesh=mesh, out_shardings=shardings)
    return init(jax.random.key(seed))


def restored(checkpoints: ocp.CheckpointManager, state: Tree, shardings: Tree) -> Tree:
    """The state of the last checkpoint, each array sharded as it is used from here on."""
    wanted = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings)
    return checkpoints.restore(checkpoints.latest_step(), args=ocp.args.StandardRestore(wanted))


def run(config: Config, mesh: Mesh, steps: int, folder: Path, seed: int = 0) -> list[float]:
    """Trains up to `steps` steps in all, from the last checkpoint in `folder`, if any; the losses of this run."""
    types, shardings = layout(config, mesh)
    windows = NamedSharding(mesh, P("data" if "data" in mesh.axis_names else None))
    step = sdy.partition(
        train_lm.make_train_step(config),
        mesh=mesh,
        in_shardings=(shardings, windows),
        out_shardings=(shardings, NamedSharding(mesh, P())),
        donate_argnums=0,
    )
    losses: list[float] = []
    with ocp.CheckpointManager(folder.absolute()) as checkpoints:
        done = checkpoints.latest_step() or 0
        state = restored(checkpoints, types, shardings) if done else initial(config, mesh, shardings, seed)
        print(f"{f'resuming after step {done}' if done else 'starting'} on {dict(mesh.shape)}", flush=True)
        for number in range(done + 1, steps + 1):
            state, loss = step(state, jax.device_put(batch(config, seed, number), windows))
            losses.append(float(loss))
            print(f"step {number:4d}  loss {losses[-1]:.4f}", flush=True)
            if number % EVERY == 0 or number == steps:
                checkpoints.save(number, args=ocp.args.StandardSave(state))
                checkpoints.wait_until_finished()  # the next step takes the arrays' memory
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a byte-level transformer, and resumes on any mesh.")
    train_lm.add_arguments(parser)
    parser.add_argument("--steps", type=int, default=10, help="steps in all, those of earlier runs included")
    parser.add_argument("--checkpoints", type=Path, default=CHECKPOINTS, help="a folder (default: %(default)s)")
    args = parser.parse_args()
    job = train_lm.job_of(args)
    run(job.config, job.mesh, args.steps, args.checkpoints, args.seed)


if __name__ == "__main__":
    main()
