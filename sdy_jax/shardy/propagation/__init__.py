"""Sharding propagation: factor propagation to a fixed point, level by level."""

from sdy_jax.shardy.propagation.propagate import propagate

__all__ = ["propagate"]
