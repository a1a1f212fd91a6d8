"""The arguments of one call of a partitioned function: what is said of each, and how those that are arrays lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import PyTreeDef

from sdy_jax.annotate.arguments import Leaf, Spec, abstracted
from sdy_jax.calls.statics import Statics
from sdy_jax.plan.moves import Move, moves_at_border
from sdy_jax.plan.plan import Plan
from sdy_jax.runtime.layouts import as_specification, is_on, layout_of

Layouts = tuple[Spec, ...]
"""By leaf, how it lies where nothing is said of it; None where something is said or nothing is known."""


@dataclass(frozen=True)
class Arguments:
    """The dynamic arguments of a call.

    Attributes:
        given: the leaves as they were passed, with what the user says of them.
        leaves: their types; where the user says nothing, how the array lies.
        layouts: what `leaves` have from the arrays, and their types do not say.
        tree: the structure of positional and keyword arguments.
        statics: the static arguments.
        mesh: the mesh of the function.
    """

    given: Sequence[Leaf]
    leaves: Sequence[Leaf]
    layouts: Layouts
    tree: PyTreeDef
    statics: Statics
    mesh: jax.sharding.Mesh

    @classmethod
    def of(
        cls,
        given: Sequence[Leaf],
        tree: PyTreeDef,
        statics: Statics,
        mesh: jax.sharding.Mesh,
        layouts: Layouts | None = None,
    ) -> Arguments:
        """`layouts` are given where the arguments are tracers that stand for arrays.

        Raises:
            SdyError: a leaf is no array.
        """
        typed = [abstracted(leaf, mesh.axis_names) for leaf in given]
        if layouts is None:
            layouts = tuple(_layout(a, b, mesh) for a, b in zip(given, typed, strict=True))
        leaves = [t if spec is None else replace(t, spec=spec) for t, spec in zip(typed, layouts, strict=True)]
        return cls(given, leaves, layouts, tree, statics, mesh)

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells the plans of calls apart."""
        types = tuple((x.value.shape, x.value.dtype, x.value.weak_type, x.spec, x.unreduced) for x in self.leaves)
        return (self.mesh, self.tree, types, self.statics.key)

    def moves(self, plan: Plan) -> tuple[Move, ...]:
        """The arguments that lie otherwise than `plan` takes them."""
        return moves_at_border(self.given, [value.sharding for value in plan.arguments], self.mesh)

    @property
    def as_passed(self) -> frozenset[str]:
        """The paths of the leaves whose specifications are those of what was passed."""
        pairs = zip(self.given, self.leaves, strict=True)
        return frozenset(leaf.path for given, leaf in pairs if given.spec is None and leaf.spec is not None)

    @property
    def may_move(self) -> bool:
        """There are arrays that may lie otherwise than what is said of them."""
        return any(
            own is not None and _specification(leaf.spec, self.mesh) != as_specification(own, self.mesh)
            for leaf, own in zip(self.leaves, self._own, strict=True)
        )

    @property
    def bring_other_meshes(self) -> bool:
        """There are arrays on other meshes: jit would name the axes of results after those."""
        return any(own is not None and not is_on(own, self.mesh) for own in self._own)

    @cached_property
    def _own(self) -> list[NamedSharding | None]:
        return [layout_of(leaf.value) for leaf in self.given]


def _layout(given: Leaf, typed: Leaf, mesh: jax.sharding.Mesh) -> Spec:
    """How a leaf lies of which the user says nothing, nor does its type say all."""
    if given.spec is not None or isinstance(typed.spec, PartitionSpec):
        return None
    own = layout_of(given.value)
    return None if own is None else as_specification(own, mesh)


def _specification(spec: Spec, mesh: jax.sharding.Mesh) -> Spec:
    return as_specification(spec, mesh) if isinstance(spec, NamedSharding) else spec
