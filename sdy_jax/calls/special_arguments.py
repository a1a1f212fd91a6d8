"""Arguments that a plan is not made of: `jax.Ref`s, planned as their values; jax's tokens; and symbolic sizes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding

from sdy_jax.annotate.argument_errors import ClosedOverReferences
from sdy_jax.annotate.arguments import Leaf, function_signature, is_token, match_prefix
from sdy_jax.base.errors import ArgumentError, ShardingError
from sdy_jax.base.jax_calls import jit
from sdy_jax.calls.argument_placement import stated_sharding
from sdy_jax.calls.arguments import Statics
from sdy_jax.calls.planned_function import PlannedFunction
from sdy_jax.ir.jax_shardings import AnyMesh, mesh_from_jax
from sdy_jax.plan.notices import warn_of
from sdy_jax.runtime.boundary import layout_of
from sdy_jax.runtime.meshes import auto_mesh

# `jax.Ref`s that a function takes or closes over: it is partitioned as a function of their values, which also returns
# what it leaves in them.
#
# Inside, each Ref is one that the function makes itself: jax puts reads and writes in their order, in loops and
# branches too.

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


# jax's tokens as arguments and results. They hold nothing, so the function is partitioned without them: where one is
# passed or returned, the trees have a node without leaves.


@jax.tree_util.register_static
class _InPlaceOfToken:
    """A node without leaves."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _InPlaceOfToken)

    def __hash__(self) -> int:
        return hash(_InPlaceOfToken)


_IN_PLACE = _InPlaceOfToken()


def without_tokens(tree: Any) -> Any:
    """The tree without its tokens."""
    return jax.tree.map(lambda x: _IN_PLACE if is_token(x) else x, tree)


def with_tokens(tree: Any) -> Any:
    """The tree with new tokens where there were some."""
    return jax.tree.map(
        lambda x: jax.lax.create_token() if isinstance(x, _InPlaceOfToken) else x,
        tree,
        is_leaf=lambda x: isinstance(x, _InPlaceOfToken),
    )


def of_others(fun: Callable[..., Any]) -> Callable[..., Any]:
    """A function of what is no token, which returns what is none."""

    @functools.wraps(fun)
    def run(*args: Any, **kwargs: Any) -> Any:
        return without_tokens(fun(*with_tokens(args), **with_tokens(kwargs)))

    return run


# Calls with symbolic sizes, as `jax.export` makes them: a plan is for sizes that are numbers, so these are jit's
# program, with the shardings that are stated.


def with_stated_shardings(function: PlannedFunction) -> Callable[..., Any]:
    """The user's function, its shardings as constraints."""

    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, tree, statics = function.given(args, kwargs)
        mesh = function.mesh_of(leaves)
        dynamic, named = jax.tree.unflatten(tree, _constrained(leaves, mesh, "in_shardings"))
        around = mesh if any(_has_type(leaf.value) for leaf in leaves) else auto_mesh(mesh)
        with jax.sharding.use_abstract_mesh(around.abstract_mesh):
            result = function.traced.inner(statics, mesh)(*dynamic, **named)
            stated = match_prefix(function.options.out_shardings, result, "result", "out_shardings")
            values = _constrained(stated, around, "out_shardings")
        return jax.tree.unflatten(jax.tree.structure(result), values)

    return run


def stage_arguments(function: PlannedFunction, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a stage, types with the shardings that are stated for them. Warns that there is no plan."""
    leaves, tree, statics = function.given(args, kwargs)
    mesh = function.mesh_of(leaves)
    warn_of(
        [
            f"{function.name} has arguments of symbolic sizes, for which nothing is planned: XLA partitions the "
            "program, by the shardings that are stated; for a plan per size, partition what sdy_jax.load reads of it"
        ]
    )
    dynamic, named = jax.tree.unflatten(tree, [_described(leaf, mesh) for leaf in leaves])
    return tuple(statics.merged(dynamic)), {**named, **dict(statics.named)}


def of_results(function: PlannedFunction, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """`out_shardings` for jit: those that are stated."""
    dynamic, named, statics = function.split(args, kwargs)
    held = functools.partial(_with_statics, run, statics)
    types = jax.eval_shape(held, *dynamic, **named)
    mesh = function.mesh_of(function.given(args, kwargs)[0])
    leaves = match_prefix(function.options.out_shardings, types, "result", "out_shardings")
    return jax.tree.unflatten(jax.tree.structure(types), [stated_sharding(leaf, mesh) for leaf in leaves])


def _with_statics(run: Callable[..., Any], statics: Statics, /, *dynamic: Any, **named: Any) -> Any:
    return run(*statics.merged(dynamic), **named, **dict(statics.named))


def _described(leaf: Leaf, mesh: AnyMesh) -> Any:
    sharding = stated_sharding(leaf, mesh, "in_shardings")
    is_type = isinstance(leaf.value, jax.ShapeDtypeStruct)
    return leaf.value.update(sharding=sharding) if is_type and sharding is not None else leaf.value


def _constrained(leaves: Sequence[Leaf], mesh: AnyMesh, where: str) -> list[Any]:
    pairs = [(leaf.value, stated_sharding(leaf, mesh, where)) for leaf in leaves]
    return [x if sharding is None else _under_constraint(x, sharding) for x, sharding in pairs]


def _under_constraint(x: Any, sharding: NamedSharding) -> Any:
    if not _has_type(x):
        return jax.lax.with_sharding_constraint(x, NamedSharding(auto_mesh(sharding.mesh), sharding.spec))
    return jax.sharding.reshard(x, sharding)


def _has_type(x: Any) -> bool:
    return AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types
