"""The ops that make values from pieces of the same bases, one dimension after the other, and what they send."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Op, Value
from sdy_jax.lowering.strategies.assembly import Assembly
from sdy_jax.lowering.strategies.pieces import attributes, fetch_of
from sdy_jax.lowering.strips.joint_fetch import Pieces
from sdy_jax.lowering.strips.wants import Piece
from sdy_jax.representation.attributes import shardings_to_attribute, write_reduction
from sdy_jax.representation.mesh import Axes, Mesh, axes_size
from sdy_jax.representation.sharding import TensorSharding


@dataclass(frozen=True, slots=True)
class Layouts:
    """The shardings of a program's values."""

    mesh_name: str
    mesh: Mesh
    shardings: Mapping[Value, TensorSharding]

    def of(self, value: Value) -> TensorSharding:
        found = self.shardings.get(value)
        return found or TensorSharding.closed(self.mesh_name, ((),) * value.rank)

    def axes(self, value: Value, dim: int) -> Axes:
        return self.of(value).axes[dim]

    def shards(self, value: Value, dim: int) -> int:
        return axes_size(self.axes(value, dim), self.mesh)


class Root(NamedTuple):
    """A value that is used, and what it is made of."""

    value: Value
    assembly: Assembly


@dataclass(slots=True, eq=False)
class _Made:
    """A value that exists, or that an op will make: of `shape`, in `sharding`."""

    shape: tuple[int, ...]
    sharding: TensorSharding
    mlir: ir.Value | None = None


class _Step(NamedTuple):
    """An op that makes pieces of its operands along a dimension."""

    dim: int
    operands: tuple[_Made, ...]
    pieces: tuple[Pieces, ...]
    results: tuple[_Made, ...]


class Exchange:
    """What makes the roots of one family, in the order in which it runs.

    Roots that are alike in a dimension share what is made for it. So the dimension comes first in which an element of a
    strip stands for most bytes; those that are not split come last.
    """

    def __init__(self, roots: Sequence[Root], layouts: Layouts):
        self._roots, self._layouts = roots, layouts
        self._steps: list[_Step] = []
        self._made: list[tuple[Root, _Made]] = []
        first = roots[0].assembly
        bases = tuple(_Made(v.shape or (), layouts.of(v), v.mlir) for v in first.bases)
        self._expand(bases, roots, self._dims(first))

    @property
    def sent(self) -> list[float]:
        """Bytes per device, of each op that sends any."""
        found = [self._elements(s.dim, s.operands, s.pieces) for s in self._steps]
        return [n * self._roots[0].value.itemsize for n in found if n]

    def _dims(self, first: Assembly) -> list[int]:
        base, joined = self._roots[0].value, first.joined
        local = self._local(base.shape or (), self._layouts.of(base))
        moved = {d for root in self._roots for d in root.assembly.moved}
        return sorted(moved, key=lambda d: (d != joined, self._layouts.shards(base, d) == 1, local[d], d))

    def _local(self, shape: Sequence[int], sharding: TensorSharding) -> tuple[int, ...]:
        return sharding.local_shape(tuple(shape), self._layouts.mesh)

    def _expand(self, sources: tuple[_Made, ...], roots: Sequence[Root], dims: Sequence[int]) -> None:
        """Makes the roots of values that are right in all dimensions but `dims`."""
        if not dims:
            self._made += [(root, sources[0]) for root in roots]
            return
        dim, *rest = dims
        found: dict[Pieces, list[Root]] = {}
        for root in roots:
            found.setdefault(root.assembly.dims[dim], []).append(root)
        if len(sources) == 1:
            kept = found.pop((Piece(0, 0, sources[0].shape[dim]),), [])
            if kept:
                self._expand(sources, kept, rest)
        for pieces in self._together(dim, sources, list(found)):
            split = _split_along(dim, sources)
            results = tuple(self._result(split, dim, each, found[each], last=not rest) for each in pieces)
            self._steps.append(_Step(dim, sources, pieces, results))
            for each, result in zip(pieces, results, strict=True):
                self._expand((result,), found[each], rest)

    def _result(self, source: _Made, dim: int, pieces: Pieces, roots: Sequence[Root], last: bool) -> _Made:
        shape = (*source.shape[:dim], sum(piece.length for piece in pieces), *source.shape[dim + 1 :])
        return _Made(shape, self._layouts.of(roots[0].value) if last else source.sharding)

    def _together(self, dim: int, sources: Sequence[_Made], results: Sequence[Pieces]) -> list[tuple[Pieces, ...]]:
        """The results by the op that makes them: one op for those that send less together."""
        groups: list[tuple[Pieces, ...]] = []
        costs: list[int] = []
        for pieces in results:
            alone = self._elements(dim, sources, (pieces,))
            joint = [self._elements(dim, sources, (*group, pieces)) for group in groups]
            savings = [cost + alone - both for cost, both in zip(costs, joint, strict=True)]
            best = max(range(len(groups)), key=savings.__getitem__, default=None)
            if best is None or savings[best] <= 0:
                groups.append((pieces,))
                costs.append(alone)
            else:
                groups[best], costs[best] = (*groups[best], pieces), joint[best]
        return groups

    def _elements(self, dim: int, sources: Sequence[_Made], results: tuple[Pieces, ...]) -> int:
        """What a device sends."""
        split = _split_along(dim, sources)
        shards = axes_size(split.sharding.axes[dim], self._layouts.mesh)
        if shards == 1:
            return 0
        row = math.prod(n for d, n in enumerate(self._local(split.shape, split.sharding)) if d != dim)
        return row * fetch_of([s.shape[dim] for s in sources], _whole(dim, sources), results, shards).plan.wire_elements

    # Writing it down.

    def write(self) -> None:
        """Puts the ops before the first root, and lets all that use the roots use their results."""
        before = self._roots[0].value.owner
        assert isinstance(before, Op)
        fill = self._roots[0].assembly.fill
        for step in self._steps:
            self._write(step, before, fill)
        for root, made in self._made:
            assert made.mlir is not None
            root.value.mlir.replace_all_uses_with(made.mlir)
            root.value.mlir = made.mlir  # it may be a base of other families

    def _write(self, step: _Step, before: Op, fill: Value | None) -> None:
        context, location = before.mlir.context, before.mlir.location
        operands = [made.mlir for made in step.operands]
        is_filled = any(piece.operand is None for pieces in step.pieces for piece in pieces)
        if is_filled:
            assert fill is not None
            operands.append(fill.mlir)
        element = before.results[0].mlir.type.element_type
        op = ir.Operation.create(
            "stablehlo.custom_call",
            results=[ir.RankedTensorType.get(list(made.shape), element, loc=location) for made in step.results],
            operands=operands,
            attributes=attributes(step.dim, step.pieces, _whole(step.dim, step.operands), context),
            loc=location,
            ip=ir.InsertionPoint(before.mlir),
        )
        shardings = tuple(made.sharding for made in step.results)
        op.attributes["sdy.sharding"] = shardings_to_attribute(shardings, context)
        write_reduction(op, shardings)
        for made, result in zip(step.results, op.results, strict=True):
            made.mlir = result


def _split_along(dim: int, sources: Sequence[_Made]) -> _Made:
    """A value that is split along the dimension, if any is."""
    return next((source for source in sources if source.sharding.axes[dim]), sources[0])


def _whole(dim: int, sources: Sequence[_Made]) -> list[bool]:
    """Of each value whether it is whole along the dimension, beside others that are split."""
    is_split = bool(_split_along(dim, sources).sharding.axes[dim])
    return [is_split and not source.sharding.axes[dim] for source in sources]
