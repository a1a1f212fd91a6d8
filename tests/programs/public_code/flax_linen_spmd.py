"""flax.linen as in its guide to several devices: boxed parameters, a sharded `TrainState`, constraints by mesh axes."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))


class DotReluDot(nn.Module):
    depth: int

    @nn.compact
    def __call__(self, x):
        kernel = nn.initializers.xavier_normal()
        y = nn.Dense(self.depth, kernel_init=nn.with_partitioning(kernel, (None, "model")), use_bias=False)(x)
        y = jax.lax.with_sharding_constraint(nn.relu(y), NamedSharding(mesh, P("data", "model")))
        w2 = self.param("w2", nn.with_partitioning(kernel, ("model", None)), (self.depth, x.shape[-1]))
        return jax.lax.with_sharding_constraint(y @ w2, NamedSharding(mesh, P("data", None))), None


class Layers(nn.Module):
    layers: int
    depth: int

    @nn.compact
    def __call__(self, x):
        stack = nn.scan(
            DotReluDot,
            length=self.layers,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            metadata_params={nn.PARTITION_NAME: None},
        )
        return stack(self.depth)(x)[0]


def init_fn(key, x, model, optimizer):
    return train_state.TrainState.create(apply_fn=model.apply, params=model.init(key, x), tx=optimizer)


def main(placed, batched):
    model, optimizer = Layers(2, 32), optax.sgd(0.1, momentum=0.9)
    x_sharding = NamedSharding(mesh, P("data", None))
    x = jax.device_put(jax.random.normal(jax.random.key(0), (8, 16)), x_sharding)
    shapes = jax.eval_shape(functools.partial(init_fn, model=model, optimizer=optimizer), jax.random.key(1), x)
    state_sharding = nn.get_sharding(shapes, mesh)
    init = jax.jit(
        init_fn,
        static_argnums=(2, 3),
        in_shardings=(NamedSharding(mesh, P()), x_sharding),
        out_shardings=state_sharding,
    )
    state = init(jax.random.key(1), x, model, optimizer)

    @functools.partial(jax.jit, in_shardings=(state_sharding, x_sharding), out_shardings=state_sharding)
    def train_step(state, x):
        gradients = jax.grad(lambda params: jnp.mean((model.apply(params, x) - x) ** 2))(state.params)
        return state.apply_gradients(grads=gradients)

    for _ in range(3):
        state = train_step(state, x)
    kernels = state.params["params"]["ScanDotReluDot_0"]
    assert kernels["w2"].value.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "model", None)), 3)
    return state.params, state.opt_state
