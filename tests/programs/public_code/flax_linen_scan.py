"""flax.linen: layers under `nn.scan` and `nn.remat`, with the gradient of a loss."""

import flax.linen as nn
import jax
import jax.numpy as jnp


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(4)(y, y)
        return x + nn.Dense(32)(nn.gelu(nn.Dense(64)(nn.LayerNorm()(x)))), None


class Layers(nn.Module):
    @nn.compact
    def __call__(self, x):
        block = nn.remat(Block, prevent_cse=False)
        x, _ = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)()(x, None)
        return nn.Dense(8)(x)


def main(placed, batched):
    layers, x = Layers(), batched(jax.random.normal(jax.random.key(0), (8, 16, 32)))
    variables = placed(jax.jit(layers.init)(jax.random.key(1), x))
    return jax.jit(jax.value_and_grad(lambda variables, x: jnp.mean(layers.apply(variables, x) ** 2)))(variables, x)
