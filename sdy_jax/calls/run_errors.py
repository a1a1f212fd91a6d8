"""Errors of a run, in terms of the plan: the op that made a NaN, and what a plan holds where memory ran out."""

from __future__ import annotations

import heapq
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from functools import cache
from types import TracebackType
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from sdy_jax.base.errors import UnsupportedError
from sdy_jax.base.jax_tracing import mesh_in_context
from sdy_jax.calls.planned_function import PlannedFunction
from sdy_jax.ir.graph import Op
from sdy_jax.ir.jax_shardings import AnyMesh
from sdy_jax.ir.locations import raising_line, short_source
from sdy_jax.plan.notices import held_text
from sdy_jax.plan.plan import Plan
from sdy_jax.runtime.meshes import auto_mesh

# What `jax_debug_nans` and `jax_debug_infs` report of a partitioned function: the op and its line.
#
# jit looks at a program's results, and where it finds such a number runs the function op by op, as if it were not
# jitted. Here that is the user's function on whole arrays: of the partitioned program no op is the user's.

_OF_AN_OP = re.compile(r"invalid value \(\w+\) encountered in \S+")
"""How jax names an op."""


def op_by_op(function: PlannedFunction, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: AnyMesh) -> Any:
    """The result of the user's function, run op by op on arrays that lie on the mesh.

    Raises:
        FloatingPointError: an op gives NaN or infinity; or the function cannot be run so.
    """
    mesh, name = auto_mesh(mesh), function.name
    own = mesh if function.traced.has_mesh_in_context else None
    try:
        with mesh_in_context(own) if isinstance(own, jax.sharding.Mesh) else nullcontext():
            args, kwargs = jax.tree.map(lambda x: _on_mesh(x, mesh), (args, kwargs))
            return function.fun(*args, **kwargs)
    except (FloatingPointError, ZeroDivisionError) as error:
        raise explained(error, name) from None
    except Exception as error:
        reason = str(error).split("\n")[0]
        raise FloatingPointError(
            f"a result of {name}() has NaN or infinity, and which op makes it is not known, because the plain function "
            f"does not run op by op: {reason}"
        ) from error


def _on_mesh(x: Any, mesh: AnyMesh) -> Any:
    """An argument as the function sees it under jit: an array, on the mesh."""
    if not isinstance(x, (jax.Array, np.ndarray)) or isinstance(x, (jax.core.Tracer, jax.Ref)):
        return x
    is_there = isinstance(getattr(x, "sharding", None), NamedSharding)
    return x if is_there else jax.device_put(x, NamedSharding(mesh, PartitionSpec()))


def explained(error: ArithmeticError, name: str) -> ArithmeticError:
    """What jax raised of the function `name`, with the line of the op."""
    text, line = str(error), raising_line(error)
    if line and _OF_AN_OP.fullmatch(text):
        error.args = (f"{text} at {short_source(line)} in {name}()",)
    elif "de-optimized" in text:
        return FloatingPointError(
            f"a result of {name}() has NaN or infinity, and op by op the plain function gives none: either it returns "
            "a constant that is one, or its compiled program rounds otherwise, or is wrong; to find out which, call "
            f"sdy_jax.verify({name}, ...) with these arguments"
        )
    return error


# Programs of others may hold custom calls and ops that only their own runtimes know: XLA says so when it compiles.

_NO_CALL = re.compile(
    r"(?:custom call to|handler registered for) \"?(?P<name>[\w.$:]+?)\"? (?:for|on a platform) (?P<platform>\w+)"
)
_NO_ELEMENTS = re.compile(r"Only dense elements.*?<\{value = (?P<value>dense_resource<[^>]*>|sparse<)", re.DOTALL)
_NO_OP = re.compile(r"'(?P<name>\w+\.[\w.]+)' op unsupported op for export to XLA")


def not_there(error: BaseException, plan: Plan) -> UnsupportedError | None:
    """The error about an op of the program that devices cannot run, with its line; None where `error` is another."""
    text = str(error)
    if (call := _NO_CALL.search(text)) is not None:
        name, platform = call["name"], call["platform"].replace("Host", "cpu")
        return UnsupportedError(
            f"{_line_of(plan, _is_called(name))}: stablehlo.custom_call @{name}: no function of this name is "
            f"registered for {platform} devices; to fix: register it before, by jax.ffi.register_ffi_target({name!r}, "
            f"..., platform={platform!r}), or run the program where it is"
        )
    if (elements := _NO_ELEMENTS.search(text)) is not None:
        line = _line_of(plan, lambda op: elements["value"] in str(op.attributes.get("value")))
        return UnsupportedError(
            f"{line}: the elements of a constant are sparse, or not in the program ({elements['value'].strip('<')}); "
            "to fix: write all of them, as dense<...>, or print the program with none elided"
        )
    if (op := _NO_OP.search(text)) is not None:
        name = op["name"]
        return UnsupportedError(
            f"{_line_of(plan, _is_called(name))}: {name}: XLA cannot compile an op of the dialect "
            f"`{name.partition('.')[0]}`; to fix: lower it to StableHLO by that dialect's own passes"
        )
    return None


def _is_called(name: str) -> Callable[[Op], bool]:
    """Whether an op has this name, or is a custom call of this target."""
    return lambda op: name in (op.name, op.text("call_target_name"))


def _line_of(plan: Plan, is_it: Callable[[Op], bool]) -> str:
    """The line of the first op that it is."""
    found = next(filter(is_it, plan.graph.main.walk()), None)
    return plan.source if found is None else short_source(found.source)


# Errors of devices that are out of memory get a note: what the plan holds, and its largest values.
#
# What a call raises is explained where it is called: of compilers, and of devices that take memory when a program
# begins. Most of what goes wrong later is raised where a result is waited for, in the user's code; if that ends the
# process, the note is of the plans that hold most.

_EXHAUSTED = "RESOURCE_EXHAUSTED"
"""How XLA calls it."""

_OURS = "sdy_jax: "
"""What our notes begin with."""

_NAMED = 3
"""Plans that are named where it may be any. Chosen: for a reader."""

_functions: weakref.WeakSet[PlannedFunction] = weakref.WeakSet()


def explain(error: BaseException, plans: Iterable[Plan]) -> None:
    """Adds a note on plans to an error that is of memory, unless it has one."""
    if is_of_memory(error) and not any(note.startswith(_OURS) for note in getattr(error, "__notes__", ())):
        for plan in plans:
            error.add_note(f"{_OURS}{held_text(plan)}")


def is_of_memory(error: BaseException) -> bool:
    """Whether a device, or a compiler for one, has too little memory."""
    return isinstance(error, jax.errors.JaxRuntimeError) and _EXHAUSTED in str(error)


def explain_if_uncaught(function: PlannedFunction) -> None:
    """From now on an error of memory that ends the process tells of this function's plans, if they hold much."""
    _functions.add(function)
    _hooked()


@cache
def _hooked() -> None:
    sys.excepthook = _explaining(sys.excepthook)


def _explaining(hook: Callable[..., Any]) -> Callable[..., Any]:
    def explained(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        with suppress(Exception):  # the user's error is what matters
            explain(error, _largest())
        hook(kind, error, traceback)

    return explained


def _largest() -> Iterator[Plan]:
    """The plans of living functions that hold most."""
    plans = [call.plan for function in list(_functions) for call in function.plans]
    yield from heapq.nlargest(_NAMED, plans, key=lambda plan: plan.memory.peak)
