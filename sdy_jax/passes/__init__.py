"""Named passes on MLIR modules, before and after propagation, and their pipelines."""
