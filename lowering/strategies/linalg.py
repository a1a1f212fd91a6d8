"""Matrix decompositions and solvers: batches are independent, and so are the right-hand sides of a system.

A matrix that is split along its rows is gathered while it is small. A large one stays split for Cholesky decompositions
and triangular systems, which `blocked_linalg.py` computes block after block; what that costs is stated here.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from sdy_jax.ir.graph import Op
from sdy_jax.lowering.emission.local_op import LocalOp
from sdy_jax.lowering.strategies.registry import Inside, Shards, Strategy, pass_through_factors, strategies
from sdy_jax.lowering.strategies.shards import block_shape
from sdy_jax.op_rules.linalg import cholesky_is_lower, triangular_system
from sdy_jax.representation.rule import OpShardingRule

_LARGE = 1 << 16
"""Bytes of a matrix from which it is worth while to compute blocks of it one after the other. Guessed: smaller ones are
gathered in about the time in which the collective of one block starts."""


@strategies("stablehlo.cholesky", "stablehlo.triangular_solve")
def _of_the_op(op: Op, rule: OpShardingRule) -> list[Strategy]:
    return factorization_strategies(op, rule, pass_through_factors(rule)) or []


def factorization_strategies(op: Op, rule: OpShardingRule, passing: frozenset[int]) -> list[Strategy] | None:
    """Those of a Cholesky decomposition or a triangular system, of whole matrices and of blocks; None for other ops."""
    dim = blocked_dim(op)
    if dim is None:
        return None
    is_system = triangular_system(op) is not None
    if is_system:
        # In Shardy's terms nothing passes along the right-hand sides, but they need nothing either.
        passing |= set(rule.operand_mappings[1][_free(op)])
    operations = _of_system if is_system else _of_cholesky
    factors = frozenset(rule.operand_mappings[0][dim])
    whole = Strategy("whole_matrices", passing, work=factors, operations=operations(op, rule, dim))
    n = (op.operands[0].shape or ())[dim]
    if factors != frozenset(rule.result_mappings[0][_along(op, dim)]) or n * n * op.operands[0].itemsize < _LARGE:
        return [whole]
    inside = _sent_for_system(op, rule, dim) if is_system else _sent_for_cholesky(op, rule, dim)
    blocks = Strategy("blocks", passing | factors, inside=inside, work=factors, operations=whole.operations)
    return [whole, blocks]


def blocked_dim(op: Op) -> int | None:
    """The dimension of the matrix along which it may be split into blocks; None for other ops.

    For a lower triangle that is factored, rows; for an upper one, columns; for a system, its equations.
    """
    rank, system = op.operands[0].rank if op.operands else 0, triangular_system(op)
    if system is not None:
        return rank + system.kept
    lower = cholesky_is_lower(op)
    return None if lower is None else rank - 2 if lower else rank - 1


def is_blocked(local: LocalOp) -> bool:
    """Whether an op is to be computed block after block."""
    dim = blocked_dim(local.op)
    return dim is not None and bool(local.operand_axes(0, dim))


def _along(op: Op, dim: int) -> int:
    """The dimension of the result that is split like that of the matrix."""
    system = triangular_system(op)
    return dim if system is None else op.results[0].rank + system.solved


def _free(op: Op) -> int:
    system = triangular_system(op)
    assert system is not None
    return -3 - system.solved


def _blocks(op: Op, rule: OpShardingRule, dim: int, shards: Shards) -> tuple[int, int, int]:
    """In how many blocks the matrix is, the rows of each, and the number of matrices that a device has."""
    shape = block_shape(op.operands[0].shape or (), rule.operand_mappings[0], shards)
    count = math.prod(shards[f] for f in rule.operand_mappings[0][dim])
    return count, shape[dim], math.prod(shape[:-2])


def _of_cholesky(op: Op, rule: OpShardingRule, dim: int) -> Callable[[Shards], float]:
    def operations(shards: Shards) -> float:
        """Per step one block is factored, the column below it solved, and the columns right of it updated."""
        count, block, batch = _blocks(op, rule, dim, shards)
        return batch * block**3 * (count / 3 + 3 * count * (count - 1) / 2)

    return operations


def _of_system(op: Op, rule: OpShardingRule, dim: int) -> Callable[[Shards], float]:
    def operations(shards: Shards) -> float:
        """Per step one block is solved, and the equations of the others updated."""
        count, block, _ = _blocks(op, rule, dim, shards)
        rows = math.prod(block_shape(op.results[0].shape or (), rule.result_mappings[0], shards))
        return block * rows * (count + 2 * (count - 1))

    return operations


def _sent_for_cholesky(op: Op, rule: OpShardingRule, dim: int) -> tuple[Inside, ...]:
    factors = frozenset(rule.operand_mappings[0][dim])

    def columns(shards: Shards) -> float:
        """A column of blocks is gathered for each step but the last one: less than to gather the matrix."""
        count, block, batch = _blocks(op, rule, dim, shards)
        return batch * (count - 1) ** 2 * block**2

    def failures(shards: Shards) -> float:
        """An int32 per matrix says where it is not positive."""
        count, _, batch = _blocks(op, rule, dim, shards)
        return 2 * (count - 1) / count * batch * 4 / op.operands[0].itemsize

    gathered = Inside("all_gather", factors, 0, columns, _steps_between(op, rule, dim))
    return gathered, Inside("all_reduce", factors, 0, failures)


def _sent_for_system(op: Op, rule: OpShardingRule, dim: int) -> tuple[Inside, ...]:
    def unknowns(shards: Shards) -> float:
        """A block of x for each step but the last one."""
        count, _, _ = _blocks(op, rule, dim, shards)
        block = math.prod(block_shape(op.results[0].shape or (), rule.result_mappings[0], shards))
        return (count - 1) * 2 * (count - 1) / count * block

    factors = frozenset(rule.operand_mappings[0][dim])
    return (Inside("all_reduce", factors, 2, unknowns, _steps_between(op, rule, dim)),)


def _steps_between(op: Op, rule: OpShardingRule, dim: int) -> Callable[[Shards], int]:
    """How many steps have one after them, of one per block."""
    return lambda shards: _blocks(op, rule, dim, shards)[0] - 1
