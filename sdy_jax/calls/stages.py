"""Ahead of time: arguments as they are to be lowered, with the layouts that the compiled program takes."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AxisType

from sdy_jax.calls.arguments import Arguments
from sdy_jax.calls.planned_call import PlannedCall
from sdy_jax.representation.named import AnyMesh, has_sub_axes
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.runtime.layouts import named


def lowered_arguments(call: Arguments, planned: PlannedCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, static ones among them. Those that no device holds yet become types with the sharding of
    the plan, so that the compiled program says by the axes of the mesh how it takes them.

    On Explicit axes a type's sharding is part of what is traced; there they stay as they are. So they do where one lies
    by a part of an axis: jax names the shardings of all arguments by axes of the mesh, or of none.
    """
    leaves = [call.leaves[i].value if i in call.elsewhere else leaf.value for i, leaf in enumerate(call.given)]
    entering = [_named(x, sharding, call.mesh) for x, sharding in zip(leaves, planned.entering, strict=True)]
    if AxisType.Explicit not in call.mesh.axis_types and None not in entering:
        unused = planned.unused
        leaves = [x if i in unused else type_ for i, (x, type_) in enumerate(zip(leaves, entering, strict=True))]
    args, kwargs = jax.tree.unflatten(call.tree, leaves)
    return tuple(call.statics.merged(args)), {**kwargs, **dict(call.statics.named)}


def _named(x: Any, sharding: TensorSharding, mesh: AnyMesh) -> Any:
    """The type with the sharding of the plan, the array itself where it lies on devices; None if jax has no name for
    the sharding."""
    if _is_laid_out(x):
        return x
    if sharding.unreduced_axes or has_sub_axes(sharding):
        return None
    type_ = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    weak = getattr(type_, "weak_type", False)
    return jax.ShapeDtypeStruct(type_.shape, type_.dtype, weak_type=weak, sharding=named(sharding, mesh))


def _is_laid_out(x: Any) -> bool:
    if isinstance(x, jax.core.Tracer):
        return True
    return getattr(x, "sharding", None) is not None and getattr(x, "committed", True)
