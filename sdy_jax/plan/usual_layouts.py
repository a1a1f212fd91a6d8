"""The layouts that people give arguments by hand: data parallel, fully sharded, tensor parallel, expert parallel;
and none at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

from sdy_jax.annotate.program import Program
from sdy_jax.annotate.trees import Part, by_argument, children
from sdy_jax.ir.graph import Block, Graph, Op, Value
from sdy_jax.ir.meshes import AxisRef, Mesh, axes_size
from sdy_jax.ir.shardings import CLOSED, DimensionSharding, OpShardingRule, TensorMapping, TensorSharding
from sdy_jax.shardy.propagation.data_flow import edges_of, is_data_flow
from sdy_jax.shardy.rules import RuleBook

# How weights are split for tensor parallelism: column by row, as in Megatron.
#
# One pass in program order. A product of whole activations splits its weight along the largest dimension that is not
# contracted; the split goes on with the activations, and the next product that contracts a split dimension splits its
# weight along that one, so that its result is a sum to be reduced. What is added to split activations, or multiplied
# with them (a bias), is split like them. Source: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter
# Language Models Using Model Parallelism", 2019.


def tensor_parallel_dims(graph: Graph, weights: Collection[int], devices: int, rules: RuleBook) -> dict[int, int]:
    """Per argument of the main function that is split among `devices`, the dimension along which it is.

    Args:
        graph: the program.
        weights: the numbers of the arguments that are weights.
        devices: by what a split dimension must be divisible.
        rules: rules of its ops.
    """
    return _Columns(graph, weights, devices, rules).found()


class Weight(NamedTuple):
    """What a value is of a weight: the number of the argument, and per dimension the weight's, if it is all of one."""

    number: int
    dims: tuple[int | None, ...]


class WeightPass:
    """A pass in program order that knows which values are of weights. Subclasses say what becomes of ops on others."""

    def __init__(self, graph: Graph, weights: Collection[int], devices: int, rules: RuleBook):
        self.devices, self.split_weights = devices, dict[int, int]()
        self._rules, self._main = rules, graph.main.blocks[0]
        self.weights = {
            value: Weight(value.index, tuple(range(value.rank)))
            for value in graph.arguments
            if value.index in weights and value.shape is not None
        }

    def found(self) -> dict[int, int]:
        """Per weight that is split, the dimension."""
        self.visit(self._main)
        return self.split_weights

    def run(self, op: Op, rule: OpShardingRule, weights: Sequence[int], others: Sequence[int]) -> None:
        """Visits an op on values of weights, by the indices of these operands, and on others, or on others alone."""
        raise NotImplementedError

    def flows(self, source: Value, target: Value) -> None:
        """Notes that a value that is no weight becomes another one."""

    def visit(self, block: Block) -> None:
        for op in block.ops:
            if is_data_flow(op):
                self._flow(op)
            elif op.results and (rule := self._rules.rule_of(op)) is not None:
                self._run(op, rule)

    def _flow(self, op: Op) -> None:
        """Values keep what is known of the first source that flows in."""
        edges = edges_of(op)
        for edge in edges:
            for target in edge.targets:
                self._copy(edge.sources[0], target)
        for block in op.blocks:
            self.visit(block)
        for edge in edges:
            for source in edge.sources[1:]:
                self._copy(source, edge.owner)

    def _copy(self, source: Value, target: Value) -> None:
        if source in self.weights:
            self.weights.setdefault(target, self.weights[source])
        else:
            self.flows(source, target)

    def _run(self, op: Op, rule: OpShardingRule) -> None:
        weights = [i for i, value in enumerate(op.operands) if value in self.weights]
        others = [i for i in range(len(op.operands)) if i not in weights]
        if weights and not any(op.operands[i].rank for i in others):  # as a layer of a stack, which a loop reads
            self._of_weights(op, rule, weights[0])
        else:
            self.run(op, rule, weights, others)

    def _of_weights(self, op: Op, rule: OpShardingRule, first: int) -> None:
        """The results of an op on weights alone are parts of the first one, or are no weights at all."""
        weight, mapping = self.weights[op.operands[first]], rule.operand_mappings[first]
        origin = {factors[0]: weight.dims[dim] for dim, factors in enumerate(mapping) if len(factors) == 1}
        for value, dims in zip(op.results, rule.result_mappings, strict=True):
            if value.shape is not None:
                found = tuple(origin.get(factors[0]) if len(factors) == 1 else None for factors in dims)
                self.weights[value] = Weight(weight.number, found)

    def split_weight(self, weight: Weight, mapping: TensorMapping, factor: int) -> None:
        """Splits a weight along a factor, as far as that is a dimension of it."""
        dim = _leading(mapping, factor)
        own = weight.dims[dim] if dim is not None else None
        if own is not None:
            self.split_weights.setdefault(weight.number, own)


