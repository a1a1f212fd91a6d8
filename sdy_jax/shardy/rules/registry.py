"""The registry of op sharding rules, and how a rule is written down, one factor at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from copy import copy
from enum import Enum, auto
from typing import Literal, TypeVar

import jaxlib
from jax.extend.mlir import ir

from sdy_jax.base.extensions import load_extensions, registered
from sdy_jax.ir.attributes import rule_from_attribute
from sdy_jax.ir.graph import Op
from sdy_jax.ir.shardings import FactorType, OpShardingRule

# The registry of op sharding rules.
#
# Contract of a rule function: it is given an `Op` of the graph, whose operands and results are ranked tensors of
# static shape, and whether propagation is conservative; it reads shapes, attributes and (rarely) the ops that define
# its operands; it returns the op's `OpShardingRule`, or None where the op has none. It never looks at shardings,
# never changes anything, and answers the same for ops of equal `signature` unless it is registered with
# `reads_neighbours=True`.

RuleFunction = Callable[[Op, bool], OpShardingRule | None]
AnyRule = TypeVar("AnyRule", bound=RuleFunction)

Compat = Literal["shardy", "shardy-0.10", "shardy-0.12", "sdy_jax"]
"""Whose rules and passes: `"shardy-0.10"` and `"shardy-0.12"` those that Shardy has in these versions of jaxlib, which
differ for a few ops and in a few passes; `"shardy"` those of the installed jaxlib; `"sdy_jax"` the newer passes, and
also some rules that Shardy does not have, as in plans."""

RULES: dict[str, RuleFunction] = {}
BEYOND: dict[str, RuleFunction] = {}
"""Rules of ours that say more than Shardy's of the same ops."""
NEWER: dict[str, RuleFunction] = {}
"""Shardy's rules since jaxlib 0.12, of ops that had others before."""

WRITTEN_BY_JAX: dict[str, Callable[[Op], OpShardingRule | None]] = {}
"""By op name, the rule that jax itself writes on such an op when it lowers it. It says no more than ours does."""

INSTALLED_IS_NEW = jaxlib.version.__version_info__ >= (0, 12)
"""Whether Shardy has the newer rules there. Given: jaxlib 0.11.2 has still the others, but for one."""
_HAS_NEWER_PASSES = jaxlib.version.__version_info__ >= (0, 11)
"""Whether Shardy has the newer passes there. Given: those of jaxlib 0.11 are in the order of 0.12."""

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
        self._instead = BEYOND if self._is_ours else NEWER if is_newest(compat) else {}
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
        return found(op, self._conservative) if all(v.shape is not None for v in (*op.operands, *op.results)) else None

    def _remember(self, own: ir.Attribute, read: Callable[[ir.Attribute], OpShardingRule]) -> OpShardingRule | None:
        if own not in self._known:
            self._known[own] = read(own)
        return self._known[own]


def is_newest(compat: Compat) -> bool:
    """Whether Shardy's rules, and the end of its export, are those of jaxlib 0.12 and later."""
    return compat == "shardy-0.12" or (compat == "shardy" and INSTALLED_IS_NEW)


def has_newer_passes(compat: Compat) -> bool:
    """Whether constraints reach calls and values stated to be open, and returned values the results of main."""
    return compat in ("shardy-0.12", "sdy_jax") or (compat == "shardy" and _HAS_NEWER_PASSES)


# Ops through which unreduced values may pass before they are reduced.
#
# If f is linear, the sum of f over partial sums is f of their sum: a product's partial sums may be negated,
# transposed, scaled and added to others first, and reduced once, where it is cheapest. What only moves elements
# around lets unreduced values of every kind pass. Each op's family says so beside its rule or strategy. Conversions
# to narrower types do not: they would round each partial sum instead of the total. See
# docs/explanation/strategies.md#partial-sums.


class Linear(Enum):
    """Which operands have to be unreduced together for the results to be so."""

    DATA = auto()
    """The first alone: the others say where to find it."""
    EVERY = auto()
    """All."""
    SUMMANDS = auto()
    """All but known zeros, which count any number of times."""
    BRANCHES = auto()
    """As `SUMMANDS`, without the first, which decides and must be whole."""
    ONE_FACTOR = auto()
    """Any one: linear in each operand, not in several at once."""
    NUMERATOR = auto()
    """The first, of numbers that are not rounded to integers."""
    UPDATED = auto()
    """The first two: what is updated, and by what."""
    WIDENED = auto()
    """The first, of floating-point numbers that are not rounded: converted to a type with more digits."""
    SUMMED = auto()
    """As `SUMMANDS`, of a reduction by the sum: an initial value that is not zero must count once."""


LINEAR: dict[str, Mapping[str, Linear]] = {}
"""Op -> kind of reduction, or "*" for any -> how unreduced values of the kind pass."""


def passes_unreduced(name: str, by_kind: Mapping[str, Linear]) -> None:
    """Registers how unreduced values pass through the ops of a name, by the kind of their reduction; "*" for any."""
    assert name not in LINEAR, f"{name} is registered twice"
    LINEAR[name] = by_kind


