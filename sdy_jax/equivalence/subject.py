"""The programs of a function that are verified, as text with arguments: the function's, and its derivative's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.mlir import ir

from sdy_jax.annotate.program import Program
from sdy_jax.calls.partitioned_function import PartitionedFunction
from sdy_jax.calls.traced_programs import Transposed, plain_text, source_of, traced_program, transposed
from sdy_jax.equivalence.drawing import arguments
from sdy_jax.equivalence.job import Subject
from sdy_jax.errors import InternalError, UnsupportedError
from sdy_jax.ir.custom_ops import Kernel, kept_in
from sdy_jax.ir.graph import Graph
from sdy_jax.ir.operations import copied
from sdy_jax.passes.inline_calls import inline_calls


@dataclass(frozen=True)
class Subjects:
    """What is verified of a call.

    Attributes:
        programs: the traced ones, whose contexts keep the functions of this process that they call.
        found: the function's program, and its derivative's.
        notes: what is not compared, and why.
    """

    programs: tuple[Program, ...]
    found: tuple[Subject, ...]
    notes: tuple[str, ...] = ()

    @property
    def program(self) -> Program:
        """That of the function."""
        return self.programs[0]


def subjects_of(
    function: PartitionedFunction[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    derivatives: bool,
    seed: int,
) -> Subjects:
    """The programs of a call.

    Raises:
        UnsupportedError: it closes over values of an outer trace.
    """
    program, leaves = traced_program(function, args, kwargs), jax.tree.leaves((args, kwargs))
    leaves = leaves if len(leaves) == len(program.inputs) else [None] * len(program.inputs)  # some are static
    given = [_array(x) for x in (*program.constants, *leaves)]
    plain, why_traced = _without_us(lambda: plain_text(function, args, kwargs))
    first = _subject(program, plain, source_of(function), given, seed)
    notes = [f"{_TRACED}: {why_traced}"] if why_traced else []
    if not derivatives:
        return Subjects((program,), (first,), tuple(notes))
    if not all(isinstance(each, Kernel) for each in kept_in(program.module.context)):
        return Subjects((program,), (first,), (*notes, f"{_NONE}: it calls functions of this process"))
    backward, why_not = _transposed(function, args, kwargs)
    if backward is None:
        return Subjects((program,), (first,), (*notes, f"{_NONE}: {why_not}"))
    known = first.values[len(program.constants) :]
    more = [None] * (len(backward.program.inputs) - len(known))
    values = [*map(_array, backward.program.constants), *known, *more]
    plain, _ = _without_us(backward.plain)
    second = _subject(backward.program, plain, first.source, values, seed + 1, is_derivative=True)
    return Subjects((program, backward.program), (first, second), tuple(notes))


_NONE = "no derivatives"
_TRACED = "the plain program is the one that is traced, without its meshes, as jax does not lower it for one device"


def is_bound_here(program: Program) -> bool:
    """Whether a program calls functions of this process: callbacks, ops of users, kernels."""
    return bool(kept_in(program.module.context))


def _without_us(lowered: Callable[[], str]) -> tuple[str, str]:
    """The text of what jax makes of a function; empty where it lowers it for a mesh only, and then why."""
    try:
        return lowered(), ""
    except Exception as error:  # of which the traced program is there
        return "", str(error).partition("\n")[0] or type(error).__name__


_NOTHING = "it is a program from text, or takes or returns no floating-point numbers"


def _transposed(
    function: PartitionedFunction[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Transposed | None, str]:
    """The derivative; where there is none, why: jax does not differentiate every function that it runs."""
    try:
        found = transposed(function, args, kwargs)
    except InternalError:
        raise
    except Exception as error:
        return None, str(error).partition("\n")[0] or type(error).__name__
    return (
        found,
        "" if found is not None else "it is a program from text, or takes or returns no floating-point numbers",
    )


def _subject(
    program: Program,
    plain: str,
    source: str,
    given: Sequence[np.ndarray | None],
    seed: int,
    is_derivative: bool = False,
) -> Subject:
    first = len(program.constants)
    return Subject(
        program.name,
        source,
        program.module.get_asm(enable_debug_info=True),
        "" if "sdy.manual_computation" in plain else plain,
        program.mesh_name,
        tuple(arguments(_inlined(program), given, seed)),
        program.outputs,
        frozenset(first + i for i in program.automatic_arguments),
        program.automatic_results,
        is_derivative,
    )


def _inlined(program: Program) -> Graph:
    """The program in one function, so that what indexes what is seen."""
    module = copied(program.module)
    with module.context, ir.Location.unknown(module.context):
        inline_calls(module)
    return Graph(module)


def _array(x: Any) -> np.ndarray | None:
    """A value as the module takes it; None for what is only a type."""
    if isinstance(x, jax.core.Tracer):
        raise UnsupportedError("verify: the function closes over values of an outer trace; call it outside of that")
    return None if x is None or isinstance(x, jax.ShapeDtypeStruct) else words_of(x)


def words_of(x: Any) -> np.ndarray:
    """An array on the host, as a module takes it: of random keys the words."""
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(x))
    return np.asarray(x, jax.typeof(x).dtype)
