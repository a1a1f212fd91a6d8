"""Why a value is sharded as it is: each axis followed back to the annotation that it came from, as chains of
links.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Graph
from sdy_jax.ir.meshes import AxisRef
from sdy_jax.ir.operations import copied, main_function
from sdy_jax.ir.rules import FactorType, OpShardingRule, factor_symbol
from sdy_jax.ir.stored_shardings import function_shardings
from sdy_jax.ir.type_text import axis_name, bytes_text, count_text, type_text
from sdy_jax.lowering.planner.report import InParts, Note, NotHeld
from sdy_jax.plan.explanations.layout_reasons import LayoutReason
from sdy_jax.plan.explanations.naming import Marks, Named, Naming
from sdy_jax.plan.explanations.origins import Annotations, Derivation, DerivedTypes, StatedBorder
from sdy_jax.plan.explanations.why_not import Obstacle, Obstacles, ObstacleTexts, WhyNot
from sdy_jax.shardy.propagation import propagate
from sdy_jax.shardy.propagation.engine import Engine, Event, RecordedStep
from sdy_jax.shardy.propagation.explanations import Blockers, Cause, History
from sdy_jax.shardy.rules import Compat, RuleBook

# The answer of `plan.why`: chains of links, from the axis of a value back to its annotation.


@dataclass(frozen=True, slots=True)
class Link:
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
    links: tuple[Link, ...]

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

    def __iter__(self) -> Iterator[Link]:
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

    def links(self, value_id: int, dim: int, axis: AxisRef) -> Iterator[Link]:
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

    def _before_export(self, value_id: int, dim: int, axis: AxisRef) -> tuple[AxisRef, Link | None]:
        """The axis that the value id had after propagation, and what export made of it if it is another one."""
        sharding = self.engine.sharding(value_id)
        if sharding is None or axis in sharding.dimensions[dim].axes:
            return axis, None
        whole = next((a for a in sharding.dimensions[dim].axes if a.name == axis.name), axis)
        size, shards = self.naming.shape_of(value_id)[dim], self._size(whole)
        text = f"'{axis_name(whole)}' of size {shards}, shortened at the boundary: it does not divide {size} evenly"
        type_ = self.naming.type_of(value_id)
        return whole, Link("export", axis_name(whole), dim, self.naming.describe(value_id), type_, text)

    def _size(self, axis: AxisRef) -> int:
        return axis.sub_axis.size if axis.sub_axis else self._sizes[axis.name]

    def _link(self, cause: Cause) -> Link:
        step, naming = cause.write.step, self.naming
        value_id, dim = cause.value_id, cause.dim
        value, type_ = naming.describe(value_id), naming.type_of(value_id)
        site = naming.site_of_value_id(cause.value_id) if step.op.name == "func.return" else naming.site_of(step.op)
        if cause.spread is None:
            text = f"{value}, dim {dim} of {type_}; it is in the same sharding group"
            return Link("group", axis_name(cause.axis), dim, value, type_, text, "sdy.sharding_group")
        text = self._spread_text(cause, value, type_)
        place = (step.op.name, site.line, site.function) if site else (step.op.name, "", "")
        return Link("propagation", axis_name(cause.axis), dim, value, type_, text, *place, step.level, step.priority)

    def _spread_text(self, cause: Cause, value: str, type_: str) -> str:
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

    def _derived(self, derived: Derivation) -> Link:
        naming, op = self.naming, derived.op
        site = naming.site_of_value_id(derived.value_id) if op.name == "func.return" else naming.site_of(op)
        value, type_ = naming.describe(derived.value_id), naming.type_of(derived.value_id)
        text = f"{self._source_text(derived, value)}, dim {derived.dim} of {type_}; {self._effect_text(derived)}"
        place = (op.name, site.line, site.function) if site else (op.name, "", "")
        return Link("type", axis_name(derived.axis), derived.dim, value, type_, text, *place)

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

    def _origin(self, value_id: int, dim: int, axis: AxisRef) -> Iterator[Link]:
        """The annotation at which a chain ends, and how it came to the value id."""
        found = self.annotations.of(value_id)
        if not found:
            value, type_ = self.naming.describe(value_id), self.naming.type_of(value_id)
            yield Link("unknown", axis_name(axis), dim, value, type_, f"no annotation: {value} began with the axis")
        for note in found:
            value, type_ = self.naming.describe(note.value_id), self.naming.type_of(note.value_id)
            yield Link(note.kind, axis_name(axis), dim, value, type_, note.text, note.op, note.line, note.function)


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
