"""The reference of a kernel: a plain function traced to a program, its backward pass, and its work."""

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

from sdy_jax.annotate import primitives
from sdy_jax.annotate.jaxprs import all_equations
from sdy_jax.base.errors import SdyError
from sdy_jax.base.jax_primitives import scan_parts
from sdy_jax.base.jax_tracing import trace_and_lower
from sdy_jax.ir.custom_ops import StatedWork
from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.ir.kernels.work import efficiency_of
from sdy_jax.ir.operations import copied
from sdy_jax.lowering.planner.facts.fusion import is_product
from sdy_jax.lowering.planner.facts.loops import executions
from sdy_jax.lowering.planner.rewrites.preparation import erase_dead_code
from sdy_jax.shardy.passes.calls import inline_calls
from sdy_jax.shardy.propagation.data_flow import is_data_flow
from sdy_jax.shardy.rules.op_attributes import operations_of

# A plain function traced to a program, of which the rules of ops are asked.

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
        region = primitives.trace(fun, xs)
        if not any(eqn.primitive is scan_p for eqn in all_equations(region.region)):
            return fun(*xs)
        values = (*region.captured, *xs)
        return primitives.evaluated(region.region, values, range(len(region.region.out_avals)), _mapped)

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


# The backward pass of a function of arrays as another one: cotangents of its results to those of its arguments.

Flat = Callable[..., Sequence[Any]]
"""A function of arrays that returns a list of arrays."""


def smooth(types: Sequence[Any]) -> tuple[int, ...]:
    """Those of which there are derivatives: floating-point and complex numbers."""
    return tuple(i for i, type_ in enumerate(types) if jnp.issubdtype(type_.dtype, jnp.inexact))


def backward_of(fun: Flat, arguments: Sequence[int], results: Sequence[int]) -> Flat:
    """The backward pass of a function: of all its arguments, then of the cotangents of some results, it returns the
    cotangents of some arguments. Cotangents are converted to the types of results."""

    def backward(*xs: Any) -> list[Any]:
        given, cotangents = list(xs[: len(xs) - len(results)]), xs[len(xs) - len(results) :]

        def of_smooth(*ys: Any) -> list[Any]:
            merged = list(given)
            for i, y in zip(arguments, ys, strict=True):
                merged[i] = y
            outs = fun(*merged)
            return [outs[i] for i in results]

        outs, pull = jax.vjp(of_smooth, *(given[i] for i in arguments))
        return list(pull([x.astype(out.dtype) for x, out in zip(cotangents, outs, strict=True)]))

    return backward


# What a kernel performs, by what its reference does: the same operations, and nothing of memory in between.

_TRANSCENDENTAL = frozenset(("stablehlo.exponential", "stablehlo.log", "stablehlo.logistic", "stablehlo.tanh"))


def work_of(program: ReferenceProgram) -> StatedWork:
    """The work of a kernel: the operations of its reference, and its arguments and results, once each."""
    ops = [op for op in program.graph.main.walk() if op.block is not None and op.results and not _is_inside(op)]
    flops = sum([operations_of(op) * executions(op).times for op in ops if not is_data_flow(op)])
    moved = sum([value.bytes for value in (*program.arguments, *program.graph.outputs)])
    is_attention = any(op.name in _TRANSCENDENTAL for op in ops)
    share = efficiency_of(any(map(is_product, ops)), is_attention, "mosaic")
    return StatedWork(flops, moved, share, "counted of its reference")


def _is_inside(op: Op) -> bool:
    """Whether an op is in the body of another one, as that of a reduction, and counts with that."""
    parent = op.parent
    return parent is not None and parent.name != "func.func" and not is_data_flow(parent)
