"""What the ops of the mesh and shard dialects do to local arrays, inside the body of a `shard_map`.

The ops of programs in text and the functions of `sdy_jax.shard` both compute by these functions.
"""
