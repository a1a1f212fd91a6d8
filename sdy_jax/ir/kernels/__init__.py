"""Kernels: what a `pallas_call` says of itself, read as a sharding rule and as work, and the same call on blocks."""
