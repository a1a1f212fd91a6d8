"""The factors of a reference's arguments along which it runs on blocks, and where a factor is in each of its values.

See docs/explanation/rules.md#references.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TypeVar

import jax
from jax.extend.mlir import ir

from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.ir.locations import short_source
from sdy_jax.ir.operations import TERMINATORS
from sdy_jax.ir.shardings import OpShardingRule
from sdy_jax.lowering.ops.elementwise import carries, is_identity, reduction_kind
from sdy_jax.lowering.ops.registry import PART_BY_PART, strategies_of
from sdy_jax.lowering.planner.references.reference import ReferenceProgram
from sdy_jax.lowering.planner.rewrites.blocking_groups import Span, Split, placed, split_along, within_factor
from sdy_jax.shardy.propagation.data_flow import DataFlowEdge, edges_of, is_data_flow
from sdy_jax.shardy.rules import RuleBook
from sdy_jax.shardy.rules.linalg import library_call

# Where one factor of a program's arguments is in all of its values: how the rules of the ops carry it.
#
# If each device runs the program on a block of the factor, then a value is, on each device,
#
# * a *span*: the block of it along the factor, where that is in it;
# * *partial*: a term of it, of all blocks, which combine by some kind of reduction;
# * *whole*, as all others: the same on all devices.
#
# An op that makes none of these of its operands refuses the factor. See docs/explanation/rules.md#references.

T = TypeVar("T")

_SAME_ON_BLOCKS = frozenset(
    (
        *PART_BY_PART,
        "chlo.top_k",
        "stablehlo.bitcast_convert",
        "stablehlo.cholesky",
        "stablehlo.convolution",
        "stablehlo.custom_call",
        "stablehlo.fft",
        "stablehlo.reduce_window",
        "stablehlo.reverse",
        "stablehlo.select_and_scatter",
        "stablehlo.sort",
        "stablehlo.triangular_solve",
    )
)
"""Ops that make blocks of their results along a pass-through factor of blocks of their operands, whichever these are,
where all their attributes but sizes are the same for blocks."""

_REPEATING = frozenset(("stablehlo.broadcast_in_dim",))
"""Ops that make a block of a dimension of what does not have it."""

_KINDS = {"sum": "sum", "max": "maximum", "min": "minimum", "product": "product"}

_ALL, _TWICE = "needs all of it", "takes it along two of its dimensions at once"


@dataclass(frozen=True, slots=True)
class Partial:
    """A value is a term of itself; `kind`: how terms combine."""

    kind: str


State = Span | Partial
"""Of a value that is not whole."""


@dataclass(frozen=True)
class Refusal:
    """Why a program does not run along a factor: an op, and what it does, as the end of a sentence about it. `op`: None
    where it is none. `parts`: the sizes of factors that the op sees in this one, major to minor; empty if it is one."""

    op: Op | None
    text: str
    parts: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.op is None:
            return self.text
        return f"its reference's {self.op.title} at {short_source(self.op.source)} {self.text}"


class ProgramRules:
    """The rules of one program's ops, and the edges along which its values flow."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.rule_of = RuleBook(conservative=True).without_overrides().rule_of

    @cached_property
    def edges(self) -> Mapping[Value, tuple[DataFlowEdge, ...]]:
        """Per value, the edges that it flows into or out of."""
        found: dict[Value, tuple[DataFlowEdge, ...]] = {}
        for edge in (edge for op in self.graph.ops for edge in edges_of(op)):
            for value in dict.fromkeys((*edge.sources, *edge.targets)):
                found[value] = (*found.get(value, ()), edge)
        return found

    @cached_property
    def slots(self) -> frozenset[tuple[Op, int]]:
        """Where values flow into edges."""
        return frozenset(slot for edges in self.edges.values() for edge in edges for slot in edge.slots)


class _Refused(Exception):
    """Ends the spread of a factor."""

    def __init__(self, op: Op | None, text: str, parts: tuple[int, ...] = ()):
        super().__init__(text)
        self.refusal = Refusal(op, text, parts)


