"""Functions on each device's rows of a microbatch, in a region that is manual on all other axes of the mesh as well.

Stages that run different functions take different branches, in which devices may not wait for each other: so nothing is
sent in a branch. Rows are split over the devices of a stage as far as they divide; weights are whole, gathered before
it where they are split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from sdy_jax.errors import UnsupportedError
from sdy_jax.pipelines.layer_passes import is_inexact
from sdy_jax.pipelines.rows_alike import where_rows_mix

RowFunction = Callable[..., Any]
"""Of weights, activations, then lists of extra inputs and of keys."""


@dataclass(frozen=True)
class LocalRows:
    """How the devices of a stage share rows.

    Attributes:
        others: the axes of the mesh beside that of the stages.
        over: those that rows are split over.
        parts: into how many.
    """

    others: tuple[str, ...]
    over: tuple[str, ...]
    parts: int

    @classmethod
    def of(cls, rows: int, axis: str) -> LocalRows:
        """In the code around, over the axes as far as they divide the rows, in the order of the mesh."""
        mesh = jax.sharding.get_abstract_mesh()
        others = tuple(name for name in mesh.axis_names if name != axis and name not in mesh.manual_axes)
        over, parts = list[str](), 1
        for name in others:
            if rows % (parts * mesh.shape[name]) == 0:
                over, parts = [*over, name], parts * mesh.shape[name]
        return cls(others, tuple(over), parts)

    def run(self, fun: RowFunction, weights: Any, x: Any, extra: list[Any], keys: list[Any]) -> Any:
        """What a function of weights and rows makes of all rows, each device of its own; keys are others on each.

        Weights are given to each part of the rows as its own: so their gradients are sums over a dimension, which a
        loop that adds them up may leave to the end, and no sums of a layer.
        """

        def given(leaf: Any) -> Any:
            return jnp.broadcast_to(leaf, (self.parts, *leaf.shape)) if is_inexact(leaf) else leaf

        def local(weights: Any, x: Any, extra: list[Any], keys: list[Any]) -> Any:
            own = jax.tree.map(lambda leaf: leaf[0] if is_inexact(leaf) else leaf, weights)
            return fun(own, x, extra, [jax.random.fold_in(key, lax.axis_index(self.over)) for key in keys])

        split = P(self.over)
        specs = jax.tree.map(lambda leaf: split if is_inexact(leaf) else P(), weights), split, split, P()
        run = jax.shard_map(local, in_specs=specs, out_specs=split, axis_names={*self.others}, check_vma=False)
        return run(jax.tree.map(given, weights), x, extra, keys)

    def check(self, name: str, fun: RowFunction, weights: Any, x: Any, extra: list[Any], keys: list[Any]) -> None:
        """
        Raises:
            UnsupportedError: a function does not treat rows alike, which are on several devices.
        """
        if self.parts == 1:
            return

        def traced(times: int) -> Any:
            def rows(leaf: Any) -> Any:
                return jax.ShapeDtypeStruct((times * leaf.shape[0], *leaf.shape[1:]), leaf.dtype)

            return jax.make_jaxpr(fun)(weights, jax.tree.map(rows, x), jax.tree.map(rows, extra), keys)

        found = where_rows_mix(traced(1), traced(2), bool(keys))  # one row alone may trace to other equations
        if found is not None:
            raise UnsupportedError(
                f"pipeline: {name} looks at several rows of a microbatch, or at their number, at {found}; layers are "
                f"different functions, of which each device of a stage runs its own for its own rows, over "
                f"{', '.join(self.over)}; to fix: layers that treat rows alike, or a mesh on which all other axes have "
                "size one"
            )
