"""A graph network: edges split over eight devices, messages along them summed at the nodes.

    python examples/graph_network.py

Each device has an eighth of the edges and looks up the features of their ends; what it sums at the nodes is its part of
a sum over all edges. The plan reduces these partial sums once per round, updates an eighth of the nodes on each device,
which propagation alone would not, and gathers the nodes for the next round. No edge and no message moves.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy

jax.config.update("jax_platforms", "cpu")  # eight virtual devices; leave these two lines out on eight GPUs or TPUs
jax.config.update("jax_num_cpu_devices", 8)

NODES, EDGES, WIDTH, ROUNDS = 200, 4096, 32, 3


def init(key):
    message, update = jax.random.split(key)
    return {
        "message": jax.random.normal(message, (ROUNDS, 2 * WIDTH, WIDTH)) / (2 * WIDTH) ** 0.5,
        "update": jax.random.normal(update, (ROUNDS, 2 * WIDTH, WIDTH)) / (2 * WIDTH) ** 0.5,
    }


def network(weights, nodes, senders, receivers):
    """Rounds of messages from senders to receivers: [nodes, width] to the same shape."""
    degree = jax.ops.segment_sum(jnp.ones(EDGES), receivers, NODES)
    for message, update in zip(weights["message"], weights["update"], strict=True):
        ends = jnp.concatenate([nodes[senders], nodes[receivers]], axis=-1)
        sums = jax.ops.segment_sum(jax.nn.relu(ends @ message), receivers, NODES)
        mean = sums / jnp.maximum(degree, 1)[:, None]
        nodes = nodes + jnp.tanh(jnp.concatenate([nodes, mean], axis=-1) @ update)
    return nodes


mesh = jax.make_mesh((8,), ("edges",), axis_types=(AxisType.Auto,))
partitioned = sdy.partition(network, mesh=mesh, in_shardings=(P(), P(), P("edges"), P("edges")), out_shardings=P())
rng = np.random.default_rng(0)
senders, receivers = rng.integers(NODES, size=(2, EDGES)).astype(np.int32)
weights, nodes = init(jax.random.key(0)), jax.random.normal(jax.random.key(1), (NODES, WIDTH))
plan = partitioned.plan(weights, nodes, senders, receivers)
print(plan)
expected = network(weights, nodes, senders, receivers)
np.testing.assert_allclose(partitioned(weights, nodes, senders, receivers), expected, atol=1e-4)

sent, all_nodes, messages = plan.wire_bytes / ROUNDS / 1024, nodes.nbytes / 1024, EDGES * WIDTH * 4 / 1024
print(f"\na round of messages sends {sent:.0f} KiB per device, 2 x 7/8 of all {all_nodes:.0f} KiB of nodes;")
print(f"its {messages:.0f} KiB of messages stay on the devices that made them")
