"""Running per-device programs: refined meshes, and the boundary to jax arrays."""
