"""Calls of the host as one op of ours, which jax does not know as a callback until it lowers it.

jax refuses a program with callbacks if it is on more meshes than one, and a partitioned one is on the user's mesh and
on the refined one. Each device that comes to such a call does it, so the device does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

Bind = Callable[..., Sequence[Any]]
"""Binds jax's primitive to the operands, and returns its results."""


def host_call(bind: Bind, *operands: Any) -> list[Any]:
    """What `bind` of the operands returns, which is a callback."""
    traced = jax.make_jaxpr(lambda *xs: list(bind(*xs)))(*operands)
    types, does = tuple(traced.out_avals), frozenset(traced.effects)
    results: list[Any] = host_call_p.bind(*operands, bind=bind, types=types, does=does)
    return results


host_call_p = Primitive("sdy_host_call")
host_call_p.multiple_results = True
host_call_p.def_effectful_abstract_eval(lambda *_, types, does, **__: (types, does))


def _lower(ctx: mlir.LoweringRuleContext, *xs: Any, bind: Bind, **_: Any) -> Sequence[Any]:
    found: Sequence[Any] = mlir.lower_fun(bind, multiple_results=True)(ctx, *xs)
    return found


mlir.register_lowering(host_call_p, _lower, cacheable=False)  # on TPUs each has a channel of its own


def _batch(values: Sequence[Any], dims: Sequence[int | None], *, bind: Bind, **_: Any) -> tuple[list[Any], list[int]]:
    results = jax.vmap(lambda *xs: list(bind(*xs)), tuple(dims))(*values)
    return results, [0] * len(results)


batching.primitive_batchers[host_call_p] = _batch
