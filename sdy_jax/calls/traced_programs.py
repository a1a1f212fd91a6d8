"""The programs of a partitioned function that are not planned here: its own as it is traced, and its derivative's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from sdy_jax.annotate.arguments import Leaf
from sdy_jax.annotate.program import Program
from sdy_jax.calls.options import Options
from sdy_jax.calls.partition import partition
from sdy_jax.calls.partitioned_function import PartitionedFunction
from sdy_jax.jax_internals.jit import jit
from sdy_jax.loading.loaded_function import LoadedFunction


def traced_program(function: PartitionedFunction[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
    """The program of a call as it is traced, before anything is planned."""
    planned = function._function
    return planned.program(planned.arguments(args, kwargs))


def options_of(function: PartitionedFunction[..., Any]) -> Options:
    """The options of a partitioned function."""
    return function._function.options


def name_of(function: PartitionedFunction[..., Any]) -> str:
    """What messages call a partitioned function."""
    return function._function.name


def source_of(function: PartitionedFunction[..., Any]) -> str:
    """The line at which a function was partitioned."""
    return function._function.source


def size_of_mesh(function: PartitionedFunction[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """How many devices the mesh of a call has; of several the first."""
    planned = function._function
    return int(planned.mesh_of(planned.given(args, kwargs)[0]).size)


def plain_results(function: PartitionedFunction[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The leaves of what the function returns under `jax.jit`; of random keys the words."""
    leaves, run = _of_leaves(function, args, kwargs)
    found = jax.tree.leaves(jit(run)(*(leaf.value for leaf in leaves)))
    return [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in found]


def plain_text(function: PartitionedFunction[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """What jax makes of the function without us, as StableHLO for one CPU: its arguments are the leaves of the call.
    Empty for programs from text, which are what they say."""
    if isinstance(function._function.fun, LoadedFunction):
        return ""
    leaves, run = _of_leaves(function, args, kwargs)
    return _lowered(run, [_type_of(leaf) for leaf in leaves])


def _of_leaves(
    function: PartitionedFunction[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Sequence[Leaf], Callable[..., Any]]:
    """The leaves of a call that are not static, and the plain function of them."""
    planned = function._function
    leaves, tree, statics = planned.given(args, kwargs)

    def run(*given: Any) -> Any:
        positional, named = jax.tree.unflatten(tree, given)
        return planned.fun(*statics.merged(positional), **named, **dict(statics.named))

    return leaves, run


def _lowered(run: Callable[..., Any], types: Sequence[Any]) -> str:
    traced = jit(run, keep_unused=True).trace(*types)
    module = traced.lower(lowering_platforms=("cpu",)).compiler_ir("stablehlo")
    return str(module.operation.get_asm(enable_debug_info=False, print_generic_op_form=True))


@dataclasses.dataclass(frozen=True)
class Transposed:
    """The derivative of a function: its program, and what jax makes of it without us."""

    program: Program
    plain: Callable[[], str]


def transposed(
    function: PartitionedFunction[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Transposed | None:
    """The program that takes the leaves of a call and a cotangent for every inexact result, and returns the gradients
    of all inexact leaves, laid out like these; None where there are none, nothing to differentiate, or no derivatives,
    as of programs from text."""
    planned = function._function
    if isinstance(planned.fun, LoadedFunction) and not planned.fun.has_derivatives:
        return None
    call, (_, run) = planned.arguments(args, kwargs), _of_leaves(function, args, kwargs)
    program = planned.program(call)
    results = program.stated_results
    smooth, wanted = _smooth(call.leaves), _smooth(results)
    if not smooth or not wanted:
        return None
    cotangents = [results[i] for i in wanted]
    specs = [leaf.spec for leaf in call.leaves], [leaf.spec for leaf in cotangents]
    backward = _backward(run, smooth, wanted)
    backward.__name__ = f"{planned.name}_backward"
    made = partition(
        backward,
        mesh=call.mesh,
        in_shardings=specs,
        out_shardings=tuple(specs[0][i] for i in smooth),
        **{name: getattr(planned.options, name) for name in _KEPT},
    )
    made._function.traced.is_typed = call.are_typed
    called = [_type_of(leaf) for leaf in call.leaves], [_type_of(leaf) for leaf in cotangents]
    return Transposed(traced_program(made, called, {}), lambda: plain_text(made, called, {}))


def _smooth(leaves: Sequence[Leaf]) -> list[int]:
    """The indices of floating-point and complex leaves."""
    return [i for i, leaf in enumerate(leaves) if jnp.issubdtype(_type_of(leaf).dtype, jnp.inexact)]


def _backward(run: Callable[..., Any], smooth: Sequence[int], wanted: Sequence[int]) -> Callable[..., Any]:
    """The gradients of some leaves that a function takes, from cotangents of some that it returns."""

    def backward(given: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        def smooth_results(*xs: Any) -> list[Any]:
            merged = list(given)
            for i, x in zip(smooth, xs, strict=True):
                merged[i] = x
            found = jax.tree.leaves(run(*merged))
            return [found[i] for i in wanted]

        _, pull = jax.vjp(smooth_results, *(given[i] for i in smooth))
        return pull(list(cotangents))

    return backward


_KEPT = ("uneven", "layouts")
"""The options of a function with which its derivative is traced; others are about planning."""


def _type_of(leaf: Leaf) -> jax.ShapeDtypeStruct:
    value = leaf.value if isinstance(leaf.value, jax.ShapeDtypeStruct) else jax.typeof(leaf.value)
    return jax.ShapeDtypeStruct(value.shape, value.dtype, weak_type=getattr(value, "weak_type", False))
