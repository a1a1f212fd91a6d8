"""Levanter's `Trainer.train_step` of a tiny Llama: its mesh and axis mappings, haliax's `named_jit`."""

import logging
import os
import tempfile

MODULES = ("haliax.partitioning",)
CASES = {
    "fsdp": {"axes": {"data": 8, "replica": 1, "model": 1}},
    "fsdp_tensor": {"axes": {"data": 4, "replica": 1, "model": 2}},
    "replicas": {"axes": {"data": 4, "replica": 2, "model": 1}},
}


def build(case):
    """A function that trains one step: its loss and the squared norm of the new parameters."""
    os.environ["WANDB_MODE"] = "disabled"
    logging.disable(logging.WARNING)

    import haliax as hax
    import jax
    import jax.numpy as jnp
    from levanter.checkpoint import CheckpointerConfig
    from levanter.models.llama import LlamaConfig
    from levanter.models.lm_model import LmExample
    from levanter.optim.config import AdamConfig
    from levanter.tracker import NoopConfig
    from levanter.trainer import Trainer, TrainerConfig
    from levanter.utils.mesh import MeshConfig

    shapes = {"hidden_dim": 128, "intermediate_dim": 256, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    llama = LlamaConfig(max_seq_len=64, **shapes)
    quiet = {
        "id": "tiny",
        "tracker": NoopConfig(),
        "require_accelerator": False,
        "log_jaxprs": False,
        "log_xla_hlo": False,
    }
    checkpoints = CheckpointerConfig(base_path=tempfile.mkdtemp())
    mesh = MeshConfig(**CASES[case])
    config = TrainerConfig(train_batch_size=8, num_train_steps=8, mesh=mesh, checkpointer=checkpoints, **quiet)
    optimizer = AdamConfig(learning_rate=1e-2).build(8)

    def loss_of(model, example, *, key=None):
        return model.compute_next_token_loss(example, key=key).scalar()

    trainer = Trainer(config, optimizer, loss_of, add_default_hooks=False)
    with trainer:
        vocab = hax.Axis("vocab", 512)
        state = trainer.initial_state(
            jax.random.key(0), model_init=lambda: llama.model_type.init(vocab, llama, key=jax.random.key(1))
        )
    batch = hax.Axis("batch", 8)
    tokens = hax.random.randint(jax.random.key(2), (batch, llama.max_Pos), 0, 512)
    example = hax.vmap(LmExample.causal, batch)(tokens)

    def step():
        nonlocal state
        with trainer:
            info = trainer.train_step(state, example)
        state = info.state
        return [info.loss, sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(state.trainable_model))]

    return step