class FactorFlow:
    """Where a factor is in all values of a program.

    Args:
        rules: those of the program.
        value, span: where it is in one argument.
        fixed: arguments that are the same on all devices.

    Attributes:
        states: the values that are not whole, with where the factor is in them.
        refusal: why the program does not run along the factor; None if it does.
    """

    def __init__(self, rules: ProgramRules, value: Value, span: Span, fixed: frozenset[Value]):
        self._rules, self._fixed = rules, fixed
        self.states: dict[Value, State] = {}
        self._ops, self._edges = dict[Op, None](), dict[DataFlowEdge, None]()
        self.refusal: Refusal | None = None
        try:
            self._set(value, span)
            self._run()
            self._check()
        except _Refused as refused:
            self.refusal = refused.refusal

    def _set(self, value: Value, state: State, by: Op | None = None) -> None:
        """Gives a value a state; all that takes it or makes it is to be visited."""
        known = self.states.get(value)
        if known == state:
            return
        if known is not None:
            raise _Refused(by, _conflict(known, state))
        if value in self._fixed:
            raise _Refused(by, "takes it together with an array that the reference closes over")
        self.states[value] = state
        self._edges.update(dict.fromkeys(self._rules.edges.get(value, ())))
        users = [user for user, _ in value.uses]
        self._ops.update(dict.fromkeys([*users, *([value.owner] if isinstance(value.owner, Op) else [])]))

    def _run(self) -> None:
        while self._ops or self._edges:
            while self._edges:
                self._flow(self._pop(self._edges))
            if self._ops:
                op = self._pop(self._ops)
                if not _is_flow(op):
                    self._compute(op)

    @staticmethod
    def _pop(waiting: dict[T, None]) -> T:
        first = next(iter(waiting))
        del waiting[first]
        return first

    def _flow(self, edge: DataFlowEdge) -> None:
        """What flows along an edge is in one state, but for known zeros, which are terms of any sum."""
        found = list(dict.fromkeys(state for v in (*edge.sources, *edge.targets) if (state := self.states.get(v))))
        op = _op_of(edge)
        if len(found) > 1:
            raise _Refused(op, _conflict(*found[:2]))
        for value in edge.targets:
            self._set(value, found[0], op)
        if isinstance(found[0], Span):
            for value in edge.sources:
                self._set(value, found[0], op)

    def _compute(self, op: Op) -> None:
        spans = self._spans(op)
        terms = self._terms(op)
        if not op.operands:
            self._check_made_of_nothing(op)
        elif spans:
            self._along(op, *spans[0])
        elif terms:
            self._pass_on(op, terms)

    def _spans(self, op: Op) -> list[tuple[int, Span]]:
        """The tensors of an op that have the factor, operands first."""
        states = enumerate(map(self.states.get, (*op.operands, *op.results)))
        return [(index, state) for index, state in states if isinstance(state, Span)]

    def _terms(self, op: Op) -> dict[int, Partial]:
        """The operands of an op that are terms."""
        states = enumerate(map(self.states.get, op.operands))
        return {index: state for index, state in states if isinstance(state, Partial)}

    def _along(self, op: Op, tensor: int, span: Span) -> None:
        """An op that runs along the factor: all its tensors have it where its rule says so."""
        rule = self._rules.rule_of(op)
        split = split_along(op, rule, tensor, span, _SAME_ON_BLOCKS) or _added(op, rule, tensor, span)
        if split is None or not _keeps_to_blocks(op, rule, tensor, span):
            raise _Refused(op, _ALL, _parts(rule, tensor, span))
        if not any(split.operands) and op.name not in _REPEATING:
            raise _Refused(op, _ALL)
        made = [Partial(split.kind) if split.kind else found for found in split.results]
        for value, state in zip((*op.operands, *op.results), (*split.operands, *made), strict=True):
            if state is not None:
                self._set(value, state, op)
            elif value in self.states:
                raise _Refused(op, _conflict(self.states[value], span))

    def _pass_on(self, op: Op, terms: Mapping[int, Partial]) -> None:
        """What an op makes of terms, perhaps: others may become terms yet."""
        kinds = {term.kind for term in terms.values()}
        kind = next(iter(kinds))
        if len(kinds) == 1 and _carried(op, kind, frozenset(terms)) is not None:
            for value in op.results:
                self._set(value, Partial(kind), op)

    def _check_made_of_nothing(self, op: Op) -> None:
        span = self.states[op.results[0]]
        if op.name == "stablehlo.iota" and isinstance(span, Span) and span.dim == op.int("iota_dimension"):
            raise _Refused(op, "counts positions along it, which are others on each device")
        value = op.attributes.get("value")
        is_one_number = isinstance(value, ir.DenseElementsAttr) and value.is_splat
        if op.name != "stablehlo.iota" and not is_one_number:
            raise _Refused(op, "makes numbers that are others on each device")

    def _check(self) -> None:
        """Whether all agrees, now that no state is to come."""
        for op in dict.fromkeys(user for value in self.states for user, _ in value.uses):
            if _is_flow(op):
                self._check_decisions(op)
            else:
                self._check_terms(op)
        for edge in dict.fromkeys(edge for value in self.states for edge in self._rules.edges.get(value, ())):
            self._check_flow(edge)

    def _check_decisions(self, op: Op) -> None:
        """What decides where control goes is whole."""
        for index, value in enumerate(op.operands if op.name != "func.return" else ()):
            if value in self.states and (op, index) not in self._rules.slots:
                raise _Refused(op, "decides by it what runs")

    def _check_terms(self, op: Op) -> None:
        """What an op makes of terms are terms of what it makes of their sum."""
        terms = self._terms(op)
        for term in terms.values():
            if _carried(op, term.kind, frozenset(terms)) != frozenset(terms) or len(set(terms.values())) > 1:
                raise _Refused(op, _needs(term))

    def _check_flow(self, edge: DataFlowEdge) -> None:
        """All that flows along an edge is in the state of its owner, but for known zeros, which are terms of a sum."""
        state = self.states[edge.owner]
        for value in edge.sources:
            is_zero = state == Partial("sum") and is_identity(value, "sum")
            if self.states.get(value) != state and not is_zero:
                raise _Refused(_op_of(edge), "joins a sum over it with what is no part of that")


