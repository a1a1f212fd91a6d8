"""Whether a module keeps the rules of the SDY dialect: one built or changed in Python, which no parser has looked at.

The rules have the names of `representation.dialect_rules`; those of other dialects are left to jaxlib's verifier.
"""

from sdy_jax.verification.module import verify_dialect, verify_module

__all__ = ["verify_dialect", "verify_module"]
