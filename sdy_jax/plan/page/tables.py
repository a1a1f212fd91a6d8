"""Tables of all that a plan has, and drawings of which devices hold which block of an array."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sdy_jax.base.errors import SdyError
from sdy_jax.ir.device_orders import block_indices, device_ids
from sdy_jax.ir.jax_shardings import bytes_text, flops_text, seconds_text, sizes_text
from sdy_jax.ir.meshes import Axes, Mesh, MeshAxis, axes_size
from sdy_jax.ir.parsers import parse_axis_name
from sdy_jax.plan.page.costs import cause_of, said, trips
from sdy_jax.plan.page.findings import PipelineRow, mesh_columns, pipeline_rows
from sdy_jax.plan.page.text import aligned, coloured, show, terminal_width, within
from sdy_jax.plan.record.program import RecordedBorder, RecordedCollective, RecordedTensor
from sdy_jax.plan.record.record import PlanRecord

# Which devices hold which block of an array, drawn as a grid, as `jax.debug.visualize_sharding` draws it.

_WIDE = 100
"""Columns up to which a grid is drawn. Chosen: wider ones break in most terminals."""


@dataclass(frozen=True)
class Drawing:
    """The grid of an array: its type, and in each cell the devices that hold that block."""

    title: str
    cells: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        width = max(len(cell) for row in self.cells for cell in row) + 2
        if (width + 1) * len(self.cells[0]) > _WIDE:
            return f"{self.title}\n  {len(self.cells)} x {len(self.cells[0])} blocks, too many to draw"
        lines = [_rule("┌┬┐", width, len(self.cells[0]))]
        for number, row in enumerate(self.cells):
            lines += [_rule("├┼┤", width, len(row))] if number else []
            lines.append("│" + "│".join(cell.center(width) for cell in row) + "│")
        lines.append(_rule("└┴┘", width, len(self.cells[0])))
        return "\n".join([self.title, *(f"  {line}" for line in lines)])

    def _repr_html_(self) -> str:
        style = "border:1px solid currentColor;padding:.4em .8em;text-align:center"
        rows = ("".join(f'<td style="{style}">{html.escape(cell)}</td>' for cell in row) for row in self.cells)
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        return f'<table style="border-collapse:collapse"><caption>{html.escape(self.title)}</caption>{body}</table>'


def _rule(corners: str, width: int, count: int) -> str:
    return corners[0] + corners[1].join("─" * width for _ in range(count)) + corners[2]


def drawing_of(record: PlanRecord, path: str) -> Drawing:
    """The grid of an argument or result, `params['w1']`, or of a value of the record.

    Raises:
        SdyError: there is none of this name, or more than two of its dimensions are split.
    """
    tensor = _tensor(record, path)
    split = [dim for dim, axes in enumerate(tensor.axes) if axes]
    if len(split) > 2:
        raise SdyError(f"{path}, {tensor.type}, is split along {len(split)} dimensions; a drawing has two")
    mesh = Mesh(tuple(MeshAxis(axis.name, axis.size) for axis in record.mesh.axes), record.mesh.device_ids)
    dims = _dims(split, len(tensor.shape))
    rows, columns = (tuple(map(parse_axis_name, tensor.axes[dim])) if dim is not None else () for dim in dims)
    blocks = _blocks(mesh, rows, columns)
    cells = tuple(
        tuple(_cell(blocks.get((i, j), [])) for j in range(axes_size(columns, mesh)))
        for i in range(axes_size(rows, mesh))
    )
    kind = f" on {record.mesh.device_kind}" if record.mesh.device_kind else ""
    return Drawing(f"{path}  {tensor.type}{kind}", cells)


def _tensor(record: PlanRecord, path: str) -> RecordedTensor:
    border: Sequence[RecordedBorder] = (*record.arguments, *record.closed_over, *record.results)
    found = {value.path: value.tensor for value in border}
    if path in found:
        return found[path]
    if path in record.value_of:
        return record.value_of[path].tensor
    raise SdyError(f"no argument, result or value is called {path!r}; the plan prints the names of the first two")


def _dims(split: Sequence[int], rank: int) -> tuple[int | None, int | None]:
    """The dimensions that run down and across; of a vector, and where one is split, the other has one block."""
    if len(split) == 2:
        return split[0], split[1]
    if not split:
        return None, None
    return (None, split[0]) if split[0] == rank - 1 else (split[0], None)


def _blocks(mesh: Mesh, rows: Axes, columns: Axes) -> dict[tuple[int, int], list[int]]:
    """The devices that hold the block of each row and column."""
    found: dict[tuple[int, int], list[int]] = {}
    for device, row, column in zip(
        device_ids(mesh), block_indices(rows, mesh), block_indices(columns, mesh), strict=True
    ):
        found.setdefault((int(row), int(column)), []).append(device)
    return found


def _cell(devices: Sequence[int]) -> str:
    """`0,4`, and `0..7` for many that follow each other."""
    if len(devices) > 4 and list(devices) == list(range(devices[0], devices[-1] + 1)):
        return f"{devices[0]}..{devices[-1]}"
    return ",".join(map(str, devices[:8])) + (",.." if len(devices) > 8 else "")


# Tables of all that a plan has: each prints whole, and iterating over it gives its rows.


class CollectiveRow(NamedTuple):
    """A collective that sends something: what it moves and its type afterwards; bytes of all executions, trips of the
    loops around it."""

    collective: str
    type: str
    bytes: float
    trips: str
    moves: str
    line: str
    cause: str


class OpRow(NamedTuple):
    """An op: the type of its first result, operations of one device in all executions, and those that others perform
    as well."""

    op: str
    type: str
    flops: float
    repeated: float
    line: str
    scope: str


class KernelRow(NamedTuple):
    """A kernel: operations of one device in all executions, bytes that it reads from memory and writes to it, how long
    that takes by the cost model, and where these figures are from."""

    kernel: str
    type: str
    flops: float
    bytes: float
    time: str
    trips: str
    basis: str
    line: str


class ValueRow(NamedTuple):
    """A value: its name, its type as planned and as propagation proposed it, one device's block and its bytes."""

    value: str
    type: str
    proposed: str
    block: str
    bytes: float
    line: str


