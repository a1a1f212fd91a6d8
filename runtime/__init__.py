"""Running per-device programs: devices, refined meshes, and the boundary to jax arrays."""
