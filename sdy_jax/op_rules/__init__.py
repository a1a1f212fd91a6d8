"""Op sharding rules: importing this package registers the rules of all families."""

from sdy_jax.op_rules import (  # noqa: F401  (each registers its rules)
    collective,
    convolution,
    custom_call,
    dot,
    elementwise,
    indexing,
    linalg,
    normalization,
    random,
    reduction,
    shape,
    slicing,
    sorting,
    window,
)
from sdy_jax.op_rules.registry import Compat, RuleBook, has_no_rule_silently, rule

__all__ = ["Compat", "RuleBook", "has_no_rule_silently", "rule"]
