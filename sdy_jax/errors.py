"""The exceptions of sdy_jax: one small tree.

`SdyError` and its subclasses report a mistake of the user; `InternalError` reports one of ours. Every message says
what was given, where (argument path, source line or MLIR location), and what would be right.
"""

from __future__ import annotations

import math
from typing import Any


class SdyError(Exception):
    """Base of everything that sdy_jax raises on purpose."""


class ShardingError(SdyError, ValueError):
    """A mesh, sharding or sharding rule that breaks a rule of the SDY dialect or does not fit its tensor."""


class ArgumentError(SdyError, TypeError, ValueError):
    """Arguments that a function does not take; jit raises a TypeError or a ValueError for the same."""


class DeletedArrayError(SdyError, RuntimeError):
    """An argument whose memory is gone: it was donated before, or deleted. jit raises a RuntimeError for the same."""


class ParseError(SdyError, ValueError):
    """Text that is not a well-formed mesh, sharding, rule or module."""


class UnsupportedError(SdyError, NotImplementedError):
    """Something that is valid but cannot be partitioned, raised where falling back silently was not wanted."""


class MemoryLimitError(SdyError):
    """No program was found that keeps within `memory=`; `least`: the bytes that a device holds by what holds least of
    all that was found."""

    least: float = math.inf


class ContractError(SdyError):
    """A plan does what its function's `budget=` or `strict` does not allow; `plan` is the plan."""

    plan: Any = None


class PinnedPlanError(SdyError):
    """A plan that `plan=` pins is not that of the function, or not as it was written; `diff`: what differs between the
    two, as `Plan.diff` says it, where that is it."""

    def __init__(self, message: str, diff: Any = None):
        super().__init__(message)
        self.diff = diff


class ProcessError(SdyError, RuntimeError):
    """The processes of a program do not run the same, or some of them do not come."""


class InternalError(SdyError, AssertionError):
    """A broken invariant of sdy_jax itself."""

    def __init__(self, message: str):
        super().__init__(f"{message} (this is a bug in sdy_jax)")


def with_article(kind: type) -> str:
    """`a dict`, `an int`."""
    return f"{'an' if kind.__name__[0] in 'aeiouAEIO' else 'a'} {kind.__name__}"
