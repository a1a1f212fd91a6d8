"""Steps around propagation, each a named pass with options, and running lists of them."""

from sdy_jax.shardy.passes.pipelines import parse, run, run_pipeline
from sdy_jax.shardy.passes.registry import Pass

__all__ = ["Pass", "parse", "run", "run_pipeline"]
