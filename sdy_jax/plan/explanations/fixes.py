"""Fix-its: changes of one line of the user's code that save bytes, each tried by the planner before it is offered."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import overload

from jax.extend.mlir import ir

from sdy_jax.annotate.program import Program
from sdy_jax.base.errors import SdyError, some_of
from sdy_jax.ir.attributes import itemsize, sharding_to_attribute
from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.ir.jax_shardings import bytes_text, from_partition_spec, on_whole_axes, to_partition_spec, type_text
from sdy_jax.ir.locations import place_of, short_source, source_line
from sdy_jax.ir.meshes import Mesh, axes_size
from sdy_jax.ir.operations import CONSTRAINTS, copied, main_function, named, pre_order, replace_op
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.ir.stored_shardings import function_shardings, set_function_shardings, sharding_of
from sdy_jax.lowering.ops.emit import value_shardings
from sdy_jax.lowering.planner.report import ChangedLayout
from sdy_jax.lowering.planner.setting import Policy
from sdy_jax.plan.border import BoundaryValue
from sdy_jax.plan.explanations.layout_reasons import RESULTS
from sdy_jax.plan.explanations.origins import spec_text
from sdy_jax.plan.plan import Plan
from sdy_jax.plan.record.differences import folded
from sdy_jax.plan.usual_layouts import carried

# Changes of a traced program that stand for the change of one line of the user's code.


@dataclass(frozen=True, slots=True)
class Change:
    """A change of one line.

    Attributes:
        kind: "argument", "result", "constraint", "state", "size" or "option".
        line: the line of the user's code.
        text: what to write there.
        program: makes the traced program that the changed code would be.
        policy: the decisions of the changed code; None: they stay.
        size: about how many bytes of a device it concerns, to try the largest first.
        leaves: the argument leaves that it is about, where no other change shall be.
    """

    kind: str
    line: str
    text: str
    program: Callable[[], Program]
    policy: Policy | None = None
    size: float = 0.0
    leaves: frozenset[int] = frozenset()


def stated(sharding: TensorSharding, program: Program) -> TensorSharding:
    """What a `PartitionSpec` says of a layout: closed dimensions on whole axes of the user's mesh."""
    spec = to_partition_spec(replace(on_whole_axes(sharding), unreduced_axes=(), reduction="sum"))
    return from_partition_spec(spec, sharding.rank, program.mesh, program.mesh_name)


def with_border(
    program: Program, arguments: Mapping[int, TensorSharding], results: Mapping[int, TensorSharding]
) -> Program:
    """The program with other shardings of some argument and result leaves."""
    module = copied(program.module)
    main, first = main_function(module), len(program.constants)
    with module.context:
        set_function_shardings(main, "arg_attrs", {first + leaf: sharding for leaf, sharding in arguments.items()})
        set_function_shardings(main, "res_attrs", results)
    return program.with_module(module)


def without_constraints(program: Program, line: str) -> Program:
    """The program without the sharding constraints of a source line."""
    module = copied(program.module)
    for op in constraints_in(module):
        if source_line(op.location) == line:
            replace_op(op, list(op.operands))
    return program.with_module(module)


def constraints_in(module: ir.Operation) -> list[ir.Operation]:
    """The sharding constraints and reshards of a module, in program order."""
    return named(module, *CONSTRAINTS)


def constrained(program: Program, line: str, type_: ir.Type, sharding: TensorSharding) -> Program:
    """The program with a constraint on what a source line makes of a type: the values that other lines use."""
    module = copied(program.module)
    for op in pre_order(module):
        if len(op.results) == 1 and op.results[0].type == type_ and source_line(op.location) == line:
            _constrain(op.results[0], line, sharding)
    return program.with_module(module)


def _constrain(value: ir.Value, line: str, sharding: TensorSharding) -> None:
    outside = [use for use in value.uses if source_line(use.owner.operation.location) != line]
    if not outside:
        return
    maker = value.owner
    with maker.context, ir.Location.unknown(maker.context):
        constraint = ir.Operation.create(
            "sdy.sharding_constraint",
            results=[value.type],
            operands=[value],
            attributes={"sharding": sharding_to_attribute(sharding, maker.context)},
            loc=maker.location,
            ip=ir.InsertionPoint.after(maker),
        )
    for use in outside:
        use.owner.operation.operands[use.operand_number] = constraint.results[0]


# Changes of what `in_shardings` and `out_shardings` say: values that move right where they enter or leave.

Moved = dict[tuple[str, str, str], list[tuple[int, TensorSharding]]]
"""The leaves that move alike, with the layouts that they move to: by their path without numbers and both layouts."""


