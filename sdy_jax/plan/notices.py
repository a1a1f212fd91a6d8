"""What planning tells users unasked: its progress, notes as `on_unknown` says, what does not fit a device, and the
shardings that `sdy.show_sharding` asks for.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Protocol

from jax.extend.mlir import ir

from sdy_jax.base.errors import PartitionWarning, UnsupportedError
from sdy_jax.ir.custom_ops import INSPECTED, Callback, function_of, kept_in
from sdy_jax.ir.graph import Graph, Op
from sdy_jax.ir.jax_shardings import bytes_text, type_text
from sdy_jax.ir.locations import short_source, users_stack_level
from sdy_jax.lowering.ops.emit import value_shardings
from sdy_jax.lowering.planner.memory.buffers import LocalBytes
from sdy_jax.lowering.planner.problem.candidates import MOST_ATOMS
from sdy_jax.lowering.planner.report import Note
from sdy_jax.lowering.planner.search.baseline import MOST_PLANNED
from sdy_jax.plan.plan import Plan

# What planning is doing: a bar in a terminal where it takes long, and lines of the logger `sdy_jax.plan`.

_BAR = 20
"""Columns of the bar. Chosen: beside the text of what is done."""

LOG = logging.getLogger("sdy_jax.plan")
"""Tells of each plan (INFO) and of each of its stages (DEBUG)."""

_QUIET = 2.0
"""Seconds before a bar is shown. Chosen: most plans are made by then."""


class Tell(Protocol):
    """Is told what is done now, and the share of all that was done before; None: not known."""

    def __call__(self, what: str, done: float | None = None) -> None: ...


class _Told(threading.local):
    """What this thread's outermost planning tells: plans that are made for it have no bar of their own."""

    tell: Tell | None = None


_told = _Told()


@contextmanager
def progress_of(name: str) -> Iterator[Tell]:
    """What planning a function tells of its progress. In a terminal a bar, if it takes long, which is gone in the end;
    it is drawn by `rich`, and without that there is none."""
    begun, outer = time.monotonic(), _told.tell

    def logged(what: str, done: float | None = None) -> None:
        LOG.debug("%s, after %.2f s: %s", name, time.monotonic() - begun, what)

    if outer is not None:
        yield logged
        return
    with _bar(name) as shown:

        def tell(what: str, done: float | None = None) -> None:
            logged(what)
            shown(what, done)

        _told.tell = tell
        try:
            yield tell
        finally:
            _told.tell = None


@contextmanager
def _bar(name: str) -> Iterator[Tell]:
    if not sys.stderr.isatty() or find_spec("rich") is None:
        yield lambda what, done=None: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn(f"planning {name}", markup=False), BarColumn(_BAR), TimeElapsedColumn()
    bar = Progress(
        *columns, TextColumn("{task.description}", markup=False), console=Console(stderr=True), transient=True
    )
    task = bar.add_task("", total=None)
    later = threading.Timer(_QUIET, bar.start)
    later.daemon = True
    later.start()
    try:
        yield lambda what, done=None: bar.update(
            task, description=what, completed=done, total=None if done is None else 1.0
        )
    finally:
        later.cancel()
        later.join()
        bar.stop()


# What a plan holds on a device, in words: for those whose devices have less.

TO_HOLD_LESS = (
    "to fix: split these, compute them again (jax.checkpoint), or donate arguments that are replaced (donate_argnums)"
)

TO_SPLIT = (
    "to fix: split these further, by in_shardings and out_shardings, or leave them to the planner (AUTO); donate "
    "arguments that are replaced (donate_argnums)"
)

_LISTED_VALUES = 5
"""Values in a message. Chosen: for a reader."""


def held_text(plan: Plan) -> str:
    """What a device holds when it holds most, with the largest arguments, results and temporaries, and their lines."""
    held = plan.memory
    parts = ("arguments", held.arguments), ("results", held.own_results), ("temporaries", held.temporaries)
    return (
        f"{plan.name}, partitioned at {plan.source}, is planned to hold {bytes_text(held.peak)} on each device: "
        f"{', '.join(f'{name} {bytes_text(count)}' for name, count in parts)}. The largest values: "
        f"{_largest((*_border_values(plan), *_temporaries(plan)))}; {TO_HOLD_LESS}, or plan for less (memory=); "
        "plan.memory has all of them"
    )


