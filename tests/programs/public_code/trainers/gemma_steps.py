"""Gemma 3 of a tiny size, trained by Kauldron's `TrainStep` under its own sharding strategies."""

import logging

MODULES = ("kauldron.train.train_step",)
CASES = {"fsdp": None}


def build(case):
    """A function that trains one step: its loss and the squared norm of the new parameters."""
    logging.disable(logging.WARNING)

    import jax
    import jax.numpy as jnp
    import optax
    from gemma import gm
    from gemma.gm.nn import _config, _modules
    from kauldron import kd

    config = _config.TransformerConfig(
        num_embed=512,
        embed_dim=128,
        hidden_dim=256,
        num_heads=4,
        head_dim=32,
        num_kv_heads=1,
        final_logit_softcap=None,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        use_qk_norm=True,
        attention_types=(_modules.AttentionType.LOCAL_SLIDING, _modules.AttentionType.GLOBAL),
        sliding_window_size=16,
        transpose_gating_einsum=True,
    )
    fsdp = kd.sharding.FSDPSharding(min_size_to_shard_mb=0)
    strategy = kd.sharding.ShardingStrategy(batch=kd.sharding.FIRST_DIM, params=fsdp, opt_state=fsdp)
    loss = kd.losses.SoftmaxCrossEntropyWithIntLabels(logits="preds.logits", labels="batch.target")
    trainer = kd.train.TrainStep(
        model=gm.nn.Transformer(config=config, tokens="batch.input", dtype=jnp.float32),
        optimizer=optax.adamw(1e-2),
        rng_streams=kd.train.RngStreams(seed=0),
        sharding=strategy,
        init_transform=kd.ckpts.NoopTransform(),
        aux=kd.train.Auxiliaries(losses={"xentropy": loss}, metrics={}, summaries={}),
    )
    tokens = jax.random.randint(jax.random.key(1), (8, 33), 0, 512)
    batch = {"input": tokens[:, :-1], "target": tokens[:, 1:, None]}
    batch = kd.sharding.device_put(batch, strategy.batch)
    state = trainer.init(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch))

    def step():
        nonlocal state
        state, aux = trainer.step(state, batch, return_losses=True)
        return [
            aux.compute(flatten=False).loss_values["xentropy"],
            sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(state.params)),
        ]

    return step
