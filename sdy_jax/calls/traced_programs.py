"""The programs of a partitioned function that are not planned here: its own as it is traced, and its derivative's."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from sdy_jax.annotate.arguments import Leaf, match_prefix
from sdy_jax.annotate.program import Program
from sdy_jax.calls.options import Options
from sdy_jax.calls.partition import partition
from sdy_jax.calls.partitioned_function import PartitionedFunction
from sdy_jax.loading.loaded_function import LoadedFunction


def traced_program(function: PartitionedFunction[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
    """The program of a call as it is traced, before anything is planned."""
    planned = function._function
    return planned.traced.program(planned.arguments(args, kwargs))


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
    planned = function._function
    positional, named, statics = planned.split(args, kwargs)

    def run(positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return planned.fun(*statics.merged(positional), **named, **dict(statics.named))

    found = jax.tree.leaves(jax.jit(run)(positional, named))
    return [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in found]


def transposed_program(
    function: PartitionedFunction[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Program | None:
    """The program that takes the leaves of a call and a cotangent for every inexact result, and returns the gradients
    of all inexact leaves, laid out like these; None where there are none, nothing to differentiate, or no derivatives,
    as of programs from text."""
    planned = function._function
    if isinstance(planned.fun, LoadedFunction) and not planned.fun.has_derivatives:
        return None
    leaves, tree, statics = planned.given(args, kwargs)
    values = [leaf.value if isinstance(leaf.value, jax.ShapeDtypeStruct) else jax.typeof(leaf.value) for leaf in leaves]
    smooth = [i for i, value in enumerate(values) if jnp.issubdtype(value.dtype, jnp.inexact)]

    def run(*given: Any) -> Any:
        positional, named = jax.tree.unflatten(tree, given)
        return planned.fun(*statics.merged(positional), **named, **dict(statics.named))

    types = planned.types_of_results(planned.arguments(args, kwargs))
    results = match_prefix(planned.options.out_shardings, types, "result", "out_shardings")
    wanted = [i for i, leaf in enumerate(results) if jnp.issubdtype(leaf.value.dtype, jnp.inexact)]
    if not smooth or not wanted:
        return None

    def backward(given: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        def smooth_results(*xs: Any) -> list[Any]:
            merged = list(given)
            for i, x in zip(smooth, xs, strict=True):
                merged[i] = x
            found = jax.tree.leaves(run(*merged))
            return [found[i] for i in wanted]

        _, pull = jax.vjp(smooth_results, *(given[i] for i in smooth))
        return pull(list(cotangents))

    cotangents = [results[i] for i in wanted]
    specs = [leaf.spec for leaf in leaves], [leaf.spec for leaf in cotangents]
    backward.__name__ = f"{planned.name}_backward"
    options = {f.name: getattr(planned.options, f.name) for f in dataclasses.fields(Options) if f.name in _KEPT}
    made = partition(
        backward,
        mesh=planned.mesh_of(leaves),
        in_shardings=specs,
        out_shardings=tuple(specs[0][i] for i in smooth),
        **options,
    )
    return traced_program(made, (values, [_type(leaf) for leaf in cotangents]), {})


_KEPT = ("uneven", "layouts")
"""The options of a function with which its derivative is traced; others are about planning."""


def _type(leaf: Leaf) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.value.shape, leaf.value.dtype)
