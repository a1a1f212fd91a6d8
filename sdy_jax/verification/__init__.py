"""Whether a module keeps the rules of the SDY dialect: jaxlib's verifier, with the name of the rule that is broken.

The rules have the names of `representation.dialect_rules`. What jaxlib accepts or dies of is checked here.
"""

from sdy_jax.verification.module import verify_module

__all__ = ["verify_module"]
