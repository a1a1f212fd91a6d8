"""Which devices hold which block of an array, drawn as a grid, as `jax.debug.visualize_sharding` draws it."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from sdy_jax.errors import SdyError
from sdy_jax.plan.record.program import RecordedBorder, RecordedMesh, RecordedTensor
from sdy_jax.plan.record.record import PlanRecord

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
    rows, columns = _dims(split, len(tensor.shape))
    blocks = _blocks(record.mesh, tensor)
    counts = [_count(record.mesh, tensor, dim) for dim in (rows, columns)]
    cells = tuple(
        tuple(_cell(blocks.get((i if rows is not None else 0, j), [])) for j in range(counts[1]))
        for i in range(counts[0])
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


def _count(mesh: RecordedMesh, tensor: RecordedTensor, dim: int | None) -> int:
    return 1 if dim is None else math.prod(_size(mesh, axis) for axis in tensor.axes[dim])


def _size(mesh: RecordedMesh, axis: str) -> int:
    """The devices along an axis or a part of one, `model:(1)2`."""
    name, _, part = axis.partition(":")
    if part:
        return int(part.rpartition(")")[2])
    return next(each.size for each in mesh.axes if each.name == name)


def _blocks(mesh: RecordedMesh, tensor: RecordedTensor) -> dict[tuple[int, int], list[int]]:
    """The devices that hold the block of each row and column."""
    rows, columns = _dims([dim for dim, axes in enumerate(tensor.axes) if axes], len(tensor.shape))
    names = [axis.name for axis in mesh.axes]
    ids = mesh.device_ids or tuple(range(mesh.size))
    found: dict[tuple[int, int], list[int]] = {}
    for device, place in zip(ids, product(*(range(axis.size) for axis in mesh.axes)), strict=True):
        at = dict(zip(names, place, strict=True))
        block = [_index(mesh, tensor.axes[dim], at) if dim is not None else 0 for dim in (rows, columns)]
        found.setdefault((block[0], block[1]), []).append(device)
    return found


def _index(mesh: RecordedMesh, axes: Sequence[str], at: dict[str, int]) -> int:
    """The number of a device's block along a dimension, from its place on the mesh."""
    index = 0
    for axis in axes:
        name, _, part = axis.partition(":")
        place = at[name]
        if part:
            before, size = (int(n) for n in part.removeprefix("(").split(")"))
            place = place // (_size(mesh, name) // (before * size)) % size
        index = index * _size(mesh, axis) + place
    return index


def _cell(devices: Sequence[int]) -> str:
    """`0,4`, and `0..7` for many that follow each other."""
    if len(devices) > 4 and list(devices) == list(range(devices[0], devices[-1] + 1)):
        return f"{devices[0]}..{devices[-1]}"
    return ",".join(map(str, devices[:8])) + (",.." if len(devices) > 8 else "")
