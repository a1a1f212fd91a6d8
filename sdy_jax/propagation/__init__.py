"""Sharding propagation: factor propagation to a fixed point, level by level."""

from sdy_jax.propagation.propagate import propagate
from sdy_jax.propagation.record import FunctionResult, RecordedStep, Recorder, Spread

__all__ = ["FunctionResult", "RecordedStep", "Recorder", "Spread", "propagate"]
