"""Rules of ops that only rearrange or repeat dimensions: transpose, broadcast, reshape."""

from __future__ import annotations

import math
from typing import ClassVar

from sdy_jax.ir.graph import Op
from sdy_jax.ir.shardings import FactorType, OpShardingRule
from sdy_jax.shardy.rules.registry import (
    NEED_REPLICATION,
    PASS_THROUGH,
    PERMUTATION,
    Linear,
    RuleBuilder,
    Shape,
    passes_unreduced,
    result_shape,
    rule,
    shape_of,
)


@rule("stablehlo.transpose")
def transpose(op: Op, conservative: bool) -> OpShardingRule:
    builder = RuleBuilder.of(op)
    for to, (source, size) in enumerate(zip(op.ints("permutation"), result_shape(op), strict=True)):
        builder.add((source,), (to,), size)
    return builder.build()


@rule("stablehlo.broadcast_in_dim")
def broadcast_in_dim(op: Op, conservative: bool) -> OpShardingRule:
    """A dimension of size 1 that is repeated has nothing in common with its result dimension."""
    operand, builder = shape_of(op), RuleBuilder.of(op)
    source_of = {to: source for source, to in enumerate(op.ints("broadcast_dimensions"))}
    for to, size in enumerate(result_shape(op)):
        source = source_of.get(to)
        if source is not None and operand[source] == 1 != size:
            builder.add((source,), (None,), 1)
            source = None
        builder.add((source,), (to,), size)
    return builder.build()


@rule("stablehlo.reshape")
def reshape(op: Op, conservative: bool) -> OpShardingRule | None:
    """Factors that dimensions of the two shapes share, found from the major end.

    `2x6x4 -> 3x16` gives `([i, km, n])->([j, lmn]) {i=2, j=3, k=3, l=2, m=2, n=4}`.
    """
    return _reshape(op, _ReshapeWalk)


@rule("stablehlo.reshape", newer=True)
def reshape_in_places(op: Op, conservative: bool) -> OpShardingRule | None:
    """The same, but a dimension that lies across the borders of others is split with the one at the same place.

    `2x6x4 -> 3x16` gives `([i, jl, m])->([i, klm]) {i=2, j=3, k=2, l=2, m=4} need_replication={j, k} permutation={i}`.
    """
    return _reshape(op, _ReshapeWalkAcross)


def _reshape(op: Op, walk: type[_ReshapeWalk]) -> OpShardingRule | None:
    operand, result = shape_of(op), result_shape(op)
    if math.prod(operand) == 0:
        return None
    builder = RuleBuilder.of(op)
    walk(_Side(operand), _Side(result), builder).run()
    return builder.build()


class _Side:
    """One shape, walked from major to minor.

    `entered` is the product of the dimensions entered so far, `emitted` that of the factors placed on them. They are
    equal between dimensions; inside one, `rest` of the current dimension has no factor yet.
    """

    def __init__(self, shape: Shape):
        self.shape = shape
        self.dim = 0
        self.entered = self.emitted = 1

    @property
    def at_end(self) -> bool:
        return self.dim == len(self.shape)

    @property
    def at_unit(self) -> bool:
        return not self.at_end and self.shape[self.dim] == 1

    @property
    def rest(self) -> int:
        return self.entered // self.emitted

    def enter(self) -> None:
        if not self.at_end and self.entered == self.emitted:
            self.entered *= self.shape[self.dim]

    def leave(self) -> None:
        if not self.at_end and self.entered == self.emitted:
            self.dim += 1


class _ReshapeWalk:
    """Walks both sides of a reshape together.

    While both have emitted the same product, the next elements lie at the same place, so a common divisor of what is
    left of the two dimensions becomes a shared factor. Otherwise the side that is behind alone gets a factor, which
    brings it level if that is possible.
    """

    alone: ClassVar[FactorType] = PASS_THROUGH
    """The kind of factors that one side alone has."""

    def __init__(self, operand: _Side, result: _Side, builder: RuleBuilder):
        self.operand, self.result, self.builder = operand, result, builder

    def run(self) -> None:
        while not (self.operand.at_end and self.result.at_end):
            if self.operand.at_unit:
                self._skip_unit(self.operand)
            elif self.result.at_unit:
                self._skip_unit(self.result)
            else:
                self._step()

    def _skip_unit(self, side: _Side) -> None:
        self._add_factor(1, side)
        side.dim += 1

    def _step(self) -> None:
        operand, result = self.operand, self.result
        operand.enter()
        result.enter()
        if operand.emitted == result.emitted:
            self._step_level()
        elif operand.emitted < result.emitted:
            self._add_factor(_catch_up(operand, result), operand)
        else:
            self._add_factor(_catch_up(result, operand), result)
        operand.leave()
        result.leave()

    def _step_level(self) -> None:
        common = math.gcd(self.operand.rest, self.result.rest)
        if common > 1:
            self._add_factor(common, self.operand, self.result)
            return
        self._step_across()

    def _step_across(self) -> None:
        """What is left of the two dimensions has no common divisor."""
        self._add_factor(self.operand.rest, self.operand)
        self._add_factor(self.result.rest, self.result)

    def _add_factor(self, size: int, *sides: _Side) -> None:
        operand, result = (side.dim if side in sides else None for side in (self.operand, self.result))
        self.builder.add((operand,), (result,), size, self.alone if len(sides) == 1 else PASS_THROUGH)
        for side in sides:
            side.emitted *= size


class _ReshapeWalkAcross(_ReshapeWalk):
    """The same walk, but where there is no common divisor, what is left of the operand's dimension is a factor of both,
    whose shards differ. What one side alone has stays whole."""

    alone = NEED_REPLICATION

    def _step_across(self) -> None:
        operand, result = self.operand, self.result
        self.builder.add((operand.dim,), (result.dim,), operand.rest, PERMUTATION)
        operand.emitted, result.emitted = operand.entered, result.entered


def _catch_up(behind: _Side, ahead: _Side) -> int:
    """The size of the factor that only the side that is behind gets."""
    missing, remainder = divmod(ahead.emitted, behind.emitted)
    if remainder == 0 and behind.rest % missing == 0:
        return missing
    common = math.gcd(behind.rest, ahead.rest)
    return behind.rest // common if behind.rest > common else behind.rest


passes_unreduced("stablehlo.reshape", {"*": Linear.DATA})
passes_unreduced("stablehlo.transpose", {"*": Linear.DATA})
passes_unreduced("stablehlo.broadcast_in_dim", {"*": Linear.DATA})
