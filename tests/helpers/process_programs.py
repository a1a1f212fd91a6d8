"""What each of several processes runs, and what starts them.

    process_programs.py NAME INDEX COUNT PORT FOLDER

Each has four virtual CPU devices, or as many as are asked for; they exchange data by gloo.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cluster_step import CLUSTER, ClusterStep
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from places import ROOT

import sdy_jax as sdy
from sdy_jax.calls import planned_call
from sdy_jax.plan.digests import digest

HEARTBEAT = 4
"""Seconds after which a process that is gone is missed."""


def start(name: str, count: int, folder: Path, devices: int = 4, **environment: str) -> list[subprocess.Popen[str]]:
    """All processes of a program, of so many devices each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", f"device_count={devices}")
    own = {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, **own, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment}
    command = [sys.executable, __file__, name]
    return [
        subprocess.Popen(
            [*command, str(index), str(count), port, str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(count)
    ]


def ended(processes: Sequence[subprocess.Popen[str]], timeout: float = 100) -> list[tuple[int, str]]:
    """The exit status and the output of each; none is left behind."""
    end = time.monotonic() + timeout
    try:
        outputs = [process.communicate(timeout=max(0.1, end - time.monotonic()))[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


def reports(
    name: str, count: int, folder: Path, devices: int = 4, timeout: float = 100, **environment: str
) -> list[dict[str, Any]]:
    """What each process of a program reports."""
    found = ended(start(name, count, folder, devices, **environment), timeout)
    assert [status for status, _ in found] == [0] * count, "\n".join(output for _, output in found)
    return [json.loads((folder / f"{name}.{index}").read_text()) for index in range(count)]


# What the processes run.

STEPS = 6


def mesh_of(devices: Sequence[Any]) -> Mesh:
    return Mesh(np.array(devices).reshape(2, -1), ("data", "model"))


def placed(mesh: Mesh, spec: P, values: np.ndarray) -> jax.Array:
    """An array of which each process has its part."""
    return jax.make_array_from_callback(values.shape, NamedSharding(mesh, spec), lambda index: values[index])


SPECS = {"up": P(None, "model"), "down": P("model"), "moment": P(None, "model")}


def initial() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    up, down = random.normal(size=(8, 16)) / 4, random.normal(size=(16, 4)) / 4
    found = {"up": up, "down": down, "moment": np.zeros((8, 16))}
    return {name: value.astype(np.float32) for name, value in found.items()}


def batch(step: int) -> np.ndarray:
    return np.random.default_rng(step).normal(size=(16, 8)).astype(np.float32)


def loss(state: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
    y = jnp.tanh(x @ state["up"]) @ state["down"]
    return jnp.mean((y - x[:, :4]) ** 2)


def step(state: Mapping[str, jax.Array], x: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    value, slopes = jax.value_and_grad(loss)(state, x)
    moment = 0.9 * state["moment"] + slopes["up"]
    return {"up": state["up"] - 0.1 * moment, "down": state["down"] - 0.1 * slopes["down"], "moment": moment}, value


def trained(
    mesh: Mesh,
    state: Mapping[str, np.ndarray],
    first: int = 0,
    after: Callable[[int, dict[str, jax.Array]], None] = lambda number, state: None,
) -> list[float]:
    """The losses of the steps from `first` on."""
    run = sdy.partition(step, mesh=mesh, in_shardings=(SPECS, P("data")), out_shardings=(SPECS, P()))
    arrays = {name: placed(mesh, SPECS[name], value) for name, value in state.items()}
    losses = []
    for number in range(first, STEPS):
        arrays, value = run(arrays, placed(mesh, P("data"), batch(number)))
        losses.append(float(value))
        after(number, arrays)
    return losses


def train(folder: Path) -> dict[str, Any]:
    """Trains on all devices, and meanwhile has derivatives and programs of one process alone."""
    mesh, me = mesh_of(jax.devices()), jax.process_index()
    x, state = batch(0), {name: placed(mesh, SPECS[name], value) for name, value in initial().items()}
    partitioned = sdy.partition(loss, mesh=mesh, in_shardings=(SPECS, P("data")))
    arguments = state, placed(mesh, P("data"), x)
    slopes = jax.grad(partitioned)(*arguments)
    jitted = jax.jit(lambda state, x: 2 * partitioned(state, x))(*arguments)
    own = None
    if me == jax.process_count() - 1:  # the others are not waited for
        alone = sdy.partition(loss, mesh=mesh_of(jax.local_devices()), in_shardings=(SPECS, P("data")))
        own = float(alone(initial(), x))
    if me == 0:  # nor for what is only looked at
        assert (
            "psum" in str(partitioned.trace(*arguments).jaxpr) and jax.eval_shape(partitioned, *arguments).shape == ()
        )
        assert partitioned.lower(*arguments).as_text()
    plan = partitioned.plan(*arguments)
    whole = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))(slopes["up"])
    return {
        "losses": trained(mesh, initial()),
        "slopes": np.asarray(whole).tolist(),
        "doubled": float(jitted),
        "compiled": float(partitioned.lower(*arguments).compile()(*arguments)),
        "alone": own,
        "fingerprint": plan.fingerprint(),
        "lowered": digest([partitioned.lower(*arguments).as_text()]),
    }


def train_apart(folder: Path) -> dict[str, Any]:
    """As `train`, by the cache in the process's own one of the folders `KEPT`; and how many programs it emits.

    Of fewer folders than processes the last is that of the others.
    """
    kept = os.environ["KEPT"].split(os.pathsep)
    os.environ["SDY_JAX_CACHE_DIR"] = kept[min(jax.process_index(), len(kept) - 1)]
    emitted, emit = [], planned_call.local_function

    def noting(*args: Any) -> Any:
        emitted.append(args)
        return emit(*args)

    planned_call.local_function = noting
    return {**train(folder), "emitted": len(emitted)}


def refused(run: Callable[[], Any]) -> tuple[str, float]:
    """The error, and after how many seconds."""
    start = time.monotonic()
    try:
        jax.block_until_ready(run())
    except sdy.ProcessError as error:
        return str(error), time.monotonic() - start
    return "", time.monotonic() - start


def differ(folder: Path) -> dict[str, Any]:
    """The last process runs something else, or does not come."""
    mesh, is_odd = mesh_of(jax.devices()), jax.process_index() == jax.process_count() - 1
    x = placed(mesh, P("data"), batch(0))

    def partitioned(fun: Callable[..., Any]) -> Callable[..., Any]:
        fun.__name__ = "program"
        return sdy.partition(fun, mesh=mesh, in_shardings=P("data"), out_shardings=P())

    sums, largest = partitioned(lambda x: x.sum()), partitioned(lambda x: x.max())
    twice = partitioned(lambda x: (2 * x).sum())
    absent = partitioned(lambda x: (x * x).sum())
    lowered = (twice if is_odd else sums).lower(x)
    found = {
        "collectives": refused(lambda: (largest if is_odd else sums)(x)),
        "ops": refused(lambda: (twice if is_odd else sums)(x)),
        "jitted": refused(lambda: jax.jit(lambda x: (largest if is_odd else sums)(x))(x)),
        "compiled": refused(lowered.compile),
        "missing": ("", 0.0) if is_odd else refused(lambda: absent(x)),
    }
    gone_on = folder / f"gone on.{jax.process_index()}"
    gone_on.touch()
    while len(list(folder.glob("gone on.*"))) < jax.process_count():
        time.sleep(0.01)
    return {**found, "then": float(sums(x))}


def die(folder: Path) -> dict[str, Any]:
    """Saves every step; after the third one the process `VICTIM` is killed."""

    def save(number: int, arrays: dict[str, jax.Array]) -> None:
        whole = jax.jit(lambda s: s, out_shardings=NamedSharding(mesh, P()))(arrays)
        values = {name: np.asarray(value) for name, value in whole.items()}
        if jax.process_index() == 0:
            np.savez(folder / "new.npz", step=number + 1, **values)
            os.replace(folder / "new.npz", folder / "checkpoint.npz")
        if number == 2 and jax.process_index() == int(os.environ["VICTIM"]):
            time.sleep(0.2)  # the first process has saved
            os.kill(os.getpid(), signal.SIGKILL)

    mesh = mesh_of(jax.devices())
    return {"losses": trained(mesh, initial(), after=save)}


def fail(folder: Path) -> dict[str, Any]:
    """An error ends the process `VICTIM` before it comes to the program."""
    mesh, started = mesh_of(jax.devices()), time.monotonic()
    total = sdy.partition(lambda x: x.sum(), mesh=mesh, in_shardings=P("data"), out_shardings=P())
    if jax.process_index() == int(os.environ["VICTIM"]):
        raise KeyError("the batch has no tokens")
    message, _ = refused(lambda: total(placed(mesh, P("data"), batch(0))))
    (folder / f"fail.{jax.process_index()}").write_text(json.dumps([message, time.monotonic() - started]))
    while jax.process_index() == 0 and len(list(folder.glob("fail.*"))) < jax.process_count() - 1:
        time.sleep(0.1)  # it serves the others, which end with it
        if time.monotonic() - started > 30:
            break
    os._exit(0)  # jax would wait for all processes


def resume(folder: Path) -> dict[str, Any]:
    """Goes on from the last checkpoint, on the devices that there are now."""
    with np.load(folder / "checkpoint.npz") as saved:
        state = {name: saved[name] for name in SPECS}
        first = int(saved["step"])
    return {"first": first, "losses": trained(mesh_of(jax.devices()), state, first)}


# A cluster: a model with experts on four mesh axes, over all devices of all processes.


def cluster(folder: Path) -> dict[str, Any]:
    """Trains over all devices of all processes."""
    step = ClusterStep.on(CLUSTER)
    return {"losses": step.losses(), "fingerprint": step.fingerprint()}


def agree(folder: Path) -> dict[str, Any]:
    """Plans for all devices of all processes, and runs nothing."""
    return {"fingerprint": ClusterStep.on(CLUSTER).fingerprint()}


def main() -> None:
    name, index, count, port, folder = sys.argv[1:]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"127.0.0.1:{port}", int(count), int(index), heartbeat_timeout_seconds=HEARTBEAT, initialization_timeout=60
    )
    programs = {program.__name__: program for program in (train_apart, differ, die, fail, resume, cluster, agree)}
    report = programs[name](Path(folder))
    (Path(folder) / f"{name}.{index}").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
