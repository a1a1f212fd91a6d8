"""The registry of op sharding rules.

Contract of a rule function: it is given an `Op` of the graph, whose operands and results are ranked tensors of static
shape, and whether propagation is conservative; it reads shapes, attributes and (rarely) the ops that define its
operands; it returns the op's `OpShardingRule`, or None where the op has none. It never looks at shardings, never
changes anything, and answers the same for ops of equal `signature` unless it is registered with
`reads_neighbours=True`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from copy import copy
from typing import Literal, TypeVar

import jaxlib
from jax.extend.mlir import ir

from sdy_jax.ir.extensions import load_extensions, registered
from sdy_jax.ir.graph import Op
from sdy_jax.representation.attributes import rule_from_attribute
from sdy_jax.representation.rule import OpShardingRule

RuleFunction = Callable[[Op, bool], OpShardingRule | None]
AnyRule = TypeVar("AnyRule", bound=RuleFunction)

Compat = Literal["shardy", "shardy-0.10", "shardy-0.12", "sdy_jax"]
"""Whose rules: `"shardy-0.10"` and `"shardy-0.12"` those that Shardy has in these versions of jaxlib, which differ for
a few ops; `"shardy"` those of the installed jaxlib; `"sdy_jax"` also some that Shardy does not have, as in plans."""

RULES: dict[str, RuleFunction] = {}
BEYOND: dict[str, RuleFunction] = {}
"""Rules of ours that say more than Shardy's of the same ops."""
NEWER: dict[str, RuleFunction] = {}
"""Shardy's rules since jaxlib 0.12, of ops that had others before."""

WRITTEN_BY_JAX: dict[str, Callable[[Op], OpShardingRule | None]] = {}
"""By op name, the rule that jax itself writes on such an op when it lowers it. It says no more than ours does."""

INSTALLED_IS_NEW = jaxlib.version.__version_info__ >= (0, 12)
"""Whether Shardy has the newer rules there. Given: jaxlib 0.11.2 has still the others, but for one."""

_READS_NEIGHBOURS: set[str] = set()
_EXTRA: set[str] = set()


def names(dialect: str, words: str) -> tuple[str, ...]:
    """Op names of a dialect: `names("stablehlo", "add abs")`."""
    return tuple(f"{dialect}.{word}" for word in words.split())


NO_RULE = frozenset(
    (
        "builtin.module",
        *names("func", "func call return"),
        *names("sdy", "constant data_flow_edge func_data_flow_edge manual_computation named_computation mesh"),
        *names("sdy", "propagation_barrier sharding_group reshard return"),
        *names("stablehlo", "after_all case constant create_token get_tuple_element infeed iota outfeed"),
        *names("stablehlo", "optimization_barrier partition_id recv return send while"),
        *names("tensor", "extract from_elements"),
        *names("mesh", "process_linear_index process_multi_index recv send"),
        *names("shard", "process_linear_index process_multi_index recv send"),
    )
)
"""Ops through which nothing propagates by design: they have no dimensions in common, or are data-flow ops."""

SILENT_TARGETS = frozenset(
    (
        "tpu_custom_call",
        "xla_python_cpu_callback",
        "xla_python_gpu_callback",
        "xla_ffi_python_cpu_callback",
        "xla_ffi_python_gpu_callback",
        "xla.debug.Log",
        "sdy_testonly",
    )
)
"""Targets of custom calls that are opaque by design."""


def rule(
    *names: str, reads_neighbours: bool = False, extra: bool = False, beyond: bool = False, newer: bool = False
) -> Callable[[AnyRule], AnyRule]:
    """Registers the rule of the ops with these names.

    Args:
        names: op names, dialect included.
        reads_neighbours: the rule also depends on the ops around it, so it is not shared between equal ops.
        extra: Shardy has no rule for these ops; `compat="shardy"` switches ours off.
        beyond: Shardy's rule of these ops, which is registered too, keeps more whole than it needs to;
            `compat="shardy"` switches to that one.
        newer: Shardy's rule since jaxlib 0.12; the one before, on which plans are built, is registered too.
    """
    rules = BEYOND if beyond else NEWER if newer else RULES

    def register(function: AnyRule) -> AnyRule:
        registered(rules, names, "rules")(function)
        if reads_neighbours:
            _READS_NEIGHBOURS.update(names)
        if extra:
            _EXTRA.update(names)
        return function

    return register


