"""Changes of sizes: a dimension that its axes do not divide becomes the next multiple."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

from sdy_jax.annotate.program import Program
from sdy_jax.errors import SdyError
from sdy_jax.ir.operations import main_function
from sdy_jax.ir.stored_shardings import function_shardings
from sdy_jax.plan.fixes.change import Change
from sdy_jax.plan.plan import Plan
from sdy_jax.representation.mesh import axes_size


def size_changes(plan: Plan) -> Iterator[Change]:
    """A multiple for each size of an argument that is stated to be split by axes which do not divide it, for all
    dimensions of that size. The function is traced with the arguments that it would have then."""
    if plan.resized is None:
        return
    for size, (shards, paths) in _uneven(plan).items():
        larger = math.ceil(size / shards) * shards
        text = f"{larger} instead of {size} in {', '.join(f'`{path}`' for path in paths[:2])}"
        more = f" and {len(paths) - 2} more" if len(paths) > 2 else ""
        yield Change(
            "size", plan.source, f"a multiple of {shards}: {text}{more}", partial(_resized, plan, size, larger)
        )


def _resized(plan: Plan, size: int, larger: int) -> Program:
    """The program of larger arguments.

    Raises:
        SdyError: the function does not take such arguments.
    """
    assert plan.resized is not None
    try:
        return plan.resized(size, larger)
    except Exception as error:  # the user's function was written for other sizes
        raise SdyError(f"the function does not take {larger} instead of {size}") from error


def _uneven(plan: Plan) -> dict[int, tuple[int, list[str]]]:
    """Sizes that the axes stated for them do not divide: by how many blocks, and of which arguments."""
    found: dict[int, tuple[int, list[str]]] = {}
    traced, mesh = plan.traced, plan.program.mesh
    shardings = function_shardings(main_function(traced.module), "arg_attrs")[len(traced.constants) :]
    for info, sharding, path in zip(traced.in_info, shardings, traced.inputs, strict=True):
        if sharding is None or sharding.mesh != traced.mesh_name:
            continue
        with suppress(TypeError):  # symbolic sizes
            for size, axes in zip(info.shape, sharding.axes, strict=False):
                shards = axes_size(axes, mesh)
                if size % shards:
                    most, paths = found.get(size, (1, []))
                    found[size] = math.lcm(most, shards), [*paths, path]
    return found