_Sized = tuple[float, str]
"""The bytes on a device of what it holds, and what that is."""


def _border_values(plan: Plan) -> Iterator[_Sized]:
    sizes, graph = LocalBytes(plan.graph, plan.target.arrays), plan.graph
    border = zip((*graph.arguments, *graph.outputs), (*plan.constants, *plan.arguments, *plan.results), strict=True)
    for value, of in border:
        yield sizes.of(value), f"{bytes_text(sizes.of(value))} of {of.path}: {of.type}"


def _temporaries(plan: Plan) -> Iterator[_Sized]:
    for one in plan.memory.largest:
        yield one.bytes, f"{bytes_text(one.bytes)} of {one.type} at {one.source}"


def _largest(values: Iterable[_Sized]) -> str:
    return "; ".join(text for _, text in sorted(values, key=lambda value: -value[0])[:_LISTED_VALUES])


# Reporting the notes of a plan by `on_unknown`: not at all, as a warning per op and source line, or as an error.


def report_notes(notes: Sequence[Note], on_unknown: str) -> None:
    """Reports the notes of a plan as `on_unknown` asks: "warn", "error" or "ignore".

    Raises:
        UnsupportedError: there are notes, and `on_unknown` is "error".
    """
    if on_unknown == "error" and notes:
        raise UnsupportedError("cannot be split, and on_unknown='error':\n" + "\n".join(map(str, notes)))
    if on_unknown == "warn":
        warn_of(map(str, notes))


def too_large(plan: Plan) -> Iterator[str]:
    """What is said of a plan that takes more memory than its devices have."""
    given = plan.planned_with
    if given is None or not given.available:  # what fits anyhow is not counted
        return
    if 0 < plan.counted_peak <= given.available or plan.memory.fits:
        return
    held = plan.memory
    if held.border > held.available:
        what = f"arguments and results alone hold {bytes_text(held.border)}"
        most, largest, fix = "", _border_values(plan), TO_SPLIT
    else:
        what, most = bytes_text(held.peak), ", the least that was found"
        largest, fix = _temporaries(plan), TO_HOLD_LESS
    yield (
        f"{plan.source}: {plan.name}: does not fit: {what} of {bytes_text(held.available)} on each device{most}. "
        f"The largest: {_largest(largest)}; {fix}"
    )


def placed_op_by_op(plan: Plan) -> Iterator[str]:
    """What is said of a plan on so many axes that layouts were not chosen for the whole program, as was asked."""
    given, count = plan.planned_with, sum(axis.size > 1 for axis in plan.program.mesh.axes)
    is_asked = given is not None and given.policy.layouts == "global" and plan.layouts is None
    if is_asked and count > MOST_ATOMS and plan.wire_bytes:
        yield (
            f"{plan.source}: {plan.name}: layouts are chosen op by op: the mesh has {count} axes, and they are "
            f"searched for whole programs along {MOST_ATOMS}, or {MOST_PLANNED} where devices would repeat much work; "
            "to fix: make one axis of several that split the same dimensions"
        )


def warn_of(texts: Iterable[str]) -> None:
    """Warns of each once, at the user's line that called us."""
    level = users_stack_level()
    for text in dict.fromkeys(texts):
        warnings.warn(text, PartitionWarning, stacklevel=level)


# What `sdy.show_sharding` says of the values of a program that was planned.


def report_shown(module: ir.Operation, mesh_name: str) -> None:
    """Tells each function that asks for it, in program order, how its value lies in a partitioned program."""
    if not any(isinstance(each, Callback) and each.planned for each in kept_in(module.context)):
        return
    graph = Graph(module)
    shardings = value_shardings(graph)
    for op in graph.main.walk():
        if op.key == INSPECTED and (planned := _callback(op).planned) is not None:
            (value,), mesh = op.operands, graph.meshes[mesh_name]
            sharding = shardings.get(value)
            type_ = type_text(value.dtype, value.shape, sharding, mesh_name)
            local = value.shape if sharding is None or value.shape is None else sharding.local_shape(value.shape, mesh)
            planned(short_source(op.source), type_, type_text(value.dtype, local, None))


def _callback(op: Op) -> Callback:
    own: Callback = function_of(op.text("backend_config"), op.mlir.context, op.source)
    return own
