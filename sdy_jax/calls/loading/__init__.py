"""Programs that are not traced here: MLIR text and bytecode, portable artifacts and files of `jax.export`."""
