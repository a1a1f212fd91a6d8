"""Calls that communicate over an axis which a `jax.vmap` around them names: what is planned is the mapped function.

A plan has no such axis. So a call becomes an op, which waits for the `vmap`s: each maps the function in it, and where
no axis is left that it names, that is partitioned, with the stated shardings and the new dimensions in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import batching
from jax.tree_util import PyTreeDef

from sdy_jax.annotate import regions
from sdy_jax.annotate.arguments import Leaf, match_prefix
from sdy_jax.annotate.automatic import AUTO
from sdy_jax.annotate.equations import named_axes
from sdy_jax.annotate.named import StatedSpecs, give_derivatives, mapped, specs_of
from sdy_jax.calls.options import Options
from sdy_jax.calls.planned_function import PlannedFunction
from sdy_jax.calls.statics import Statics
from sdy_jax.jax_internals.batching import mapped_results
from sdy_jax.jax_internals.contexts import trace_state

Partition = Callable[[Callable[..., Any], Options, bool], Any]


class MappedLater:
    """A function whose calls wait for `jax.vmap`s; `partition` as special calls have it."""

    def __init__(self, function: PlannedFunction, partition: Partition):
        self._function, self._partition = function, partition
        self._calls: dict[Any, _Call] = {}

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        leaves, tree, statics = self._function.given(args, kwargs)
        call = self._call_of(leaves, tree, statics)
        traced, captured = call.traced, call.traced.captured
        results = jax.tree.unflatten(traced.out_tree, traced.region.out_avals)
        outputs = match_prefix(self._function.options.out_shardings, results, "result", "out_shardings")
        found = waiting_p.bind(
            *captured,
            *(leaf.value for leaf in leaves),
            region=traced.region,
            name=self._function.name,
            in_shardings=(None,) * len(captured) + _stated(leaves, "in_shardings"),
            out_shardings=_stated(outputs, "out_shardings"),
            call=call,
        )
        return jax.tree.unflatten(traced.out_tree, found)

    def _call_of(self, leaves: Sequence[Leaf], tree: PyTreeDef, statics: Statics) -> _Call:
        """A kind of call, kept unless the function closes over values of an outer trace."""
        values, mesh = [leaf.value for leaf in leaves], self._function.mesh_of(leaves)
        key = (mesh, tree, statics.key, tuple(map(jax.typeof, values)), trace_state())
        if key in self._calls:
            return self._calls[key]

        def flat(*xs: Any) -> Any:
            dynamic, named = jax.tree.unflatten(tree, xs)
            return self._function.traced.inner(statics, mesh)(*dynamic, **named)

        call = _Call(self, mesh, regions.trace(flat, values))
        if not any(isinstance(value, jax.core.Tracer) for value in call.traced.captured):
            self._calls[key] = call
        return call

    def forget(self) -> None:
        """Forgets what was traced and partitioned."""
        self._calls.clear()

    def partitioned(self, mesh: Any, parameters: dict[str, Any]) -> Any:
        """A mapped function, partitioned."""
        options = replace(
            self._function.options.of_derivatives(mesh),
            in_shardings=parameters["in_shardings"],
            out_shardings=list(parameters["out_shardings"]),
        )
        region = jaxpr_as_fun(parameters["region"])

        def run(*xs: Any) -> list[Any]:
            return list(region(*xs))

        run.__name__ = f"{parameters['name']} (mapped)"
        return self._partition(run, options, True)


def _stated(leaves: Sequence[Leaf], where: str) -> StatedSpecs:
    return specs_of([replace(leaf, spec=None) if leaf.spec is AUTO else leaf for leaf in leaves], where)


class _Call:
    """A kind of call: the function traced for it, and what it is partitioned as, by how it is mapped."""

    def __init__(self, of: MappedLater, mesh: Any, traced: regions.Traced):
        self._of, self._mesh, self.traced = of, mesh, traced
        self._made: dict[Any, Any] = {}

    def run(self, key: Any, values: Sequence[Any], parameters: dict[str, Any]) -> Sequence[Any]:
        """The results of a mapped function; `key` says how it is mapped, None where it is another than this."""
        made = self._made.get(key) or self._of.partitioned(self._mesh, parameters)
        if key is not None:
            self._made[key] = made
        results: Sequence[Any] = made(*values)
        return results


def _batched(
    axis_data: Any, values: Sequence[Any], dims: Sequence[int | None], **parameters: Any
) -> tuple[list[Any], list[int | None]]:
    call, region = parameters["call"], parameters["region"]
    changed = mapped(axis_data, dims, parameters)
    if named_axes(changed["region"]):
        found = waiting_p.bind(*values, **changed)
    else:
        along = (axis_data.name, axis_data.size, axis_data.spmd_name, tuple(dims))
        found = call.run(along if region is call.traced.region else None, values, changed)
    are_mapped = mapped_results(region, axis_data, dims)
    outs = [x if is_mapped else x[0] for x, is_mapped in zip(found, are_mapped, strict=True)]
    return outs, [0 if is_mapped else None for is_mapped in are_mapped]


waiting_p = Primitive("sdy_waiting_for_vmap")
"""Parameters: the function as a region, its name, a specification or None per operand and result, and its call."""
waiting_p.multiple_results = True
waiting_p.def_effectful_abstract_eval(lambda *_, region, **__: (region.out_avals, region.effects))
batching.fancy_primitive_batchers[waiting_p] = _batched
give_derivatives(waiting_p)
