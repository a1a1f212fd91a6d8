"""Steps around propagation, each a named pass, and running lists of them."""

from sdy_jax.passes.programs import run

__all__ = ["run"]
