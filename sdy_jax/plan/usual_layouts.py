"""The layouts that people give arguments by hand: data parallel, fully sharded, tensor parallel, expert parallel; and
none at all.

They are where the search for automatic layouts starts, and what it is compared with. An argument that comes back as a
result, such as weights and what an optimizer keeps of them, is *state*, or where none does, the largest one; the others
are taken to be the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from sdy_jax.annotate.program import Program
from sdy_jax.annotate.trees import Part, by_argument, children
from sdy_jax.ir.graph import Graph
from sdy_jax.op_rules import RuleBook
from sdy_jax.plan.expert_parallel import expert_parallel
from sdy_jax.plan.tensor_parallel import tensor_parallel
from sdy_jax.representation.mesh import AxisRef, Mesh, axes_size
from sdy_jax.representation.sharding import CLOSED, DimensionSharding, TensorSharding

Border = Mapping[int, TensorSharding]
"""The shardings of argument leaves, by index."""

WeightsSplit = Callable[[Graph, Collection[int], int, RuleBook], dict[int, int]]
"""Of a program, the numbers of its weights, a number of devices and rules: which weights are split, and along which
dimension."""


def carried(program: Program) -> dict[int, int]:
    """The argument leaves that come back as results, with the result leaves: those of an argument with the structure
    and the types of all results, or of one of them."""
    positional, named = by_argument(program.in_tree)
    free = [(program.out_tree, range(len(program.outputs))), *children(program.out_tree)]
    found = dict[int, int]()
    for argument in [*positional, *named.values()]:
        result = next((each for each in free if _are_alike(program, argument, each)), None)
        if result is not None:
            free.remove(result)
            found.update(zip(argument[1], result[1], strict=True))
    return found


def largest(program: Program) -> Sequence[int]:
    """The leaves of the argument with the most bytes: the weights, where nothing comes back."""
    positional, named = by_argument(program.in_tree)
    trees = [which for _, which in (*positional, *named.values())]
    return max(trees, key=lambda which: sum(_bytes(program.in_info[i]) for i in which), default=[])


def _bytes(leaf: Any) -> int:
    return int(math.prod(leaf.shape) * leaf.dtype.itemsize)


def _are_alike(program: Program, argument: Part, result: Part) -> bool:
    if argument[0] != result[0]:
        return False
    both = [(program.in_info[i], program.out_info[j]) for i, j in zip(argument[1], result[1], strict=True)]
    return bool(both) and all(a.shape == b.shape and a.dtype == b.dtype for a, b in both)


@dataclass(frozen=True, slots=True)
class UsualLayouts:
    """The usual layouts of some arguments of a program.

    Attributes:
        program: the program; its module is that after import.
        free: the argument leaves whose layouts are asked for.
        state: those of them that are state.
        slow: the axes that state is not split along, as those between slices: each has all of it.
    """

    program: Program
    free: Sequence[int]
    state: Sequence[int]
    slow: Collection[str] = ()

    def borders(self) -> Iterator[tuple[str, Border]]:
        """The layouts by name; those that the mesh cannot tell apart once."""
        if not self.state:
            return
        axes = tuple(AxisRef(axis.name) for axis in self.program.mesh.axes if axis.size > 1)
        *others, last = axes
        yield "replicated", self._border((), {})
        yield "data", self._border(axes, {})
        fully, first = self._fully_sharded(axes, {}), self._fully_sharded(axes, {}, first=True)
        yield "fsdp", fully
        if first != fully:
            yield "fsdp-first", first
        tensor, experts = self._split(tensor_parallel, last), self._split(expert_parallel, last)
        if tensor:
            yield "megatron", self._border(tuple(others), tensor)
        if tensor and others:
            yield "fsdp+megatron", self._fully_sharded(tuple(others), tensor)
        if experts:
            yield "expert", self._border(axes, experts)
            everywhere = self._fully_sharded(axes, experts)
            yield "fsdp+expert", everywhere
            apart = self._fully_sharded(axes, experts, along=others)
            if others and apart != everywhere:  # other weights are whole along the axis of the experts
                yield "fsdp-rest+expert", apart

    def _border(self, batch: Sequence[AxisRef], state: Mapping[int, Mapping[int, Sequence[AxisRef]]]) -> Border:
        """The batch split along its first dimension, state as given per dimension."""
        found = {}
        for leaf in self.free:
            dims = state.get(leaf, {}) if leaf in self.state else self._along(leaf, 0, batch)
            found[leaf] = self._sharding(leaf, dims)
        return found

    def _fully_sharded(
        self,
        axes: Sequence[AxisRef],
        tensor: Mapping[int, Mapping[int, Sequence[AxisRef]]],
        first: bool = False,
        along: Sequence[AxisRef] | None = None,
    ) -> Border:
        """State split along the largest dimension that is free and can be, too, by the axes that it is not split by, or
        some of them; or along the first of those that most of these divide: of stacks of layers that is often the
        layers."""
        state = {}
        for leaf in self.state:
            own, shape = dict(tensor.get(leaf, {})), self._shape(leaf)
            taken = [axis for found in own.values() for axis in found]
            left = [axis for axis in along or axes if axis not in taken and axis.name not in self.slow]
            able = {dim: self._axes(leaf, dim, left) for dim in range(len(shape)) if dim not in own}
            if any(able.values()):
                dim = max(filter(able.get, able), key=lambda dim: len(able[dim]) if first else shape[dim])
                own[dim] = able[dim]
            state[leaf] = own
        return self._border(axes, state)

    def _split(self, of: WeightsSplit, axis: AxisRef) -> dict[int, dict[int, Sequence[AxisRef]]]:
        """The weights that a kind of parallelism splits, and state of their shape whose path ends as theirs does."""
        first, size = len(self.program.constants), axes_size((axis,), self.program.mesh)
        graph = Graph(self.program.module)
        weights = of(graph, [first + leaf for leaf in self.state], size, RuleBook())
        split = {number - first: dim for number, dim in weights.items()}
        found = {}
        for leaf in self.state:
            like = leaf if leaf in split else self._alike(leaf, split)
            if like is not None:
                found[leaf] = self._along(leaf, split[like], (axis,))
        return found

    def _alike(self, leaf: int, weights: Mapping[int, int]) -> int | None:
        able = [w for w in weights if self._shape(w) == self._shape(leaf) and self._suffix(w, leaf)]
        return max(able, key=lambda w: self._suffix(w, leaf), default=None)

    def _suffix(self, leaf: int, other: int) -> int:
        """How much of two paths is equal at their ends."""
        ends = zip(*(reversed(self.program.inputs[n]) for n in (leaf, other)), strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], ends))

    def _along(self, leaf: int, dim: int, axes: Sequence[AxisRef]) -> dict[int, Sequence[AxisRef]]:
        """A dimension split along as many of the axes as divide it; nothing where none do."""
        found = self._axes(leaf, dim, axes)
        return {dim: found} if found else {}

    def _axes(self, leaf: int, dim: int, axes: Sequence[AxisRef]) -> Sequence[AxisRef]:
        """As many of the axes as divide a dimension, the first ones."""
        shape, count = self._shape(leaf), 0
        if dim >= len(shape) or not shape[dim]:
            return ()
        while count < len(axes) and shape[dim] % axes_size(axes[: count + 1], self._mesh) == 0:
            count += 1
        return axes[:count]

    def _sharding(self, leaf: int, dims: Mapping[int, Sequence[AxisRef]]) -> TensorSharding:
        entries = [
            DimensionSharding(tuple(dims[dim])) if dim in dims else CLOSED for dim in range(len(self._shape(leaf)))
        ]
        return TensorSharding(self.program.mesh_name, tuple(entries))

    def _shape(self, leaf: int) -> tuple[int, ...]:
        return tuple(self.program.in_info[leaf].shape)

    @property
    def _mesh(self) -> Mesh:
        return self.program.mesh