class ArgumentRow(NamedTuple):
    """An argument, closed-over array or result: its type, one device's block, its bytes, what says its layout."""

    path: str
    role: str
    type: str
    block: str
    bytes: float
    layout: str


class MemoryRow(NamedTuple):
    """What a device holds when it holds most: a value, its bytes, and the line that makes it."""

    value: str
    type: str
    bytes: float
    line: str


class MeshRow(NamedTuple):
    """A mesh of several of which one was chosen: what the plan on it takes by the cost model, the bytes that a device
    sends and those that it holds, and how that is beside the chosen one."""

    mesh: str
    time: str
    bytes: float
    held: float
    remark: str


@dataclass(frozen=True)
class Table:
    """Rows with a title and names of columns. Its text has all of them; where standard output is a terminal that is
    narrower, long cells lose their middle. Notebooks show it as a table."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[Any, ...]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        if not self.rows:
            return f"{self.title}\n  none"
        rows, width = [self.columns, *self._texts], terminal_width()
        lines = aligned(within(rows, width, self._numbers) if width else rows, self._numbers)
        return "\n".join([self.title, *lines])

    def show(self) -> None:
        """Prints it, in colours where standard output is a terminal and `rich` is installed."""
        show(str(self))

    def __rich__(self) -> Any:
        return coloured(str(self))

    def __repr__(self) -> str:
        return f"<{self.title}: {len(self.rows)} rows>"

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{html.escape(name)}</th>" for name in self.columns)
        return (
            f"<table><caption>{html.escape(self.title)}</caption><thead><tr>{head}</tr></thead>"
            f"<tbody>{''.join(map(self._row, self._texts))}</tbody></table>"
        )

    def _row(self, cells: Sequence[str]) -> str:
        style = ' style="text-align:right"'
        texts = (f"<td{style if n in self._numbers else ''}>{html.escape(cell)}</td>" for n, cell in enumerate(cells))
        return f"<tr>{''.join(texts)}</tr>"

    @property
    def _numbers(self) -> set[int]:
        return {n for n, name in enumerate(self.columns) if name in _UNITS}

    @property
    def _texts(self) -> list[tuple[str, ...]]:
        pairs = [list(zip(self.columns, row, strict=True)) for row in self.rows]
        return [tuple(_UNITS[name](cell) if name in _UNITS else cell for name, cell in row) for row in pairs]


def _flops(count: float) -> str:
    return flops_text(count) if count else ""


_UNITS: Mapping[str, Callable[[float], str]] = {
    "bytes": bytes_text,
    "held": bytes_text,
    "flops": _flops,
    "repeated": _flops,
}
"""The columns of numbers, and how these are written."""


def table_of(record: PlanRecord, name: str) -> Table:
    """A table of a plan.

    Raises:
        SdyError: there is none of this name.
    """
    if name not in _TABLES:
        raise SdyError(f"no table {name!r}; the tables are {', '.join(map(repr, _TABLES))}")
    title, row, rows = _TABLES[name]
    return Table(f"{title} of {record.name} (bytes and operations per device)", row._fields, tuple(rows(record)))


def _collectives(record: PlanRecord) -> Iterator[CollectiveRow]:
    for each in record.collectives:
        if each.members:
            yield _collective(each, record, f" bucket {each.bucket}, {len(each.members)} of {each.dtype}")
        for one in each.single:
            if one.wire_bytes:
                yield _collective(one, record, "", "  " if each.members else "")


def _collective(each: RecordedCollective, record: PlanRecord, bucket: str, indent: str = "") -> CollectiveRow:
    what, type_ = f"{indent}{said(each)}{bucket}", "" if bucket else each.type
    scope = f" in {each.place.scope}" if each.place.scope else ""
    cause = "" if bucket else f"{cause_of(each, record.time.unit)}{scope}"
    runs = " ".join(trips(each)).removesuffix(" x") + ("" if each.counted else " in a smaller branch")
    return CollectiveRow(what, type_, each.total_wire_bytes, runs.strip(), each.value, each.place.lines, cause)


def _ops(record: PlanRecord) -> Iterator[OpRow]:
    for op in record.ops:
        value = record.value_of.get(op.results[0]) if op.results else None
        type_ = value.tensor.type if value is not None else ""
        yield OpRow(op.title, type_, op.flops * op.times, op.repeated * op.times, op.place.lines, op.place.scope)


def _kernels(record: PlanRecord) -> Iterator[KernelRow]:
    for op in record.ops:
        if (own := op.kernel) is not None:
            value = record.value_of.get(op.results[0]) if op.results else None
            type_ = value.tensor.type if value is not None else ""
            time = seconds_text(own.seconds * op.times) if own.seconds else ""
            runs = f"{op.times} trips" if op.times > 1 else ""
            figures = op.flops * op.times, own.bytes * op.times, time
            yield KernelRow(own.title, type_, *figures, runs, own.basis, op.place.lines)


def _values(record: PlanRecord) -> Iterator[ValueRow]:
    for value in record.values:
        tensor, line = value.tensor, record.ops[value.op].place.lines if value.op is not None else ""
        proposed = value.proposed if value.proposed != tensor.type else ""
        yield ValueRow(value.name, tensor.type, proposed, sizes_text(tensor.local_shape), tensor.bytes, line)


def _arguments(record: PlanRecord) -> Iterator[ArgumentRow]:
    roles = ("argument", record.arguments), ("closed over", record.closed_over), ("result", record.results)
    for role, values in roles:
        for value in values:
            layout = f"{value.origin}: {value.stated}" if value.stated else value.origin
            block = sizes_text(value.tensor.local_shape)
            yield ArgumentRow(value.path, role, value.tensor.type, block, value.tensor.bytes, layout)


def _memory(record: PlanRecord) -> Iterator[MemoryRow]:
    memory = record.memory
    if memory is None:
        return
    of_their_own = "results" if not memory.shared else "results outside of donated arguments"
    for what, held in (("arguments", memory.arguments), (of_their_own, memory.own_results)):
        yield MemoryRow(what, "", held, "")
    for buffer in memory.largest:
        value = record.value_of.get(buffer.value)
        line = record.ops[value.op].place.lines if value is not None and value.op is not None else ""
        yield MemoryRow(buffer.value, value.tensor.type if value is not None else "", buffer.bytes, line)


def _meshes(record: PlanRecord) -> Iterator[MeshRow]:
    for each in record.meshes:
        _, time, _, _, remark = mesh_columns(record, each)
        yield MeshRow(each.mesh, time, each.wire_bytes, each.peak, remark)


_TABLES: Mapping[str, tuple[str, Any, Callable[[PlanRecord], Iterator[Any]]]] = {
    "collectives": ("collectives", CollectiveRow, _collectives),
    "ops": ("ops", OpRow, _ops),
    "values": ("values", ValueRow, _values),
    "arguments": ("arguments and results", ArgumentRow, _arguments),
    "memory": ("what a device holds when it holds most", MemoryRow, _memory),
    "meshes": ("meshes", MeshRow, _meshes),
    "pipelines": ("pipelines", PipelineRow, pipeline_rows),
    "kernels": ("kernels", KernelRow, _kernels),
}
