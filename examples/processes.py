"""Several processes: two of four devices each, as on two hosts, train together.

    python examples/processes.py

This program starts two of itself and waits for them. Each process has half of the batch and calls the same partitioned
step on a mesh over the devices of both; gloo carries what they send. `data` is the axis over processes. Before the step
runs for the first time the processes compare their programs: what would hang or go wrong otherwise is an error that
names the line.
"""

import os
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy

PROCESSES, DEVICES = 2, 4
BATCH, WIDTH, STEPS = 32, 64, 5
SPECS = {"up": P(None, "model"), "down": P("model")}


def init():
    up, down = jax.random.split(jax.random.key(0))
    scale = WIDTH**-0.5
    return {
        "up": jax.random.normal(up, (WIDTH, 4 * WIDTH)) * scale,
        "down": jax.random.normal(down, (4 * WIDTH, WIDTH)) * scale / 2,
    }


def train_step(weights, x):
    def loss_fn(w):
        return jnp.mean((jax.nn.gelu(x @ w["up"]) @ w["down"] - x) ** 2)

    loss, gradients = jax.value_and_grad(loss_fn)(weights)
    return jax.tree.map(lambda w, g: w - g, weights, gradients), loss


def batch(step):
    return np.random.default_rng(step).normal(size=(BATCH, WIDTH)).astype(np.float32)


def train(address, process):
    """What each process does."""
    jax.distributed.initialize(address, PROCESSES, process)
    mesh = jax.make_mesh((PROCESSES, DEVICES), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    on_mesh = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    step = sdy.partition(train_step, mesh=mesh, in_shardings=(SPECS, P("data")), out_shardings=(SPECS, P()))
    weights = jax.jit(init, out_shardings=on_mesh)()
    losses = []
    for number in range(STEPS):
        rows = np.split(batch(number), PROCESSES)[process]  # a process reads its own part of the data
        x = jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), rows)
        weights, loss = step(weights, x)
        losses.append(float(loss))
    print(f"process {process} of {PROCESSES}, devices {[d.id for d in jax.local_devices()]}: losses", end=" ")
    print(*(f"{loss:.5f}" for loss in losses), flush=True)
    if process == 0:
        plan = step.plans[0].plan
        over_hosts = sum(c.wire_bytes for c in plan.collectives if "data" in str(c.axes))
        print(f"a step sends {plan.wire_bytes:.0f} bytes per device, {over_hosts:.0f} of them between processes")


def leave_stdout_to_prints():
    """What gloo itself writes to the standard output, in the midst of lines, goes to standard error."""
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)


def main():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    children = [
        subprocess.Popen([sys.executable, __file__, address, str(n)], stdout=subprocess.PIPE, text=True)
        for n in range(PROCESSES)
    ]
    said = [child.communicate(timeout=120)[0] for child in children]
    assert all(child.returncode == 0 for child in children), said
    print(*said, sep="", end="")
    weights, plain, expected = init(), jax.jit(train_step), []
    for number in range(STEPS):
        weights, loss = plain(weights, batch(number))
        expected.append(float(loss))
    for text in said:
        losses = text.splitlines()[0].partition("losses ")[2].split()
        np.testing.assert_allclose(np.array(losses, float), expected, rtol=1e-3)
    print(f"losses of both processes are those of one device: {', '.join(f'{loss:.5f}' for loss in expected)}")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    if len(sys.argv) > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        leave_stdout_to_prints()
        train(sys.argv[1], int(sys.argv[2]))
    else:
        main()
