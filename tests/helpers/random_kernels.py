"""Kernels drawn at random, each a description that can be printed and from which a `pallas_call` is made.

All numbers are small integers, so sums are the same in any order. Each result is written before it is read, in every
block, so a kernel has one right answer, which is that of the call on one device.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

FOLLOWING = ("follow", "major")
_STATE = (2, 4)
"""The shape of scratch."""


@dataclass(frozen=True)
class Index:
    """One index of a block: `kind` says what it is of the indices of one or two grid dimensions."""

    kind: str
    dims: tuple[int, ...] = ()
    group: int = 1
    block: int = 2
    is_squeezed: bool = False

    def __call__(self, kernel: Kernel, steps: Sequence[Any], table: Any) -> Any:
        """The index at a step of the grid."""
        here = [steps[d] for d in self.dims]
        extents = [kernel.grid[d] for d in self.dims]
        match self.kind:
            case "follow":
                return here[0]
            case "major":
                return here[0] // self.group
            case "minor":
                return here[0] % self.group
            case "reversed":
                return extents[0] - 1 - here[0]
            case "table":
                return table[here[0] % kernel.table]
            case "flat":
                return here[0] * extents[1] + here[1]
            case "both":
                return jnp.where(here[0] > here[1], here[1], 0)
            case "window":
                return here[0] * self.block
            case "second":
                return 1
        return 0

    def blocks(self, kernel: Kernel) -> int:
        """How many blocks it counts."""
        extents = [kernel.grid[d] for d in self.dims]
        match self.kind:
            case "follow" | "reversed" | "window":
                return extents[0]
            case "major":
                return extents[0] // self.group
            case "minor":
                return self.group
            case "table":
                return kernel.table
            case "flat":
                return math.prod(extents)
            case "both":
                return extents[1]
        return 2 if self.kind == "second" else 1

    def size(self, kernel: Kernel) -> int:
        return self.blocks(kernel) * self.block + (self.kind == "window")

    @property
    def shape(self) -> Any:
        """This dimension of a block, as a `BlockSpec` has it."""
        if self.kind == "window":
            return pl.Element(self.block + 1)
        return pl.squeezed if self.is_squeezed else self.block


@dataclass(frozen=True)
class Tensor:
    """An operand or a result; of results `mode` says how they are made.

    Modes: "last", of which the last step wins; "sum", over the steps that have the same block; "scratch", the same sum
    in scratch, written in the last of these steps; "state", a running sum along grid dimension `along` and those that
    are further in; "added", on top of operand 0, whose buffer it shares.
    """

    indices: tuple[Index, ...]
    mode: str = ""
    along: int = 0
    is_used: bool = True

    def shape(self, kernel: Kernel) -> tuple[int, ...]:
        return tuple(i.size(kernel) for i in self.indices)

    def spec(self, kernel: Kernel) -> pl.BlockSpec:
        rank = len(kernel.grid)

        def index_map(*steps: Any) -> tuple[Any, ...]:
            table = steps[rank] if kernel.table else None
            return tuple(i(kernel, steps[:rank], table) for i in self.indices)

        return pl.BlockSpec(tuple(i.shape for i in self.indices), index_map)

    def follows(self, dim: int) -> bool:
        return any(i.dims == (dim,) and i.kind in FOLLOWING for i in self.indices)

    def goes_on(self, kernel: Kernel, dim: int) -> bool:
        """Whether something of a result goes on from one index of a grid dimension to the next one."""
        match self.mode:
            case "state":
                return dim >= self.along
            case "scratch":
                return any(d < dim or (d == dim and not self.follows(d)) for d, _ in self.repeated(kernel))
            case "sum":
                return not self.follows(dim) and bool(self.repeated(kernel))
            case "added":
                return not self.follows(dim)
        return False

    def repeated(self, kernel: Kernel) -> tuple[tuple[int, int], ...]:
        """The grid dimensions along which a block is met again, each with after how many steps it is another."""
        found = {d: n for d, n in enumerate(kernel.grid) if n > 1}
        for i in self.indices:
            for d in i.dims:
                if i.kind == "major":
                    found[d] = i.group
                else:
                    found.pop(d, None)
        return tuple((d, n) for d, n in found.items() if n > 1)


@dataclass(frozen=True)
class Read:
    """Where a body uses its place along a grid dimension, or the extent of that."""

    dim: int
    place: str

    def value(self) -> Any:
        if self.place == "extent":
            return pl.num_programs(self.dim) + jnp.int32(0)
        here = pl.program_id(self.dim)
        match self.place:
            case "branch":
                return lax.cond(here > 1, lambda: here * 2, lambda: jnp.int32(5))
            case "fori":
                return lax.fori_loop(0, here + 1, lambda i, x: x + here + i, jnp.int32(0))
            case "while":
                return lax.while_loop(lambda x: x[0] <= here, lambda x: (x[0] + 1, x[1] + 3), (0, 0))[1]
            case "call":
                return jax.jit(lambda x: x * x)(here)
        return here


@dataclass(frozen=True)
class Kernel:
    """A `pallas_call`; `table` is the length of a table of scalars that index maps read, 0 without one; `mapped` says
    per `vmap` around it which operands it maps, of so many `lanes`; its body adds to the operand `changed`."""

    grid: tuple[int, ...]
    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    reads: tuple[Read, ...] = ()
    table: int = 0
    reads_table: int | None = None
    mapped: tuple[tuple[bool, ...], ...] = ()
    lanes: tuple[int, ...] = ()
    changed: int | None = None
    seed: int = 0

    @property
    def scratch(self) -> tuple[Any, ...]:
        return tuple(pltpu.VMEM(_STATE, jnp.float32) for r in self.results if r.mode in ("scratch", "state"))

    def factors(self) -> tuple[int, ...]:
        """The dimensions of the grid along which it may be split, those of `vmap` in front."""
        first = len(self.mapped)
        return (*range(first), *(first + dim for dim in range(len(self.grid)) if self._is_factor(dim)))

    def _is_factor(self, dim: int) -> bool:
        steps = math.lcm(*(i.group for t in (*self.operands, *self.results) for i in t.indices if i.dims == (dim,)))
        if self.grid[dim] % steps or self.grid[dim] // steps < 2:
            return False
        if not all(r.follows(dim) for r in self.results if r.is_used):
            return False
        if self.changed is not None and not self.operands[self.changed].follows(dim):
            return False
        return not any(r.goes_on(self, dim) for r in self.results)

    def arguments(self) -> list[np.ndarray]:
        """Scalars first."""
        rng = np.random.default_rng(self.seed)
        found = [rng.permutation(self.table).astype(np.int32)] if self.table else []
        for number, tensor in enumerate(self.operands):
            lanes = [n for n, which in zip(self.lanes, self.mapped, strict=True) if which[number]]
            found.append(rng.integers(-4, 5, (*lanes, *tensor.shape(self))).astype(np.float32))
        return found

    def __call__(self, *args: Any) -> Any:
        call = self._call
        for which in reversed(self.mapped):
            call = jax.vmap(call, in_axes=(*([None] * bool(self.table)), *(0 if each else None for each in which)))
        found = call(*args)
        return tuple(x for x, tensor in zip(found, self.results, strict=True) if tensor.is_used)

    def _call(self, *args: Any) -> Any:
        grid_spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=int(bool(self.table)),
            grid=self.grid,
            in_specs=[t.spec(self) for t in self.operands],
            out_specs=[t.spec(self) for t in self.results],
            scratch_shapes=self.scratch,
        )
        shapes = [jax.ShapeDtypeStruct(t.shape(self), jnp.float32) for t in self.results]
        added = [number for number, t in enumerate(self.results) if t.mode == "added"]
        aliases = {int(bool(self.table)): number for number in added}
        run = pl.pallas_call(
            self._body, out_shape=shapes, grid_spec=grid_spec, input_output_aliases=aliases, interpret=True
        )
        return run(*args)

    def _body(self, *refs: Any) -> None:
        refs_in = list(refs)
        table = refs_in.pop(0) if self.table else None
        operands, refs_in = refs_in[: len(self.operands)], refs_in[len(self.operands) :]
        results, scratch = refs_in[: len(self.results)], iter(refs_in[len(self.results) :])
        value = jnp.zeros(4, jnp.float32)
        for weight, (ref, tensor) in enumerate(zip(operands, self.operands, strict=True)):
            value += (weight + 1) * _summary(ref[...], tensor)
        for weight, read in enumerate(self.reads):
            value += (weight + 2) * jnp.asarray(read.value(), jnp.float32)
        if self.reads_table is not None:
            value += table[pl.program_id(self.reads_table) % self.table].astype(jnp.float32)
        for number, (ref, tensor) in enumerate(zip(results, self.results, strict=True)):
            self._write(ref, tensor, value * (number + 1), scratch)
        if self.changed is not None:
            operands[self.changed][...] += 1

    def _write(self, ref: Any, tensor: Tensor, value: Any, scratch: Any) -> None:
        match tensor.mode:
            case "last":
                ref[...] = _spread(value, ref.shape)
            case "added":
                ref[...] += _spread(value, ref.shape)
            case "sum":
                self._start(tensor, lambda: _clear(ref))
                ref[...] += _spread(value, ref.shape)
            case "scratch":
                state = next(scratch)
                self._start(tensor, lambda: _clear(state))
                state[...] += _spread(value, _STATE)
                self._end(tensor, lambda: _store(ref, state))
            case "state":
                state = next(scratch)
                at_start = [pl.program_id(d) == 0 for d in range(tensor.along, len(self.grid))]
                pl.when(_all(at_start))(lambda: _clear(state))
                state[...] += _spread(value, _STATE)
                _store(ref, state)

    def _start(self, tensor: Tensor, do: Callable[[], None]) -> None:
        pl.when(_all([pl.program_id(d) % n == 0 for d, n in tensor.repeated(self)]))(do)

    def _end(self, tensor: Tensor, do: Callable[[], None]) -> None:
        pl.when(_all([pl.program_id(d) % n == n - 1 for d, n in tensor.repeated(self)]))(do)


def _all(conditions: Sequence[Any]) -> Any:
    found = jnp.bool_(True)
    for condition in conditions:
        found &= condition
    return found


def _clear(ref: Any) -> None:
    ref[...] = jnp.zeros(ref.shape, ref.dtype)


def _store(ref: Any, state: Any) -> None:
    ref[...] = _spread(state[1], ref.shape)


def _summary(x: jax.Array, tensor: Tensor) -> jax.Array:
    """Four numbers that depend on where in a block its elements are."""
    weights = (jnp.arange(x.size, dtype=jnp.float32) % 3 + 1).reshape(x.shape)
    return jnp.resize((x * weights).reshape(-1), (-(-x.size // 4) * 4,)).reshape(-1, 4).sum(0)


def _spread(value: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Numbers for all of a block."""
    size = math.prod(shape)
    return jnp.resize(value, (size,)).reshape(shape) + (jnp.arange(size, dtype=jnp.float32) % 5).reshape(shape)


