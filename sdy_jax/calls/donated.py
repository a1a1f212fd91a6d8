"""Which leaves of a call are donated, by the options of jit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.tree_util import PyTreeDef

from sdy_jax.calls.options import Options
from sdy_jax.calls.statics import StaticParameters, Statics


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
