"""Which leaves of a call are donated, by the options of jit."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import jax
from jax.tree_util import PyTreeDef

from sdy_jax.calls.options import Options
from sdy_jax.calls.planned_call import PlannedCall
from sdy_jax.calls.statics import StaticParameters, Statics
from sdy_jax.ir.hidden_frames import users_stack_level
from sdy_jax.representation.named import AnyMesh
from sdy_jax.runtime.layouts import named as named_sharding


def donated_leaves(fun: Callable[..., Any], options: Options, tree: PyTreeDef, statics: Statics) -> frozenset[int]:
    """The indices of the leaves of dynamic arguments that are donated. Jit takes no notice of negative positions.

    Args:
        fun: the function.
        options: with `donate_argnums` and `donate_argnames`.
        tree: the structure of dynamic positional and keyword arguments.
        statics: the static arguments, which positions count.
    """
    if options.donate_argnums is None and options.donate_argnames is None:
        return frozenset()
    donated = StaticParameters.of(fun, options.donate_argnums, options.donate_argnames)
    args, named = jax.tree.unflatten(tree, range(tree.num_leaves))
    count = len(args) + len(statics.positional)
    dynamic = (position for position in range(count) if position not in statics.positions)
    found = [arg for position, arg in zip(dynamic, args, strict=True) if position in donated.positions]
    found += [value for name, value in named.items() if name in donated.names]
    return frozenset(jax.tree.leaves(found))


def warn_of_unusable(call: PlannedCall, mesh: AnyMesh, donated: Collection[int]) -> None:
    """Warns as jit does of donated arguments whose memory no result can take over, where some have their types: of the
    others jit knows."""
    program = call.plan.program
    results = jax.tree.leaves(call.results)
    blocks = Counter((s.shard_shape(y.shape), y.dtype) for s, y in zip(results, program.out_info, strict=True))
    types, unusable = {(y.shape, y.dtype) for y in program.out_info}, []
    for i in sorted({*donated} - call.unused):
        x = program.in_info[i]
        block = named_sharding(call.entering[i], mesh).shard_shape(x.shape), x.dtype
        if blocks[block]:
            blocks[block] -= 1
        elif (x.shape, x.dtype) in types:
            unusable.append(f"{x.dtype}[{','.join(map(str, block[0]))}]")
    if unusable:
        text = f"Some donated buffers were not usable: {', '.join(unusable)}.\nNo result that is left has such blocks."
        warnings.warn(text, stacklevel=users_stack_level())
