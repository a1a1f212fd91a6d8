"""Rules that say nothing of some operands, completed by what such functions mostly want: operands that are split alike.

    ([i, j, k], [l, m, n])->([i, j, k])   becomes   ([i, j, k], [i, j, k])->([i, j, k])

An axis splits one factor. So by the first rule, in which `l`, `m` and `n` stand for "whatever it is", both operands are
never split along the same axes, which by the second one they always are.
"""

from __future__ import annotations

from sdy_jax.representation.rule import OpShardingRule, TensorMapping


def alike_rule(rule: OpShardingRule) -> OpShardingRule:
    """The rule with each dimension of which it says nothing tied to that of the first operand with as many dimensions;
    the rule itself where there is none.

    It says nothing of a dimension whose factor no other tensor has. Dimensions of other sizes, and factors of other
    types, stay as they are.
    """
    tied = dict[int, int]()
    for index, mapping in enumerate(rule.mappings):
        leader = next((m for m in rule.operand_mappings if len(m) == len(mapping)), None)
        if leader is not None and leader is not mapping:
            tied.update(_ties(rule, index, mapping, leader))
    return _with_ties(rule, tied) if tied else rule


def _ties(rule: OpShardingRule, index: int, mapping: TensorMapping, leader: TensorMapping) -> dict[int, int]:
    """Factors of a tensor, with those of the leading operand that take their place."""
    own, others = rule.factors_of[index], rule.factors_of[:index] + rule.factors_of[index + 1 :]
    found = dict[int, int]()
    for factors, leading in zip(mapping, leader, strict=True):
        if len(factors) != 1 or len(leading) != 1:
            continue
        (factor,), (first,) = factors, leading
        is_alike = rule.factor_sizes[factor] == rule.factor_sizes[first]
        is_alike = is_alike and rule.type_of(factor) == rule.type_of(first)
        if is_alike and first not in own and not any(factor in of_other for of_other in others):
            found[factor] = first
    return found


def _with_ties(rule: OpShardingRule, tied: dict[int, int]) -> OpShardingRule:
    left = [factor for factor in range(len(rule.factor_sizes)) if factor not in tied]
    number = {factor: index for index, factor in enumerate(left)}
    number.update({factor: number[first] for factor, first in tied.items()})

    def renamed(factors: frozenset[int]) -> frozenset[int]:
        return frozenset(number[factor] for factor in factors)

    def of_tensors(mappings: tuple[TensorMapping, ...]) -> tuple[TensorMapping, ...]:
        return tuple(tuple(tuple(number[f] for f in factors) for factors in mapping) for mapping in mappings)

    return OpShardingRule(
        tuple(rule.factor_sizes[factor] for factor in left),
        of_tensors(rule.operand_mappings),
        of_tensors(rule.result_mappings),
        renamed(rule.reduction),
        renamed(rule.need_replication),
        renamed(rule.permutation),
        renamed(rule.blocked),
        rule.is_custom,
    )
