"""Tunix's `PeftTrainer` of tiny models with their own sharding configurations, under flax's `nnx.jit`."""

import logging

MODULES = ("flax.nnx.transforms.compilation",)
SIZES = {"num_layers": 2, "vocab_size": 512, "embed_dim": 128, "hidden_dim": 256, "num_heads": 4, "head_dim": 32}
CASES = {
    "llama3": {"num_kv_heads": 4, "rope_theta": 10_000, "norm_eps": 1e-5},
    "qwen3": {"num_kv_heads": 4, "rope_theta": 10_000, "norm_eps": 1e-5},
}


def build(case):
    """A function that trains one step: its loss and the norm of its gradients."""
    logging.disable(logging.WARNING)

    import importlib

    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx
    from jax.sharding import Mesh
    from tunix.sft import peft_trainer, sharding_utils

    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tp"))
    family = importlib.import_module(f"tunix.models.{case}.model")
    config = family.ModelConfig(**SIZES, **CASES[case])
    make = family.Llama3 if case == "llama3" else family.Qwen3

    with mesh:
        # As in tunix's guides: the model is made in parts.
        @nnx.jit
        def model():
            made = make(config, rngs=nnx.Rngs(params=0))
            state = nnx.state(made)
            nnx.update(made, jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state)))
            return made

        training = peft_trainer.TrainingConfig(eval_every_n_steps=100, max_steps=8)
        trainer = peft_trainer.PeftTrainer(model(), optax.adamw(1e-2), training)
        train_step, _ = trainer.jit_train_and_eval_step()
    tokens = jax.random.randint(jax.random.key(1), (8, 64), 0, 512)
    batch = {
        "input_tokens": tokens,
        "input_mask": jnp.ones((8, 64), bool),
        "positions": jnp.tile(jnp.arange(64), (8, 1)),
        "attention_mask": jnp.tile(jnp.tril(jnp.ones((64, 64), bool)), (8, 1, 1)),
    }

    def step():
        with mesh:
            loss, _, norm = train_step(sharding_utils.shard_input(batch, ("fsdp",)))
        return [loss, norm]

    return step
