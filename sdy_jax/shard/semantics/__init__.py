"""What the ops of the mesh and shard dialects do to local arrays, inside the body of a `shard_map`.

One function per op, of a `Grid`, arrays and the op's static parameters; grid axes are integers. The Python functions of
`sdy_jax.shard` and the execution of programs in text both call these. Where the dialect leaves a value undefined, it is
zeros. Nothing here knows MLIR.
"""
