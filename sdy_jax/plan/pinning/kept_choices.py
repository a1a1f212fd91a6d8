"""The choices of a plan for the ops that another program has as well: these are kept, all others are made anew.

Ops are matched by their names, which edits elsewhere do not change, and by what they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sdy_jax.annotate.program import Program
from sdy_jax.ir.graph import Graph
from sdy_jax.ir.operations import main_function
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.ir.stored_shardings import function_shardings
from sdy_jax.lowering.planner.problem.layout_plan import LayoutPlan
from sdy_jax.lowering.planner.setting import Setting
from sdy_jax.plan.auto_layouts import with_border
from sdy_jax.plan.pinning.choices import layout_from, op_names, types_of
from sdy_jax.plan.pinning.replay import ChoiceReader
from sdy_jax.plan.record.choices import RecordedBorderLayout, RecordedChoices
from sdy_jax.plan.record.comparison import matched

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
            for n, (op, name) in enumerate(zip(graph.ops, op_names(graph, self.name, self.program), strict=True))
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
