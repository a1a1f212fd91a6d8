"""flax.nnx as in its guide to several devices: a model made sharded, by the partition specs of its variables."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))


class DotReluDot(nnx.Module):
    def __init__(self, depth, rngs):
        def init(*names):
            return nnx.with_partitioning(nnx.initializers.lecun_normal(), names, eager_sharding=False)

        self.dot1 = nnx.Linear(depth, 4 * depth, kernel_init=init(None, "model"), use_bias=False, rngs=rngs)
        kernel = nnx.initializers.lecun_normal()(rngs.params(), (4 * depth, depth))
        self.w2 = nnx.Param(kernel, out_sharding=("model", None), eager_sharding=False)

    def __call__(self, x):
        y = nnx.relu(self.dot1(x))
        y = jax.lax.with_sharding_constraint(y, NamedSharding(mesh, P("data", "model")))
        return y @ self.w2[...]


def main(placed, batched):
    graph, shapes = nnx.split(nnx.eval_shape(lambda: DotReluDot(16, nnx.Rngs(0))))
    shardings = nnx.get_named_sharding(shapes, mesh)

    @jax.jit
    def create_sharded():
        state = nnx.state(DotReluDot(16, nnx.Rngs(0)))
        return jax.lax.with_sharding_constraint(state, nnx.get_named_sharding(state, mesh))

    state = create_sharded()

    @jax.jit
    def train_step(state, x):
        def loss_of(state):
            return jnp.mean((nnx.merge(graph, state)(x) - x) ** 2)

        loss, gradients = jax.value_and_grad(loss_of)(state)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradients), loss

    stated = jax.jit(
        lambda state, x: nnx.merge(graph, state)(x), in_shardings=(shardings, NamedSharding(mesh, P("data")))
    )
    x = batched(jax.random.normal(jax.random.key(0), (8, 16)))
    for _ in range(3):
        state, loss = train_step(state, x)
    assert jax.tree.leaves(state["w2"])[0].sharding.is_equivalent_to(NamedSharding(mesh, P("model", None)), 2)
    return loss, nnx.to_pure_dict(state), stated(jax.device_put(state, shardings), x)