def border_changes(plan: Plan, others: Collection[int] = ()) -> Iterator[Change]:
    """Arguments stated as all their users take them, and results as they are made; but for `others`, leaves that other
    changes are about.

    What is split over fewer devices then is none: weights that are gathered layer by layer are meant to lie split.
    """
    graph = Graph(plan.stages["partitioned"])
    border = _Border(plan, graph, value_shardings(graph))
    yield from border.of_arguments(others)
    yield from border.of_results()


class _Border:
    def __init__(self, plan: Plan, graph: Graph, shardings: Mapping[Value, TensorSharding]):
        self._plan, self._graph, self._shardings = plan, graph, shardings
        self._traced, self._back = plan.traced, carried(plan.program)

    def of_arguments(self, others: Collection[int]) -> Iterator[Change]:
        found, first = Moved(), len(self._plan.constants)
        values = self._graph.arguments[first:]
        for leaf, (value, argument) in enumerate(zip(values, self._plan.arguments, strict=True)):
            if argument.path not in self._plan.as_passed and leaf not in others:
                self._add(found, leaf, value, argument.path, argument.sharding, self._taken(value))
        for (path, before, after), leaves in found.items():
            shardings = dict(leaves)
            results = {self._back[leaf]: s for leaf, s in leaves if leaf in self._back}
            what = "in_shardings and out_shardings" if results else "in_shardings"
            made = partial(with_border, self._traced, shardings, results)
            size = sum(self._held(values[leaf], self._plan.arguments[leaf].sharding) for leaf in shardings)
            yield Change("argument", self._plan.source, _text(what, path, len(leaves), before, after), made, size=size)

    def of_results(self) -> Iterator[Change]:
        found, returned = Moved(), set(self._back.values())
        for leaf, (value, result) in enumerate(zip(self._graph.outputs, self._plan.results, strict=True)):
            if leaf not in returned:
                self._add(found, leaf, value, result.path, result.sharding, self._made(value))
        for (path, before, after), leaves in found.items():
            made = partial(with_border, self._traced, {}, dict(leaves))
            text = _text("out_shardings", path, len(leaves), before, after)
            size = sum(self._held(self._graph.outputs[leaf], self._plan.results[leaf].sharding) for leaf, _ in leaves)
            yield Change("result", self._plan.source, text, made, size=size)

    def _add(
        self, found: Moved, leaf: int, value: Value, path: str, now: TensorSharding, better: TensorSharding | None
    ) -> None:
        """Notes a leaf whose layout might be another one that an array can have."""
        if better is None or value.shape is None or better.mesh != now.mesh or better.unreduced_axes:
            return
        mesh, after = self._plan.program.mesh, stated(better, self._traced)
        is_even = not any(n % count for n, count in zip(value.shape, after.shard_counts(mesh), strict=True))
        if is_even and not after.same_layout_as(now) and _shards(after, mesh) >= _shards(now, mesh):
            key = folded(path) if re.search(r"\[\d+\]", path) else path
            found.setdefault((key, spec_text(now), spec_text(after)), []).append((leaf, after))

    def _taken(self, argument: Value) -> TensorSharding | None:
        """The layout in which all users take an argument, if collectives bring it there before."""
        ends = list(_ends(argument))
        layouts = [self._shardings.get(end) for end in ends]
        if not layouts or layouts[0] is None or any(end is argument for end in ends):
            return None
        return layouts[0] if all(each is not None and each.same_layout_as(layouts[0]) for each in layouts) else None

    def _made(self, result: Value) -> TensorSharding | None:
        """The layout of a result before collectives bring it where it is returned."""
        value = result
        while (op := value.defining_op) is not None and _is_collective(op):
            value = op.operands[0]
        return None if value is result else self._shardings.get(value)

    def _held(self, value: Value, sharding: TensorSharding) -> float:
        return math.prod(sharding.local_shape(value.shape or (), self._plan.program.mesh)) * value.itemsize


def _ends(value: Value) -> Iterator[Value]:
    """What ops take of a value: itself, or what it is behind all collectives."""
    for user, _ in value.uses:
        if not _is_collective(user):
            yield value
        elif all(_is_collective(each) for each, _ in user.results[0].uses):
            yield from _ends(user.results[0])
        else:
            yield user.results[0]


def _is_collective(op: Op) -> bool:
    return op.name.startswith("sdy.") and len(op.operands) == 1 and len(op.results) == 1 and not op.blocks


def _shards(sharding: TensorSharding, mesh: Mesh) -> int:
    return math.prod(sharding.shard_counts(mesh))


