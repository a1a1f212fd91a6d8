"""Trains a byte-level transformer on English text, partitioned by sdy_jax, and checks it against `jax.jit`.

    python examples/train_lm.py                  # 2 x 4 mesh: batch over `data`, heads and MLP over `model`
    python examples/train_lm.py --mesh data=8    # data parallelism only
    python examples/train_lm.py --fsdp           # weights and optimiser state sharded over `data` too

The model knows nothing of devices: `train_step` is an ordinary JAX function. All that is said about the mesh is in
`weight_specs`, `shardings` and `Job.train_step`. Without accelerators the mesh is made of virtual CPU devices; to use
real ones, set JAX_PLATFORMS (`cuda`, `tpu`) and give a mesh of their number.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy

VOCABULARY = 256  # one token per byte
COMPARED_STEPS = 10
TIMED_STEPS = 16
Tree = Any
Step = Callable[[Tree, jax.Array], tuple[Tree, jax.Array]]


@dataclass(frozen=True)
class Config:
    """Sizes of the model and of its training."""

    layers: int = 4
    d_model: int = 128
    heads: int = 8
    sequence: int = 128
    batch: int = 8
    learning_rate: float = 3e-3

    @property
    def optimizer(self) -> optax.GradientTransformation:
        schedule = optax.warmup_cosine_decay_schedule(0.0, self.learning_rate, warmup_steps=10, decay_steps=1000)
        return optax.adamw(schedule, weight_decay=0.01)


# --- the model: pure functions of a dictionary of weights ------------------------------------------------------------


def init_params(config: Config, key: jax.Array) -> Tree:
    """The weights: embeddings [vocabulary, d], positions [sequence, d], and a list of layers."""
    d, h, hidden = config.d_model, config.heads, 4 * config.d_model
    embed_key, position_key, *layer_keys = jax.random.split(key, 2 + config.layers)

    def normal(key: jax.Array, fan_in: int, *shape: int) -> jax.Array:
        return jax.random.normal(key, shape) / math.sqrt(fan_in)

    def layer(key: jax.Array) -> Tree:
        qkv, out, up, down = jax.random.split(key, 4)
        return {
            "attention_norm": init_norm(d),
            "qkv": normal(qkv, d, d, 3, h, d // h),
            "out": normal(out, d * config.layers, h, d // h, d),
            "mlp_norm": init_norm(d),
            "up": normal(up, d, d, hidden),
            "up_bias": jnp.zeros(hidden),
            "down": normal(down, hidden * config.layers, hidden, d),
            "down_bias": jnp.zeros(d),
        }

    return {
        "embed": normal(embed_key, d, VOCABULARY, d),
        "position": normal(position_key, d, config.sequence, d),
        "layers": [layer(key) for key in layer_keys],
        "final_norm": init_norm(d),
    }


def init_norm(d: int) -> Tree:
    return {"scale": jnp.ones(d), "bias": jnp.zeros(d)}


def layer_norm(weights: Tree, x: jax.Array) -> jax.Array:
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * weights["scale"] + weights["bias"]


def attention(weights: Tree, x: jax.Array) -> jax.Array:
    """Causal self-attention: [batch, sequence, d] to the same shape."""
    q, k, v = jnp.moveaxis(jnp.einsum("bsd,dnhk->bsnhk", x, weights["qkv"]), 2, 0)
    scores = jnp.einsum("bqhk,bshk->bhqs", q, k) / math.sqrt(q.shape[-1])
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    probabilities = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
    return jnp.einsum("bhqs,bshk,hkd->bqd", probabilities, v, weights["out"])


def mlp(weights: Tree, x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x @ weights["up"] + weights["up_bias"]) @ weights["down"] + weights["down_bias"]


Constrain = Callable[[jax.Array], jax.Array]
"""Says how activations [batch, sequence, d] are sharded; the identity where nothing has to be said."""


def forward(params: Tree, tokens: jax.Array, constrain: Constrain) -> jax.Array:
    """Logits [batch, sequence, vocabulary] of the byte after each of `tokens` [batch, sequence]."""
    x = constrain(params["embed"][tokens] + params["position"])
    for layer in params["layers"]:
        x = constrain(x + attention(layer, layer_norm(layer["attention_norm"], x)))
        x = constrain(x + mlp(layer, layer_norm(layer["mlp_norm"], x)))
    return layer_norm(params["final_norm"], x) @ params["embed"].T


def loss_fn(params: Tree, window: jax.Array, constrain: Constrain) -> jax.Array:
    """Mean cross-entropy, in nats per byte, of predicting `window[:, 1:]`; `window` is [batch, sequence + 1]."""
    logits = forward(params, window[:, :-1], constrain)
    return optax.softmax_cross_entropy_with_integer_labels(logits, window[:, 1:]).mean()


def init_state(config: Config, key: jax.Array) -> Tree:
    params = init_params(config, key)
    return {"params": params, "optimizer": config.optimizer.init(params)}


def make_train_step(config: Config, constrain: Constrain = lambda x: x) -> Step:
    """The function to partition: `(state, window) -> (state, loss)`."""
    optimizer = config.optimizer

    def train_step(state: Tree, window: jax.Array) -> tuple[Tree, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_fn)(state["params"], window, constrain)
        updates, optimizer_state = optimizer.update(gradients, state["optimizer"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer_state}, loss

    return train_step


# --- what is said about the mesh -------------------------------------------------------------------------------------


def weight_specs(config: Config, fsdp: bool) -> Tree:
    """How each weight is sharded: heads, MLP width and vocabulary over `model`; with `fsdp`, another
    dimension over `data`: such that no activation inherits `data` from a weight, as the batch has it."""
    data = "data" if fsdp else None
    norm = {"scale": P(), "bias": P()}
    layer = {
        "attention_norm": norm,
        "qkv": P(data, None, "model", None),
        "out": P("model", None, data),
        "mlp_norm": norm,
        "up": P(data, "model"),
        "up_bias": P("model"),
        "down": P("model", data),
        "down_bias": P(),
    }
    return {
        "embed": P(("model", "data") if fsdp else "model"),
        "position": P(data),
        "layers": [layer] * config.layers,
        "final_norm": norm,
    }


def shardings(config: Config, mesh: Mesh, fsdp: bool = False) -> tuple[Tree, NamedSharding]:
    """The shardings of `(state, window)`: optimiser state goes with its weights, the batch over `data`."""

    def on_mesh(spec: P) -> NamedSharding:
        entries = (entry if isinstance(entry, tuple) else (entry,) for entry in spec)
        return NamedSharding(mesh, P(*(tuple(a for a in axes if a in mesh.axis_names) or None for axes in entries)))

    params = jax.tree.map(on_mesh, weight_specs(config, fsdp), is_leaf=lambda x: isinstance(x, P))
    state = jax.eval_shape(lambda: init_state(config, jax.random.key(0)))
    optimizer = optax.tree.map_params(
        config.optimizer,
        lambda _, sharding: sharding,
        state["optimizer"],
        params,
        transform_non_params=lambda _: on_mesh(P()),
    )
    return {"params": params, "optimizer": optimizer}, on_mesh(P("data", None))


def parse_mesh(text: str) -> Mesh:
    """`data=2,model=4` to a mesh over the first devices."""
    try:
        axes = {name: int(size) for name, size in (part.split("=") for part in text.split(","))}
    except ValueError:
        raise SystemExit(f"--mesh {text}: give axes and sizes, as in data=2,model=4") from None
    needed, devices = math.prod(axes.values()), jax.devices()
    if len(devices) < needed:
        raise SystemExit(f"--mesh {text} needs {needed} devices, but there are {len(devices)} ({devices[0].platform})")
    return Mesh(np.array(devices[:needed]).reshape(tuple(axes.values())), tuple(axes))


# --- data ------------------------------------------------------------------------------------------------------------


def windows(config: Config, seed: int) -> Iterator[np.ndarray]:
    """Random windows [batch, sequence + 1] of Python's own reference text, which every CPython carries."""
    text = np.frombuffer("\n".join(topics[name] for name in sorted(topics)).encode(), np.uint8)
    rng = np.random.default_rng(seed)
    offsets = np.arange(config.sequence + 1)
    while True:
        starts = rng.integers(len(text) - config.sequence, size=(config.batch, 1))
        yield text[starts + offsets].astype(np.int32)


