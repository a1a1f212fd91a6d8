"""The user's function as jax sees it: under its own name and parameters, at its own line, and called as it may be."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any

from sdy_jax.errors import ArgumentError, with_article


def check_function(fun: object) -> None:
    """
    Raises:
        ArgumentError: it cannot be called, or gives no arrays when it is.
    """
    if not callable(fun):
        raise ArgumentError(
            f"partition got {with_article(type(fun))}; expected a function, or a program from sdy_jax.load"
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


def check_call(name: str, signature: inspect.Signature | None, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """
    Raises:
        ArgumentError: the function does not take these arguments; in Python's words, with its parameters.
    """
    if signature is None:
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        problem = _missing(signature, args, kwargs) or _surplus(signature, args) or str(error)
        problem = f"got {problem}" if problem.startswith("multiple") else problem
        raise ArgumentError(f"{name}() {problem}; its parameters are {_without_annotations(signature)}") from None


def _missing(signature: inspect.Signature, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    parameters = signature.parameters.values()
    positional = [p for p in parameters if p.kind in _POSITIONAL][len(args) :]
    named = [p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    for kind, left in (("positional", positional), ("keyword-only", named)):
        names = [repr(p.name) for p in left if p.default is p.empty and p.name not in kwargs]
        if names:
            *first, last = names
            listed = f"{', '.join(first)}{',' * (len(first) > 1)} and {last}" if first else last
            return f"missing {len(names)} required {kind} argument{'s' * (len(names) > 1)}: {listed}"
    return ""


def _surplus(signature: inspect.Signature, args: Sequence[Any]) -> str:
    parameters = signature.parameters.values()
    count = sum(p.kind in _POSITIONAL for p in parameters)
    if len(args) <= count or any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        return ""
    were = "was" if len(args) == 1 else "were"
    return f"takes {count} positional argument{'' if count == 1 else 's'} but {len(args)} {were} given"


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _without_annotations(signature: inspect.Signature) -> inspect.Signature:
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return signature.replace(parameters=plain, return_annotation=inspect.Signature.empty)


def _without_partials(fun: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(fun, functools.partial):
        fun = fun.func
    return fun
