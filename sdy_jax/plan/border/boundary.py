"""The arguments and results of a partitioned program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jax.extend.mlir import ir

from sdy_jax.annotate.program import Program
from sdy_jax.ir.operations import function_type, main_function
from sdy_jax.ir.stored_shardings import function_shardings
from sdy_jax.ir.tensor_types import shape_and_dtype
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.representation.type_text import type_text


@dataclass(frozen=True, slots=True)
class BoundaryValue:
    """An argument or a result: its path, its type with axes, and its sharding."""

    path: str
    type: str
    sharding: TensorSharding


class BoundaryValues(NamedTuple):
    """All of them, in order; `constants` are the arrays that a function closes over."""

    arguments: tuple[BoundaryValue, ...]
    constants: tuple[BoundaryValue, ...]
    results: tuple[BoundaryValue, ...]


def boundary_values(program: Program) -> BoundaryValues:
    """The arguments, closed-over arrays and results of a partitioned program."""
    main = main_function(program.module)
    type_ = function_type(main)
    paths = [*(f"constant {i}" for i in range(len(program.constants))), *program.inputs]
    given = _boundary(paths, type_.inputs, function_shardings(main, "arg_attrs"), program)
    results = _boundary(program.outputs, type_.results, function_shardings(main, "res_attrs"), program)
    count = len(program.constants)
    return BoundaryValues(tuple(given[count:]), tuple(given[:count]), tuple(results))


def _boundary(
    paths: Sequence[str], types: Sequence[ir.Type], shardings: Sequence[TensorSharding | None], program: Program
) -> list[BoundaryValue]:
    found = []
    for path, type_, stated in zip(paths, types, shardings, strict=True):
        shape, dtype = shape_and_dtype(type_)
        sharding = stated or TensorSharding.replicated(program.mesh_name, len(shape or ()))
        found.append(BoundaryValue(path, type_text(dtype, shape, sharding), sharding))
    return found