def _needs(term: Partial) -> str:
    return f"needs the {_KINDS.get(term.kind, term.kind)} over all of it"


def _conflict(one: State, other: State) -> str:
    """Why a value cannot be in two states."""
    term = next((state for state in (one, other) if isinstance(state, Partial)), None)
    return _TWICE if term is None else _needs(term)


def _is_flow(op: Op) -> bool:
    return op.name in TERMINATORS or is_data_flow(op)


def _op_of(edge: DataFlowEdge) -> Op:
    return edge.owner.owning_op


def _carried(op: Op, kind: str, terms: frozenset[int]) -> frozenset[int] | None:
    """The operands that have to be terms with these for the results to be so. Terms may be rounded one by one: a kernel
    rounds its results, too."""
    if op.name == "stablehlo.convert" and all(v.dtype.startswith(("f", "bf")) for v in (*op.operands, *op.results)):
        return terms
    return carries(op, kind, terms)


def _keeps_to_blocks(op: Op, rule: OpShardingRule | None, tensor: int, span: Span) -> bool:
    """Whether an op communicates nothing along the factor of a span, beside what its rule says."""
    if rule is None or op.name in PART_BY_PART:
        return True
    if op.name == "stablehlo.custom_call" and library_call(op) is None:
        return False
    factors = rule.mappings[tensor][span.dim]
    return any(
        strategy.splittable.issuperset(factors) and not any(i.factors.intersection(factors) for i in strategy.inside)
        for strategy in strategies_of(op, rule)
        if strategy.rule is None and strategy.ask is None
    )


def _added(op: Op, rule: OpShardingRule | None, tensor: int, span: Span) -> Split | None:
    """How an op scatters blocks of updates into zeros, or what else adds nothing: results are terms."""
    found = within_factor(rule, tensor, span) if rule is not None and op.name == "stablehlo.scatter" else None
    if rule is None or found is None or found[0] not in rule.reduction:
        return None
    kind, count = reduction_kind(op.blocks[0]), len(op.results)
    if kind is None or not all(is_identity(value, kind) for value in op.operands[:count]):
        return None
    operands = tuple(placed(rule, mapping, *found) for mapping in rule.operand_mappings)
    return Split(operands, (None,) * count, kind)


