"""The user's function and its arguments: specifications matched with leaves, by jit's prefix rules and key paths."""

from __future__ import annotations

import functools
import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, final

import jax
from jax.experimental.layout import Format
from jax.extend.core import AbstractToken
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import keystr

from sdy_jax.annotate.argument_errors import (
    HoldsTokens,
    SymbolicSizes,
    array_for_tree,
    no_array,
    no_entries,
    no_entry_of_each,
    no_parameter,
    no_reference,
    no_specification,
    other_tree,
)
from sdy_jax.annotate.trees import keyed_children, named_children, named_leaves
from sdy_jax.base.errors import ArgumentError, PartitionWarning, ShardingError, with_article
from sdy_jax.ir.jax_shardings import (
    AnyMesh,
    auto_mesh_of,
    explicit_axes,
    sharding_of_type,
    type_elsewhere,
    type_on,
    unreduced_by,
)
from sdy_jax.ir.locations import users_stack_level
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.runtime.boundary import as_named, is_on_host, states_host

# `AUTO`: a specification that leaves the layout of an argument or a result to the planner.


@final
class Automatic:
    """The type of `AUTO`, its only instance."""

    def __new__(cls) -> Automatic:
        return AUTO if "AUTO" in globals() else super().__new__(cls)

    def __reduce__(self) -> str:
        return "AUTO"

    def __repr__(self) -> str:
        return "AUTO"


AUTO: Final = Automatic()
"""In `in_shardings` and `out_shardings`, for one leaf or a whole tree: the planner chooses the layout, together with
those of the values inside."""


# A specification that depends on the values that it is given for.


class SpecRule(ABC):
    """What stands where a tree of specifications is taken, and makes that tree from the argument or result itself."""

    @abstractmethod
    def for_tree(self, tree: Any, root: str) -> Any:
        """A prefix tree of specifications for `tree`, which messages call `root`.

        Raises:
            ShardingError: the tree is none that the rule can be applied to.
        """

    def unused(self, trees: Mapping[str, Any]) -> str:
        """What is said where the rule splits no array of the trees that it is given for, by their names; empty where
        that is as it should be."""
        return ""

    def check_axes(self, names: Sequence[str], where: str) -> None:
        """Whether a mesh with axes of these `names` has all those that the rule may say; `where` is what states it.

        Raises:
            ShardingError: it lacks one.
        """
        return


def warn_of_unused(*said: str) -> None:
    """Warns, at the user's line that called us, where rules that are to split arrays split none."""
    for text in filter(None, said):
        warnings.warn(text, PartitionWarning, stacklevel=users_stack_level())


# The user's function as jax sees it: under its own name and parameters, at its own line, and called as it may be.


def check_function(fun: object) -> None:
    """
    Raises:
        ArgumentError: it cannot be called, or gives no arrays when it is.
    """
    if not callable(fun):
        is_result = isinstance(fun, jax.Array)
        called = "; to fix: partition the function, not what it returns: partition(fun, mesh=mesh)(x)" * is_result
        raise ArgumentError(
            f"partition got {with_article(type(fun))}; expected a function, or a program from sdy_jax.load{called}"
        )
    if inspect.isgeneratorfunction(fun) or inspect.iscoroutinefunction(fun):
        kind = "a generator" if inspect.isgeneratorfunction(fun) else "a coroutine"
        raise ArgumentError(
            f"partition got the function {function_name(fun)}, which returns {kind}; expected one that returns arrays"
        )


def function_name(fun: Callable[..., Any]) -> str:
    """`mlp`, also of `functools.partial(mlp, ...)`; the class of a callable object."""
    fun = _without_partials(fun)
    return str(getattr(fun, "__name__", type(fun).__name__))


def function_signature(fun: Callable[..., Any]) -> inspect.Signature | None:
    """The parameters; None where Python does not know them."""
    try:
        return inspect.signature(fun)
    except (TypeError, ValueError):
        return None


def in_name_of(
    fun: Callable[..., Any], called: Callable[..., Any], without: Collection[str] = ()
) -> Callable[..., Any]:
    """`called` as jax is to name it in errors: `mlp at model.py:10`, `params['w1']`.

    Args:
        fun: the user's function.
        called: what runs in its place; changed here.
        without: the parameters of `fun` that `called` does not take.
    """
    functools.update_wrapper(called, fun, updated=())
    own = _without_partials(fun)
    called.__wrapped__ = own if hasattr(own, "__name__") else type(own).__call__  # type: ignore[attr-defined]
    called.__name__ = function_name(fun)
    signature = function_signature(fun)
    if signature is not None:
        left = [p for name, p in signature.parameters.items() if name not in without]
        called.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
    return called


