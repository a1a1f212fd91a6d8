"""Propagation of one op as a pure, memoized function, in the directions that its priority allows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

from sdy_jax.ir.graph import Op
from sdy_jax.ir.meshes import Axes, Mesh, PrefixStatus, prefix_status
from sdy_jax.ir.shardings import OpShardingRule, TensorMapping, TensorSharding
from sdy_jax.shardy.propagation.factors import (
    Direction,
    FactorProblem,
    Spread,
    project,
    propagate_aggressive,
    propagate_basic,
    unproject,
)
from sdy_jax.shardy.rules.elementwise import is_elementwise

# Op priorities: at each level more ops may propagate, and in more directions.
#
# Level 0: element-wise ops, reshapes, transposes whose operands have one use; 1: the same with any uses; 2: all ops
# along pass-through factors; 3: along all factors; 4: broadcasts forward as well. A level includes those before it.
# See docs/explanation/propagation.md#priorities-of-ops.

LEVELS = 5
"""The levels of ops' priorities. Published (Shardy: pass-through, single use first; pass-through; by factor; broadcasts
backward; all)."""
WITHOUT_LEVELS = LEVELS
"""Stands for a level where all ops take part at once."""

Directions = tuple[Direction, Direction]
"""The directions of pass-through factors, and of the other factors."""

NEITHER_WAY: Directions = (Direction.NONE, Direction.NONE)

_BOTH_EARLY = frozenset({"stablehlo.reshape", "stablehlo.transpose"})
_FORWARD_EARLY = frozenset({"stablehlo.dynamic_slice", "stablehlo.dynamic_update_slice"})
_MOVES = frozenset({"MoveToDevice", "MoveToHost"})


def early_direction(op: Op) -> Direction:
    """In which direction the op may propagate at level 1, and at level 0 if its operands have one use each."""
    if is_elementwise(op) or op.name in _BOTH_EARLY:
        return Direction.BOTH
    if op.name == "stablehlo.custom_call" and op.text("call_target_name") in _MOVES:
        return Direction.BOTH
    return Direction.FORWARD if op.name in _FORWARD_EARLY else Direction.NONE


def _at_level(level: int, early: Direction, is_broadcast: bool) -> Directions:
    if level < 2:
        return early, early
    late = Direction.BOTH if level == 4 or not is_broadcast else Direction.BACKWARD
    union = Direction(early | late)  # FORWARD and BACKWARD together are BOTH
    return union, union if level > 2 else early


@cache
def by_level(early: Direction, is_broadcast: bool) -> tuple[Directions, ...]:
    """The directions at each level, then those of propagation without levels.

    At level 0 they are those of an op whose operands have one use each.
    """
    levels = (_at_level(level, early, is_broadcast) for level in range(LEVELS))
    return (*levels, (Direction.BOTH, Direction.BOTH))


@cache
def at_every_level(direction: Direction) -> tuple[Directions, ...]:
    """Directions that are equal at every level."""
    return ((direction, direction),) * (WITHOUT_LEVELS + 1)


# Propagation of one op as a pure, memoized function: shardings in, shardings out.
#
# Repeated layers pose the same problem many times; the key is the rule, the tensors' shardings and the directions.
# Shardings are interned: a number stands for each, 0 for none.

FactorStrategy = Callable[[FactorProblem], set[int]]

FACTOR_STRATEGIES: dict[str, tuple[FactorStrategy, ...]] = {
    "basic": (propagate_basic,),
    "aggressive": (propagate_aggressive,),
    "basic-then-aggressive": (propagate_basic, propagate_aggressive),
}
"""Each strategy is a sequence of fixed points."""

NO_SHARDING = 0


class Interned:
    """Tensor shardings as numbers."""

    def __init__(self) -> None:
        self._all: list[TensorSharding | None] = [None]
        self._numbers: dict[TensorSharding | None, int] = {None: NO_SHARDING}

    def number(self, sharding: TensorSharding | None) -> int:
        found = self._numbers.get(sharding)
        if found is None:
            found = self._numbers[sharding] = len(self._all)
            self._all.append(sharding)
        return found

    def __getitem__(self, number: int) -> TensorSharding | None:
        return self._all[number]

    def __iter__(self) -> Iterator[TensorSharding]:
        return (sharding for sharding in self._all if sharding is not None)


@dataclass(frozen=True, slots=True)
class RuleKind:
    """The properties of an op that propagation depends on, besides its tensors' shardings."""

    rule: OpShardingRule
    elementwise: bool = False
    conservative: bool = False


Updates = tuple[tuple[int, int], ...]
"""The tensors that change, with the numbers of their new shardings, in the order in which to store them."""


