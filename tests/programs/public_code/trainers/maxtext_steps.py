"""MaxText's `train_step` of tiny models: its configuration, its sharding rules, its `jit_train_and_eval_step`."""

import logging
import os
import sys
import tempfile
import types

MODULES = ("maxtext.utils.train_utils",)
# As on MaxText's command line.
TINY = """
    run_name=tiny dataset_type=synthetic enable_checkpointing=False hardware=cpu skip_jax_distributed_system=True
    attention=dot_product per_device_batch_size=1 max_target_length=64 log_config=False sharding_tolerance=1.0
    learning_rate=1e-3 steps=8 vocab_size=512 base_emb_dim=128 base_num_query_heads=4 base_num_kv_heads=2 head_dim=32
    base_mlp_dim=256 base_moe_mlp_dim=256 base_num_decoder_layers=4 megablox=False
"""
CASES = {
    "fsdp_tensor": "ici_fsdp_parallelism=4 ici_tensor_parallelism=2",
    "data_fsdp": "ici_data_parallelism=2 ici_fsdp_parallelism=4",
    "context": "ici_fsdp_parallelism=4 ici_context_parallelism=2",
    "experts": """
        ici_fsdp_parallelism=4 ici_expert_parallelism=2 decoder_block=mixtral num_experts=4 num_experts_per_tok=2
        sparse_matmul=False
    """,
    "mixtral": """
        ici_fsdp_parallelism=4 ici_tensor_parallelism=2 model_name=mixtral-8x7b override_model_config=True
        base_num_decoder_layers=2 sparse_matmul=True
    """,
    "pipeline": """
        ici_fsdp_parallelism=4 ici_pipeline_parallelism=2 num_pipeline_microbatches=4 num_layers_per_pipeline_stage=2
        per_device_batch_size=2 scan_layers=False
    """,
}


def build(case):
    """A function that trains one step: its loss and the norm of its gradients."""
    os.environ["DECOUPLE_GCLOUD"] = "TRUE"
    logging.disable(logging.WARNING)
    data = types.ModuleType("maxtext.input_pipeline.input_pipeline_interface")  # its sources import TensorFlow
    data.create_data_iterator = lambda config, mesh: (iter(()), None)
    sys.modules[data.__name__] = data

    import jax
    import maxtext
    from flax import nnx
    from flax.core.spmd import logical_axis_rules
    from maxtext.configs import pyconfig
    from maxtext.trainers.pre_train import train
    from maxtext.utils import maxtext_utils, sharding, train_utils

    settings = dict(setting.split("=") for setting in f"{TINY} {CASES[case]}".split())
    settings["base_output_directory"] = tempfile.mkdtemp()
    base = os.path.join(os.path.dirname(maxtext.__file__), "configs", "base.yml")
    config = pyconfig.initialize(["train", base, *map("=".join, settings.items())])

    # As in MaxText's train_loop.
    _, _, shardings, _, mesh, _, _, _, _, _, state = train_utils.setup_train_loop(config, None)
    graph, state = nnx.split(state)
    params_shardings, shardings = sharding.maybe_update_params_sharding_with_opt(config, shardings)
    train_step, _ = train_utils.jit_train_and_eval_step(
        config, graph, mesh, state, shardings, train.train_step, train.eval_step, None, params_shardings
    )
    with jax.set_mesh(mesh):
        split = sharding.get_input_data_sharding(config, mesh)
        batch = train.make_synthetic_batch(config, maxtext_utils.get_shaped_batch(config, batch_sharding=split))

    def step():
        nonlocal state
        with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
            state, metrics = train_step(state, batch)
        return [metrics["scalar"]["learning/loss"], metrics["scalar"]["learning/raw_grad_norm"]]

    return step