def _text(what: str, path: str, count: int, before: str, after: str) -> str:
    many = f" ({count} arrays)" if count > 1 else ""
    return f"{what} of `{path}`{many}: {after} instead of {before}"


# Changes of sharding constraints: those that cost much are left out, those that are missing are written.

_MOST_CONSTRAINTS = 3
"""Constraints that are tried, of those that are there and of those that might be missing. Guessed: each is a plan; the
dearest come first."""


def statement_changes(plan: Plan) -> Iterator[Change]:
    """Constraints that are dear, or behind which what was gathered is sliced again, one by one, and all as hints; and,
    where layouts follow propagation, those that the layouts of the whole program would amount to."""
    lines = {note.source: 0.0 for note in plan.dear_constraints if note.op != RESULTS}
    lines |= dict.fromkeys(_gathered_for_nothing(plan), 0.0)
    if plan.layouts is None:
        lines |= {source_line(op.location): 0.0 for op in constraints_in(plan.traced.module)}
    sizes = {line: _sent_on(plan, line) for line in lines}
    for line in sorted(lines, key=lambda line: -sizes[line])[:_MOST_CONSTRAINTS]:
        if said := _said_on(plan, line):
            made = partial(without_constraints, plan.traced, line)
            yield Change("constraint", line, f"leave out {said}", made, size=sizes[line])
    if lines and plan.policy.layouts == "global" and plan.policy.constraints == "kept":
        policy, text = replace(plan.policy, constraints="hints"), 'partition(..., constraints="hints")'
        yield Change("option", plan.source, text, lambda: plan.traced, policy, max(sizes.values()))
    if plan.policy.optimize_collectives is False and any(record.origin == "user" for record in plan.collectives):
        policy = replace(plan.policy, optimize_collectives=True)
        text = "partition(..., optimize_collectives=True)"
        yield Change("option", plan.source, text, lambda: plan.traced, policy)
    if plan.policy.layouts != "global":
        yield from _missing(plan)


def _sent_on(plan: Plan, line: str) -> float:
    return sum(record.total_wire_bytes for record in plan.collectives if record.source == line)


def _said_on(plan: Plan, line: str) -> str:
    """`the constraint P('data') (in 12 places)`, of a line that has one."""
    found = [op for op in constraints_in(plan.traced.module) if source_line(op.location) == line]
    specs = Counter(spec_text(sharding) for op in found if (sharding := sharding_of(op.results[0])) is not None)
    if not specs:
        return ""
    places = f" (in {len(found)} places)" if len(found) > 1 else ""
    return f"the constraint {' and '.join(specs)}{places}"


# Gathered, and sliced again.


def _gathered_for_nothing(plan: Plan) -> Iterator[str]:
    """The lines for which a value is gathered along an axis and then sliced along it again, by itself or behind
    element-wise ops."""
    for op in Graph(plan.stages["partitioned"]).main.walk():
        if op.name == "sdy.all_gather" and op.results[0].uses and _is_sliced(op.results[0], _DEEP):
            yield source_line(op.mlir.location)


_DEEP = 4
"""Ops between a gather and the slice of what it gathered. Guessed, a guard: with more, what is found is rarely one
statement's doing."""


def _is_sliced(value: Value, deep: int) -> bool:
    users = [user for user, _ in value.uses]
    return bool(users) and deep > 0 and all(_slices(user, value, deep) for user in users)


def _slices(user: Op, value: Value, deep: int) -> bool:
    if user.name == "sdy.all_slice":
        return True
    is_alike = len(user.results) == 1 and user.results[0].shape == value.shape and not user.blocks
    return is_alike and _is_sliced(user.results[0], deep - 1)


# Missing ones.


def _missing(plan: Plan) -> Iterator[Change]:
    """Layouts of the whole program instead of what propagation says; and the constraints that say the largest
    differences between the two."""
    best = plan.replanned(plan.traced, replace(plan.policy, layouts="global"))
    if best.wire_bytes >= plan.wire_bytes:
        return
    policy = replace(plan.policy, layouts="global")
    yield Change("option", plan.source, 'partition(..., layouts="global")', lambda: plan.traced, policy)
    changed = best.layouts.changed if best.layouts is not None else ()
    sizes = Counter[tuple[str, str, ir.Type]]()
    by_key: dict[tuple[str, str, ir.Type], ChangedLayout] = {}
    for change in changed:
        if change.chosen.unreduced_axes or change.chosen.mesh != plan.program.mesh_name:
            continue
        key = change.source, spec_text(stated(change.chosen, plan.traced)), _type(change, plan)
        sizes[key] += math.prod(change.shape) * int(itemsize(change.dtype))
        by_key[key] = change
    for key, size in sizes.most_common(_MOST_CONSTRAINTS):
        line, spec, type_ = key
        change = by_key[key]
        name = place_of(change.location).primitive or change.op
        what = type_text(change.dtype, change.shape, None)
        text = f"sdy.sharding_constraint(..., {spec}) around what {name} makes, {what}"
        made = partial(constrained, plan.traced, line, type_, stated(change.chosen, plan.traced))
        yield Change("constraint", line, text, made, size=size)


