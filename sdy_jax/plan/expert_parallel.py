"""Which weights are those of experts: products run for each of them apart, beside activations that do, too.

    dot_general %tokens, %weight, batching_dims = [0] x [0]      [experts, capacity, d] x [experts, d, ffn]

Split along the experts, each device has the weights of some of them, and tokens are exchanged.
Source: Lepikhin et al., "GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding", 2020.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sdy_jax.ir.graph import Graph, Op
from sdy_jax.op_rules import RuleBook
from sdy_jax.plan.tensor_parallel import WeightPass, multiplies
from sdy_jax.representation.rule import OpShardingRule


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
