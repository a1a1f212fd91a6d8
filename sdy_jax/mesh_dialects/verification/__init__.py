"""Whether mesh and shard ops keep the rules of their dialects; jaxlib knows none of them."""

from sdy_jax.mesh_dialects.verification.module import verify_ops

__all__ = ["verify_ops"]