def drawn_kernel(seed: int) -> Kernel:
    """A kernel, the same one for a seed."""
    draw = random.Random(seed)
    rank = draw.choice((1, 2, 2, 3, 3, 4))
    grid = tuple(draw.choice((1, 2, 3, 4, 4, 6, 8) if rank < 3 else (1, 2, 2, 4, 4)) for _ in range(rank))
    table = draw.choice((0, 0, 2, 4))
    kernel = Kernel(grid, (), (), table=table)
    results = tuple(_drawn_result(draw, kernel) for _ in range(draw.choice((1, 1, 2, 3))))
    if not any(r.is_used for r in results):
        results = (Tensor(results[0].indices, results[0].mode, results[0].along), *results[1:])
    operands = [Tensor(_drawn_indices(draw, kernel, True)) for _ in range(draw.choice((1, 2, 3)))]
    if draw.random() < 0.25:
        operands[0] = Tensor(results[0].indices)
        results = (Tensor(results[0].indices, "added", is_used=results[0].is_used), *results[1:])
    places = ("top", "branch", "fori", "while", "call", "extent")
    reads = tuple(Read(draw.randrange(rank), draw.choice(places)) for _ in range(draw.choice((0, 0, 1, 2))))
    mapped, lanes = [], []
    for _ in range(draw.choice((0, 0, 0, 1, 2)) if rank < 4 else 0):
        which = [draw.random() < 0.7 for _ in operands]
        which[draw.randrange(len(operands))] = True
        mapped.append(tuple(which))
        lanes.append(draw.choice((2, 3, 4)))
    reads_table = draw.choice((None, draw.randrange(rank))) if table else None
    may_change = [n for n in range(len(operands)) if all(which[n] for which in mapped) and draw.random() < 0.1]
    changed = may_change[0] if may_change and results[0].mode != "added" else None
    return Kernel(grid, tuple(operands), results, reads, table, reads_table, tuple(mapped), tuple(lanes), changed, seed)


