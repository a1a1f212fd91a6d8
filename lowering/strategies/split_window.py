"""Windows over split dimensions: what a strategy states about them, and how a device runs its own.

An emitter fetches one dimension after the other, so what it sends for the second one includes what it fetched for the
first: the corners.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from sdy_jax.lowering.emission.local_op import LocalOp
from sdy_jax.lowering.emission.redistribute import Axes, cut, fetch, redistribute
from sdy_jax.lowering.strategies.registry import Inside, Shards
from sdy_jax.lowering.strategies.shards import block_shape
from sdy_jax.lowering.strips.strip_plan import StripPlan
from sdy_jax.lowering.strips.window_reads import Reads, Window, contracted_reads, window_reads
from sdy_jax.op_rules.op_attributes import WindowDimension
from sdy_jax.representation.mesh import axes_size
from sdy_jax.representation.rule import TensorMapping


@dataclass(frozen=True, slots=True)
class Fetch:
    """A dimension of a tensor that is split along `factor`; `plan(window, shards)` brings what the devices read."""

    dim: int
    factor: int
    window: Window
    plan: Callable[[Window, int], StripPlan]


def read_by_windows(window: Window, shards: int) -> StripPlan:
    return window_reads(window, shards).plan


def read_by_elements(window: Window, shards: int) -> StripPlan:
    return contracted_reads(window, shards).plan


@dataclass(frozen=True, slots=True)
class _Sent:
    """The elements that a device sends in the last one of some fetches of one tensor."""

    shape: tuple[int, ...]
    mapping: TensorMapping
    fetches: tuple[Fetch, ...]

    def __call__(self, shards: Shards) -> float:
        lengths = list(block_shape(self.shape, self.mapping, shards))
        *before, last = self.fetches
        for earlier in before:
            if self._shards(earlier, shards) > 1:
                lengths[earlier.dim] = self._plan(earlier, shards).length
        lengths[last.dim] = self._plan(last, shards).wire_elements
        return math.prod(lengths)

    def _shards(self, fetch: Fetch, shards: Shards) -> int:
        return math.prod([shards[f] for f in self.mapping[fetch.dim]])

    def _plan(self, fetch: Fetch, shards: Shards) -> StripPlan:
        return fetch.plan(fetch.window, self._shards(fetch, shards))


def whole_window(size: int, window: WindowDimension) -> Window:
    """How an op reads a dimension of `size` elements."""
    w = window
    return Window(size, w.size, w.stride, w.low, w.high, w.base_dilation, w.window_dilation)


def padding_text(paddings: Iterable[tuple[int, int]]) -> str:
    """The attribute `padding` of an op with windows, from (low, high) per dimension."""
    pairs = [list(pair) for pair in paddings]
    return f"dense<{pairs}> : tensor<{len(pairs)}x2xi64>"


def array_text(numbers: Iterable[int]) -> str:
    """An attribute that is an array of integers."""
    return f"array<i64: {', '.join(map(str, numbers))}>"


def fetched(tensor: int, shape: Sequence[int], mapping: TensorMapping, fetches: Sequence[Fetch]) -> list[Inside]:
    """What an emitter sends that runs these fetches in turn.

    Args:
        tensor: the index of the operand.
        shape: its global shape.
        mapping: its dimensions in the op's rule.
    """
    return [
        Inside(
            "collective_permute", frozenset([f.factor]), tensor, _Sent(tuple(shape), mapping, tuple(fetches[: i + 1]))
        )
        for i, f in enumerate(fetches)
    ]


@dataclass(frozen=True, slots=True)
class LocalWindow:
    """One dimension over which windows move, as a device runs them: `reads` is None where the dimension is whole."""

    dim: int
    window: Window
    axes: Axes
    reads: Reads | None

    @classmethod
    def of(cls, local: LocalOp, dim: int, window: Window, contracted: bool) -> LocalWindow:
        """The window over a dimension of the first operand, whose own elements may be split instead of the results."""
        axes = local.operand_axes(0, dim)
        reads = contracted_reads if contracted else window_reads
        return cls(dim, window, axes, reads(window, axes_size(axes, local.mesh.mesh)) if axes else None)

    @classmethod
    def over_whole(cls, local: LocalOp, dim: int, window: Window, axes: Axes) -> LocalWindow:
        """A window whose elements are split along `axes`, over a dimension that every device has whole."""
        return cls(dim, window, axes, contracted_reads(window, axes_size(axes, local.mesh.mesh), is_whole=True))

    @property
    def _padding(self) -> tuple[int, int] | None:
        """What the local op pads where it also dilates, so that it does not compute with fill values."""
        return self.reads.padding if self.reads is not None and self.reads.dilation > 1 else None

    def fetched(self, local: LocalOp, x: jax.Array, fill: Any) -> jax.Array:
        """What the local op runs over."""
        if self.reads is None:
            return x
        if self._padding is None:
            return fetch(local, x, self.dim, self.axes, self.reads, fill)
        return redistribute(local, [x], self.dim, self.axes, self.reads.plan, fill)

    def local_window(self, x: jax.Array) -> Window:
        """How the local op moves over what was fetched."""
        size = x.shape[self.dim]
        if self.reads is None:
            return replace(self.window, size=size)
        low, high = self._padding or (0, 0)
        dilation = 1 if self._padding is None else self.reads.dilation
        local = replace(self.window, size=size, window=self.reads.window)
        return replace(local, low=low, high=high, base_dilation=dilation)

    def kept(self, local: LocalOp, result: jax.Array, dim: int) -> jax.Array:
        """This device's part of what the local op computed, along a dimension of the result."""
        if self.reads is None or self._padding is None or self.reads.starts is None:
            return result
        return cut(local, result, dim, self.axes, self.reads.starts, self.reads.block)