def has_no_rule_silently(name: str, call_target: str = "") -> bool:
    """Whether an op without a rule is meant to have none; of others a report says that nothing propagates through.

    Args:
        name: the op's name, such as `stablehlo.iota`.
        call_target: of custom calls, what they call.
    """
    return name in NO_RULE or (name == "stablehlo.custom_call" and call_target in SILENT_TARGETS)


def depends_on_signature_only(name: str) -> bool:
    """Whether all ops of this name and one signature have the same registered rule."""
    return name in RULES and name not in _READS_NEIGHBOURS


class RuleBook:
    """The rules of one module's ops, each computed once per op signature.

    Args:
        conservative: leave out factors along which a shard of the result is not one shard of the operand (windows,
            slices, pads, concatenated and spatial dimensions).
        compat: `"shardy"` has exactly the rules that Shardy has; `"sdy_jax"` also those of ops that plainly have one
            (`chlo.erf`, `stablehlo.map`, ...), and for a few ops rules that keep less whole (the columns of linear
            systems, the batches of LAPACK's functions).
        overrides: whether an `sdy.sharding_rule` on an op replaces its registered rule, as it does for propagation.
            Without, it only speaks for ops that have no other: what an op computes does not depend on it.
    """

    def __init__(self, conservative: bool = False, compat: Compat = "sdy_jax", overrides: bool = True):
        load_extensions()
        self._conservative, self._overrides = conservative, overrides
        self._is_ours = compat == "sdy_jax"
        self._off = set() if self._is_ours else _EXTRA
        self._instead = BEYOND if self._is_ours else NEWER if _is_new(compat) else {}
        self._known: dict[Hashable, OpShardingRule | None] = {}

    def without_overrides(self) -> RuleBook:
        """The same book, but with `overrides=False`: what one of the two computes, the other one knows."""
        book = copy(self)
        book._overrides = False
        return book

    def rule_of(self, op: Op, signature: Hashable = None) -> OpShardingRule | None:
        """The op's own `sdy.sharding_rule` if somebody gave it one, else the registered rule, else None.

        `signature` is that of the op, where it is known.
        """
        own = op.attribute("sdy.sharding_rule")
        if own is None:
            return self._registered(op, signature)
        given = self._remember(own, rule_from_attribute)
        registered = self._registered(op, signature) if self._gives_way(op, given) else None
        return registered or given

    def _gives_way(self, op: Op, own: OpShardingRule | None) -> bool:
        """Whether the registered rule comes before the op's own one."""
        written = WRITTEN_BY_JAX.get(op.name) if self._is_ours else None
        return not self._overrides or (written is not None and written(op) == own)

    def _registered(self, op: Op, signature: Hashable) -> OpShardingRule | None:
        if op.name not in RULES or op.name in self._off:
            return None
        if op.name in _READS_NEIGHBOURS:
            return self._computed(op)
        signature = signature or op.signature
        if signature not in self._known:
            self._known[signature] = self._computed(op)
        return self._known[signature]

    def _computed(self, op: Op) -> OpShardingRule | None:
        found = self._instead.get(op.name) or RULES[op.name]
        return found(op, self._conservative) if _has_static_tensors(op) else None

    def _remember(self, own: ir.Attribute, read: Callable[[ir.Attribute], OpShardingRule]) -> OpShardingRule | None:
        if own not in self._known:
            self._known[own] = read(own)
        return self._known[own]


def _is_new(compat: Compat) -> bool:
    """Whether Shardy's rules are those of jaxlib 0.12 and later."""
    return compat == "shardy-0.12" or (compat == "shardy" and INSTALLED_IS_NEW)


def _has_static_tensors(op: Op) -> bool:
    return all(v.shape is not None for v in (*op.operands, *op.results))
