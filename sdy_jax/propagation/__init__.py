"""Sharding propagation: factor propagation to a fixed point, level by level."""

from sdy_jax.propagation.propagate import propagate
from sdy_jax.propagation.record import FunctionResult, RecordedStep, Spread

__all__ = ["FunctionResult", "RecordedStep", "Spread", "propagate"]
