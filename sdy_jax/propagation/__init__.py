"""Sharding propagation: factor propagation to a fixed point, level by level."""

from sdy_jax.propagation.propagate import propagate
from sdy_jax.propagation.record import FunctionResult, Recorder, Spread, Step

__all__ = ["FunctionResult", "Recorder", "Spread", "Step", "propagate"]
