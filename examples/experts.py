"""A mixture of experts: eight experts on eight devices, tokens sent to the one that each of them chooses.

    python examples/experts.py

The layer is written with einsums, as in GShard: `dispatch` says which token goes to which place of which expert, and
each expert has room for `CAPACITY` tokens. Tokens lie over the axis on which the experts are; the plan moves them there
and back by all_to_all, and no weight of an expert moves.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy

jax.config.update("jax_platforms", "cpu")  # eight virtual devices; leave these two lines out on eight GPUs or TPUs
jax.config.update("jax_num_cpu_devices", 8)

TOKENS, WIDTH, EXPERTS = 512, 64, 8
CAPACITY = 16  # tokens of each group of 64 that one expert takes
SPECS = {"gate": P(), "up": P("expert"), "down": P("expert")}


def init(key):
    gate, up, down = jax.random.split(key, 3)
    return {
        "gate": jax.random.normal(gate, (WIDTH, EXPERTS)) / WIDTH**0.5,
        "up": jax.random.normal(up, (EXPERTS, WIDTH, 4 * WIDTH)) / WIDTH**0.5,
        "down": jax.random.normal(down, (EXPERTS, 4 * WIDTH, WIDTH)) / (4 * WIDTH) ** 0.5,
    }


def experts(weights, x):
    """[groups, tokens, width] to the same shape: each token by its best expert, those without a place unchanged."""
    gates = jax.nn.softmax(jnp.einsum("gtd,de->gte", x, weights["gate"]))
    chosen = jax.nn.one_hot(jnp.argmax(gates, axis=-1), EXPERTS)
    place = (jnp.cumsum(chosen, axis=1) - 1) * chosen  # the number of the token among those of its expert
    dispatch = jax.nn.one_hot(jnp.where(chosen > 0, place, -1), CAPACITY)  # [groups, tokens, experts, places]
    sent = jnp.einsum("gtec,gtd->egcd", dispatch, x)
    h = jax.nn.gelu(jnp.einsum("egcd,edf->egcf", sent, weights["up"]))
    back = jnp.einsum("egcf,efd->egcd", h, weights["down"])
    return x + jnp.einsum("gtec,egcd->gtd", dispatch * gates[..., None], back)


mesh = jax.make_mesh((8,), ("expert",), axis_types=(AxisType.Auto,))
partitioned = sdy.partition(
    experts,
    mesh=mesh,
    in_shardings=(SPECS, P("expert")),
    out_shardings=P("expert"),
    budget=sdy.Budget(forbid=("all_gather",)),  # a plan that gathers weights or tokens is an error
)
weights = init(jax.random.key(0))
x = jax.random.normal(jax.random.key(1), (8, TOKENS // 8, WIDTH))
plan = partitioned.plan(weights, x)
print(plan)
np.testing.assert_allclose(partitioned(weights, x), experts(weights, x), atol=1e-4)

moves = [collective for collective in plan.collectives if collective.wire_bytes]
room = EXPERTS * CAPACITY * WIDTH * 4  # of the places for tokens of one group
assert [collective.kind for collective in moves] == ["all_to_all"] * 2
sent = moves[0].wire_bytes
print(f"\ntokens go to their experts and back in {len(moves)} all_to_alls of {sent:.0f} bytes per device,")
print(f"7/8 of {room}; {weights['up'].nbytes + weights['down'].nbytes} bytes of experts stay where they are")
