"""Op sharding rules: importing this package registers the rules of all families."""

from sdy_jax.shardy.rules import (  # noqa: F401  (each registers its rules)
    custom_calls,
    elementwise,
    gather_scatter,
    linalg,
    products,
    reductions,
    reshapes,
    slicing,
)
from sdy_jax.shardy.rules.registry import Compat, RuleBook, has_newer_passes, has_no_rule_silently, is_newest, rule

__all__ = ["Compat", "RuleBook", "has_newer_passes", "has_no_rule_silently", "is_newest", "rule"]
