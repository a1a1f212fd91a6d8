"""`jax.Ref`s that a function takes or closes over: it is partitioned as a function of their values, which also returns
what it leaves in them.

Inside, each Ref is one that the function makes itself: jax puts reads and writes in their order, in loops and branches
too.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding

from sdy_jax.annotate.argument_errors import ClosedOverReferences
from sdy_jax.annotate.user_function import function_signature
from sdy_jax.errors import ArgumentError, ShardingError
from sdy_jax.jax_internals.jit import jit
from sdy_jax.representation.named import mesh_from_jax
from sdy_jax.runtime.layouts import layout_of

VALUES = "values_of_refs"
"""The keyword of the values of those Refs that a function closes over."""


@dataclass(frozen=True, slots=True)
class ReferenceCall:
    """A call that reads or writes Refs.

    Attributes:
        refs: the Refs among the arguments, then those that the function closes over.
        where: the indices of the former among the leaves of `(args, kwargs)`.
        values: what is in the Refs.
        args, kwargs: the arguments, with values in place of the Refs and those of the latter under `VALUES`.
    """

    refs: tuple[Any, ...]
    values: tuple[Any, ...]
    where: tuple[int, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any], closed: Sequence[Any]) -> ReferenceCall | None:
        """None where there are no Refs.

        Raises:
            ArgumentError: a Ref is passed twice, or passed and closed over.
        """
        leaves, tree = jax.tree.flatten((args, kwargs))
        where = tuple(i for i, x in enumerate(leaves) if isinstance(x, jax.Ref))
        refs = (*(leaves[i] for i in where), *closed)
        if not refs:
            return None
        if len({*map(id, refs)}) < len(refs):
            raise ArgumentError("a jax.Ref is passed as two arguments, or closed over as well; to fix: pass it once")
        values = tuple(ref[...] for ref in refs)
        args, kwargs = _with_leaves(tree, leaves, where, values)
        return cls(refs, values, where, args, {**kwargs, VALUES: [*values[len(where) :]]} if closed else kwargs)

    def write(self, values: Sequence[Any]) -> None:
        """Stores what the function left in the Refs."""
        for ref, value in zip(self.refs, values, strict=True):
            ref[...] = value


def bring(ref: Any, path: str, sharding: Any) -> None:
    """Has jit bring a Ref that lies on other devices where a sharding says.

    Raises:
        ShardingError: jit refuses that: it moves no blocks of a Ref, and since jax 0.12 no Ref at all.
    """
    try:
        jit(_rewritten, in_shardings=sharding)(ref)
    except (ValueError, jax.errors.JaxRuntimeError):
        raise ShardingError(
            f"`{path}` is a jax.Ref that lies on other devices than the mesh's, and in_shardings says {sharding.spec}, "
            "which it must have already; to fix: make it there, by jax.new_ref(jax.device_put(x, NamedSharding(mesh, "
            "...)))"
        ) from None


def check_split(value: Any, path: str, stated: Any) -> None:
    """
    Raises:
        ShardingError: the value of a Ref on the mesh is split otherwise than is stated: jit moves none.
    """
    own = layout_of(value)
    if own is not None and not NamedSharding(stated.mesh, stated.spec).is_equivalent_to(own, value.ndim):
        raise ShardingError(
            f"`{path}` is a jax.Ref that is split by {own.spec} on {mesh_from_jax(own.mesh)}, and in_shardings says "
            f"{stated.spec}, which does not match; a Ref stays where it is. To fix: state that, or nothing, or make it "
            "so, by jax.new_ref(jax.device_put(x, NamedSharding(mesh, ...)))"
        )


def _rewritten(ref: Any) -> None:
    ref[...] = ref[...]


def of_values(fun: Callable[..., Any], where: Sequence[int], closed: Sequence[Any]) -> Callable[..., Any]:
    """A function of Refs as one of values: at these leaves, and of those that it closes over. It returns the result and
    the values that it leaves in all of them."""

    @functools.wraps(fun)
    def run(*args: Any, **kwargs: Any) -> Any:
        own = [jax.new_ref(value) for value in kwargs.pop(VALUES, ())]
        leaves, tree = jax.tree.flatten((args, kwargs))
        refs = [jax.new_ref(leaves[i]) for i in where]
        args, kwargs = _with_leaves(tree, leaves, where, refs)
        result = _with_own_references(fun, args, kwargs, closed, own) if own else fun(*args, **kwargs)
        return result, [ref[...] for ref in (*refs, *own)]

    signature = function_signature(fun)
    if closed and signature is not None:
        run.__signature__ = _with_values(signature)  # type: ignore[attr-defined]
    return run


def _with_values(signature: inspect.Signature) -> inspect.Signature:
    """A signature with the keyword `VALUES`."""
    added = inspect.Parameter(VALUES, inspect.Parameter.KEYWORD_ONLY)
    parameters = list(signature.parameters.values())
    is_open = parameters and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD
    parameters.insert(len(parameters) - bool(is_open), added)
    return signature.replace(parameters=parameters)


def _with_own_references(
    fun: Callable[..., Any], args: Any, kwargs: Any, closed: Sequence[Any], own: Sequence[Any]
) -> Any:
    """The result of a function in which Refs of its own stand for those that it closes over."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    where = [i for i, x in enumerate(leaves) if isinstance(x, jax.core.Tracer)]
    trees = []

    def flat(*xs: Any) -> list[Any]:
        args, kwargs = _with_leaves(tree, leaves, where, xs)
        results, result_tree = jax.tree.flatten(fun(*args, **kwargs))
        trees.append(result_tree)
        return results

    traced = jax.make_jaxpr(flat)(*(leaves[i] for i in where))
    found = {id(ref): new for ref, new in zip(closed, own, strict=True)}
    consts = [found.get(id(constant), constant) for constant in traced.consts]
    if more := [c for c in consts if isinstance(c, jax.Ref) and not isinstance(c, jax.core.Tracer)]:
        raise ClosedOverReferences(more)
    return jax.tree.unflatten(trees[0], jax.core.eval_jaxpr(traced.jaxpr, consts, *(leaves[i] for i in where)))


def _with_leaves(tree: Any, leaves: Sequence[Any], where: Sequence[int], new: Sequence[Any]) -> Any:
    placed = dict(zip(where, new, strict=False))
    return jax.tree.unflatten(tree, [placed.get(i, x) for i, x in enumerate(leaves)])