# --- the job: one train step, ready to be run by either side ----------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A train step, its mesh, and where its state and its data live."""

    config: Config
    mesh: Mesh
    fsdp: bool
    seed: int

    @property
    def keywords(self) -> dict[str, Any]:
        """What `sdy.partition` and `jax.jit` are both told."""
        state, window = shardings(self.config, self.mesh, self.fsdp)
        loss = NamedSharding(self.mesh, P())
        return {"in_shardings": (state, window), "out_shardings": (state, loss), "donate_argnums": 0}

    @property
    def train_step(self) -> Step:
        """The step, told that activations are split like the batch: with `--fsdp` the weights would say otherwise."""
        batch = NamedSharding(self.mesh, P("data" if "data" in self.mesh.axis_names else None))
        return make_train_step(self.config, lambda x: jax.lax.with_sharding_constraint(x, batch))

    def partitioned(self) -> sdy.PartitionedFunction:
        return sdy.partition(mesh=self.mesh, **self.keywords)(self.train_step)

    def jitted(self) -> Any:
        return jax.jit(self.train_step, **self.keywords)

    def initial_state(self) -> Tree:
        state, _ = shardings(self.config, self.mesh, self.fsdp)
        init = jax.jit(lambda key: init_state(self.config, key), out_shardings=state)
        return init(jax.random.key(self.seed))

    def batches(self, count: int) -> Iterator[jax.Array]:
        _, sharding = shardings(self.config, self.mesh, self.fsdp)
        for window in itertools.islice(windows(self.config, self.seed), count):
            yield jax.device_put(window, sharding)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = Config()
    parser.add_argument("--mesh", default="data=2,model=4", help="axes and sizes (default: %(default)s)")
    parser.add_argument("--fsdp", action="store_true", help="shard weights and optimiser state over `data` too")
    parser.add_argument("--layers", type=int, default=default.layers)
    parser.add_argument("--d-model", type=int, default=default.d_model)
    parser.add_argument("--batch", type=int, default=default.batch)
    parser.add_argument("--seed", type=int, default=0)


