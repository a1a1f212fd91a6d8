"""A plain function traced to a program, of which the rules of ops are asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.extend.core.primitives import scan_p
from jax.extend.mlir import ir

from sdy_jax.annotate import regions
from sdy_jax.annotate.equations import all_equations
from sdy_jax.errors import SdyError
from sdy_jax.ir.graph import Graph, Value
from sdy_jax.ir.operations import copied
from sdy_jax.jax_internals.scans import scan_parts
from sdy_jax.jax_internals.tracing import trace_and_lower
from sdy_jax.lowering.prepare.dead_code import erase_dead_code
from sdy_jax.passes.inline_calls import inline_calls

PLATFORM = "cpu"
"""For which references are lowered, so that a rule is the same wherever its kernel runs. Chosen: all have it."""


@dataclass(frozen=True, eq=False)
class ReferenceProgram:
    """A function in StableHLO, in one function. The first arguments of its module are arrays that it closes over."""

    graph: Graph
    captured: tuple[np.ndarray, ...]

    @property
    def arguments(self) -> list[Value]:
        """Those of the function itself."""
        return self.graph.arguments[len(self.captured) :]

    @property
    def closed_over(self) -> list[Value]:
        return self.graph.arguments[: len(self.captured)]


def traced(fun: Callable[..., Sequence[Any]], types: Sequence[jax.ShapeDtypeStruct]) -> ReferenceProgram:
    """A function of arrays, which returns a list, as a program for whole arrays of these types, on no mesh.

    Raises:
        SdyError: it closes over values that are traced.
    """
    x64 = jnp.result_type(float) == np.float64
    with ThreadPoolExecutor(1) as thread:  # where nothing of the trace around is seen, nor its source lines
        return thread.submit(copy_context().run, _traced, fun, types, x64).result()


def _traced(fun: Callable[..., Sequence[Any]], types: Sequence[jax.ShapeDtypeStruct], x64: bool) -> ReferenceProgram:
    with jax.enable_x64(x64):
        module, _, _, captured = trace_and_lower(fun, (tuple(types), {}), None, PLATFORM)
    if any(isinstance(x, jax.core.Tracer) for x in captured):
        raise SdyError("partition_like: the reference closes over a traced array; to fix: make it an argument")
    with module.context, ir.Location.unknown(module.context):
        own = copied(module)
        inline_calls(own)
        graph = erase_dead_code(Graph(own))
    return ReferenceProgram(graph, tuple(map(_words, captured)))


def _words(x: Any) -> np.ndarray:
    """An array on the host; of random keys the words."""
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def side_by_side(fun: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
    """The function with loops that only map, as those of `jax.lax.map`, as `jax.vmap` of what they run."""

    def run(*xs: Any) -> Sequence[Any]:
        region = regions.trace(fun, xs)
        if not any(eqn.primitive is scan_p for eqn in all_equations(region.region)):
            return fun(*xs)
        values = (*region.captured, *xs)
        return regions.evaluated(region.region, values, range(len(region.region.out_avals)), _mapped)

    return run


def _mapped(eqn: Any, operands: Sequence[Any]) -> Sequence[Any] | None:
    """What a loop that carries nothing computes; None for others, and for all that is no loop."""
    if eqn.primitive is not scan_p:
        return None
    constants, carried, _ = scan_parts(eqn)
    if carried or eqn.effects or not eqn.params["length"] or len(operands) == constants:
        return None
    dims = [None] * constants + [0] * (len(operands) - constants)
    found: Sequence[Any] = jax.vmap(jaxpr_as_fun(eqn.params["jaxpr"]), in_axes=dims)(*operands)
    return found
