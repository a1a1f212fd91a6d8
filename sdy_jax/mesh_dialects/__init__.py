"""The mesh and shard dialects: their ops in programs in text, and the collectives and shardings of `sdy_jax.shard`."""