def job_of(args: argparse.Namespace) -> Job:
    config, mesh = Config(layers=args.layers, d_model=args.d_model, batch=args.batch), parse_mesh(args.mesh)
    for what, size, divisor in (
        ("--batch", config.batch, mesh.shape.get("data", 1)),
        ("number of heads", config.heads, mesh.shape.get("model", 1)),
        ("--d-model", config.d_model, config.heads),
    ):
        if size % divisor:
            raise SystemExit(f"{what} {size} must be a multiple of {divisor} (mesh {args.mesh}, {config.heads} heads)")
    return Job(config, mesh, args.fsdp, args.seed)


# --- comparing two steps ---------------------------------------------------------------------------------------------


def largest_difference(ours: Tree, reference: Tree) -> float:
    """The largest |ours - reference| of any leaf, relative to the largest |reference| of that leaf; NaN if any is."""

    def leaf(a: jax.Array, b: jax.Array) -> float:
        x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
        return float(np.abs(x - y).max() / max(np.abs(y).max(), 1e-30))

    return float(np.max(jax.tree.leaves(jax.tree.map(leaf, ours, reference))))


def timed(step: Step, state: Tree, window: jax.Array) -> tuple[Tree, float]:
    start = time.perf_counter()
    state, _ = jax.block_until_ready(step(state, window))
    return state, time.perf_counter() - start


def paired_times(ours: Step, reference: Step, states: list[Tree], batches: Iterable[jax.Array]) -> np.ndarray:
    """Seconds [batches, 2] of both steps on the same batches, taking turns at going first. The states are consumed."""
    steps, states, rows = (ours, reference), list(states), []
    for number, window in enumerate(batches):
        row = [0.0, 0.0]
        for side in (0, 1) if number % 2 else (1, 0):
            states[side], row[side] = timed(steps[side], states[side], window)
        rows.append(row)
    return np.array(rows)


# --- the program -----------------------------------------------------------------------------------------------------


@contextmanager
def progress(steps: int) -> Iterator[Callable[[float], None]]:
    """A progress bar (where rich is installed) told each loss; the first, every tenth and the last are printed."""
    losses: list[float] = []

    def line(loss: float) -> str:
        losses.append(loss)
        return f"step {len(losses):4d}  loss {loss:.3f}" if len(losses) in (1, steps) or len(losses) % 10 == 0 else ""

    try:
        from rich.progress import Progress
    except ImportError:
        yield lambda loss: print(text, flush=True) if (text := line(loss)) else None
        return
    with Progress() as bar:
        task = bar.add_task("training", total=steps)

        def advance(loss: float) -> None:
            bar.advance(task)
            if text := line(loss):
                bar.console.print(text, highlight=False)

        yield advance


def say(text: str) -> None:
    """What comes next, before it takes its time."""
    print(text, flush=True)


def run(job: Job, steps: int) -> None:
    ours, reference = job.partitioned(), job.jitted()
    say("making the initial weights and optimiser state, once for each side")
    state, reference_state = job.initial_state(), job.initial_state()
    say("planning the train step")
    say(ours.plan(state, next(job.batches(1))).summary())
    say("compiling it, and with jax.jit to compare with; then training")

    differences: list[tuple[float, ...]] = []
    with progress(steps) as advance:
        for number, window in enumerate(job.batches(steps)):
            state, loss = ours(state, window)
            if number < COMPARED_STEPS:
                reference_state, reference_loss = reference(reference_state, window)
                pairs = ((loss, reference_loss), (state, reference_state))
                differences.append(tuple(largest_difference(*pair) for pair in pairs))
            advance(float(loss))
    of_loss, of_state = (f"{x:.1e}" if x else "none" for x in np.max(differences, axis=0))
    print(
        f"largest relative difference from jax.jit over the first {len(differences)} steps: "
        f"loss {of_loss}, weights and optimiser state {of_state}"
    )
    say(f"timing {TIMED_STEPS} more steps of each")
    times = paired_times(ours, reference, [state, reference_state], job.batches(TIMED_STEPS))
    seconds, ratio = np.median(times, axis=0), np.median(times[:, 0] / times[:, 1])
    print(f"step time: {seconds[0] * 1e3:.0f} ms, with jax.jit {seconds[1] * 1e3:.0f} ms; ratio {ratio:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a byte-level transformer, partitioned by sdy_jax.")
    add_arguments(parser)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    if args.steps < 1:
        parser.error("--steps must be at least 1")
    run(job_of(args), args.steps)


if __name__ == "__main__":
    main()
