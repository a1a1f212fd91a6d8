"""`jax.Ref`s as arguments: a function of them is partitioned as one of their values, which also returns what it leaves
in them.

Inside, each Ref is one that the function makes itself: jax puts reads and writes in their order, in loops and branches
too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from sdy_jax.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class ReferenceCall:
    """A call with Refs among its arguments.

    Attributes:
        refs: the Refs.
        where: their indices among the leaves of `(args, kwargs)`.
        args, kwargs: the arguments with values in place of the Refs.
    """

    refs: tuple[Any, ...]
    where: tuple[int, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ReferenceCall | None:
        """None where no argument is a Ref.

        Raises:
            ArgumentError: a Ref is passed twice.
        """
        leaves, tree = jax.tree.flatten((args, kwargs))
        where = tuple(i for i, x in enumerate(leaves) if isinstance(x, jax.Ref))
        if not where:
            return None
        refs = tuple(leaves[i] for i in where)
        if len({*map(id, refs)}) < len(refs):
            raise ArgumentError("a jax.Ref is passed as two arguments; to fix: pass it once")
        return cls(refs, where, *_with_leaves(tree, leaves, where, [ref[...] for ref in refs]))

    def write(self, values: Sequence[Any]) -> None:
        """Stores what the function left in the Refs."""
        for ref, value in zip(self.refs, values, strict=True):
            ref[...] = value


def of_values(fun: Callable[..., Any], where: Sequence[int]) -> Callable[..., Any]:
    """A function of Refs as one of values at these leaves: its result, and the values that it leaves in them."""

    @functools.wraps(fun)
    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        refs = [jax.new_ref(leaves[i]) for i in where]
        args, kwargs = _with_leaves(tree, leaves, where, refs)
        result = fun(*args, **kwargs)
        return result, [ref[...] for ref in refs]

    return run


def _with_leaves(tree: Any, leaves: Sequence[Any], where: Sequence[int], new: Sequence[Any]) -> Any:
    placed = dict(zip(where, new, strict=True))
    return jax.tree.unflatten(tree, [placed.get(i, x) for i, x in enumerate(leaves)])
