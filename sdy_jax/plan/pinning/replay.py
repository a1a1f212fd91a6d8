"""The plan that plain data says, for all of a program, or for those ops that another program has as well."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

from sdy_jax.annotate.program import Program
from sdy_jax.base.errors import SdyError
from sdy_jax.ir.graph import Graph, Op
from sdy_jax.ir.operations import main_function
from sdy_jax.ir.parsers import parse_axes
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.ir.stored_shardings import function_shardings
from sdy_jax.ir.validity import verify_sharding
from sdy_jax.lowering.ops.registry import Strategy
from sdy_jax.lowering.planner.placement.decisions import kinds_of
from sdy_jax.lowering.planner.problem.assignments import runs_in
from sdy_jax.lowering.planner.problem.layout_plan import LayoutPlan, Rewrite, RewriteKind
from sdy_jax.lowering.planner.problem.op_problem import Decision, InsideCollective, Kinds, OpKind
from sdy_jax.lowering.planner.setting import Setting
from sdy_jax.plan.auto_layouts import with_border
from sdy_jax.plan.pinning.choices import layout_from, recorded_op_names, types_of
from sdy_jax.plan.record.comparison import matched
from sdy_jax.plan.record.recorded_plan import (
    RecordedBorderLayout,
    RecordedChoice,
    RecordedChoices,
    RecordedInside,
    RecordedLayout,
    RecordedLayoutPlan,
    RecordedRewrite,
)
from sdy_jax.shardy.propagation.data_flow import edges_of

# The plan for a program that plain data says, to be followed in place of a search.


class DoesNotFit(SdyError):
    """Choices are for other ops than a program has."""


class Replay:
    """Follows the choices that data says, in a program of the same ops; a `Follow`.

    Args:
        recorded: the data.

    Raises:
        SdyError: it names a rewrite that is not known.
    """

    def __init__(self, recorded: RecordedChoices):
        self._layouts = [*(rewrite.layouts for rewrite in recorded.rewrites), recorded.layouts]
        self.rewrites, self.saved = [_rewrite(each) for each in recorded.rewrites], recorded.saved

    def plan(self, number: int, graph: Graph, setting: Setting) -> LayoutPlan | None:
        """The plan of the program after so many rewrites.

        Raises:
            DoesNotFit: the program has other ops.
            SdyError: the data says what cannot be.
        """
        recorded = self._layouts[number]
        if number in (0, len(self.rewrites)):
            check_ops(recorded.ops, graph.ops)
        elif len(recorded.ops) > len(graph.ops):
            raise DoesNotFit(f"the choices are for {len(recorded.ops)} ops, the program has {len(graph.ops)}")
        return ChoiceReader(graph, setting).plan(recorded) if recorded.is_planned else None


def _rewrite(recorded: RecordedRewrite) -> Rewrite:
    for kind in get_args(RewriteKind):
        if recorded.kind == kind:
            said = recorded.memory_multiplier, recorded.keeps_named, recorded.in_parts, recorded.shared, recorded.size
            return Rewrite(kind, *said, recorded.limit, recorded.axes)
    raise SdyError(f"{recorded.kind!r} is no rewrite that this sdy_jax knows")


def check_ops(recorded: Sequence[RecordedChoice], ops: Sequence[Op]) -> None:
    """
    Raises:
        DoesNotFit: the choices are for other ops than these.
    """
    if len(recorded) != len(ops):
        raise DoesNotFit(f"the choices are for {len(recorded)} ops, the program has {len(ops)}")
    known = dict[object, tuple[str, ...]]()
    for choice, op in zip(recorded, ops, strict=True):
        key = tuple([(value.dtype, value.shape) for value in (*op.operands, *op.results)])
        if key not in known:
            known[key] = types_of(op)
        if choice.kind != op.name or choice.types != known[key]:
            raise DoesNotFit(f"{op.source}: the choice is for {choice.kind}, the op is {op.name}")


class ChoiceReader:
    """Reads what is chosen for the ops of a program."""

    def __init__(self, graph: Graph, setting: Setting):
        self._graph, self._mesh_name = graph, setting.mesh_name
        self._kinds: Kinds = kinds_of(setting)
        self._decided = dict[object, Decision]()

    def plan(self, recorded: RecordedLayoutPlan) -> LayoutPlan:
        """The plan that says all of it."""
        ops, edges, operands = dict[int, Decision](), dict[int, list[TensorSharding]](), dict[int, TensorSharding]()
        shared = dict[tuple[int, int], TensorSharding]()
        for number, (op, choice) in enumerate(zip(self._graph.ops, recorded.ops, strict=False)):
            if choice.layouts:
                ops[number] = self._decision(op, choice)
            if choice.edges:
                edges[number] = self._edges(op, choice)
            if choice.operand is not None:
                operands[number] = self._layout(op, 0, choice.operand)
            shared.update(self._shared(number, op, choice))
        copies = {(each.maker, each.index, each.user): each.number for each in recorded.copies}
        self._check_copies(copies)
        return LayoutPlan(ops, shared, edges, copies, recorded.chosen, operands)

    def kept(self, choices: Sequence[RecordedChoice | None]) -> LayoutPlan:
        """The plan that says those of some ops that can be; None of ops of which nothing is known."""
        ops, edges = dict[int, Decision](), dict[int, list[TensorSharding]]()
        for number, (op, choice) in enumerate(zip(self._graph.ops, choices, strict=True)):
            if choice is None:
                continue
            with suppress(SdyError):  # of another size, say
                if choice.layouts:
                    ops[number] = self._decision(op, choice)
                if choice.edges:
                    edges[number] = self._edges(op, choice)
        return LayoutPlan(ops, {}, edges)

    def _shared(self, number: int, op: Op, choice: RecordedChoice) -> Iterator[tuple[tuple[int, int], TensorSharding]]:
        for index, layout in enumerate(choice.shared):
            if layout is not None:
                yield (number, index), self._layout(op, len(op.operands) + index, layout)

    def _decision(self, op: Op, choice: RecordedChoice) -> Decision:
        kind = self._kinds.of(op)
        if kind is None:
            raise SdyError(f"{op.source}: {op.name} has no choice of layouts, and the file states one")
        key = kind, choice
        if key not in self._decided:
            shardings = tuple([self._layout(op, n, layout) for n, layout in enumerate(choice.layouts)])
            if not runs_in(kind, shardings, self._graph.meshes[_mesh_of(shardings, self._mesh_name)]):
                said = ", ".join(f"<{sharding}>" for sharding in shardings)
                raise SdyError(f"{op.source}: {op.name} cannot run in the layouts that the file states: {said}")
            inside = tuple(map(_inside, choice.inside))
            tensors, factors = [each.tensor for each in inside], choice.gathered
            if not {*tensors} <= {*range(len(shardings))} or not {*factors} <= {*range(len(kind.rule.factor_sizes))}:
                raise SdyError(f"{op.source}: {op.name} has no such tensors, or factors, as the file states")
            strategy = self._strategy(op, kind, choice)
            self._decided[key] = Decision(kind, shardings, choice.gathered, inside, strategy)
        return self._decided[key]

    def _edges(self, op: Op, choice: RecordedChoice) -> list[TensorSharding]:
        owners, found = [edge.owner for edge in edges_of(op)], list[TensorSharding]()
        if len(owners) != len(choice.edges):
            raise SdyError(f"{op.source}: {len(choice.edges)} layouts for the {len(owners)} edges of {op.name}")
        for owner, recorded in zip(owners, choice.edges, strict=True):
            found.append(layout_from(recorded, self._mesh_name))
            verify_sharding(found[-1], self._graph.meshes, owner.shape, f"{op.source}: the layout that the file states")
        return found

    def _strategy(self, op: Op, kind: OpKind, choice: RecordedChoice) -> Strategy | None:
        if not choice.strategy:
            return None
        if choice.number in range(len(kind.strategies)) and kind.strategies[choice.number].name == choice.strategy:
            return kind.strategies[choice.number]
        raise SdyError(f"{op.source}: {op.name} has no strategy {choice.strategy!r} at place {choice.number}")

    def _layout(self, op: Op, index: int, recorded: RecordedLayout) -> TensorSharding:
        """The layout of a value of an op, operands first."""
        found, values = layout_from(recorded, self._mesh_name), (*op.operands, *op.results)
        if index >= len(values):
            raise SdyError(f"{op.source}: {op.name} has {len(values)} values, and the file states more layouts")
        verify_sharding(found, self._graph.meshes, values[index].shape, f"{op.source}: the layout that the file states")
        return found

    def _check_copies(self, copies: Iterable[tuple[int | None, int, int]]) -> None:
        ops, arguments = self._graph.ops, self._graph.arguments
        for maker, index, user in copies:
            is_there = (maker is None or maker in range(len(ops))) and user in range(len(ops))
            values = arguments if maker is None or not is_there else ops[maker].results
            if not is_there or index not in range(len(values)):
                raise SdyError("the file states a copy of a value that the program does not have")


def _mesh_of(shardings: Sequence[TensorSharding], mesh_name: str) -> str:
    """The mesh on which an op runs: that of what is split."""
    split = [sharding.mesh for sharding in shardings if not sharding.has_no_axes]
    return str(split[0]) if split else mesh_name


def _inside(recorded: RecordedInside) -> InsideCollective:
    axes = parse_axes(recorded.axes)
    return InsideCollective(recorded.kind, axes, recorded.tensor, recorded.wire_bytes, recorded.time, recorded.is_exact)


# The layouts of arguments and results that are left to the planner, as choices say them.


def pinned_border(
    program: Program, choices: RecordedChoices
) -> tuple[Mapping[int, TensorSharding], Mapping[int, TensorSharding]]:
    """The layouts of a program's automatic arguments, and those of its automatic results, by index.

    Raises:
        DoesNotFit: the choices have none for one of them.
    """
    of_arguments = _layouts(program, program.automatic_arguments, program.inputs, program.in_info, choices.arguments)
    return of_arguments, _layouts(
        program, program.automatic_results, program.outputs, program.out_info, choices.results
    )


def _layouts(
    program: Program,
    automatic: frozenset[int],
    paths: Sequence[str],
    types: Sequence[object],
    recorded: Sequence[RecordedBorderLayout],
) -> dict[int, TensorSharding]:
    known, found = {each.path: each.layout for each in recorded}, dict[int, TensorSharding]()
    for index in sorted(automatic):
        path = paths[index]
        if path not in known:
            raise DoesNotFit(f"`{path}` is left to the planner, and the choices say nothing of it")
        found[index] = layout_from(known[path], program.mesh_name)
        rank = len(types[index].shape)  # type: ignore[attr-defined]
        verify_sharding(found[index], {program.mesh_name: program.mesh}, rank, f"`{path}`")
    return found


# The choices of a plan for the ops that another program has as well: these are kept, all others are made anew.
#
# Ops are matched by their names, which edits elsewhere do not change, and by what they are.

_Entry = tuple[int, str, str, tuple[str, ...]]
"""An op: its number, its name, its kind, and its types."""


@dataclass(frozen=True, slots=True)
class KeptChoices:
    """Those of a plan; a `Keep`.

    Attributes:
        recorded: the plan's.
        name: of the function.
        program: that is planned.
        is_like: ops of other sizes are the same ones, too, and the plan says what it would cost if nothing were kept.
    """

    recorded: RecordedChoices
    name: str
    program: Program
    is_like: bool = False

    @property
    def is_compared(self) -> bool:
        """As of `Keep`."""
        return self.is_like

    def plan(self, graph: Graph, setting: Setting) -> LayoutPlan:
        """What is kept of a program."""
        names, choices = self.recorded.names, self.recorded.layouts.ops
        before = [(n, names[n], choice.kind, choice.types) for n, choice in enumerate(choices) if n < len(names)]
        now = [
            (n, name, op.name, types_of(op))
            for n, (op, name) in enumerate(
                zip(graph.ops, recorded_op_names(graph, self.name, self.program), strict=True)
            )
        ]
        pairs, _, _ = matched(before, now, [_of_size, _of_any_size] if self.is_like else [_of_size])
        found = {new[0]: choices[old[0]] for both in pairs for old, new in both}
        return ChoiceReader(graph, setting).kept([found.get(number) for number in range(len(graph.ops))])


def _of_size(entry: _Entry) -> object:
    return entry[1:]


def _of_any_size(entry: _Entry) -> object:
    return entry[1:3]


def with_known_border(program: Program, recorded: RecordedChoices, is_like: bool) -> Program:
    """A program with the layouts of a plan for its arguments and results of the same paths and ranks: for those that
    are left to the planner, and, where it `is_like` that one, those of which nothing is stated."""
    main, first = main_function(program.module), len(program.constants)
    arguments = _Side(program.inputs, program.in_info, program.automatic_arguments, recorded.arguments)
    results = _Side(program.outputs, program.out_info, program.automatic_results, recorded.results)
    given, returned = function_shardings(main, "arg_attrs")[first:], function_shardings(main, "res_attrs")
    mesh_name = program.mesh_name
    return with_border(
        program,
        (dict(arguments.known(given, mesh_name, is_like)), dict(results.known(returned, mesh_name, is_like))),
    )


class _Side(NamedTuple):
    """The arguments, or the results, of a program, and what a plan says of such."""

    paths: Sequence[str]
    types: Sequence[Any]
    automatic: Collection[int]
    recorded: Sequence[RecordedBorderLayout]

    def known(
        self, stated: Sequence[TensorSharding | None], mesh_name: str, is_like: bool
    ) -> Iterator[tuple[int, TensorSharding]]:
        """The layouts that the plan has, by index."""
        layouts = {each.path: each.layout for each in self.recorded}
        for index, (path, own) in enumerate(zip(self.paths, stated, strict=True)):
            if path in layouts and (index in self.automatic or (is_like and own is None)):
                found = layout_from(layouts[path], mesh_name)
                if found.rank == len(self.types[index].shape) and found.mesh == mesh_name:
                    yield index, found
