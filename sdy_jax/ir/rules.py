"""Op sharding rules, and the dialect's records of which axis spread from tensor to tensor of an op."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from sdy_jax.ir.meshes import AxisRef, hash_once

# Op sharding rules: which dimensions of an op's operands and results correspond.
#
# Source: the SDY dialect reference, attribute `op_sharding_rule`. For a matrix product `([i, k], [k, j])->([i, j])
# {i=8, j=4, k=16} reduction={k}`.

LETTERS = 18
"""Factors that have a letter, `i` to `z`. Given by the text of SDY."""

TensorMapping = tuple[tuple[int, ...], ...]
"""Per dimension of one tensor, the factors it is made of, major to minor."""


class FactorType(enum.Enum):
    """What it means to shard a factor."""

    PASS_THROUGH = "pass_through"
    REDUCTION = "reduction"
    NEED_REPLICATION = "need_replication"
    PERMUTATION = "permutation"


@hash_once
@dataclass(frozen=True)
class OpShardingRule:
    """Factor sizes, one mapping per operand and result, and the sets of factors that are not pass-through.

    Blocked factors take no part in propagation, whatever their type.

    Attributes:
        factor_sizes: the size of each factor: `i`, `j`, `k`, ... in the text.
        operand_mappings, result_mappings: per tensor and dimension, the factors that it is made of, major to minor.
        reduction, need_replication, permutation: the factors that are such.
        blocked: the factors that take no part in propagation.
        is_custom: whether a user wrote it.

    Example:
        >>> x, w, y = ((0,), (2,)), ((2,), (1,)), ((0,), (1,))
        >>> product = OpShardingRule((8, 4, 16), (x, w), (y,), reduction=frozenset({2}))
        >>> str(product)
        '([i, k], [k, j])->([i, j]) {i=8, j=4, k=16} reduction={k}'

    See also:
        `with_sharding_rule`, `custom_op`: take one, or its text.
    """

    factor_sizes: tuple[int, ...]
    operand_mappings: tuple[TensorMapping, ...]
    result_mappings: tuple[TensorMapping, ...]
    reduction: frozenset[int] = frozenset()
    need_replication: frozenset[int] = frozenset()
    permutation: frozenset[int] = frozenset()
    blocked: frozenset[int] = frozenset()
    is_custom: bool = False

    @cached_property
    def mappings(self) -> tuple[TensorMapping, ...]:
        """Operands, then results."""
        return self.operand_mappings + self.result_mappings

    def type_of(self, factor: int) -> FactorType:
        """What it means to shard a factor."""
        if factor in self.reduction:
            return FactorType.REDUCTION
        if factor in self.need_replication:
            return FactorType.NEED_REPLICATION
        return FactorType.PERMUTATION if factor in self.permutation else FactorType.PASS_THROUGH

    @cached_property
    def factors_of(self) -> tuple[frozenset[int], ...]:
        """Per tensor (operands, then results), the factors that occur in it."""
        return tuple(frozenset(f for dim in mapping for f in dim) for mapping in self.mappings)

    @cached_property
    def joint_factors(self) -> tuple[tuple[int, ...], ...]:
        """The factors of each dimension that is made of several."""
        return tuple([factors for mapping in self.mappings for factors in mapping if len(factors) != 1])

    def __str__(self) -> str:
        """The text inside `#sdy.op_sharding_rule<...>`."""
        tensors = [
            ", ".join(f"[{', '.join(''.join(factor_symbol(f) for f in dim) for dim in m)}]" for m in ms)
            for ms in (self.operand_mappings, self.result_mappings)
        ]
        text = f"({tensors[0]})->({tensors[1]})"
        if self.factor_sizes:
            text += " {" + ", ".join(f"{factor_symbol(f)}={n}" for f, n in enumerate(self.factor_sizes)) + "}"
        for name, factors in (
            ("reduction", self.reduction),
            ("need_replication", self.need_replication),
            ("permutation", self.permutation),
            ("blocked_propagation", self.blocked),
        ):
            if factors:
                text += f" {name}={{{', '.join(map(factor_symbol, sorted(factors)))}}}"
        return text + (", custom" if self.is_custom else "")


def factor_symbol(factor: int) -> str:
    """`i` to `z` for the first eighteen factors, then `z_1`, `z_2`, ..."""
    return chr(ord("i") + factor) if factor < LETTERS else f"z_{factor - LETTERS + 1}"


# The dialect's records of propagation: which axis spread from which tensor of an op to which others, step by step.
#
# Source: the SDY dialect reference, attributes `propagation_edges`, `propagation_one_step`,
# `axis_to_propagation_details` and `edge_value_ref`. Text: `[{step-0 = [{"a" = operand-0 -> [operand-1,
# result-0]}]}]`.


@dataclass(frozen=True, slots=True)
class EdgeValue:
    """An operand or a result of the op, by number."""

    side: Literal["operand", "result"]
    index: int

    def __str__(self) -> str:
        return f"{self.side}-{self.index}"


@dataclass(frozen=True, slots=True)
class AxisSpread:
    """An axis that came from `source` to all of `targets`."""

    axis: AxisRef
    source: EdgeValue
    targets: tuple[EdgeValue, ...]

    def __str__(self) -> str:
        return f"{self.axis} = {self.source} -> [{', '.join(map(str, self.targets))}]"


@dataclass(frozen=True, slots=True)
class PropagationStep:
    """What spread in one step of propagation; steps are numbered through the whole module."""

    index: int
    spreads: tuple[AxisSpread, ...]

    def __str__(self) -> str:
        return f"step-{self.index} = [{', '.join(f'{{{spread}}}' for spread in self.spreads)}]"


@dataclass(frozen=True, slots=True)
class PropagationEdges:
    """What spread through one op."""

    steps: tuple[PropagationStep, ...]

    def spreads(self) -> Iterator[AxisSpread]:
        """What spread, over all steps."""
        for step in self.steps:
            yield from step.spreads

    def __str__(self) -> str:
        """The text inside `#sdy.propagation_edges<...>`."""
        return f"[{', '.join(f'{{{step}}}' for step in self.steps)}]"
