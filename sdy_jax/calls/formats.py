"""Layouts of arrays in memory, stated by a `jax.experimental.layout.Format`: jit is told of them with the shardings."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental.layout import Format

from sdy_jax.annotate.arguments import SPEC_TYPES, match_prefix
from sdy_jax.calls.arguments import Arguments
from sdy_jax.calls.planned_call import PlannedCall
from sdy_jax.errors import UnsupportedError
from sdy_jax.runtime.layouts import named


def states_layouts(specs: Any) -> bool:
    """Whether a tree of specifications has a `Format`."""
    stated = jax.tree.leaves(specs, is_leaf=lambda spec: isinstance(spec, SPEC_TYPES))
    return any(isinstance(spec, Format) for spec in stated)


def formats_of_arguments(call: Arguments, planned: PlannedCall) -> Any:
    """`in_shardings` for jit.

    Raises:
        UnsupportedError: there are keyword arguments, of which jit takes no shardings.
    """
    shardings = [named(sharding, call.mesh) for sharding in planned.entering]
    formats = [
        None if leaf.layout is None else Format(leaf.layout, sharding)
        for leaf, sharding in zip(call.given, shardings, strict=True)
    ]
    args, kwargs = jax.tree.unflatten(call.tree, formats)
    if kwargs:
        raise UnsupportedError(
            f"in_shardings states the layout of an argument in memory, and the call has keyword arguments "
            f"({', '.join(kwargs)}), with which jit takes none; to fix: pass all arguments by position"
        )
    return args


def formats_of_results(specs: Any, planned: PlannedCall) -> Any:
    """`out_shardings` for jit, by the user's tree of specifications."""
    program = planned.plan.program
    results = jax.tree.unflatten(program.out_tree, program.out_info)
    leaves = match_prefix(specs, results, "result", "out_shardings")
    shardings = jax.tree.leaves(planned.results)
    formats = [s if leaf.layout is None else Format(leaf.layout, s) for leaf, s in zip(leaves, shardings, strict=True)]
    return jax.tree.unflatten(program.out_tree, formats)
