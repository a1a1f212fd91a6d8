"""Why a value is sharded as it is, each axis followed to its annotation; and why a collective runs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Protocol

from jax.extend.mlir import ir

from sdy_jax.base.errors import SdyError
from sdy_jax.ir.collectives import KINDS
from sdy_jax.ir.graph import Graph
from sdy_jax.ir.jax_shardings import axis_name, bytes_text, count_text, type_text
from sdy_jax.ir.locations import is_line, short_source
from sdy_jax.ir.meshes import AxisRef
from sdy_jax.ir.operations import copied, main_function
from sdy_jax.ir.shardings import FactorType, OpShardingRule, factor_symbol
from sdy_jax.ir.stored_shardings import function_shardings
from sdy_jax.lowering.planner.report import CollectiveRecord, InParts, Note, NotHeld
from sdy_jax.plan.explanations.layout_reasons import LayoutReason
from sdy_jax.plan.explanations.naming import Marks, Named, Naming
from sdy_jax.plan.explanations.origins import Annotations, Derivation, DerivedTypes, StatedBorder
from sdy_jax.plan.explanations.why_not import Obstacle, Obstacles, ObstacleTexts, WhyNot
from sdy_jax.plan.record.program import RecordedCollective, RecordedTensor
from sdy_jax.plan.record.record import PlanRecord
from sdy_jax.shardy.propagation import propagate
from sdy_jax.shardy.propagation.engine import Engine, Event, RecordedStep
from sdy_jax.shardy.propagation.explanations import AxisOrigin, Blockers, History
from sdy_jax.shardy.rules import Compat, RuleBook

# The answer of `plan.why`: chains of links, from the axis of a value back to its annotation.


@dataclass(frozen=True, slots=True)
class WhyLink:
    """One step on the way from an axis back to its annotation.

    Attributes:
        kind: "propagation", "type" (derived by JAX's rules, on Explicit axes), "group", "export", "annotation", or
            "unknown" where the way cannot be followed.
        axis, dim, value, type: where the axis was before this step: the value, as the user would call it, its type,
            and its dimension.
        text: the step in words.
        op, line, function: MLIR's name of the op, its source line and function; empty where there is none.
        level, priority: the op priority and the user priority at which the axis spread; None where it did not.
    """

    kind: str
    axis: str
    dim: int
    value: str
    type: str
    text: str
    op: str = ""
    line: str = ""
    function: str = ""
    level: int | None = None
    priority: int | None = None

    def __str__(self) -> str:
        return f"<- {self.text}"


@dataclass(frozen=True, slots=True)
class Chain:
    """The links of one axis of one dimension of a value, the annotation last."""

    value: str
    type: str
    axis: str
    dim: int
    links: tuple[WhyLink, ...]

    def __str__(self) -> str:
        return "\n".join([f"axis '{self.axis}' on dim {self.dim}", *(f"  {link}" for link in self.links)])


@dataclass(frozen=True)
class Why:
    """The answer of `plan.why`: iterating over it gives all links; printing it, the chains per value.

    `types` has the values asked for, with their types; `chains` one chain per axis of each. `instead` says which of
    them have another layout than propagation gave them, and what that saves and costs. `notes` are the plan's on these
    values, or on the line asked for: which ops gather them, and what that sends. `again`: those of them that are
    computed again, so that they need not be held between a forward and a backward pass; `blocked`: those that are
    computed part by part.
    """

    types: tuple[tuple[str, str], ...]
    chains: tuple[Chain, ...]
    instead: tuple[LayoutReason, ...] = ()
    notes: tuple[Note, ...] = ()
    again: tuple[NotHeld, ...] = ()
    blocked: tuple[InParts, ...] = ()

    def __iter__(self) -> Iterator[WhyLink]:
        return (link for chain in self.chains for link in chain.links)

    def __str__(self) -> str:
        texts = [*(self._value(value, type_) for value, type_ in self.types), *map(str, self.instead)]
        return "\n\n".join([*texts, *_computed_again(self.again), *map(_in_parts, self.blocked), *map(str, self.notes)])

    def _value(self, value: str, type_: str) -> str:
        chains = [chain for chain in self.chains if (chain.value, chain.type) == (value, type_)]
        if not chains:
            return f"{value}  {type_}\n  no axis splits it; `why_not` says what keeps an axis away"
        return "\n".join([f"{value}  {type_}", *(_indented(str(chain)) for chain in chains)])


def _computed_again(values: Sequence[NotHeld]) -> Iterator[str]:
    """What is not held, those of one type together."""
    sizes: dict[str, list[float]] = {}
    for value in values:
        sizes.setdefault(type_text(value.dtype, value.shape, None), []).append(value.bytes)
    for type_, found in sizes.items():
        count, less = count_text(len(found)), bytes_text(sum(found))
        yield f"{type_}{count}: not held for the backward pass, but computed again; {less} less on a device"


def _in_parts(value: InParts) -> str:
    held, type_ = bytes_text(value.bytes), type_text(value.dtype, value.shape, None)
    return (
        f"{type_}: computed in a loop over {value.parts} parts of dimension {value.dim}, with what is connected "
        f"with it; all parts would take {held} on a device"
    )


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


# Why a value is sharded as it is: each axis followed back to the annotation that it came from.
#
# Propagation is deterministic, so nothing is kept while planning: the first question propagates the imported module
# once more with a recorder, and all questions are answered from that.


class Explanation:
    """Answers about one propagated program.

    Args:
      imported: the module as propagation gets it; it is not changed.
      inputs, outputs: what the user calls the arguments and results.
      border: where their shardings come from.
      compat: as in `propagate`.
      checkpoints: the lines and types of the values that have a `checkpoint_name`.
    """

    def __init__(
        self,
        imported: ir.Operation,
        inputs: Sequence[str],
        outputs: Sequence[str],
        border: StatedBorder,
        compat: Compat = "sdy_jax",
        checkpoints: Marks = MappingProxyType({}),
    ):
        events: list[Event] = []
        self._module = copied(imported)  # the graph's handles do not keep it alive
        graph = Graph(self._module)
        self.engine = propagate(Engine(graph, recorder=events, rules=RuleBook(compat=compat)))
        self.history = History(self.engine, events)
        self.naming = Naming(graph, self.engine, inputs, outputs, checkpoints)
        self.annotations = Annotations(self.engine, self.naming, border)
        self._types = DerivedTypes(self.engine)
        self._sizes = {axis.name: axis.size for mesh in graph.meshes.values() for axis in mesh.axes}

    def why(self, value: str) -> Why:
        """The chains of links that gave a value its axes.

        Args:
          value: see `Naming.find`.

        Raises:
          SdyError: there is no such value.
        """
        found = self.naming.find(value)
        chains = [chain for named in found for chain in self._chains(named)]
        types = dict.fromkeys((named.label, self.naming.type_of(named.value_id)) for named in found)
        return Why(tuple(types), tuple(chains))

    def why_not(self, value: str, axis: str, dim: int | None = None) -> WhyNot:
        """What keeps a value from being split along an axis.

        Args:
          value: see `Naming.find`.
          axis: a mesh axis (`model`) or a sub-axis of one (`"model":(1)2`).
          dim: the dimension to be split; None: any.

        Raises:
          SdyError: there is no such value, or no such axis.
        """
        return self._obstacles.why_not(value, axis, dim)

    def obstacles(self, named: Named, axis: AxisRef, dim: int) -> tuple[Obstacle, ...]:
        """What keeps an axis from a dimension of a value that `naming` found."""
        return tuple(self._obstacles.of(named, axis, (dim,)))

    @cached_property
    def _obstacles(self) -> Obstacles:
        blockers = Blockers(self.engine)
        texts = ObstacleTexts(self.engine, blockers, self.naming, self.annotations, self._sizes, self._link_texts)
        return Obstacles(texts)

    def _link_texts(self, value_id: int, dim: int, axis: AxisRef) -> Iterator[str]:
        return (link.text for link in self.links(value_id, dim, axis))

    def _chains(self, named: Named) -> Iterator[Chain]:
        if named.sharding is None:
            return
        type_ = self.naming.type_of(named.value_id)
        for dim, dimension in enumerate(named.sharding.dimensions):
            for axis in dimension.axes:
                links = tuple(self.links(named.value_id, dim, axis))
                yield Chain(named.label, type_, axis_name(axis), dim, links)

    def links(self, value_id: int, dim: int, axis: AxisRef) -> Iterator[WhyLink]:
        """The links of an axis that a value id has in a dimension, back to the annotation."""
        axis, change = self._before_export(value_id, dim, axis)
        if change is not None:
            yield change
        while not self.history.is_given(value_id, dim, axis):
            cause = self.history.cause(value_id, dim, axis)
            if cause is None:
                break
            yield self._link(cause)
            if cause.spread is not None and cause.source is None:
                return
            value_id, dim, axis = cause.value_id, cause.dim, cause.axis
        seen = {value_id}
        while (derived := self._types.of(value_id, dim, axis)) is not None and derived.value_id not in seen:
            yield self._derived(derived)
            value_id, dim, axis = derived.value_id, derived.dim, derived.axis
            seen.add(value_id)
        yield from self._origin(value_id, dim, axis)

    def _before_export(self, value_id: int, dim: int, axis: AxisRef) -> tuple[AxisRef, WhyLink | None]:
        """The axis that the value id had after propagation, and what export made of it if it is another one."""
        sharding = self.engine.sharding(value_id)
        if sharding is None or axis in sharding.dimensions[dim].axes:
            return axis, None
        whole = next((a for a in sharding.dimensions[dim].axes if a.name == axis.name), axis)
        size, shards = self.naming.shape_of(value_id)[dim], self._size(whole)
        text = f"'{axis_name(whole)}' of size {shards}, shortened at the boundary: it does not divide {size} evenly"
        type_ = self.naming.type_of(value_id)
        return whole, WhyLink("export", axis_name(whole), dim, self.naming.describe(value_id), type_, text)

    def _size(self, axis: AxisRef) -> int:
        return axis.sub_axis.size if axis.sub_axis else self._sizes[axis.name]

    def _link(self, cause: AxisOrigin) -> WhyLink:
        step, naming = cause.write.step, self.naming
        value_id, dim = cause.value_id, cause.dim
        value, type_ = naming.describe(value_id), naming.type_of(value_id)
        site = naming.site_of_value_id(cause.value_id) if step.op.name == "func.return" else naming.site_of(step.op)
        if cause.spread is None:
            text = f"{value}, dim {dim} of {type_}; it is in the same sharding group"
            return WhyLink("group", axis_name(cause.axis), dim, value, type_, text, "sdy.sharding_group")
        text = self._spread_text(cause, value, type_)
        place = (step.op.name, site.line, site.function) if site else (step.op.name, "", "")
        return WhyLink("propagation", axis_name(cause.axis), dim, value, type_, text, *place, step.level, step.priority)

    def _spread_text(self, cause: AxisOrigin, value: str, type_: str) -> str:
        """`operand 1 of dot_general at model.py:34 in f: params['w'], dim 1 of f32[8,4]; to its result (...)`."""
        step, naming = cause.write.step, self.naming
        spread, op, source = cause.spread, cause.write.step.op, cause.source
        assert spread is not None
        target = naming.role(op, cause.write.tensor, step.num_operands)
        how = f"; to its {target} ({_how(step.rule, spread.factor, step)})"
        where = naming.op_text(op)
        if source is None:
            return f"several tensors of {where}{how}"
        there = f", dim {cause.dim} of {type_}"
        if op.name == "func.return":
            return f"{value}{there}; " + ("returned" if source < step.num_operands else "the result that it is")
        own = "" if source >= step.num_operands else f": {naming.describe(cause.value_id, naming.site_of(op))}"
        return f"{naming.role(op, source, step.num_operands)} of {where}{own}{there}{how}"

    def _derived(self, derived: Derivation) -> WhyLink:
        naming, op = self.naming, derived.op
        site = naming.site_of_value_id(derived.value_id) if op.name == "func.return" else naming.site_of(op)
        value, type_ = naming.describe(derived.value_id), naming.type_of(derived.value_id)
        text = f"{self._source_text(derived, value)}, dim {derived.dim} of {type_}; {self._effect_text(derived)}"
        place = (op.name, site.line, site.function) if site else (op.name, "", "")
        return WhyLink("type", axis_name(derived.axis), derived.dim, value, type_, text, *place)

    def _source_text(self, derived: Derivation, value: str) -> str:
        naming, op = self.naming, derived.op
        if op.name == "func.return":
            return value
        own = naming.describe(derived.value_id, naming.site_of(op))
        return f"{naming.role(op, derived.source, derived.num_operands)} of {naming.op_text(op)}: {own}"

    def _effect_text(self, derived: Derivation) -> str:
        if derived.op.name == "func.return":
            return "returned in its type"
        return f"to the type of its {self.naming.role(derived.op, derived.target, derived.num_operands)}, by JAX's rule"

    def _origin(self, value_id: int, dim: int, axis: AxisRef) -> Iterator[WhyLink]:
        """The annotation at which a chain ends, and how it came to the value id."""
        found = self.annotations.of(value_id)
        if not found:
            value, type_ = self.naming.describe(value_id), self.naming.type_of(value_id)
            yield WhyLink("unknown", axis_name(axis), dim, value, type_, f"no annotation: {value} began with the axis")
        for note in found:
            value, type_ = self.naming.describe(note.value_id), self.naming.type_of(note.value_id)
            yield WhyLink(note.kind, axis_name(axis), dim, value, type_, note.text, note.op, note.line, note.function)


def _how(rule: OpShardingRule, factor: int, step: RecordedStep) -> str:
    """`along k of ([i,k], [k,j])->([i,j]), which is summed over; op priority 2`."""
    parts = []
    if len(set(rule.mappings)) > 1:
        text = str(rule).partition(" {")[0].replace(", ", ",").replace("],[", "], [")
        parts.append(f"along {factor_symbol(factor)} of {text}{_KINDS[rule.type_of(factor)]}")
    parts.append(f"op priority {step.level}")
    if step.priority:
        parts.append(f"user priority {step.priority}")
    return "; ".join(parts)


_KINDS = {
    FactorType.PASS_THROUGH: "",
    FactorType.REDUCTION: ", which is summed over",
    FactorType.NEED_REPLICATION: ", which the op needs whole",
    FactorType.PERMUTATION: ", along which data moves",
}


def given_arguments(module: ir.Operation) -> frozenset[int]:
    """The numbers of main's arguments that have a sharding."""
    shardings = function_shardings(main_function(module), "arg_attrs")
    return frozenset(i for i, sharding in enumerate(shardings) if sharding is not None)


# Why a collective runs: what it moves from which layout to which, for which op, and where the first layout is from.

_LISTED = 5
"""Collectives that an error names. Chosen: for a reader."""

_NAMED = re.compile(rf"({'|'.join(sorted(KINDS, key=len, reverse=True))})\s.*?([^\s]+:\d+)")
"""A collective as a page names it: by its kind and its source line."""


class AskedPlan(Protocol):
    """The plan that is asked."""

    @property
    def collectives(self) -> Sequence[CollectiveRecord]:
        """Those of the partitioned program."""

    def record(self) -> PlanRecord:
        """All that it says as plain data."""

    def why(self, value: str) -> Why:
        """Why a value is sharded as it is."""


@dataclass(frozen=True)
class WhyCollective(Why):
    """The answer of `plan.why(collective)`: `reasons` has a paragraph per collective; `chains` and the other parts are
    about the values that they move."""

    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        about = super().__str__()
        return "\n\n".join([*self.reasons, *([about] if about else [])])


def is_collective(name: object) -> bool:
    """Whether a question is about a collective: `all_gather at model.py:42`, `all_gather(params['w1'])`."""
    is_made = isinstance(name, str) and any(name.startswith(f"{kind}(") for kind in KINDS)
    return is_made or (isinstance(name, str) and _NAMED.fullmatch(name) is not None)


def why_collective(plan: AskedPlan, asked: CollectiveRecord | RecordedCollective | str) -> WhyCollective:
    """See `Plan.why`."""
    record = plan.record()
    found = list(_found(plan, record, asked))
    if not found:
        known = dict.fromkeys(f"{each.kind} at {each.place.line}" for of in record.collectives for each in of.single)
        there = f"of this plan are {', '.join(list(known)[:_LISTED])}" if known else "this plan has none"
        raise SdyError(f"no collective is called {asked!r}; {there}")
    reasons = dict.fromkeys(_reason(record, each) for each in found)
    about = _about(plan, found)
    return WhyCollective(
        about.types, about.chains, about.instead, about.notes, about.again, about.blocked, tuple(reasons)
    )


def _found(
    plan: AskedPlan, record: PlanRecord, asked: CollectiveRecord | RecordedCollective | str
) -> Iterator[RecordedCollective]:
    if isinstance(asked, CollectiveRecord):
        for own, said in zip(plan.collectives, record.collectives, strict=True):
            pairs = zip((own, *own.members), (said, *said.members), strict=True)
            yield from (each for given, each in pairs if given is asked)
        return
    for each in (one for of in record.collectives for one in of.single):
        if asked in (each, each.result) or (isinstance(asked, str) and _is_named(each, asked)):
            yield each


def _is_named(each: RecordedCollective, name: str) -> bool:
    match = _NAMED.fullmatch(name)
    if match is None or match[1] != each.kind:
        return False
    return is_line(each.place.line, short_source(match[2])) or is_line(each.place.library, match[2])


def _reason(record: PlanRecord, each: RecordedCollective) -> str:
    """What it moves, why that takes it, and for which op."""
    head = f"{each.kind} {each.detail}, {bytes_text(each.wire_bytes)}{count_text(each.times)} per device"
    scope = f" in {each.place.scope}" if each.place.scope else ""
    lines = [head, f"  for {each.cause} at {each.place.lines}{scope}"]
    before, after = record.value_of.get(each.value), record.value_of.get(each.result)
    if before is not None and after is not None:
        lines.append(f"  brings {each.value} from {before.tensor.type} to {after.tensor.type}")
        lines += [f"    {change}" for change in _changes(before.tensor, after.tensor)]
    if each.origin == "user":
        lines.append("  the program holds it itself")
    return "\n".join(lines)


def _changes(before: RecordedTensor, after: RecordedTensor) -> Iterator[str]:
    """What is different after a collective, in words."""
    summed = [axis for axis in before.unreduced if axis not in after.unreduced]
    if summed:
        yield f"devices along {_listed(summed)} hold terms of a sum, which is taken"
    for dim, (old, new) in enumerate(zip(before.axes, after.axes, strict=True)):
        lost, gained = [a for a in old if a not in new], [a for a in new if a not in old]
        if lost:
            yield f"dim {dim} is no longer split along {_listed(lost)}"
        if gained:
            yield f"dim {dim} is split along {_listed(gained)}"


def _listed(axes: Sequence[str]) -> str:
    return ", ".join(f"'{axis}'" for axis in axes)


def _about(plan: AskedPlan, found: Sequence[RecordedCollective]) -> Why:
    """How the values that are moved came to their layouts: arguments by their paths, others by the line that makes
    them."""
    record, answers = plan.record(), list[Why]()
    for name in dict.fromkeys(each.value for each in found):
        value = record.value_of.get(name)
        op = record.ops[value.op] if value is not None and value.op is not None else None
        try:
            answer = plan.why(name if op is None else op.place.library or op.place.line)
        except SdyError:  # the planner made it
            continue
        shape = value.tensor.shape if value is not None else ()
        answers.append(answer if op is None else _of_shape(answer, shape))
    types = tuple(dict.fromkeys(each for answer in answers for each in answer.types))
    chains = tuple(dict.fromkeys(chain for answer in answers for chain in answer.chains))
    instead = tuple(dict.fromkeys(reason for answer in answers for reason in answer.instead))
    return Why(types, chains, instead)


def _of_shape(answer: Why, shape: Sequence[int]) -> Why:
    """The part of an answer on a line that is about values of one shape; the last of these."""
    alike = [pair for pair in answer.types if _shape(pair[1]) == tuple(shape)][-1:]
    chains = tuple(chain for chain in answer.chains if (chain.value, chain.type) in alike)
    return replace(answer, types=tuple(alike), chains=chains)


def _shape(type_: str) -> tuple[int, ...]:
    """`(8, 4)` of `f32[8@data,4@(x,y)]`."""
    sizes = re.sub(r"@\([^)]*\)(?=[,\]])|@[^,\]]*", "", type_.partition("[")[2].partition("]")[0])
    return tuple(int(size) for size in sizes.split(",") if size.isdecimal())
