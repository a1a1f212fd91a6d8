"""Op sharding rules: importing this package registers the rules of all families."""

from sdy_jax.shardy.rules import custom_calls, elementwise, linalg, reductions, reshapes, slicing  # noqa: F401  (each registers its rules)
from sdy_jax.shardy.rules.registry import Compat, RuleBook, has_newer_passes, has_no_rule_silently, is_newest, rule

__all__ = ["Compat", "RuleBook", "has_newer_passes", "has_no_rule_silently", "is_newest", "rule"]