def _drawn_indices(draw: random.Random, kernel: Kernel, is_operand: bool) -> tuple[Index, ...]:
    """Of results each dimension of the grid at most once, and all blocks of a dimension."""
    dims = list(range(len(kernel.grid)))
    draw.shuffle(dims)
    found = []
    for dim in dims[: draw.randint(0 if is_operand else 1, 3)]:
        found.append(_drawn_index(draw, kernel, dim, is_operand))
    found.insert(draw.randint(0, len(found)), Index("second" if is_operand and draw.random() < 0.2 else "first"))
    return tuple(found)


def _drawn_index(draw: random.Random, kernel: Kernel, dim: int, is_operand: bool) -> Index:
    extent, block = kernel.grid[dim], draw.choice((1, 2, 3))
    groups = [g for g in range(2, extent) if not extent % g]
    kinds = ["follow"] * 6 + ["major"] * 2 * bool(groups) + ["reversed"]
    if is_operand:
        kinds += ["minor"] * 2 * bool(groups) + ["table"] * 2 * bool(kernel.table) + ["flat", "both", "window"]
    kind = draw.choice(kinds)
    is_squeezed = draw.random() < 0.2 and kind != "window"
    block = 1 if is_squeezed else block
    if kind in ("flat", "both"):
        other = draw.randrange(len(kernel.grid))
        return Index(kind, (dim, other), 1, block, is_squeezed)
    return Index(kind, (dim,), draw.choice(groups) if kind in ("major", "minor") else 1, block, is_squeezed)


def _drawn_result(draw: random.Random, kernel: Kernel) -> Tensor:
    mode = draw.choice(("last", "last", "last", "sum", "scratch", "scratch", "state"))
    along = max(draw.randrange(len(kernel.grid)) for _ in range(2))
    return Tensor(_drawn_indices(draw, kernel, False), mode, along, draw.random() < 0.8)