def _parts(rule: OpShardingRule | None, tensor: int, span: Span) -> tuple[int, ...]:
    """The sizes of factors of an op that a span consists of; empty where it is one, or consists of parts of some."""
    factors = rule.mappings[tensor][span.dim] if rule is not None else ()
    sizes = [rule.factor_sizes[f] for f in factors] if rule is not None else []
    borders = [span.outer, *(math.prod(sizes[:n]) for n in range(1, len(sizes))), span.outer * span.size]
    inside = sorted({border for border in borders if span.outer <= border <= span.outer * span.size})
    parts = [b // a for a, b in pairwise(inside) if not b % a]
    is_whole = math.prod(parts) == span.size and len(parts) == len(inside) - 1
    return tuple(parts) if is_whole and len(parts) > 1 else ()


# The factors of a reference's arguments along which its ops run on blocks, and why it does not run along others.

Types = Sequence[jax.ShapeDtypeStruct]
"""Those of arguments or results."""

Reasons = dict[tuple[int, Span], str]
"""By argument, parts of its dimensions that are whole, with what keeps them so."""


@dataclass(frozen=True, eq=False)
class Factor:
    """A factor of some arguments and results of a program: where it flows to, in spans of `size`; and where it is in
    arguments that only lend their shapes, as those of a sum do to its backward pass."""

    flow: FactorFlow
    program: ReferenceProgram
    size: int
    lent: Mapping[Value, Span] = field(default_factory=dict)

    def span_of(self, value: Value) -> Span | None:
        """Where it is in a value, if it is."""
        state = self.flow.states.get(value)
        return state if isinstance(state, Span) else self.lent.get(value)

    @cached_property
    def arguments(self) -> tuple[Span | None, ...]:
        """Where it is in each argument."""
        return tuple(map(self.span_of, self.program.arguments))

    @cached_property
    def results(self) -> tuple[Span | Partial | None, ...]:
        """What it makes of each result."""
        return tuple(self.flow.states.get(value) for value in self.program.graph.outputs)

    @property
    def kinds(self) -> frozenset[str]:
        """How results that do not have it combine."""
        return frozenset(state.kind for state in self.results if isinstance(state, Partial))

    def refuse(self, reason: str, reasons: Reasons) -> None:
        """Notes in all its arguments that it is whole."""
        reasons.update({(i, span): reason for i, span in enumerate(self.arguments) if span is not None})


Parts = Mapping[Factor, int]
"""Into how many parts factors are cut."""


def block_shape(value: Value, parts: Parts) -> tuple[int, ...]:
    """The shape of a block of a value."""
    shape = list(value.shape or ())
    for factor, count in parts.items():
        span = factor.span_of(value)
        if span is not None:
            shape[span.dim] //= count
    return tuple(shape)


def block_types(types: Types, parts: Parts) -> list[jax.ShapeDtypeStruct]:
    """The types of blocks of arguments."""
    shapes = [list(type_.shape) for type_ in types]
    for factor, count in parts.items():
        for shape, span in zip(shapes, factor.arguments, strict=True):
            if span is not None:
                shape[span.dim] //= count
    return [type_.update(shape=tuple(shape)) for type_, shape in zip(types, shapes, strict=True)]


def factors_of(program: ReferenceProgram, reasons: Reasons) -> list[Factor]:
    """The factors of its arguments along which all ops of a program run.

    A dimension that some op sees as several is followed as these: heads that are merged into a batch.
    """
    rules, fixed, found = ProgramRules(program.graph), frozenset(program.closed_over), list[Factor]()
    waiting = [(i, span) for i, value in enumerate(program.arguments) for span in _whole_dimensions(value)]
    while waiting:
        index, span = waiting.pop(0)
        value = program.arguments[index]
        if not value.uses:
            reasons[index, span] = _UNUSED
            continue
        if any(factor.arguments[index] == span for factor in found):
            continue
        flow = FactorFlow(rules, value, span, fixed)
        if flow.refusal is None:
            found.append(Factor(flow, program, span.size))
        elif flow.refusal.parts:
            waiting[:0] = [(index, part) for part in _parts_of_span(span, flow.refusal.parts)]
        else:
            reasons[index, span] = str(flow.refusal)
    return [factor for factor in _of_one_kind(found, reasons) if _is_apart(factor, found, reasons)]


_UNUSED = "no result depends on it"


def _whole_dimensions(value: Value) -> Iterator[Span]:
    return (Span(dim, 1, size, 1) for dim, size in enumerate(value.shape or ()) if size > 1)


def _parts_of_span(span: Span, sizes: Sequence[int]) -> Iterator[Span]:
    """The factors of these sizes, major to minor, that make up a span."""
    outer, left = span.outer, span.size
    for size in sizes:
        left //= size
        yield Span(span.dim, outer, size, left * span.inner)
        outer *= size


def reduction_of(factors: Sequence[Factor]) -> str:
    """How results combine along factors: by a sum, if they do so along one."""
    kinds = [kind for factor in factors for kind in factor.kinds]
    return "sum" if "sum" in kinds or not kinds else kinds[0]


def _of_one_kind(factors: Sequence[Factor], reasons: Reasons) -> list[Factor]:
    """Those along which results combine by one kind of reduction, if they do; and that some result needs."""
    reduction, found = reduction_of(factors), list[Factor]()
    for factor in factors:
        if not any(factor.results):
            factor.refuse(_UNUSED, reasons)
        elif factor.kinds - {reduction}:
            factor.refuse(f"results combine by {min(factor.kinds)} along it, by {reduction} along others", reasons)
        elif factor.kinds and not all(factor.results):
            factor.refuse("some results are sums over it, and others are the same on all devices", reasons)
        else:
            found.append(factor)
    return found


def _is_apart(factor: Factor, factors: Sequence[Factor], reasons: Reasons) -> bool:
    """Whether a factor shares no elements of a dimension with those before it."""
    before = factors[: factors.index(factor)]
    for other in before:
        for one, two in zip((*factor.arguments, *factor.results), (*other.arguments, *other.results), strict=True):
            if isinstance(one, Span) and isinstance(two, Span) and overlap(one, two):
                factor.refuse("it is a part of another one", reasons)
                return False
    return True


def overlap(one: Span, two: Span) -> bool:
    """Whether two parts of dimensions have elements in common, so that not both can be split."""
    major, minor = sorted((one, two), key=lambda span: span.outer)
    return one.dim == two.dim and bool(minor.outer % (major.outer * major.size))