class Solver:
    """Answers op propagations of one module, whose meshes it is given by symbol."""

    def __init__(self, meshes: Mapping[str, Mesh]):
        self.shardings = Interned()
        self._meshes = meshes
        self._kinds: dict[RuleKind, int] = {}
        self._kind_list: list[RuleKind] = []
        self._numbers: dict[tuple[int, bool, bool], tuple[OpShardingRule, int]] = {}
        """Those of kinds by the identity of their rule, which is kept: to compare rules takes longer."""
        self._known: dict[object, Updates] = {}

    def kind(self, rule: OpShardingRule, elementwise: bool = False, conservative: bool = False) -> int:
        """The number that stands for an op kind."""
        key = id(rule), elementwise, conservative
        if key not in self._numbers:
            self._numbers[key] = rule, self._number(RuleKind(rule, elementwise, conservative))
        return self._numbers[key][1]

    def _number(self, kind: RuleKind) -> int:
        found = self._kinds.setdefault(kind, len(self._kinds))
        if found == len(self._kind_list):
            self._kind_list.append(kind)
        return found

    def kind_of(self, number: int) -> RuleKind:
        return self._kind_list[number]

    def solve(self, kind: int, tensors: tuple[int, ...], directions: Directions, strategy: FactorStrategy) -> Updates:
        """What propagation changes.

        Args:
          kind: the number of the op's kind.
          tensors: the sharding numbers of operands, then results.
          directions: of pass-through factors, and of the other factors.
          strategy: how factors propagate.
        """
        key = (kind, tensors, directions, strategy)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._compute(self._kind_list[kind], tensors, directions, strategy)
        return found

    def spreads(
        self, kind: int, tensors: tuple[int, ...], directions: Directions, strategy: FactorStrategy
    ) -> tuple[Spread, ...]:
        """Which axes go from where to where when `solve` answers the same question, if it changes anything.

        A factor of a tensor may get axes that its dimension cannot show, as a factor before it is not full.
        """
        posed = self.pose(self._kind_list[kind], tensors, directions)
        if posed is None or not self.solve(kind, tensors, directions, strategy):
            return ()
        problem, _ = posed
        before = [{f: s.axes for f, s in t.factors.items()} for t in problem.tensors]
        mappings = self._kind_list[kind].rule.mappings
        return _spreads(problem, mappings, before, sorted(strategy(problem)))

    def _compute(
        self, kind: RuleKind, numbers: tuple[int, ...], directions: Directions, strategy: FactorStrategy
    ) -> Updates:
        posed = self.pose(kind, numbers, directions)
        if posed is None:
            return ()
        problem, reference = posed
        updates = []
        for number in sorted(strategy(problem)):
            mapping, old = kind.rule.mappings[number], self.shardings[numbers[number]]
            new = unproject(problem.tensors[number], mapping, problem.sizes, problem.mesh, reference)
            if new != old and not (old is None and new.has_no_axes):
                updates.append((number, self.shardings.number(new)))
        return tuple(updates)

    def pose(
        self, kind: RuleKind, numbers: tuple[int, ...], directions: Directions
    ) -> tuple[FactorProblem, str | Mesh] | None:
        """The propagation problem of an op and the mesh of its tensors; None where they have no common mesh."""
        shardings = [self.shardings[n] for n in numbers]
        reference = self._common_mesh(shardings)
        if reference is None:
            return None
        mesh, rule = self._mesh(reference), kind.rule
        tensors = (project(s, m, rule.factor_sizes, mesh) for s, m in zip(shardings, rule.mappings, strict=True))
        problem = FactorProblem(
            tuple(tensors),
            len(rule.operand_mappings),
            rule.factor_sizes,
            _directions(rule, directions),
            mesh,
            kind.conservative,
            kind.elementwise,
        )
        return problem, reference

    def _mesh(self, reference: str | Mesh) -> Mesh:
        return self._meshes[reference] if isinstance(reference, str) else reference

    def _common_mesh(self, shardings: Sequence[TensorSharding | None]) -> str | Mesh | None:
        """The first mesh that is not empty, if all others are equal to it or empty, and it is not maximal."""
        found: str | Mesh | None = None
        for sharding in shardings:
            if sharding is None or sharding.mesh == found:
                continue
            mesh = self._mesh(sharding.mesh)
            if mesh.is_maximal:
                return None
            if mesh.is_empty:
                continue
            if found is None:
                found = sharding.mesh
            elif mesh != self._mesh(found):
                return None
        return found


@lru_cache(maxsize=4096)
def _directions(rule: OpShardingRule, directions: Directions) -> tuple[Direction, ...]:
    special = rule.reduction | rule.need_replication | rule.permutation
    return tuple(
        Direction.NONE if f in rule.blocked else directions[f in special] for f in range(len(rule.factor_sizes))
    )


def _spreads(
    problem: FactorProblem,
    mappings: Sequence[TensorMapping],
    before: Sequence[Mapping[int, Axes]],
    changed: Sequence[int],
) -> tuple[Spread, ...]:
    """For each factor that grew: the first tensor, operands before results, that had the new axes already."""
    spreads = []
    for target in changed:
        for factor, sharding in problem.tensors[target].factors.items():
            if sharding.axes == before[target][factor]:
                continue
            source = next((n for n, axes in enumerate(before) if _has(axes.get(factor, ()), sharding.axes)), None)
            dim, old = dim_of(mappings[target], factor), before[target][factor]
            spreads.append(Spread(factor, dim, old, sharding.axes, source, target))
    return tuple(spreads)


def dim_of(mapping: TensorMapping, factor: int) -> int:
    """The dimension of a tensor that a factor belongs to; -1 if the tensor does not have it."""
    return next((dim for dim, factors in enumerate(mapping) if factor in factors), -1)


def _has(axes: Axes, wanted: Axes) -> bool:
    return prefix_status(wanted, axes) is not PrefixStatus.NOT
