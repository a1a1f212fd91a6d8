"""penzai: named axes through an MLP and a Llama-like transformer of its own, with a gradient step."""

import jax
import jax.numpy as jnp
from penzai import pz
from penzai.models import simple_mlp
from penzai.models.transformer.variants import llamalike_common as llama


def main(placed, batched):
    mlp, variables = pz.unbind_params(simple_mlp.MLP.from_config(jax.random.key(0), [8, 64, 4]), freeze=True)
    x = pz.nx.wrap(batched(jax.random.normal(jax.random.key(1), (16, 8)))).tag("batch", "features")

    @jax.jit
    def train_step(variables, x):
        def loss_of(variables):
            y = pz.bind_variables(mlp, variables)(x)
            return jnp.mean(y.unwrap("batch", "features") ** 2)

        loss, gradients = jax.value_and_grad(loss_of)(variables)
        return jax.tree.map(lambda v, g: v - 0.1 * g, variables, gradients), loss

    variables = placed(variables)
    for _ in range(3):
        variables, loss = train_step(variables, x)

    config = llama.LlamalikeTransformerConfig(
        num_kv_heads=2,
        query_head_multiplier=2,
        embedding_dim=32,
        projection_dim=8,
        mlp_hidden_dim=64,
        num_decoder_blocks=2,
        vocab_size=64,
        mlp_variant="swiglu",
        tie_embedder_and_logits=False,
    )
    transformer = llama.build_llamalike_transformer(config, init_base_rng=jax.random.key(2), name="transformer")
    shell, weights = pz.unbind_params(transformer, freeze=True)
    tokens = pz.nx.wrap(batched(jax.random.randint(jax.random.key(3), (8, 16), 0, 64))).tag("batch", "seq")

    @jax.jit
    def logits_of(weights, tokens):
        return pz.bind_variables(shell, weights)(tokens, token_positions=pz.nx.arange("seq", 16))

    return loss, jax.tree.leaves(variables), jax.tree.leaves(logits_of(placed(weights), tokens))
