"""The plan for a program that plain data says, for its ops and its border, to be followed in place of a search."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import get_args

from sdy_jax.annotate.program import Program
from sdy_jax.errors import SdyError
from sdy_jax.ir.graph import Graph, Op
from sdy_jax.ir.parsers import parse_axes
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.ir.validity import verify_sharding
from sdy_jax.lowering.ops.registry import Strategy
from sdy_jax.lowering.planner.placement.decisions import kinds_of
from sdy_jax.lowering.planner.problem.assignments import runs_in
from sdy_jax.lowering.planner.problem.layout_plan import Kind as RewriteKind
from sdy_jax.lowering.planner.problem.layout_plan import LayoutPlan, Rewrite
from sdy_jax.lowering.planner.problem.op_problem import Decision, InsideCollective, Kind, Kinds
from sdy_jax.lowering.planner.setting import Setting
from sdy_jax.plan.pinning.choices import layout_from, types_of
from sdy_jax.plan.record.choices import (
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
            return Rewrite(kind, *said)
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

    def _strategy(self, op: Op, kind: Kind, choice: RecordedChoice) -> Strategy | None:
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
