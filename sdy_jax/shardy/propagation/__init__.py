"""Sharding propagation: factor propagation to a fixed point, level by level."""

from sdy_jax.shardy.propagation.engine import propagate

__all__ = ["propagate"]
