"""The functions of `sdy_jax.shard`: the dialects' ops on arrays of JAX."""
