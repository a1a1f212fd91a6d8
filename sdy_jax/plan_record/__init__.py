"""Plans as plain data: what a plan says, without the function, jax objects or MLIR that it was made from."""
