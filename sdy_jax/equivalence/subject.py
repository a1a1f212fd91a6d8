"""The programs of a function that are verified, as text with arguments: the function's, and its derivative's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from sdy_jax.ir.graph import Graph
from sdy_jax.ir.operations import copied
from sdy_jax.passes.inline_calls import inline_calls


def subjects_of(
    function: PartitionedFunction[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    derivatives: bool,
    seed: int,
) -> tuple[Program, list[Subject], str]:
    """The traced program of a call, what is verified of it, and why that has no derivatives, if it has none.

    Raises:
        UnsupportedError: it closes over values of an outer trace.
    """
    program, leaves = traced_program(function, args, kwargs), jax.tree.leaves((args, kwargs))
    leaves = leaves if len(leaves) == len(program.inputs) else [None] * len(program.inputs)  # some are static
    given = [_array(x) for x in (*program.constants, *leaves)]
    plain = _without_us(lambda: plain_text(function, args, kwargs))
    first = _subject(program, plain, source_of(function), given, seed)
    found = [first]
    backward, why_not = _transposed(function, args, kwargs) if derivatives else (None, "")
    if backward is not None:
        known = first.values[len(program.constants) :]
        constants = [_array(x) for x in backward.program.constants]
        more = [None] * (len(backward.program.inputs) - len(known))
        values, plain = [*constants, *known, *more], _without_us(backward.plain)
        found.append(_subject(backward.program, plain, first.source, values, seed + 1, is_derivative=True))
    return program, found, why_not


def _without_us(lowered: Callable[[], str]) -> str:
    """The text of what jax makes of a function; empty where it lowers it for a mesh only."""
    try:
        return lowered()
    except Exception:  # of which the traced program is there
        return ""


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
