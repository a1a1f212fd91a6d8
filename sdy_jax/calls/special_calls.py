"""Calls that are planned otherwise than they are made: those that read or write `jax.Ref`s, and with tokens, which are
planned without them; those that communicate over axes of `jax.vmap`s around them, which are planned mapped; and of
symbolic sizes, which are not planned."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from sdy_jax.annotate.argument_errors import ClosedOverReferences, HoldsTokens, NamesMappedAxes, SymbolicSizes
from sdy_jax.calls import symbolic_calls
from sdy_jax.calls.formats import says_all, stated_sharding
from sdy_jax.calls.jitted_function import JittedFunction
from sdy_jax.calls.options import Options
from sdy_jax.calls.planned_function import PlannedFunction
from sdy_jax.calls.references import VALUES, ReferenceCall, bring, check_split, of_values
from sdy_jax.calls.tokens import of_others, with_tokens, without_tokens
from sdy_jax.calls.vmapped_calls import MappedLater
from sdy_jax.runtime.function_mesh import is_whole_elsewhere
from sdy_jax.runtime.layouts import layout_of

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
            return special(self._jitted.jit(symbolic_calls.with_stated_shardings(self._function)))
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
        run = symbolic_calls.with_stated_shardings(self._function)
        args, kwargs = symbolic_calls.ahead(self._function, args, kwargs)
        jitted = self._jitted.jit(run, out_shardings=symbolic_calls.of_results(self._function, run, args, kwargs))
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
