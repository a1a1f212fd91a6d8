"""The exceptions of sdy_jax, one small tree, and what is said of calls that do not fit. Users find the exceptions in
`sdy_jax.errors`, and read its name in tracebacks.

`SdyError` and its subclasses report a mistake of the user; `InternalError` reports one of ours. Every message says
what was given, where (argument path, source line or MLIR location), and what would be right.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

__all__ = [
    "ArgumentError",
    "ContractError",
    "DeletedArrayError",
    "InternalError",
    "MemoryLimitError",
    "MissingMeshError",
    "ParseError",
    "PartitionWarning",
    "PinnedPlanError",
    "ProcessError",
    "SdyError",
    "ShardingError",
    "UnsupportedError",
    "VerificationError",
]


class SdyError(Exception):
    """Base of everything that sdy_jax raises on purpose.

    Example:
        try:
            plan = step.plan(state, batch)
        except sdy.SdyError as error:
            print(error)  # what was given, where, and what would be right

    See also:
        `sdy_jax.errors`: the module with all of them.
    """


class ShardingError(SdyError, ValueError):
    """A mesh, sharding or sharding rule that breaks a rule of the SDY dialect or does not fit its tensor.

    Example:
        sdy.partition(f, mesh=mesh, in_shardings=P("rows")).plan(x)  # the mesh has no axis 'rows'

    See also:
        `ParseError`: text that is no sharding at all.
    """


class MissingMeshError(ShardingError, RuntimeError):
    """Nothing says on which mesh a function is to run; jit raises a RuntimeError where specs name axes of none.

    Example:
        sdy.partition(f, in_shardings=P("data"))(x)  # under no jax.set_mesh, and x lies on no mesh

    See also:
        `partition`: its `mesh`.
    """


class ArgumentError(SdyError, TypeError, ValueError):
    """Arguments that a function does not take; jit raises a TypeError or a ValueError for the same.

    Example:
        sdy.partition(lambda x: x, mesh=mesh)("text")  # no array

    See also:
        `DeletedArrayError`: an argument that is no more.
    """


class DeletedArrayError(SdyError, RuntimeError):
    """An argument whose memory is gone: it was donated before, or deleted. jit raises a RuntimeError for the same.

    Example:
        step = sdy.partition(update, mesh=mesh, donate_argnums=0)
        step(state), step(state)  # the second call: write state = step(state)

    See also:
        `partition`: its `donate_argnums`.
    """


class ParseError(SdyError, ValueError):
    """Text that is not a well-formed mesh, sharding, rule or module.

    Example:
        sdy.sharding_constraint(x, '[{"data"')

    See also:
        `ShardingError`: a sharding that is well-formed and does not fit.
    """


class UnsupportedError(SdyError, NotImplementedError):
    """Something that is valid but cannot be partitioned, raised where falling back silently was not wanted.

    Example:
        sdy.partition(f, mesh=mesh, on_unknown="error")

    See also:
        `PartitionWarning`: what says the same by default.
    """


class MemoryLimitError(SdyError):
    """No program was found that keeps within `memory=`.

    Attributes:
        least: the bytes that a device holds by what holds least of all that was found.

    Example:
        try:
            plan = sdy.partition(step, mesh=mesh, in_shardings=sdy.AUTO, memory="16GiB").plan(state, batch)
        except sdy.MemoryLimitError as error:
            print(error.least)

    See also:
        `partition`: its `memory`.
    """

    least: float = math.inf


class ContractError(SdyError):
    """A plan does what its function's `budget=` or `strict` does not allow.

    Attributes:
        plan: the plan.

    Example:
        try:
            sdy.partition(step, mesh=mesh, budget=sdy.Budget(forbid="all_gather")).plan(state, batch)
        except sdy.ContractError as error:
            print(error.plan)

    See also:
        `Budget`, `strict`: what demands it.
    """

    plan: Any = None


class PinnedPlanError(SdyError):
    """A plan that `plan=` pins is not that of the function, or not as it was written.

    Attributes:
        diff: what differs between the two, as `Plan.diff` says it, where that is it.

    Example:
        sdy.partition(step, plan="step.plan.json").plan(state, batch)  # after an edit that changes the plan

    See also:
        `partition`: its `plan` and `on_change`.
    """

    def __init__(self, message: str, diff: Any = None):
        super().__init__(message)
        self.diff = diff


class ProcessError(SdyError, RuntimeError):
    """The processes of a program do not run the same, or some of them do not come.

    Example:
        step(state, batch)  # where another process has called something else

    See also:
        `Plan.fingerprint`: what they compare.
    """


class VerificationError(AssertionError):
    """Partitioned programs do not compute what the plain function does.

    Attributes:
        verification: the `Verification` that says what differs.

    Example:
        sdy.verify(step, state, batch).raise_for_difference()

    See also:
        `verify`: what finds it.
    """

    def __init__(self, verification: Any):
        super().__init__(str(verification))
        self.verification = verification


class InternalError(SdyError, AssertionError):
    """A broken invariant of sdy_jax itself. With `JAX_TRACEBACK_FILTERING=off` its traceback says where.

    Example:
        raise sdy.InternalError("an axis is used twice")

    See also:
        `SdyError`: its subclasses are mistakes in what was given.
    """

    def __init__(self, message: str):
        super().__init__(f"{message} (this is a bug in sdy_jax)")


class PartitionWarning(UserWarning):
    """Something moves or is computed whole because it cannot be split, an argument is moved because it lies otherwise
    than stated, or a program takes more memory than a device has; it names the op, the argument or the largest values,
    and the source line.

    Example:
        warnings.simplefilter("error", sdy.PartitionWarning)  # to stop at the first

    See also:
        `partition`: its `on_unknown`.
    """


def with_article(kind: type) -> str:
    """`a dict`, `an int`; `an array` for those of jax, traced ones included."""
    name = "array" if kind.__name__ == "ArrayImpl" or kind.__name__.endswith("Tracer") else kind.__name__
    return f"{'an' if name[0] in 'aeiouAEIO' else 'a'} {name}"


for _name in __all__:
    globals()[_name].__module__ = "sdy_jax.errors"


# What is said of calls that do not fit a function: arguments that it lacks or has not, and what would be right.

_MEANT = {
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
        ours, whose = _MEANT.get(name, ("", ""))
        if ours in known:
            return f"has no option {name!r}{f' ({whose})' if whose else ''}; to fix: write {ours}="
        near = nearest(name, known)
        return f"has no option {name!r}; {f'did you mean {near}=?' if near else f'it has {listed(known)}'}"
    return ""


def listed(names: Iterable[str]) -> str:
    """`mesh, in_shardings`, or that there are none."""
    return ", ".join(names) or "none"


def some_of(names: Sequence[str], most: int) -> str:
    """`a, b and 3 more`: so many at most, and how many are left out."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


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
