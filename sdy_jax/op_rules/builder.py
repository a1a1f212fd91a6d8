"""Writing down an op's sharding rule one factor at a time.

State: per tensor (operands, then results) and dimension the factors placed so far, major to minor. A dimension that
never gets a factor receives one of size 1 of its own at the end, so that every dimension of a finished rule has one.

Worked example, `tensor<8x16> . tensor<16x4>`:

    rule = RuleBuilder.of(op)
    rule.add((0, None), (0,), 8)
    rule.add((None, 1), (1,), 4)
    rule.add((1, 0), (None,), 16, REDUCTION)
    rule.build()        # ([i, k], [k, j])->([i, j]) {i=8, j=4, k=16} reduction={k}
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sdy_jax.ir.graph import Op
from sdy_jax.representation.rule import FactorType, OpShardingRule

Shape = tuple[int, ...]
Dim = int | None

PASS_THROUGH = FactorType.PASS_THROUGH
REDUCTION = FactorType.REDUCTION
NEED_REPLICATION = FactorType.NEED_REPLICATION
PERMUTATION = FactorType.PERMUTATION


class RuleBuilder:
    """Collects the factors of one rule, in the order in which they are added."""

    def __init__(self, operands: Sequence[Shape], results: Sequence[Shape]):
        self._num_operands = len(operands)
        self._tensors = [[list[int]() for _ in shape] for shape in (*operands, *results)]
        self._sizes: list[int] = []
        self._of_kind: dict[FactorType, set[int]] = {kind: set() for kind in FactorType}
        self._blocked: set[int] = set()

    @classmethod
    def of(cls, op: Op) -> RuleBuilder:
        """Nothing placed yet on the op's tensors, which have static shapes."""
        return cls([shape_of(op, v) for v in range(len(op.operands))], [v.shape or () for v in op.results])

    def add(
        self,
        operands: Sequence[Dim],
        results: Sequence[Dim],
        size: int,
        kind: FactorType = PASS_THROUGH,
        *,
        blocked: bool = False,
    ) -> None:
        """Places a new factor on one dimension of each operand and result; None leaves a tensor out.

        A factor of size 1 says nothing about a dimension that has a factor already, and is not added to it.
        """
        factor = self._new_factor(size, kind, blocked)
        for tensor, dim in zip(self._tensors, (*operands, *results), strict=True):
            if dim is not None and not (size == 1 and tensor[dim]):
                tensor[dim].append(factor)

    def add_all(self, dim: int, size: int, kind: FactorType = PASS_THROUGH, *, blocked: bool = False) -> None:
        """Places a new factor on the same dimension of every tensor that has it; scalars are left out."""
        self._add_to(self._tensors, dim, size, kind, blocked)

    def add_operands(self, dim: int, size: int, kind: FactorType = PASS_THROUGH, *, blocked: bool = False) -> None:
        """`add_all` for operands only."""
        self._add_to(self._tensors[: self._num_operands], dim, size, kind, blocked)

    def add_results(self, dim: int, size: int, kind: FactorType = PASS_THROUGH, *, blocked: bool = False) -> None:
        """`add_all` for results only."""
        self._add_to(self._tensors[self._num_operands :], dim, size, kind, blocked)

    def pointwise(self, shape: Shape, special: Collection[int] = (), kind: FactorType = PASS_THROUGH) -> RuleBuilder:
        """One factor per dimension of `shape` on all tensors; those of `special` dimensions are of that `kind`."""
        for dim, size in enumerate(shape):
            self.add_all(dim, size, kind if dim in special else PASS_THROUGH)
        return self

    def has_factor(self, tensor: int, dim: int) -> bool:
        """Whether a dimension has a factor yet; operands are counted first, then results."""
        return bool(self._tensors[tensor][dim])

    def build(self) -> OpShardingRule:
        """The finished rule."""
        for tensor in self._tensors:
            for factors in tensor:
                if not factors:
                    factors.append(self._new_factor(1, PASS_THROUGH, False))
        mappings = tuple(tuple(map(tuple, tensor)) for tensor in self._tensors)
        return OpShardingRule(
            tuple(self._sizes),
            mappings[: self._num_operands],
            mappings[self._num_operands :],
            reduction=frozenset(self._of_kind[REDUCTION]),
            need_replication=frozenset(self._of_kind[NEED_REPLICATION]),
            permutation=frozenset(self._of_kind[PERMUTATION]),
            blocked=frozenset(self._blocked),
        )

    def _add_to(self, tensors: list[list[list[int]]], dim: int, size: int, kind: FactorType, blocked: bool) -> None:
        factor = self._new_factor(size, kind, blocked)
        for tensor in tensors:
            if dim < len(tensor):
                tensor[dim].append(factor)

    def _new_factor(self, size: int, kind: FactorType, blocked: bool) -> int:
        factor = len(self._sizes)
        self._sizes.append(size)
        self._of_kind[kind].add(factor)
        if blocked:
            self._blocked.add(factor)
        return factor


def shape_of(op: Op, operand: int = 0) -> Shape:
    """The shape of an operand; ops that get here have static shapes."""
    return op.operands[operand].shape or ()


def result_shape(op: Op, result: int = 0) -> Shape:
    """The shape of a result."""
    return op.results[result].shape or ()
