"""Trees of `PartitionSpec`s for whole models: by names of dimensions, by likeness, by size, by path.

Each function takes arrays, `ShapeDtypeStruct`s from `jax.eval_shape`, or the boxes in which libraries keep arrays with
the names of their dimensions (flax, nnx, haliax, penzai). A spec takes the place of a box, and so fits boxed and
unboxed trees alike: it is a prefix of the one and a leaf of the other. None of these libraries is imported here.
"""
