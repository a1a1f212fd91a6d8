"""Ahead of time: a call is lowered with the arguments that it has, so that calls then run what was compiled; the
compiled program says by the axes of the mesh how it takes them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax
from jax.experimental.layout import Format
from jax.sharding import AxisType, NamedSharding

from sdy_jax.calls.arguments import Arguments
from sdy_jax.calls.planned_call import PlannedCall
from sdy_jax.representation.named import AnyMesh, has_sub_axes
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.runtime.layouts import named


def lowered_arguments(
    call: Arguments, planned: PlannedCall, donated: Collection[int] = ()
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, static ones among them. Those that are types without a sharding have that of the plan,
    with which arrays will come. So have those that are `donated` and lie nowhere on the mesh: XLA would choose how they
    enter, and jit give their memory to results of another size.

    On Explicit axes a type's sharding is part of what is traced; there they stay as they are. So they do where one lies
    by a part of an axis: jax names the shardings of all arguments by axes of the mesh, or of none.
    """
    leaves = [call.leaves[i].value if i in call.elsewhere else leaf.value for i, leaf in enumerate(call.given)]
    leaves = [_type_if_unplaced(x) if i in donated else x for i, x in enumerate(leaves)]
    entering = [_named(x, sharding, call.mesh) for x, sharding in zip(leaves, planned.entering, strict=True)]
    if AxisType.Explicit not in call.mesh.axis_types and not any(x is None for x in entering):
        unused = planned.unused
        leaves = [x if i in unused else type_ for i, (x, type_) in enumerate(zip(leaves, entering, strict=True))]
    args, kwargs = jax.tree.unflatten(call.tree, leaves)
    return tuple(call.statics.merged(args)), {**kwargs, **dict(call.statics.named)}


def _type_if_unplaced(x: Any) -> Any:
    """The type of an array that lies nowhere on a mesh; what lies there itself."""
    if isinstance(x, jax.ShapeDtypeStruct) or getattr(x, "committed", False):
        return x
    type_ = jax.typeof(x)
    return jax.ShapeDtypeStruct(type_.shape, type_.dtype, weak_type=type_.weak_type)


def _named(x: Any, sharding: TensorSharding, mesh: AnyMesh) -> Any:
    """A type with the sharding of the plan; an array, or a type that has one, itself; None if jax has no name for the
    sharding."""
    if not isinstance(x, jax.ShapeDtypeStruct) or x.sharding is not None:
        return x
    if sharding.unreduced_axes or has_sub_axes(sharding):
        return None
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type, sharding=named(sharding, mesh))


class NamedLowered(jax.stages.Lowered):
    """`jax.stages.Lowered`, whose compiled program names the shardings of arguments by the axes of the mesh."""

    _lowered: jax.stages.Lowered
    _entering: Sequence[NamedSharding | None]

    @classmethod
    def of(cls, lowered: jax.stages.Lowered, call: Arguments, planned: PlannedCall) -> jax.stages.Lowered:
        """The same, if arrays that lie nowhere on the mesh are among the arguments of the call."""
        if all(isinstance(leaf.value, jax.ShapeDtypeStruct) for leaf in call.given):
            return lowered
        new: NamedLowered = _copied(cls, lowered)
        has_name = [not s.unreduced_axes and not has_sub_axes(s) for s in planned.entering]
        pairs = zip(planned.entering, has_name, strict=True)
        new._lowered, new._entering = lowered, [named(s, call.mesh) if is_ else None for s, is_ in pairs]
        return new

    def compile(self, *args: Any, **kwargs: Any) -> jax.stages.Compiled:
        """As jax's."""
        compiled: _NamedCompiled = _copied(_NamedCompiled, self._lowered.compile(*args, **kwargs))
        compiled._entering = self._entering
        return compiled


class _NamedCompiled(jax.stages.Compiled):
    """`jax.stages.Compiled`: where XLA says how it takes an argument, and the plan says the same, the plan's name."""

    _entering: Sequence[NamedSharding | None]

    @property
    def input_shardings(self) -> Any:
        """As jax's."""
        return self._with_names(super().input_shardings)

    @property
    def input_formats(self) -> Any:
        """As jax's."""
        return self._with_names(super().input_formats)

    def _with_names(self, inputs: Any) -> Any:
        found, tree = jax.tree.flatten(inputs, is_leaf=lambda x: x is None)
        types = jax.tree.leaves(self.in_avals)
        return jax.tree.unflatten(tree, map(_by_plan, found, self._entering, types))


def _by_plan(found: Any, entering: NamedSharding | None, type_: Any) -> Any:
    own = found.sharding if isinstance(found, Format) else found
    if own is None or entering is None or isinstance(own, NamedSharding):
        return found
    if not own.is_equivalent_to(entering, type_.ndim):
        return found
    return Format(found.layout, entering) if isinstance(found, Format) else entering


def _copied(kind: Any, stage: jax.stages.Lowered | jax.stages.Compiled) -> Any:
    """A stage of jax as one of a class of ours, which is below jax's."""
    new = kind.__new__(kind)
    for name in kind.__base__.__slots__:
        setattr(new, name, getattr(stage, name))
    new.__dict__.update(getattr(stage, "__dict__", {}))
    return new
