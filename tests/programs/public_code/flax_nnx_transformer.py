"""A causal transformer made of `flax.nnx` modules, trained for a few steps in nnx's functional style."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx


class Block(nnx.Module):
    def __init__(self, features, heads, rngs):
        self.attention_norm = nnx.LayerNorm(features, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, features, decode=False, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(features, rngs=rngs)
        self.up = nnx.Linear(features, 4 * features, rngs=rngs)
        self.down = nnx.Linear(4 * features, features, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.attention(self.attention_norm(x), mask=mask)
        return x + self.dropout(self.down(nnx.gelu(self.up(self.mlp_norm(x)))))


class Transformer(nnx.Module):
    def __init__(self, vocabulary, features, heads, layers, rngs):
        self.embed = nnx.Embed(vocabulary, features, rngs=rngs)
        self.blocks = nnx.List([Block(features, heads, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(features, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, nnx.make_causal_mask(tokens))
        return self.embed.attend(self.norm(x))


def main(placed, batched):
    model = Transformer(64, 32, 4, 2, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))

    @jax.jit
    def train_step(state, tokens):
        model, optimizer = nnx.merge(graph, state)

        def loss_of(model):
            logits = model(tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        loss, gradients = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), loss

    state, tokens, losses = placed(state), batched(jax.random.randint(jax.random.key(1), (8, 17), 0, 64)), []
    for _ in range(3):
        state, loss = train_step(state, tokens)
        losses.append(loss)
    parameters = nnx.to_pure_dict(nnx.filter_state(state, nnx.Param))
    return jnp.stack(losses), parameters
