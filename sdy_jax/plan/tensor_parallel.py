"""How weights are split for tensor parallelism: column by row, as in Megatron.

One pass in program order. A product of whole activations splits its weight along the largest dimension that is not
contracted; the split goes on with the activations, and the next product that contracts a split dimension splits its
weight along that one, so that its result is a sum to be reduced. What is added to split activations, or multiplied with
them (a bias), is split like them.
Source: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 2019.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from sdy_jax.ir.graph import Block, Graph, Op, Value
from sdy_jax.op_rules import RuleBook
from sdy_jax.op_rules.dataflow import edges_of, is_data_flow
from sdy_jax.representation.rule import OpShardingRule, TensorMapping


def tensor_parallel(graph: Graph, weights: Collection[int], devices: int, rules: RuleBook) -> dict[int, int]:
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