# Writing down an op's sharding rule one factor at a time.
#
# State: per tensor (operands, then results) and dimension the factors placed so far, major to minor. A dimension that
# never gets a factor receives one of size 1 of its own at the end, so that every dimension of a finished rule has
# one.
#
# Worked example, `tensor<8x16> . tensor<16x4>`:
#
#     rule = RuleBuilder.of(op)
#     rule.add((0, None), (0,), 8)
#     rule.add((None, 1), (1,), 4)
#     rule.add((1, 0), (None,), 16, REDUCTION)
#     rule.build()        # ([i, k], [k, j])->([i, j]) {i=8, j=4, k=16} reduction={k}

Shape = tuple[int, ...]
Dim = int | None

PASS_THROUGH = FactorType.PASS_THROUGH
REDUCTION = FactorType.REDUCTION
NEED_REPLICATION = FactorType.NEED_REPLICATION
PERMUTATION = FactorType.PERMUTATION


class RuleBuilder:
    """Collects the factors of one rule, in the order in which they are added."""

    def __init__(self, operands: Sequence[Shape], results: Sequence[Shape]):
        self._num_operands = len(operands)
        self._tensors = [[list[int]() for _ in shape] for shape in (*operands, *results)]
        self._sizes: list[int] = []
        self._of_kind: dict[FactorType, set[int]] = {kind: set() for kind in FactorType}
        self._blocked: set[int] = set()

    @classmethod
    def of(cls, op: Op) -> RuleBuilder:
        """Nothing placed yet on the op's tensors, which have static shapes."""
        return cls([shape_of(op, v) for v in range(len(op.operands))], [v.shape or () for v in op.results])

    def add(
        self,
        operands: Sequence[Dim],
        results: Sequence[Dim],
        size: int,
        kind: FactorType = PASS_THROUGH,
        *,
        blocked: bool = False,
    ) -> None:
        """Places a new factor on one dimension of each operand and result; None leaves a tensor out.

        A factor of size 1 says nothing about a dimension that has a factor already, and is not added to it.
        """
        factor = self._new_factor(size, kind, blocked)
        for tensor, dim in zip(self._tensors, (*operands, *results), strict=True):
            if dim is not None and not (size == 1 and tensor[dim]):
                tensor[dim].append(factor)

    def add_all(self, dim: int, size: int, kind: FactorType = PASS_THROUGH, *, blocked: bool = False) -> None:
        """Places a new factor on the same dimension of every tensor that has it; scalars are left out."""
        self._add_to(self._tensors, dim, size, kind, blocked)

    def add_operands(self, dim: int, size: int, kind: FactorType = PASS_THROUGH, *, blocked: bool = False) -> None:
        """`add_all` for operands only."""
        self._add_to(self._tensors[: self._num_operands], dim, size, kind, blocked)

    def add_results(self, dim: int, size: int, kind: FactorType = PASS_THROUGH, *, blocked: bool = False) -> None:
        """`add_all` for results only."""
        self._add_to(self._tensors[self._num_operands :], dim, size, kind, blocked)

    def pointwise(self, shape: Shape, special: Collection[int] = (), kind: FactorType = PASS_THROUGH) -> RuleBuilder:
        """One factor per dimension of `shape` on all tensors; those of `special` dimensions are of that `kind`."""
        for dim, size in enumerate(shape):
            self.add_all(dim, size, kind if dim in special else PASS_THROUGH)
        return self

    def has_factor(self, tensor: int, dim: int) -> bool:
        """Whether a dimension has a factor yet; operands are counted first, then results."""
        return bool(self._tensors[tensor][dim])

    def build(self) -> OpShardingRule:
        """The finished rule."""
        for tensor in self._tensors:
            for factors in tensor:
                if not factors:
                    factors.append(self._new_factor(1, PASS_THROUGH, False))
        mappings = tuple(tuple(map(tuple, tensor)) for tensor in self._tensors)
        return OpShardingRule(
            tuple(self._sizes),
            mappings[: self._num_operands],
            mappings[self._num_operands :],
            reduction=frozenset(self._of_kind[REDUCTION]),
            need_replication=frozenset(self._of_kind[NEED_REPLICATION]),
            permutation=frozenset(self._of_kind[PERMUTATION]),
            blocked=frozenset(self._blocked),
        )

    def _add_to(self, tensors: list[list[list[int]]], dim: int, size: int, kind: FactorType, blocked: bool) -> None:
        factor = self._new_factor(size, kind, blocked)
        for tensor in tensors:
            if dim < len(tensor):
                tensor[dim].append(factor)

    def _new_factor(self, size: int, kind: FactorType, blocked: bool) -> int:
        factor = len(self._sizes)
        self._sizes.append(size)
        self._of_kind[kind].add(factor)
        if blocked:
            self._blocked.add(factor)
        return factor


def shape_of(op: Op, operand: int = 0) -> Shape:
    """The shape of an operand; ops that get here have static shapes."""
    return op.operands[operand].shape or ()


def result_shape(op: Op, result: int = 0) -> Shape:
    """The shape of a result."""
    return op.results[result].shape or ()