def _without_partials(fun: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(fun, functools.partial):
        fun = fun.func
    return fun


# Matching what the user says about shardings with the arguments, by jit's pytree-prefix rules and key paths.
#
# A specification is None (propagation decides), a `PartitionSpec`, a `NamedSharding`, the text of an SDY sharding
# (`'[{"data"}, {"model", ?}p1]'`), a `TensorSharding`, or `AUTO` (the planner decides). It stands for every leaf of
# the tree that it is given for; or it is a `SpecRule`, which makes a tree of specifications from that tree.

Spec = Any
"""None, PartitionSpec, NamedSharding, str, TensorSharding, AUTO, a SpecRule, or a Format of one of the first three."""

SPEC_TYPES = (type(None), PartitionSpec, jax.sharding.Sharding, str, TensorSharding, Automatic, SpecRule, Format)


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array argument or result: its path for messages (`params['w1']`) and the user's specification."""

    path: str
    value: Any
    spec: Spec
    unreduced: frozenset[str] = frozenset()
    """The axes along which the array is unreduced by its type: those of a `PartitionSpec(...,
    unreduced=...)` on Explicit axes. An array that is only stated to be unreduced is its value."""
    reduction: str = "sum"
    """The reduction kind of the unreduced axes."""
    type: NamedSharding | None = None
    """What the function sees of the layout while it is traced, where that is the array's own type on Explicit axes."""
    is_moved: bool = False
    """Whether the array has such a type, and the function sees it as it is stated."""
    elsewhere: NamedSharding | None = None
    """The type of an array on another mesh with Explicit axes, where nothing else is stated: the function sees none,
    and results that are this array have it."""
    layout: Any = None
    """The order of the array's dimensions in memory, where a `Format` states it."""
    is_on_host: bool = False
    """Whether it is in the memory of the host, which its type shows."""
    shown: jax.sharding.AbstractMesh | None = None
    """The mesh without Explicit axes that the array's type shows, and that of what the function computes from it."""

    @classmethod
    def of(cls, path: str, value: Any, spec: Spec) -> Leaf:
        """A leaf by the user's specification; a `Format` is one with the layout of each device's block."""
        layout = None
        if isinstance(spec, Format):
            layout, spec = spec.layout, spec.sharding
        if isinstance(spec, jax.sharding.Sharding):
            spec = as_named(spec, jax.numpy.shape(value)) or spec
        return cls(path, value, spec, layout=layout)


@dataclass(frozen=True, slots=True)
class Parameters:
    """What a function's parameters are called: entries of `in_shardings` go with them, the positional ones first.

    What `*args` and `**kwargs` collect has no names here, only they themselves: `rest` and `named_rest`. All is empty
    where a function has no signature.
    """

    positional: tuple[str, ...] = ()
    keyword_only: tuple[str, ...] = ()
    function: str = ""
    rest: str = ""
    named_rest: str = ""

    @classmethod
    def of(cls, fun: Callable[..., Any]) -> Parameters:
        name, signature = function_name(fun), function_signature(fun)
        parameters = signature.parameters.values() if signature else ()
        positional = tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
        named = tuple(p.name for p in parameters if p.kind == p.KEYWORD_ONLY)
        rest, named_rest = (
            next((p.name for p in parameters if p.kind == kind), "")
            for kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        )
        return cls(positional, named, name, rest, named_rest)

    def without(self, positions: Container[int], names: Container[str]) -> Parameters:
        """The others."""
        positional = tuple(p for i, p in enumerate(self.positional) if i not in positions and p not in names)
        return replace(self, positional=positional, keyword_only=tuple(p for p in self.keyword_only if p not in names))


def positional_name(index: int, names: Sequence[str]) -> str:
    """The name of a positional argument, or `args[2]` of one behind those that have names."""
    return names[index] if index < len(names) else f"args[{index}]"


def argument_leaves(
    specs: Spec,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    parameters: Parameters | Sequence[str],
    where: str = "in_shardings",
) -> list[Leaf]:
    """The leaves of `(args, kwargs)` in jax's order, each with its path and specification.

    `parameters` are those of the function without its static ones, or the names of the positional ones. A tuple of
    specifications goes with the positional parameters, or with these and the keyword-only ones after them; parameters
    at the end that are not passed may have no entry. A dict of them goes by the names of parameters; the entry of
    `*args` or `**kwargs` is for each of what they collect, or a tuple or a dict of entries.

    Raises:
        ShardingError: the specifications do not match the arguments' tree.
    """
    if not isinstance(parameters, Parameters):
        parameters = Parameters(tuple(parameters))
    if not isinstance(specs, (*SPEC_TYPES, tuple, list, dict)):
        raise no_entries(specs, (*parameters.positional, *parameters.keyword_only), where)
    named = parameters.keyword_only
    if not parameters.positional and not named:  # no signature, or `**kwargs` only: as jax orders them
        named = tuple(sorted(kwargs))
    count = max(len(parameters.positional), len(args))
    roots = tuple(positional_name(i, parameters.positional) for i in range(count))
    if isinstance(specs, dict):
        specs = _of_each_collected(specs, roots[len(parameters.positional) :], kwargs, parameters, where)
    entries = _entries(specs, replace(parameters, positional=roots, keyword_only=named), len(args), kwargs, where)
    passed = dict(zip(roots, args, strict=False)) | {name: kwargs[name] for name in sorted(kwargs)}
    leaves: list[Leaf] = []
    for name, argument in passed.items():
        leaves += match_prefix(entries.get(name), argument, name, where, is_whole=True)
    for rule in {id(spec): spec for spec in entries.values() if isinstance(spec, SpecRule)}.values():
        warn_of_unused(rule.unused({name: passed[name] for name in passed if entries.get(name) is rule}))
    return leaves


def _of_each_collected(
    specs: dict[str, Spec], rest: Sequence[str], kwargs: Mapping[str, Any], parameters: Parameters, where: str
) -> dict[str, Spec]:
    """A dict of specifications whose entries for `*args` and `**kwargs` are those of what these collect: `rest`, and
    all of `kwargs` that have no parameters of their own.

    Raises:
        ShardingError: a tuple or a dict has not one entry for each.
    """
    names, found = {*parameters.positional, *parameters.keyword_only}, dict(specs)
    named_rest = [name for name in kwargs if name not in names]
    for name, members in ((parameters.rest, rest), (parameters.named_rest, named_rest)):
        if not name or name not in found or name in kwargs:
            continue
        spec = found.pop(name)
        each = spec if isinstance(spec, dict) else dict.fromkeys(members, spec)
        if isinstance(spec, (tuple, list)) and not isinstance(spec, SPEC_TYPES):
            each = dict(zip(members, spec, strict=False)) if len(spec) == len(members) else {}
        if each.keys() != set(members):
            raise no_entry_of_each(name, spec, members, where)
        found |= each
    return found


def _entries(
    specs: Spec, parameters: Parameters, passed: int, kwargs: dict[str, Any], where: str
) -> Mapping[str, Spec]:
    """The specification of each parameter; `passed` are the positional arguments of the call.

    Raises:
        ShardingError: a tuple leaves out positional arguments that are passed, or has entries for none.
    """
    positional, named = parameters.positional, parameters.keyword_only
    names = (*positional, *named)
    if isinstance(specs, SPEC_TYPES):
        return dict.fromkeys((*names, *kwargs), specs)
    if isinstance(specs, dict):
        unknown = [name for name in specs if name not in (*names, *kwargs)]
        if unknown:
            raise no_parameter(unknown[0], (*names, *(k for k in kwargs if k not in names)), parameters.function, where)
        return {**dict.fromkeys(names), **specs}
    needed = max((i + 1 for i, name in enumerate(positional) if i < passed or name in kwargs), default=0)
    if not needed <= len(specs) <= len(positional) and len(specs) != len(names):
        raise ShardingError(
            f"{where}{f' of {parameters.function}' if parameters.function else ''} has {len(specs)} "
            f"entr{'y' if len(specs) == 1 else 'ies'} for {len(positional)} positional arguments "
            f"({', '.join(positional) or 'none'})"
            + (f" and {len(named)} keyword-only ones ({', '.join(named)})" if named else "")
            + "; give one entry per argument that is not static, None where propagation decides"
        )
    return dict(zip(names, specs, strict=False))


def abstracted(leaf: Leaf, mesh: AnyMesh | None, keeps_type: bool = False) -> Leaf:
    """The leaf with shape, dtype and weak type as its value; an Explicit type's sharding becomes its specification.

    An array that has a type and is stated to lie otherwise is seen as stated, unless the leaf `keeps_type`. Of one
    that has none the function sees none, as under jit.

    Raises:
        SdyError: the leaf is no array, or one of symbolic size; the message names its path.
    """
    try:
        value = leaf.value if isinstance(leaf.value, jax.ShapeDtypeStruct) else jax.typeof(leaf.value)
    except TypeError:
        raise no_array(leaf.path, leaf.value) from None
    except OverflowError as error:
        raise OverflowError(f"`{leaf.path}`: {error}") from None
    if isinstance(value, AbstractToken):
        raise HoldsTokens(leaf.path)
    if isinstance(leaf.value, jax.Ref):
        raise no_reference(f"`{leaf.path}`")
    if not all(isinstance(size, int) for size in value.shape):
        raise SymbolicSizes(leaf.path, value.shape)
    stripped = jax.ShapeDtypeStruct(value.shape, value.dtype, weak_type=getattr(value, "weak_type", False))
    on_host = is_on_host(value) or states_host(getattr(value, "sharding", None))
    leaf = replace(leaf, value=stripped, is_on_host=on_host, shown=auto_mesh_of(value))
    own = None if mesh is None else type_on(value, mesh)
    if mesh is not None and own is None and leaf.spec is None:
        leaf = replace(leaf, elsewhere=type_elsewhere(value, mesh))
    if own is not None and keeps_type:
        leaf = replace(leaf, type=own)
    elif mesh is not None and own is not None and explicit_axes(own.mesh):
        leaf = _typed_by_itself(leaf, own, mesh)
    sharding = getattr(value, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not sharding.spec.unreduced:
        return leaf
    return replace(leaf, unreduced=frozenset(sharding.spec.unreduced), reduction=unreduced_by(sharding.spec))


def _typed_by_itself(leaf: Leaf, own: NamedSharding, mesh: AnyMesh) -> Leaf:
    """A leaf whose own type says this: its type where nothing else is stated, or the planner chooses its layout."""
    type_ = own if own.mesh.axis_types == mesh.axis_types else None
    if leaf.spec is None:
        is_whole = len(explicit_axes(own.mesh)) == len(own.mesh.axis_names)
        spec = own.spec if is_whole else sharding_of_type(own, len(leaf.value.shape), "mesh")
        return replace(leaf, type=type_, spec=spec)
    if leaf.spec is AUTO:
        return replace(leaf, type=type_)
    return replace(leaf, is_moved=type_ is not None)


def is_token(x: Any) -> bool:
    """Whether a leaf is one of jax's tokens, which hold nothing."""
    try:
        return isinstance(jax.typeof(x), AbstractToken)
    except (TypeError, OverflowError):
        return False


def match_prefix(specs: Spec, tree: Any, root: str, where: str, is_whole: bool = False) -> list[Leaf]:
    """Spreads a prefix tree of specifications over the leaves of `tree`; `root` is how the tree is called. Of a
    `SpecRule` for an argument that `is_whole` it is not said whether it splits any: it may be that of others, too.

    Raises:
        ShardingError: names the first path where the two trees differ.
    """
    if isinstance(specs, SpecRule):
        warn_of_unused("" if is_whole else specs.unused({root: tree}))
        specs = specs.for_tree(tree, root)
    if isinstance(specs, SPEC_TYPES):
        return [Leaf.of(root + keystr(path), leaf, specs) for path, leaf in named_leaves(tree)[0]]
    given, given_type = _children(specs, root, where)
    if jax.tree_util.all_leaves([tree]):
        raise array_for_tree(specs, root, where)
    wanted, wanted_type = _children(tree, root, where)
    given_keys, wanted_keys = ([keystr(k) for k, _ in children] for children in (given, wanted))
    if given_type is not wanted_type or given_keys != wanted_keys:
        raise other_tree(specs, given_keys, tree, wanted_keys, root, where)
    return [
        leaf
        for (_, spec), (keys, child) in zip(given, named_children(tree), strict=True)
        for leaf in match_prefix(spec, child, root + keystr(keys), where)
    ]


def check_rules(specs: Spec, names: Sequence[str], where: str) -> None:
    """Whether the rules in a tree of specifications say axes that a mesh has, whatever they are applied to.

    Raises:
        ShardingError: a rule says an axis that is not among `names`.
    """
    for spec in jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, SPEC_TYPES)):
        if isinstance(spec, SpecRule):
            spec.check_axes(names, where)


def _children(tree: Any, root: str, where: str) -> tuple[list[tuple[Any, Any]], type]:
    try:
        children = keyed_children(tree)
    except ValueError:
        raise no_specification(tree, root, where) from None
    return [((key,), child) for key, child in children], type(tree)
