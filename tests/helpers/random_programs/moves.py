"""Random movements of elements along a dimension that take several ops."""

from __future__ import annotations

import random

from random_programs.block import Block, Named
from random_programs.tensors import Tensor, i64s


def move(block: Block, rng: random.Random) -> None:
    """A roll, a shift, or the whole with its front once more behind."""
    x = block.pick()
    dims = [d for d, n in enumerate(x.tensor.shape) if n > 1]
    if not dims:
        return
    dim = rng.choice(dims)
    n = x.tensor.shape[dim]
    at = rng.randint(1, n - 1)
    kind = rng.choice(("roll", "roll", "shift", "twice"))
    if kind == "shift":
        _shift(block, x, [rng.choice((at, -at)) if d == dim else 0 for d in range(x.tensor.rank)])
        return
    front, back = _cut(block, x, dim, 0, at), _cut(block, x, dim, at, n)
    _concatenate(block, [back, front] if kind == "roll" else [front, back, front], dim)


def _shift(block: Block, x: Named, by: list[int]) -> None:
    scalar = Tensor((), x.tensor.dtype)
    fill = block.number({"i1": "true", "f32": "2.0", "complex<f32>": "(2.0, 1.0)"}.get(scalar.dtype, "2"), scalar)
    attributes = f"low = {by}, high = {[-n for n in by]}, interior = {[0] * len(by)}"
    block.emit(f"stablehlo.pad {x.name}, {fill.name}, {attributes} : ({x.tensor}, {scalar}) -> {x.tensor}", x.tensor)


def _cut(block: Block, x: Named, dim: int, start: int, limit: int) -> Named:
    shape = x.tensor.shape
    part = Tensor((*shape[:dim], limit - start, *shape[dim + 1 :]), x.tensor.dtype)
    starts = [start if d == dim else 0 for d in range(len(shape))]
    limits = [limit if d == dim else n for d, n in enumerate(shape)]
    attributes = f"start_indices = {i64s(starts)}, limit_indices = {i64s(limits)}, strides = {i64s([1] * len(shape))}"
    return block.emit(f'"stablehlo.slice"({x.name}) <{{{attributes}}}> : ({x.tensor}) -> {part}', part)


def _concatenate(block: Block, parts: list[Named], dim: int) -> None:
    shape = list(parts[0].tensor.shape)
    shape[dim] = sum(part.tensor.shape[dim] for part in parts)
    whole = Tensor(tuple(shape), parts[0].tensor.dtype)
    names, types = (", ".join(str(x) for x in row) for row in zip(*((p.name, p.tensor) for p in parts), strict=True))
    block.emit(f"stablehlo.concatenate {names}, dim = {dim} : ({types}) -> {whole}", whole)
