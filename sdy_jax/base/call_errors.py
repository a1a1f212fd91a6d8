"""What is said of calls that do not fit a function: arguments that it lacks or has not, and what would be right."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from sdy_jax.base.errors import ArgumentError

MEANT = {
    "in_specs": ("in_shardings", "jax.shard_map's; here a spec says how the whole array is split"),
    "out_specs": ("out_shardings", "jax.shard_map's; here a spec says how the whole array is split"),
    "in_axis_resources": ("in_shardings", "an old name of pjit's"),
    "out_axis_resources": ("out_shardings", "an old name of pjit's"),
    "static_args": ("static_argnames", ""),
    "donate": ("donate_argnums", ""),
    "devices": ("mesh", "jax.make_mesh takes devices"),
    "device_mesh": ("mesh", ""),
}
"""Options of others: ours, and whose they are."""

_WITHOUT = {
    "axis_names": "jax.shard_map's: every axis of the mesh may be used; sdy.manual_computation is manual on some",
    "check_vma": "jax.shard_map's",
    "check_rep": "jax.shard_map's",
    "abstracted_axes": "jax.jit's, and deprecated there",
}
"""Options of others that have no use here."""


def nearest(name: object, known: Iterable[str]) -> str:
    """The known name that somebody meant most likely; empty where none is like it.

    >>> nearest("wire", ["memory", "wire_bytes"])
    'wire_bytes'
    """
    known, name = list(known), str(name)
    whole = difflib.get_close_matches(name, known, 1)
    parts = [other for other in known if name.lower() in other.lower().split("_")]
    return (whole or parts or [""])[0]


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """`did you mean 'all_gather'? `, to stand before what is expected; empty where nothing is like it."""
    near = nearest(name, known)
    return f"did you mean {near!r}? " if near else ""


def unknown_option(known: Collection[str], options: Mapping[str, Any]) -> str:
    """What is wrong with the first option that a function of ours has not; empty where it has all."""
    for name in options:
        if name in known:
            continue
        if name in _WITHOUT:
            return f"has no option {name!r}, which is {_WITHOUT[name]}; to fix: leave it out"
        ours, whose = MEANT.get(name, ("", ""))
        if ours in known:
            return f"has no option {name!r}{f' ({whose})' if whose else ''}; to fix: write {ours}="
        near = nearest(name, known)
        return f"has no option {name!r}; {f'did you mean {near}=?' if near else f'it has {listed(known)}'}"
    return ""


def listed(names: Iterable[str]) -> str:
    """`mesh, in_shardings`, or that there are none."""
    return ", ".join(names) or "none"


def misfit(fun: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> ArgumentError | None:
    """The error about a call that a function of ours does not take; None where it takes it."""
    signature, name = inspect.signature(fun), fun.__name__
    first = next(iter(signature.parameters), "")
    if first in ("self", "cls"):
        name = fun.__qualname__.split(".")[-2] if name == "__init__" else name
        rest = list(signature.parameters.values())[1:]
        signature, args = signature.replace(parameters=rest), args[1:]
    problem = unknown_option([p.name for p in signature.parameters.values() if p.kind in _NAMED], kwargs)
    if problem and not any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
        return ArgumentError(f"{name} {problem}")
    try:
        check_call(name, signature, args, kwargs)
    except ArgumentError as error:
        return error
    return None


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
        problem = _unexpected(signature, kwargs) or _missing(signature, args, kwargs) or _surplus(signature, args)
        problem = problem or str(error)
        problem = f"got {problem}" if problem.startswith("multiple") else problem
        its = " Its" if problem.endswith("?") else "; its"
        raise ArgumentError(f"{name}() {problem}{its} parameters are {_without_annotations(signature)}") from None


def _unexpected(signature: inspect.Signature, kwargs: Mapping[str, Any]) -> str:
    parameters = signature.parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return ""
    known = [p.name for p in parameters if p.kind in _NAMED]
    name = next((name for name in kwargs if name not in known), None)
    if name is None:
        return ""
    near = nearest(name, known)
    return f"got an unexpected keyword argument {name!r}{f'; did you mean {near!r}?' if near else ''}"


def _missing(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    parameters = signature.parameters.values()
    positional = [p for p in parameters if p.kind in _POSITIONAL][len(args) :]
    named = [p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    for kind, left in (("positional", positional), ("keyword-only", named)):
        names = [repr(p.name) for p in left if p.default is p.empty and p.name not in kwargs]
        if names:
            *first, last = names
            all_ = f"{', '.join(first)}{',' * (len(first) > 1)} and {last}" if first else last
            return f"missing {len(names)} required {kind} argument{'s' * (len(names) > 1)}: {all_}"
    return ""


def _surplus(signature: inspect.Signature, args: Sequence[Any]) -> str:
    parameters = signature.parameters.values()
    count = sum(p.kind in _POSITIONAL for p in parameters)
    if len(args) <= count or any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        return ""
    were = "was" if len(args) == 1 else "were"
    return f"takes {count} positional argument{'' if count == 1 else 's'} but {len(args)} {were} given"


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _without_annotations(signature: inspect.Signature) -> inspect.Signature:
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return signature.replace(parameters=plain, return_annotation=inspect.Signature.empty)
