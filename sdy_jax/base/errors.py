"""The exceptions of sdy_jax: one small tree. Users find them in `sdy_jax.errors`, and read its name in tracebacks.

`SdyError` and its subclasses report a mistake of the user; `InternalError` reports one of ours. Every message says
what was given, where (argument path, source line or MLIR location), and what would be right.
"""

from __future__ import annotations

import math
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
