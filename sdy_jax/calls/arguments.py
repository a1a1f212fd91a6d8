"""The arguments of one call of a partitioned function: static ones apart, and the shardings and layouts of arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress
from typing import Any

import jax
from jax.core import ShapedArray
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import PyTreeDef

from sdy_jax.annotate.argument_errors import unhashable
from sdy_jax.annotate.arguments import Leaf, Parameters, Spec, abstracted, function_signature
from sdy_jax.base.errors import ArgumentError, with_article
from sdy_jax.calls.planned_call import PlannedCall
from sdy_jax.ir.jax_shardings import AnyMesh, explicit_axes, sharding_in
from sdy_jax.plan.border import BorderMove, moves_at_border
from sdy_jax.runtime.boundary import as_specification, is_on, layout_of
from sdy_jax.runtime.meshes import is_whole_elsewhere

# Static arguments: found by jit's rules, taken out of a call, and put back.


@dataclass(frozen=True, slots=True)
class StaticParameters:
    """The static parameters of a function, by position (negative: from the end of a call) and by name."""

    positions: tuple[int, ...]
    names: tuple[str, ...]
    parameters: tuple[str, ...] = ()
    """The names of all positional parameters; empty where their number is not fixed."""

    @classmethod
    def of(cls, fun: Callable[..., Any], numbers: Any, names: Any) -> StaticParameters:
        """As in jit: where only positions or only names are given, the parameter is static however it is passed."""
        positional = _positional(fun)
        given, named = _listed("static_argnums", numbers, int), _listed("static_argnames", names, str)
        count = len(positional)
        given = tuple(n % count if -count <= n < 0 else n for n in given)
        if names is None:
            named = tuple(name for i, name in enumerate(positional) if i in given and name not in _unnamed(fun))
        elif numbers is None:
            given = tuple(i for i, name in enumerate(positional) if name in named)
        return cls(given, named, positional)

    def split(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], Statics]:
        """Positional and keyword arguments without the static ones, and the static ones.

        Raises:
            SdyError: a static argument cannot be hashed.
        """
        count = len(args)
        positions = {n % count for n in self.positions if -count <= n < count}
        statics = Statics(
            tuple((i, args[i]) for i in sorted(positions)),
            tuple((name, kwargs[name]) for name in sorted(self.names) if name in kwargs),
        )
        self._check_hashable(statics)
        dynamic = tuple(a for i, a in enumerate(args) if i not in positions)
        return dynamic, {name: v for name, v in kwargs.items() if name not in self.names}, statics

    def _check_hashable(self, statics: Statics) -> None:
        given: list[tuple[int | str, Any]] = [*statics.positional, *statics.named]
        for place, value in given:
            try:
                hash(value)
            except TypeError:
                raise unhashable(self._name(place), value) from None

    def _name(self, place: int | str) -> str:
        if isinstance(place, str):
            return f"`{place}`"
        return f"`{self.parameters[place]}`" if place < len(self.parameters) else f"at position {place}"


@dataclass(frozen=True, slots=True)
class Statics:
    """The static arguments of a call: (position, value) and (name, value) pairs."""

    positional: tuple[tuple[int, Any], ...]
    named: tuple[tuple[str, Any], ...]

    @property
    def positions(self) -> frozenset[int]:
        return frozenset(i for i, _ in self.positional)

    @property
    def key(self) -> tuple[Any, ...]:
        """A key with the types of the values: 1, 1.0 and True are equal but not the same."""
        return (self, tuple(type(value) for _, value in (*self.positional, *self.named)))

    def merged(self, dynamic: Sequence[Any]) -> list[Any]:
        """Static and dynamic positional arguments in their order."""
        rest, values = iter(dynamic), dict(self.positional)
        return [values[i] if i in values else next(rest) for i in range(len(dynamic) + len(values))]


def _listed(name: str, given: Any, single: type) -> tuple[Any, ...]:
    listed = (
        ()
        if given is None
        else (given,)
        if isinstance(given, single) or not isinstance(given, Iterable)
        else tuple(given)
    )
    if not all(isinstance(entry, single) or (single is int and hasattr(entry, "__index__")) for entry in listed):
        raise ArgumentError(f"{name}={given!r}; expected {with_article(single)}, or a sequence of them")
    return listed


def _positional(fun: Callable[..., Any]) -> tuple[str, ...]:
    """The names of the positional parameters; empty where their number is not fixed or not known."""
    signature = function_signature(fun)
    if signature is None or any(p.kind == p.VAR_POSITIONAL for p in signature.parameters.values()):
        return ()
    return Parameters.of(fun).positional


def _unnamed(fun: Callable[..., Any]) -> frozenset[str]:
    """The parameters that cannot be passed by name."""
    signature = function_signature(fun)
    parameters = signature.parameters.values() if signature else ()
    return frozenset(p.name for p in parameters if p.kind == p.POSITIONAL_ONLY)


# The arguments of one call of a partitioned function: their stated shardings, and the layouts of arrays.

UNPLACED = "unplaced"
"""The layout of an array that is not committed: its type on Explicit axes says nothing where a sharding is stated."""

Layouts = tuple[Spec, ...]
"""Per leaf, the layout of the array; None where a sharding is stated or the layout is unknown; or `UNPLACED`."""


@dataclass(frozen=True)
class Arguments:
    """The dynamic arguments of a call.

    Attributes:
        given: the leaves as they were passed, with the shardings that the user states.
        leaves: their types; where the user states no sharding, with the array's layout.
        layouts: the layouts in `leaves` that come from arrays and are not in their types.
        tree: the structure of positional and keyword arguments.
        statics: the static arguments.
        mesh: the mesh of the function.
        are_typed: whether the function sees types that show shardings: arguments have such, or the mesh in context has
            Explicit axes.
        in_context: whether the mesh is in context while the function is traced; else what is around the call.
    """

    given: Sequence[Leaf]
    leaves: Sequence[Leaf]
    layouts: Layouts
    tree: PyTreeDef
    statics: Statics
    mesh: AnyMesh
    are_typed: bool = False
    in_context: bool = True

    @classmethod
    def of(
        cls,
        given: Sequence[Leaf],
        tree: PyTreeDef,
        statics: Statics,
        mesh: AnyMesh,
        layouts: Layouts | None = None,
        keep_types: bool = False,
        in_context: bool = True,
    ) -> Arguments:
        """`layouts` are given where the arguments are tracers that stand for arrays. These `keep_types` that they have
        on Explicit axes, whatever is stated, where they are those of a derivative. Where the mesh is not in context the
        function sees those that types show, as under jit, unless that would be Explicit axes beside those of another
        mesh: all results are on the one of the function.

        Raises:
            SdyError: a leaf is no array.
        """
        given = [
            replace(leaf, value=_struct(x)) if isinstance(x := leaf.value, ShapedArray) else leaf for leaf in given
        ]
        typed = [abstracted(leaf, mesh, keep_types) for leaf in given]
        if layouts is None:
            layouts = tuple(_layout(a, b, mesh) for a, b in zip(given, typed, strict=True))
        leaves = [_laid_out(leaf, layout) for leaf, layout in zip(typed, layouts, strict=True)]
        are_typed = _are_typed(leaves, mesh)
        in_context = in_context or (are_typed and any(x.shown and not _has_axes(x.shown, mesh) for x in leaves))
        if in_context:
            leaves = [leaf if leaf.shown is None else replace(leaf, shown=None) for leaf in leaves]
        return cls(given, leaves, layouts, tree, statics, mesh, are_typed, in_context)

    def resized(self, size: int, other: int) -> Arguments:
        """Types of arguments that have another size wherever these have one."""
        leaves = [replace(leaf, value=_resized(leaf.value, size, other)) for leaf in self.leaves]
        return replace(self, given=leaves, leaves=leaves)

    @property
    def types(self) -> Arguments:
        """The same arguments without arrays, to be kept."""
        return replace(self, given=self.leaves)

    @property
    def key(self) -> tuple[Any, ...]:
        """The key of the plan for a call like this."""
        types = tuple(
            (*_array_type(x.value), x.spec, x.type, x.is_moved, x.unreduced, x.elsewhere, x.is_on_host)
            for x in self.leaves
        )
        return (self.mesh, self.tree, types, self.statics.key, self.are_typed, self.shown)

    @property
    def shown(self) -> tuple[jax.sharding.AbstractMesh | None, ...]:
        """The meshes without Explicit axes that the function sees in the types of its arguments, as under jit."""
        return tuple(leaf.shown for leaf in self.leaves)

    def moves(self, call: PlannedCall) -> tuple[BorderMove, ...]:
        """The arguments whose layouts differ from those that `call` takes, as far as it uses them."""
        unused = call.unused
        used = [i not in unused for i in range(len(self.given))]
        entering = (call.plan.program.on_uncut(value.sharding) for value in call.plan.arguments)
        return moves_at_border(compress(self.given, used), compress(entering, used), self.mesh)

    @property
    def as_passed(self) -> frozenset[str]:
        """The paths of the leaves whose specifications are those of what was passed."""
        pairs = zip(self.given, self.leaves, strict=True)
        return frozenset(leaf.path for given, leaf in pairs if given.spec is None and leaf.spec is not None)

    @property
    def may_move(self) -> bool:
        """Whether some array's layout may differ from its stated sharding."""
        return bool(self.elsewhere) or any(
            own is not None and _specification(leaf.spec, self.mesh) != as_specification(own, self.mesh)
            for leaf, own in zip(self.leaves, self._own, strict=True)
        )

    @cached_property
    def elsewhere(self) -> tuple[int, ...]:
        """The leaves that lie whole on other devices than the mesh's, and for which shardings are stated."""
        stated = enumerate(self.given)
        return tuple(i for i, x in stated if x.spec is not None and is_whole_elsewhere(x.value, self.mesh))

    @property
    def is_traced(self) -> bool:
        """Whether some of them stand for arrays that are not there yet."""
        return any(isinstance(leaf.value, jax.core.Tracer) for leaf in self.given)

    @property
    def bring_other_meshes(self) -> bool:
        """Whether some arrays are on other meshes: jit would name the axes of results after those."""
        return any(own is not None and not is_on(own, self.mesh) for own in self._own)

    @cached_property
    def _own(self) -> list[NamedSharding | None]:
        return [layout_of(leaf.value) for leaf in self.given]


