"""Steps around propagation, each a named pass with options, and running lists of them."""

from sdy_jax.passes.programs import parse, run, run_pipeline
from sdy_jax.passes.registry import Pass

__all__ = ["Pass", "parse", "run", "run_pipeline"]
