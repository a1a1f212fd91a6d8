"""Errors of devices that are out of memory get a note: what the plan holds, and its largest values.

What a call raises is explained where it is called: of compilers, and of devices that take memory when a program begins.
Most of what goes wrong later is raised where a result is waited for, in the user's code; if that ends the process, the
note is of the plans that hold most.
"""

from __future__ import annotations

import heapq
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from types import TracebackType
from typing import Any

import jax

from sdy_jax.calls.planned_function import PlannedFunction
from sdy_jax.plan.held import held_text
from sdy_jax.plan.plan import Plan

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
