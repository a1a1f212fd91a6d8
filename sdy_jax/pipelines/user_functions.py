"""The user's layer and loss, traced as functions of leaves, with what they close over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sdy_jax.errors import ArgumentError
from sdy_jax.pipelines.checks import check_loss, check_not_split, check_same_types
from sdy_jax.pipelines.region import Region
from sdy_jax.pipelines.weight_types import type_read


@dataclass(frozen=True)
class TracedFunction:
    """A function of leaves.

    Attributes:
        jaxpr: of it.
        constants: what it closes over.
        aux: types of the auxiliary results.
        structure: the tree of these.
    """

    jaxpr: Any
    constants: list[Any]
    aux: list[Any]
    structure: Any

    @property
    def dtype(self) -> Any:
        """Of the first result."""
        return self.jaxpr.outvars[0].aval.dtype

    def call(self, constants: Sequence[Any], *leaves: Any) -> list[Any]:
        """Its results, with other arrays in place of the constants. Leaves may be of other types (`types_read`)."""
        types = [v.aval.dtype for v in self.jaxpr.invars]
        given = [x if x.dtype == dtype else x.astype(dtype) for x, dtype in zip(leaves, types, strict=True)]
        return list(jax.core.eval_jaxpr(self.jaxpr, constants, *given))

    def types_read(self, first: int, count: int) -> list[Any]:
        """The types in which it reads some of its leaves (`type_read`)."""
        return [type_read(self.jaxpr, v) for v in self.jaxpr.invars[first : first + count]]

    def with_aux(self, leaves: Sequence[Any]) -> Any:
        """Auxiliary results in the user's structure."""
        return jax.tree.unflatten(self.structure, leaves)


def trace_layer(
    region: Region, layer: Callable[..., Any], has_aux: bool, x: Any, weights: Any, *rest: Any
) -> TracedFunction:
    """A layer, called with `(weights, x, *rest)`.

    Raises:
        ArgumentError: it makes other activations than it takes.
        ShardingError: it splits something over the axis of the stages.
    """

    def called(x: Any, weights: Any, *rest: Any) -> tuple[Any, Any]:
        made = layer(weights, x, *rest)
        if not has_aux:
            return strong(made), ()
        if not isinstance(made, tuple) or len(made) != 2:
            raise ArgumentError(
                "pipeline: with has_aux=True layer returns a tuple of activations and auxiliary results"
            )
        return strong(made[0]), strong(made[1])

    closed, (y, aux) = _traced(region, "layer", called, (x, weights, *rest))
    check_same_types(x, y)
    return TracedFunction(closed.jaxpr, list(closed.consts), jax.tree.leaves(aux), jax.tree.structure(aux))


def trace_loss(region: Region, loss: Callable[..., Any], has_aux: bool, *args: Any) -> TracedFunction:
    """A loss, called with the last activations and, if there are any, the targets.

    Raises:
        ArgumentError: it is not one number, or has no auxiliary results where it should.
        ShardingError: it splits something over the axis of the stages.
    """

    def called(*args: Any) -> tuple[Any, Any]:
        made = loss(*args)
        if not has_aux:
            return made, ()
        if not isinstance(made, tuple) or len(made) != 2:
            raise ArgumentError(
                "pipeline: with loss_has_aux=True loss returns a tuple of a number and auxiliary results"
            )
        return made[0], strong(made[1])

    closed, (value, aux) = _traced(region, "loss", called, args)
    check_loss(value)
    return TracedFunction(closed.jaxpr, list(closed.consts), jax.tree.leaves(aux), jax.tree.structure(aux))


def strong(tree: Any) -> Any:
    """Arrays whose types are not weak, so that they stay the same from layer to layer."""
    return jax.tree.map(lambda x: lax.convert_element_type(x, jnp.asarray(x).dtype), tree)


def _traced(region: Region, name: str, fun: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """A function as a jaxpr of leaves, and the types of its results as a tree."""
    leaves, structure = jax.tree.flatten(args)
    closed, made = region.traced(lambda *xs: fun(*jax.tree.unflatten(structure, xs)), leaves)
    check_not_split(region.axis, closed, name)
    return closed, jax.tree.unflatten(jax.tree.structure(made), closed.out_avals)