def _array_type(value: jax.ShapeDtypeStruct) -> tuple[Any, ...]:
    return value.shape, value.dtype, value.weak_type


def _are_typed(leaves: Sequence[Leaf], mesh: AnyMesh) -> bool:
    if not explicit_axes(mesh):
        return False
    around = jax.sharding.get_abstract_mesh()
    is_around = around.axis_names == mesh.axis_names and bool(explicit_axes(around))
    return is_around or any(leaf.type is not None or leaf.is_moved for leaf in leaves)


def _has_axes(shown: jax.sharding.AbstractMesh, mesh: AnyMesh) -> bool:
    return (shown.axis_names, shown.axis_sizes) == (mesh.axis_names, mesh.axis_sizes)


def _resized(value: Any, size: int, other: int) -> Any:
    return value.update(shape=tuple(other if n == size else n for n in value.shape))


def _struct(type_: ShapedArray) -> jax.ShapeDtypeStruct:
    """A type as `lower` also takes it."""
    return jax.ShapeDtypeStruct(type_.shape, type_.dtype, weak_type=type_.weak_type, sharding=sharding_in(type_))


def _laid_out(leaf: Leaf, layout: Spec) -> Leaf:
    if layout is UNPLACED:
        return replace(leaf, is_moved=False)
    return leaf if layout is None else replace(leaf, spec=layout)


def _layout(given: Leaf, typed: Leaf, mesh: AnyMesh) -> Spec:
    """The layout of a leaf for which the user states no sharding and whose type does not determine it."""
    if typed.is_moved and not isinstance(given.value, jax.core.Tracer) and not getattr(given.value, "committed", True):
        return UNPLACED
    if given.spec is not None or isinstance(typed.spec, PartitionSpec):
        return None
    own = layout_of(given.value)
    return None if own is None else as_specification(own, mesh)


def _specification(spec: Spec, mesh: AnyMesh) -> Spec:
    return as_specification(spec, mesh) if isinstance(spec, NamedSharding) else spec