class _Columns(WeightPass):
    def __init__(self, graph: Graph, weights: Collection[int], devices: int, rules: RuleBook):
        super().__init__(graph, weights, devices, rules)
        self._split: dict[Value, int] = {}
        """The dimension along which a value that is no weight is split."""

    def flows(self, source: Value, target: Value) -> None:
        if source in self._split:
            self._split.setdefault(target, self._split[source])

    def run(self, op: Op, rule: OpShardingRule, weights: Sequence[int], others: Sequence[int]) -> None:
        factor = next(self._factors(op, rule, others), None)
        if factor is None and weights and multiplies(rule):
            factor = self._widest(op, rule, weights[0])
        if factor is None:
            return
        for i in weights:
            self.split_weight(self.weights[op.operands[i]], rule.operand_mappings[i], factor)
        if factor not in rule.reduction:
            for value, mapping in zip(op.results, rule.result_mappings, strict=True):
                dim = _leading(mapping, factor)
                if dim is not None:
                    self._split[value] = dim

    def _factors(self, op: Op, rule: OpShardingRule, operands: Sequence[int]) -> Iterator[int]:
        """The factors along which the operands of an op are split, as far as they can be."""
        for i in operands:
            dim = self._split.get(op.operands[i])
            if dim is not None and rule.operand_mappings[i][dim]:
                factor = rule.operand_mappings[i][dim][0]
                if rule.factor_sizes[factor] % self.devices == 0 and factor not in rule.need_replication:
                    yield factor

    def _widest(self, op: Op, rule: OpShardingRule, weight: int) -> int | None:
        """The largest factor of a weight along which a product makes its result, if it can be split."""
        known, mapping = self.weights[op.operands[weight]], rule.operand_mappings[weight]
        if known.number in self.split_weights:
            return None
        able = [
            factors[0]
            for dim, factors in enumerate(mapping)
            if len(factors) == 1
            and known.dims[dim] is not None
            and factors[0] not in rule.reduction | rule.need_replication
            and rule.factor_sizes[factors[0]] % self.devices == 0
        ]
        return max(able, key=lambda factor: rule.factor_sizes[factor], default=None)


def _leading(mapping: TensorMapping, factor: int) -> int | None:
    """The dimension of which a factor is the major one."""
    return next((dim for dim, factors in enumerate(mapping) if factors and factors[0] == factor), None)


def multiplies(rule: OpShardingRule) -> bool:
    """Whether operands share a dimension that is summed up."""
    return any(sum(any(f in dim for dim in m) for m in rule.operand_mappings) > 1 for f in rule.reduction)


# Which weights are those of experts: products run for each of them apart, beside activations that do, too.
#
#     dot_general %tokens, %weight, batching_dims = [0] x [0]      [experts, capacity, d] x [experts, d, ffn]
#
# Split along the experts, each device has the weights of some of them, and tokens are exchanged. Source: Lepikhin et
# al., "GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding", 2020.


def expert_parallel(graph: Graph, weights: Collection[int], devices: int, rules: RuleBook) -> dict[int, int]:
    """Per argument of the main function that has experts, which can be split among `devices`, their dimension.

    Args:
        graph: the program.
        weights: the numbers of the arguments that are weights.
        devices: by what the number of experts must be divisible.
        rules: rules of its ops.
    """
    return _Experts(graph, weights, devices, rules).found()


class _Experts(WeightPass):
    def run(self, op: Op, rule: OpShardingRule, weights: Sequence[int], others: Sequence[int]) -> None:
        if not multiplies(rule):
            return
        alike = [{factors[0] for factors in mapping if factors} for mapping in rule.mappings]
        for factor in sorted(set.intersection(*alike) - rule.need_replication):
            if rule.factor_sizes[factor] % self.devices == 0:
                for i in weights:
                    self.split_weight(self.weights[op.operands[i]], rule.operand_mappings[i], factor)
                return


# The layouts that people give arguments by hand: data parallel, fully sharded, tensor parallel, expert parallel; and
# none at all.
#
# They are where the search for automatic layouts starts, and what it is compared with. An argument that comes back as
# a result, such as weights and what an optimizer keeps of them, is *state*, or where none does, the largest one; the
# others are taken to be the batch.

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
        tensor, experts = self._split(tensor_parallel_dims, last), self._split(expert_parallel, last)
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
