"""Propagating one op, seen apart from the program: shardings in, shardings out, remembered.

Repeated layers ask the same question again and again; the answer is found by the rule, the tensors' shardings and the
directions. Shardings are interned: a number stands for each, 0 for none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sdy_jax.propagation.aggressive import propagate_aggressive
from sdy_jax.propagation.basic import Direction, Problem, propagate_basic
from sdy_jax.propagation.projection import Axes, project, unproject
from sdy_jax.representation.axes import PrefixStatus, prefix_status
from sdy_jax.representation.mesh import Mesh
from sdy_jax.representation.rule import OpShardingRule
from sdy_jax.representation.sharding import TensorSharding

Strategy = Callable[[Problem], set[int]]

STRATEGIES: dict[str, tuple[Strategy, ...]] = {
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


@dataclass(frozen=True, slots=True)
class OpKind:
    """All that propagation asks about an op besides its tensors' shardings."""

    rule: OpShardingRule
    elementwise: bool = False
    conservative: bool = False


@dataclass(frozen=True, slots=True)
class FactorSpread:
    """Axes that tensor `target` got for a factor, from tensor `source` (None: from no single one)."""

    factor: int
    axes: Axes
    source: int | None
    target: int


@dataclass(frozen=True, slots=True)
class Solution:
    """The tensors that change, with the numbers of their new shardings, in the order in which to store them."""

    updates: tuple[tuple[int, int], ...]
    spreads: tuple[FactorSpread, ...] = ()


NOTHING = Solution(())


class Solver:
    """Answers op propagations of one module.

    Args:
      meshes: the module's meshes by symbol.
      explain: also say which axes spread from where to where.
    """

    def __init__(self, meshes: Mapping[str, Mesh], explain: bool = False):
        self.shardings = Interned()
        self._meshes, self._explain = meshes, explain
        self._kinds: dict[OpKind, int] = {}
        self._kind_list: list[OpKind] = []
        self._known: dict[object, Solution] = {}

    def kind(self, kind: OpKind) -> int:
        """The number of an op kind."""
        if kind not in self._kinds:
            self._kinds[kind] = len(self._kind_list)
            self._kind_list.append(kind)
        return self._kinds[kind]

    def solve(
        self, kind: int, tensors: tuple[int, ...], directions: tuple[Direction, Direction], strategy: Strategy
    ) -> Solution:
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

    def _compute(
        self, kind: OpKind, numbers: tuple[int, ...], directions: tuple[Direction, Direction], strategy: Strategy
    ) -> Solution:
        old = [self.shardings[n] for n in numbers]
        reference = self._common_mesh(old)
        if reference is None:
            return NOTHING
        mesh = self._mesh(reference)
        rule = kind.rule
        tensors = tuple(project(s, m, rule.factor_sizes, mesh) for s, m in zip(old, rule.mappings, strict=True))
        before = [{f: s.axes for f, s in t.factors.items()} for t in tensors] if self._explain else []
        problem = Problem(
            tensors,
            len(rule.operand_mappings),
            rule.factor_sizes,
            _directions(rule, directions),
            mesh,
            kind.conservative,
            kind.elementwise,
        )
        updates = []
        for number in sorted(strategy(problem)):
            new = unproject(tensors[number], rule.mappings[number], rule.factor_sizes, mesh, reference)
            if new != old[number] and not (old[number] is None and new.has_no_axes):
                updates.append((number, self.shardings.number(new)))
        if not updates:
            return NOTHING
        return Solution(tuple(updates), _spreads(problem, before, [n for n, _ in updates]) if self._explain else ())

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


def _directions(rule: OpShardingRule, directions: tuple[Direction, Direction]) -> tuple[Direction, ...]:
    special = rule.reduction | rule.need_replication | rule.permutation
    return tuple(
        Direction.NONE if f in rule.blocked else directions[f in special] for f in range(len(rule.factor_sizes))
    )


def _spreads(
    problem: Problem, before: Sequence[Mapping[int, Axes]], changed: Sequence[int]
) -> tuple[FactorSpread, ...]:
    """For each factor that grew: the first tensor, operands before results, that had the new axes already."""
    spreads = []
    for target in changed:
        for factor, sharding in problem.tensors[target].factors.items():
            if sharding.axes == before[target][factor]:
                continue
            sources = (n for n, axes in enumerate(before) if _has(axes.get(factor, ()), sharding.axes))
            spreads.append(FactorSpread(factor, sharding.axes, next(sources, None), target))
    return tuple(spreads)


def _has(axes: Axes, wanted: Axes) -> bool:
    return prefix_status(wanted, axes) is not PrefixStatus.NOT
