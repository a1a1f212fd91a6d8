"""Specifications by likeness: an optimizer's state lies as the parameters that it belongs to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from sdy_jax.annotate.spec_rule import SpecRule
from sdy_jax.errors import ShardingError
from sdy_jax.jax_internals.tracebacks import api_boundary
from sdy_jax.spec_trees.leaves import Entries, Keys, TreeLeaf, entries_of, leaves, mapped, spec_of, stated_specs


class _Parameter(NamedTuple):
    """The shape of a parameter and its specification; None where propagation decides."""

    shape: tuple[int, ...]
    spec: PartitionSpec | None

    def for_shape(self, shape: tuple[int, ...]) -> PartitionSpec | None:
        """The specification of what belongs to it."""
        if self.spec is None or shape == self.shape:
            return self.spec
        return spec_of(_fitted(shape, self.shape, entries_of(self.spec, self.shape, "like")))


@dataclass(frozen=True)
class Like(SpecRule):
    """Specifications of whatever has parameters' paths in it; made by `like`."""

    parameters: Mapping[Keys, _Parameter]

    def __call__(self, state: Any) -> Any:
        """The specifications of a state: the tree with a `PartitionSpec` for each array."""
        return mapped(self._of_leaf, state, "state")

    def for_tree(self, tree: Any, root: str) -> Any:
        """The specifications of an argument or a result."""
        return self(tree)

    def __repr__(self) -> str:
        return f"like(<{len(self.parameters)} parameters>)"

    def _of_leaf(self, leaf: TreeLeaf) -> PartitionSpec | None:
        if leaf.shape is None:
            return None
        ends = (leaf.keys[first:] for first in range(len(leaf.keys) + 1))
        parameter = next((self.parameters[end] for end in ends if end in self.parameters), None)
        return PartitionSpec() if parameter is None else parameter.for_shape(leaf.shape)


@api_boundary
def like(params: Any, specs: Any = None) -> Like:
    """Specifications for an optimizer's state, or a whole training state, by those of the parameters.

    A leaf of the state belongs to the parameter whose path its own ends with, as in `optax`, whose states hold trees
    of the parameters' structure, masked, chained or by label. Of the same shape, it is split in the same way. Of a
    shape with more dimensions in front (the history of L-BFGS) it is split along the others. Of a shape that lacks
    dimensions, or has size 1 there (the factored moments of Adafactor), it is split along those that it has, as far as
    it is clear which these are. Everything else, such as counters, is not split.

    Args:
        params: arrays, types of arrays, or boxes of them.
        specs: a prefix tree of `PartitionSpec`s or `NamedSharding`s, or `rules`; by default as the arrays lie.

    Returns:
        What stands for the state's specifications in `in_shardings` and `out_shardings`; called with a state, or with
        its types, it gives the tree.

    Raises:
        ShardingError: nothing says how a parameter lies, or a specification does not fit it.

    Example:
        >>> params, specs = {"w": jnp.ones((128, 512))}, {"w": P(None, "model")}
        >>> state = like(params, specs)  # partition(step, in_shardings=(specs, state, P("data")), ...)
        >>> state({"count": 0, "mu": params, "factored": {"w": jnp.ones(512)}})
        {'count': P(), 'factored': {'w': P('model',)}, 'mu': {'w': P(None, 'model')}}

    See also:
        `fsdp`, `tensor_parallel`, `rules`: what it copies from.
    """
    own = specs is None
    named = leaves(params, "params")
    stated = [_own_spec(leaf) for leaf in named] if own else stated_specs(specs, params, "params", "like")
    parameters = {}
    for leaf, spec in zip(named, stated, strict=True):
        if leaf.shape is not None:
            entries_of(spec or PartitionSpec(), leaf.shape, f"like: `{leaf.path}`")  # checks it
            parameters[leaf.keys] = _Parameter(leaf.shape, spec)
    return Like(parameters)


def _own_spec(leaf: TreeLeaf) -> PartitionSpec | None:
    spec: PartitionSpec | None = getattr(getattr(leaf.value, "sharding", None), "spec", None)
    if spec is None and leaf.shape is not None:
        raise ShardingError(
            f"like: `{leaf.path}` does not lie on a mesh; to fix: say how the parameters are split, like(params, specs)"
        )
    return spec


def _fitted(shape: Sequence[int], of: Sequence[int], entries: Entries) -> Entries:
    """The axes for an array of another shape, by those for a parameter of shape `of`."""
    more = len(shape) - len(of)
    if more >= 0 and tuple(shape[more:]) == tuple(of):
        return [*((),) * more, *entries]
    if not more and all(own in (1, size) for own, size in zip(shape, of, strict=True)):
        return [axes if own == size else () for own, size, axes in zip(shape, of, entries, strict=True)]
    kept = [dims for dims in combinations(range(len(of)), len(shape)) if [of[d] for d in dims] == list(shape)]
    return [_common([entries[dims[i]] for dims in kept]) for i in range(len(shape))] if kept else []


def _common(entries: Sequence[Any]) -> Any:
    """What all say alike, or that nothing is split."""
    return entries[0] if all(entry == entries[0] for entry in entries) else ()
