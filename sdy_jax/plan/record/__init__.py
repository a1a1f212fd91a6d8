"""Plans as plain data, without what they were made from: the function, jax objects, MLIR. Files and differences."""