def _type(change: ChangedLayout, plan: Plan) -> ir.Type:
    context = plan.traced.module.context
    return ir.Type.parse(f"tensor<{'x'.join(map(str, change.shape))}x{change.dtype}>".replace("<x", "<"), context)


# Changes of what is said of an optimizer's state: to lie as its parameters do.


def state_change(plan: Plan) -> Change | None:
    """What is said of arrays that come back as results, are whole on every device, and are named and shaped as a
    parameter that is not: `opt.mu['w1']` beside `params['w1']`. All of them are one change, by `sdy.like`."""
    back = carried(plan.program)
    like = dict(_like_parameters(plan, back))
    if not like:
        return None
    arguments = {leaf: stated(parameter.sharding, plan.traced) for leaf, parameter in like.items()}
    results = {back[leaf]: sharding for leaf, sharding in arguments.items()}
    leaf, parameter = next(iter(like.items()))
    many = f" and {len(like) - 1} more" if len(like) > 1 else ""
    text = (
        f"in_shardings and out_shardings of `{plan.arguments[leaf].path}`{many}: as of their parameters, by sdy.like "
        f"({spec_text(arguments[leaf])} as `{parameter.path}`)"
    )
    size = sum(math.prod(plan.program.in_info[i].shape) * plan.program.in_info[i].dtype.itemsize for i in like)
    program = partial(with_border, plan.traced, arguments, results)
    return Change("state", plan.source, text, program, size=size, leaves=frozenset(like))


def _like_parameters(plan: Plan, back: Mapping[int, int]) -> Iterator[tuple[int, BoundaryValue]]:
    """The replicated leaves of a state, each with its parameter: the one whose path ends alike longest."""
    shapes = [info.shape for info in plan.program.in_info]
    split = [leaf for leaf in back if _is_split(plan.arguments[leaf].sharding)]
    for leaf in back:
        value = plan.arguments[leaf]
        if _is_split(value.sharding) or math.prod(shapes[leaf]) < 2:
            continue
        alike = [other for other in split if shapes[other] == shapes[leaf] and _alike(value, plan.arguments[other])]
        if alike:
            yield leaf, plan.arguments[max(alike, key=lambda other: _alike(value, plan.arguments[other]))]


def _is_split(sharding: TensorSharding) -> bool:
    return any(sharding.axes)


def _alike(one: BoundaryValue, other: BoundaryValue) -> int:
    """The number of keys with which two paths end alike."""
    ends = [path.replace("]", "").replace(".", "[").split("[")[::-1] for path in (one.path, other.path)]
    count = 0
    for a, b in zip(*ends, strict=False):
        if a != b:
            break
        count += 1
    return count


# Changes of sizes: a dimension that its axes do not divide becomes the next multiple.


def size_changes(plan: Plan) -> Iterator[Change]:
    """A multiple for each size of an argument that is stated to be split by axes which do not divide it, for all
    dimensions of that size. The function is traced with the arguments that it would have then."""
    if plan.resized is None:
        return
    for size, (shards, paths) in _uneven(plan).items():
        larger = math.ceil(size / shards) * shards
        where = some_of([f"`{path}`" for path in paths], 2)
        text = f"a multiple of {shards}: {larger} instead of {size} in {where}"
        yield Change("size", plan.source, text, partial(_resized, plan, size, larger))


def _resized(plan: Plan, size: int, larger: int) -> Program:
    """The program of larger arguments.

    Raises:
        SdyError: the function does not take such arguments.
    """
    assert plan.resized is not None
    try:
        return plan.resized(size, larger)
    except Exception as error:  # the user's function was written for other sizes
        raise SdyError(f"the function does not take {larger} instead of {size}") from error


