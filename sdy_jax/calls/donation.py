"""Which leaves of a call are donated, by the options of jit, and what becomes of them."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any

import jax
from jax.tree_util import PyTreeDef

from sdy_jax.annotate.arguments import Leaf
from sdy_jax.annotate.automatic import AUTO
from sdy_jax.annotate.trees import by_argument
from sdy_jax.calls.options import Options
from sdy_jax.calls.planned_call import PlannedCall
from sdy_jax.calls.statics import StaticParameters, Statics
from sdy_jax.errors import DeletedArrayError
from sdy_jax.ir.hidden_frames import users_stack_level
from sdy_jax.jax_internals.donation import PASSES_DONATED, delete_donated
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
    args, named = by_argument(tree)
    count = len(args) + len(statics.positional)
    dynamic = (position for position in range(count) if position not in statics.positions)
    found = [which for position, (_, which) in zip(dynamic, args, strict=True) if position in donated.positions]
    found += [which for name, (_, which) in named.items() if name in donated.names]
    return frozenset(i for which in found for i in which)


def warn_of_unusable(call: PlannedCall, mesh: AnyMesh, donated: Collection[int]) -> None:
    """Warns as jit does of donated arguments whose memory no result can take over, where some have their types: of the
    others jit knows. Where a result is left open it warns of none, as XLA finds out."""
    program = call.plan.program
    if any(leaf.spec is None or leaf.spec is AUTO for leaf in program.stated_results):
        return
    results = call.results
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


def deleting_donated(called: Callable[..., Any], fun: Callable[..., Any], options: Options) -> Callable[..., Any]:
    """The jitted function `called` of `fun`, after whose calls jit knows which arguments were donated.

    It takes 35 us of a call with 300 arrays (2026-11), so only where jit's C++ does not know it by itself.
    """
    if not PASSES_DONATED or (options.donate_argnums is None and options.donate_argnames is None):
        return called
    donated = StaticParameters.of(fun, options.donate_argnums, options.donate_argnames)

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return called(*args, **kwargs)
        finally:
            given = [args[i] for i in donated.positions if 0 <= i < len(args)]
            given += [kwargs[name] for name in donated.names if name in kwargs]
            delete_donated(jax.tree.leaves(given))

    return call


def delete_donated_elsewhere(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Has jit refuse the arguments that others have donated."""
    if PASSES_DONATED:
        delete_donated(jax.tree.leaves((args, kwargs)))


def deleted_argument(leaves: Iterable[Leaf], name: str) -> DeletedArrayError | None:
    """The error of a call of the function `name` with an array that is deleted; None if there is none."""
    for leaf in leaves:
        x = leaf.value
        if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.is_deleted():
            shape = ",".join(map(str, x.shape))
            return DeletedArrayError(
                f"Array has been deleted with shape={x.dtype}[{shape}]. It is `{leaf.path}` of {name}(), and was "
                "donated to a function before, or deleted; to fix: pass what that function returned, or do not donate "
                "it there (donate_argnums, donate_argnames)"
            )
    return None
