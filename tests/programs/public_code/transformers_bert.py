"""BERT from `transformers` (flax.linen): the forward pass of masked language modelling."""

import jax
import jax.numpy as jnp
from transformers import BertConfig, FlaxBertForMaskedLM


def main(placed, batched):
    config = BertConfig(
        num_hidden_layers=2, hidden_size=32, num_attention_heads=4, intermediate_size=64, vocab_size=128
    )
    model = FlaxBertForMaskedLM(config, seed=0)

    @jax.jit
    def logits_of(params, tokens, mask):
        return model(tokens, attention_mask=mask, params=params).logits

    tokens = batched(jax.random.randint(jax.random.key(1), (8, 16), 0, 128))
    return logits_of(placed(model.params), tokens, batched((jnp.arange(16) < 12).astype(int) * jnp.ones((8, 1), int)))
