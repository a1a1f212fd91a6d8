"""The registry of op sharding rules.

Contract of a rule function: it is given an `Op` of the graph and whether propagation is conservative; it reads shapes,
attributes and (rarely) the ops that define its operands; it returns the op's `OpShardingRule`, or None where the op has
none. It never looks at shardings, never changes anything, and answers the same for ops of equal `signature` unless it
is registered with `reads_neighbours=True`.
"""

from __future__ import annotations

from collections.abc import Callable

from sdy_jax.graph import Op
from sdy_jax.representation.rule import OpShardingRule

RuleFunction = Callable[[Op, bool], OpShardingRule | None]

RULES: dict[str, RuleFunction] = {}
_READS_NEIGHBOURS: set[str] = set()


def rule(*names: str, reads_neighbours: bool = False) -> Callable[[RuleFunction], RuleFunction]:
    """Registers the rule of the ops with these names."""

    def register(function: RuleFunction) -> RuleFunction:
        for name in names:
            assert name not in RULES, f"two rules for {name}"
            RULES[name] = function
        if reads_neighbours:
            _READS_NEIGHBOURS.update(names)
        return function

    return register


class RuleBook:
    """The rules of one module's ops, each computed once per op signature."""

    def __init__(self, conservative: bool = False):
        self._conservative = conservative
        self._known: dict[object, OpShardingRule | None] = {}

    def rule_of(self, op: Op) -> OpShardingRule | None:
        """The op's own `sdy.sharding_rule` if it has one, else the registered rule, else None."""
        raise NotImplementedError
