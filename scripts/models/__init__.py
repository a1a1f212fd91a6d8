"""Models at the sizes of real ones, in plain JAX, on shapes alone, and the rows of `scripts/bench_models`."""