def _uneven(plan: Plan) -> dict[int, tuple[int, list[str]]]:
    """Sizes that the axes stated for them do not divide: by how many blocks, and of which arguments."""
    found: dict[int, tuple[int, list[str]]] = {}
    traced, mesh = plan.traced, plan.program.mesh
    shardings = function_shardings(main_function(traced.module), "arg_attrs")[len(traced.constants) :]
    for info, sharding, path in zip(traced.in_info, shardings, traced.inputs, strict=True):
        if sharding is None or sharding.mesh != traced.mesh_name:
            continue
        with suppress(TypeError):  # symbolic sizes
            for size, axes in zip(info.shape, sharding.axes, strict=False):
                shards = axes_size(axes, mesh)
                if size % shards:
                    most, paths = found.get(size, (1, []))
                    found[size] = math.lcm(most, shards), [*paths, path]
    return found


# Trying changes, and offering those that save something.

_MOST = 8
"""Changes that are tried, each by planning the program again. Guessed: more take longer than one waits for a page."""

_WORTH, _NO_MORE = 0.005, 1.01
"""The least share of the bytes on the wire, or of the memory, that a fix-it saves; and what it may cost of the other,
and of the devices' work. Chosen: less is not worth a line of a program."""


@dataclass(frozen=True, slots=True)
class Fix:
    """A change of one line that saves bytes: the plan of the changed program was made.

    Attributes:
        kind: "argument", "result", "constraint", "state", "size" or "option".
        line: the line of the user's code.
        text: what to write there.
        wire_bytes: what each device sends less, per call.
        memory: the bytes that it holds less at the most.
        share: of all that it sends.
    """

    kind: str
    line: str
    text: str
    wire_bytes: float
    memory: float
    share: float

    def __str__(self) -> str:
        return f"{short_source(self.line)}: {self.text}: {self.saves}"

    @property
    def saves(self) -> str:
        """`saves 24.0 KiB on the wire (100%) and 1.5 KiB of memory`."""
        sent = [f"{bytes_text(self.wire_bytes)} on the wire ({self.share:.0%})"] if self.wire_bytes > 0 else []
        held = [f"{bytes_text(self.memory)} of memory"] if self.memory > 0 else []
        return f"saves {' and '.join([*sent, *held])}"


@dataclass(frozen=True)
class Fixes(Sequence[Fix]):
    """Fix-its, those that save most first; `tried` changes were planned."""

    found: tuple[Fix, ...]
    tried: int

    @overload
    def __getitem__(self, index: int) -> Fix: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Fix]: ...

    def __getitem__(self, index: int | slice) -> Fix | Sequence[Fix]:
        return self.found[index]

    def __len__(self) -> int:
        return len(self.found)

    def __str__(self) -> str:
        if self.found:
            return "\n".join(map(str, self.found))
        return (
            f"no fix-its: of {self.tried} changes that were tried, none saves anything" if self.tried else "no fix-its"
        )


def changes(plan: Plan) -> list[Change]:
    """The changes that may be worth a try, the largest first; nothing is planned for them, except for layouts that
    follow propagation, beside which those of the whole program are looked at once."""
    if plan.planner is None:
        return []
    state = state_change(plan)
    found = [*([state] if state else []), *border_changes(plan, state.leaves if state else ())]
    found += [*statement_changes(plan), *size_changes(plan)]
    return sorted(found, key=lambda change: -change.size)[:_MOST]


def fixes(plan: Plan) -> Fixes:
    """The changes that save something, by the plans of the changed programs."""
    tried = changes(plan)
    found = [fix for change in tried for fix in _worth(plan, change)]
    return Fixes(tuple(sorted(found, key=lambda fix: (-fix.wire_bytes, -fix.memory))), len(tried))


def _worth(plan: Plan, change: Change) -> Iterator[Fix]:
    try:
        after = plan.replanned(change.program(), change.policy)
    except SdyError:  # what would not even be planned is not offered
        return
    sent, held = plan.wire_bytes - after.wire_bytes, plan.memory.peak - after.memory.peak
    if after.memory.fits and not plan.memory.fits:
        yield _fix(plan, change, sent, held)
        return
    if after.wire_bytes > _NO_MORE * plan.wire_bytes or after.memory.peak > _NO_MORE * plan.memory.peak:
        return
    if after.work_cost > _NO_MORE * plan.work_cost:
        return
    if sent > _WORTH * plan.wire_bytes or held > _WORTH * plan.memory.peak:
        yield _fix(plan, change, sent, held)


def _fix(plan: Plan, change: Change, sent: float, held: float) -> Fix:
    """The fix-it of a change that saves so many bytes on the wire and of memory."""
    share = sent / plan.wire_bytes if plan.wire_bytes else 0.0
    return Fix(change.kind, change.line, change.text, max(0.0, sent), max(0.0, held), share)
