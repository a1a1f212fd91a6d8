"""Calls that are planned otherwise than they are made: as functions of other arguments, or mapped by a `jax.vmap`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import batching
from jax.tree_util import PyTreeDef

from sdy_jax.annotate import primitives
from sdy_jax.annotate.argument_errors import ClosedOverReferences, HoldsTokens, NamesMappedAxes, SymbolicSizes
from sdy_jax.annotate.arguments import AUTO, Leaf, match_prefix
from sdy_jax.annotate.computations import StatedSpecs, give_derivatives, mapped, specs_of
from sdy_jax.annotate.jaxprs import named_axes
from sdy_jax.base.jax_calls import mapped_results
from sdy_jax.base.jax_tracing import trace_state
from sdy_jax.calls import special_arguments
from sdy_jax.calls.argument_placement import says_all, stated_sharding
from sdy_jax.calls.arguments import Statics
from sdy_jax.calls.jitted_function import JittedFunction
from sdy_jax.calls.options import Options
from sdy_jax.calls.planned_function import PlannedFunction
from sdy_jax.calls.special_arguments import (
    VALUES,
    ReferenceCall,
    bring,
    check_split,
    of_others,
    of_values,
    with_tokens,
    without_tokens,
)
from sdy_jax.runtime.boundary import layout_of
from sdy_jax.runtime.meshes import is_whole_elsewhere

# Calls that communicate over an axis which a `jax.vmap` around them names: what is planned is the mapped function.
#
# A plan has no such axis. So a call becomes an op, which waits for the `vmap`s: each maps the function in it, and
# where no axis is left that it names, that is partitioned, with the stated shardings and the new dimensions in them.

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

        call = _Call(self, mesh, primitives.trace(flat, values))
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

    def __init__(self, of: MappedLater, mesh: Any, traced: primitives.TracedRegion):
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


# Calls that are planned otherwise than they are made: those that read or write `jax.Ref`s, and with tokens, which are
# planned without them; those that communicate over axes of `jax.vmap`s around them, which are planned mapped; and of
# symbolic sizes, which are not planned.

Run = Callable[..., Any]
Ordinary = Callable[[Any, Any], Any]
Special = Callable[[Run], Any]


class SpecialCalls:
    """The special calls of one function, found as they are planned; `partition(fun, options, writes_refs)` partitions
    what is planned for them. With `writes_refs` False the function is one of the values of Refs."""

    def __init__(
        self,
        function: PlannedFunction,
        jitted: JittedFunction,
        partition: Callable[[Callable[..., Any], Options, bool], Any],
        writes_refs: bool,
    ):
        self._function, self._jitted, self._partition, self._writes_refs = function, jitted, partition, writes_refs
        self._closed_over: tuple[Any, ...] = ()
        """The Refs that the function was found to close over."""
        self._of_values: dict[Any, Any] = {}
        """The functions of the values of Refs, by which arguments are Refs and how these lie."""

    def called(self, ordinary: Ordinary, args: Any, kwargs: Any) -> tuple[Any, Any, bool]:
        """As `ordinary`, what jit's C++ asks for; of a special call its result, and nothing to keep."""

        def special(run: Run) -> tuple[Any, Any, bool]:
            return run(*args, **kwargs), None, False

        try:
            found: tuple[Any, Any, bool] = self._handled(ordinary, special, args, kwargs)
        except NamesMappedAxes:
            return special(self._mapped_later)
        except SymbolicSizes:
            return special(self._jitted.jit(special_arguments.with_stated_shardings(self._function)))
        return found

    def staged(self, stage: str, ordinary: Ordinary, args: Any, kwargs: Any) -> Any:
        """As `ordinary`; of a special call jit's stage of that name."""

        def special(run: Run) -> Any:
            return getattr(self._jitted.jit(lambda *args, **kwargs: run(*args, **kwargs)), stage)(*args, **kwargs)

        try:
            return self._handled(ordinary, special, args, kwargs)
        except SymbolicSizes:
            return self._staged_unplanned(stage, args, kwargs)

    def planned(self, ordinary: Ordinary, args: Any, kwargs: Any) -> Any:
        """As `ordinary`; of a special call the plan of what runs for it."""
        try:
            if (call := ReferenceCall.of(args, kwargs, self._closed_over)) is not None:
                return self._values_of(call).plan(*call.args, **call.kwargs)
            return ordinary(args, kwargs)
        except HoldsTokens:
            return self._of_others.plan(*without_tokens(args), **without_tokens(kwargs))
        except ClosedOverReferences as error:
            self._found(error)
        return self.planned(ordinary, args, kwargs)

    def forget(self) -> None:
        """Forgets what was partitioned."""
        self._of_values.clear()
        self.__dict__.pop("_of_others", None)
        self._mapped_later.forget()

    def _handled(self, ordinary: Ordinary, special: Special, args: Any, kwargs: Any) -> Any:
        """`ordinary(args, kwargs)`, or `special(run)` of a call whose result `run(*args, **kwargs)` is."""
        try:
            if (call := ReferenceCall.of(args, kwargs, self._closed_over)) is not None:
                call = self._brought(call, args, kwargs)
                return special(functools.partial(self._with_refs, self._values_of(call)))
            return ordinary(args, kwargs)
        except HoldsTokens:
            return special(self._with_tokens)
        except ClosedOverReferences as error:
            self._found(error)
        return self._handled(ordinary, special, args, kwargs)

    def _found(self, error: ClosedOverReferences) -> None:
        if not self._writes_refs:
            raise error
        self._closed_over += error.refs

    def _staged_unplanned(self, stage: str, args: Any, kwargs: Any) -> Any:
        run = special_arguments.with_stated_shardings(self._function)
        args, kwargs = special_arguments.stage_arguments(self._function, args, kwargs)
        jitted = self._jitted.jit(run, out_shardings=special_arguments.of_results(self._function, run, args, kwargs))
        return getattr(jitted, stage)(*args, **kwargs)

    def _with_refs(self, of_values: Any, /, *args: Any, **kwargs: Any) -> Any:
        call = ReferenceCall.of(args, kwargs, self._closed_over)
        assert call is not None
        result, values = of_values(*call.args, **call.kwargs)
        call.write(values)
        return result

    def _brought(self, call: ReferenceCall, args: Any, kwargs: Any) -> ReferenceCall:
        """The call once the Refs that lie elsewhere are on the mesh, where `in_shardings` say how they lie there."""
        leaves = self._function.given(call.args, {k: v for k, v in call.kwargs.items() if k != VALUES})[0]
        mesh, by_value = self._function.mesh_of(leaves), {id(leaf.value): leaf for leaf in leaves}
        pairs = [(ref, by_value.get(id(value))) for ref, value in zip(call.refs, call.values, strict=True)]
        stated = [(r, x) for r, x in pairs if x and x.spec is not None]
        elsewhere = [(r, x) for r, x in stated if is_whole_elsewhere(x.value, mesh)]
        for _, leaf in stated:
            if says_all(leaf.spec) and isinstance(mesh, jax.sharding.Mesh) and not is_whole_elsewhere(leaf.value, mesh):
                check_split(leaf.value, leaf.path, stated_sharding(leaf, mesh, "in_shardings"))
        for ref, leaf in elsewhere:
            bring(ref, leaf.path, stated_sharding(leaf, mesh, "in_shardings"))
        again = ReferenceCall.of(args, kwargs, self._closed_over) if elsewhere else call
        assert again is not None
        return again

    def _values_of(self, call: ReferenceCall) -> Any:
        """The function of the values of a call's Refs, which leaves them as they lie."""
        layouts = [layout_of(ref[...]) for ref in call.refs]
        key = (call.where, *map(id, self._closed_over), *layouts)
        if key not in self._of_values:
            options = self._function.options
            stated = self._function.traced.stated_by_name() if self._closed_over else options.in_shardings
            options = dataclasses.replace(options, in_shardings=stated, out_shardings=(options.out_shardings, layouts))
            fun = of_values(self._function.fun, call.where, self._closed_over)
            self._of_values[key] = self._partition(fun, options, False)
        return self._of_values[key]

    def _with_tokens(self, /, *args: Any, **kwargs: Any) -> Any:
        return with_tokens(self._of_others(*without_tokens(args), **without_tokens(kwargs)))

    @functools.cached_property
    def _mapped_later(self) -> MappedLater:
        return MappedLater(self._function, self._partition)

    @functools.cached_property
    def _of_others(self) -> Any:
        """The function without tokens."""
        return self._partition(of_others(self._function.fun), self._function.options, True)
