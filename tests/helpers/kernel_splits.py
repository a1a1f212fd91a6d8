"""Kernels in all the splits that their rules allow, on eight devices against one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

from sdy_jax.base.jax_primitives import compiler_of, given_by_compiler, pallas_call_p
from sdy_jax.ir.kernels.body import equations_in
from sdy_jax.ir.kernels.grid_rule import GridRule, PallasCall, _dimension, call_on_blocks, grid_rule
from sdy_jax.ir.shardings import factor_symbol

Split = Mapping[int, tuple[str, ...]]
"""Per factor of a rule the axes of the mesh along which it is split."""


def calls_of(function: Callable[..., Any], *args: Any) -> list[Any]:
    """The equations of the kernels that a function calls, in order."""
    return [e for e in equations_in(jax.make_jaxpr(function)(*args)) if e.primitive is pallas_call_p]


def rule_of(equation: Any, platform: str = "cpu") -> GridRule:
    given = given_by_compiler(compiler_of(equation.params["compiler_params"], platform))
    shapes = [x.aval.shape for x in equation.invars]
    return grid_rule(PallasCall(equation.params), shapes, given.to_body, given.to_maps)


def rules_of(function: Callable[..., Any], *args: Any) -> list[GridRule]:
    return [rule_of(equation) for equation in calls_of(function, *args)]


def why_whole(equation: Any, dim: int) -> str:
    """Why a grid dimension is no factor."""
    return _dimension(PallasCall(equation.params), dim, True, True).whole


def splits_of(factors: Sequence[int], sizes: Mapping[str, int]) -> Iterator[Split]:
    """All ways to split some factors: each by one axis or both, and two of them by an axis each."""
    axes = tuple(sizes)
    for f in factors:
        for way in (*((a,) for a in axes), axes):
            yield {f: way}
    for f, g in itertools.permutations(factors, 2):
        yield {f: axes[:1], g: axes[1:]}


def specs_of(mappings: Sequence[Any], split: Split) -> tuple[P, ...]:
    """The shardings of tensors whose dimensions begin with a factor that is split."""
    return tuple(P(*(split.get(dim[0]) if dim else None for dim in mapping)) for mapping in mappings)


def local_grids(partitioned: Callable[..., Any], *args: Any) -> list[tuple[int, ...]]:
    """The grids of the kernels that a device runs."""
    return [e.params["grid_mapping"].grid for e in calls_of(partitioned, *args)]


def call_of(
    body: Callable[..., None],
    grid: Sequence[int],
    operands: Sequence[Any],
    results: Sequence[Any],
    *,
    scratch: Sequence[Any] = (),
    scalars: Sequence[Any] = (),
    **options: Any,
) -> Any:
    """The equation of a kernel. `operands` and `results`: pairs of a shape and a `BlockSpec`, or of a shape's block and
    index map in a triple; `scalars`: shapes of those that index maps and body may read."""

    def spec(tensor: Any) -> pl.BlockSpec:
        return pl.BlockSpec(*tensor[1:]) if len(tensor) == 3 else tensor[1]

    def run(*args: Any) -> Any:
        grid_spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=tuple(grid),
            in_specs=[spec(x) for x in operands],
            out_specs=[spec(x) for x in results],
            scratch_shapes=list(scratch),
        )
        shapes = [jax.ShapeDtypeStruct(x[0], jnp.float32) for x in results]
        return pl.pallas_call(body, out_shape=shapes, grid_spec=grid_spec, **{"interpret": True, **options})(*args)

    args = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in scalars]
    (equation,) = calls_of(run, *args, *(jax.ShapeDtypeStruct(x[0], jnp.float32) for x in operands))
    return equation


def pattern(found: GridRule) -> str:
    """A rule as text, with a dot for each dimension that is whole, and the factors whose first index matters."""
    dims = range(len(found.dims))

    def tensors(mappings: Sequence[Any]) -> str:
        entries = [
            [factor_symbol(dim[0]) if dim and dim[0] in dims else "." for dim in mapping] for mapping in mappings
        ]
        return ", ".join(f"[{', '.join(each)}]" for each in entries)

    sizes = ", ".join(f"{factor_symbol(f)}={found.rule.factor_sizes[f]}" for f in dims)
    shifted = f" shifted={{{', '.join(map(factor_symbol, sorted(found.shifted)))}}}" if found.shifted else ""
    return f"({tensors(found.rule.operand_mappings)})->({tensors(found.rule.result_mappings)}) {{{sizes}}}{shifted}"


def run_on_blocks(equation: Any, args: Sequence[Any], parts: Mapping[int, int]) -> list[np.ndarray]:
    """The results of a kernel that runs once for each block of its operands, on one device.

    Args:
        parts: per factor in how many parts it is, which divide it.
    """
    call, found = PallasCall(equation.params), rule_of(equation)
    rule, grid = found.rule, list(call.grid)
    steps = [call.grid[dim] // rule.factor_sizes[factor] for factor, dim in enumerate(found.dims)]
    for factor, count in parts.items():
        grid[found.dims[factor]] //= count
    results = [np.full(x.aval.shape, np.nan, x.aval.dtype) for x in equation.outvars]
    takes_scalars = given_by_compiler(compiler_of(equation.params["compiler_params"], "cpu")).to_maps
    for where in itertools.product(*map(range, parts.values())):
        at = dict(zip(parts, where, strict=True))
        firsts = {found.dims[f]: at[f] * (rule.factor_sizes[f] // parts[f]) * steps[f] for f in found.shifted & set(at)}
        block = partial(_block, parts=parts, at=at)
        blocks = [x[block(x.shape, m)] for x, m in zip(args, rule.operand_mappings, strict=True)]
        places = [block(x.shape, m) for x, m in zip(results, rule.result_mappings, strict=True)]
        shapes = [x[place].shape for x, place in zip(results, places, strict=True)]
        outs = _on_blocks(call, grid, shapes, takes_scalars)(blocks, firsts)
        for x, place, out in zip(results, places, outs, strict=True):
            x[place] = out
    return results


def _on_blocks(call: PallasCall, grid: Sequence[Any], shapes: Sequence[Any], takes_scalars: bool) -> Callable[..., Any]:
    return jax.jit(lambda blocks, firsts: call_on_blocks(call, grid, blocks, shapes, firsts, takes_scalars))


def _block(shape: Sequence[int], mapping: Any, parts: Mapping[int, int], at: Mapping[int, int]) -> tuple[slice, ...]:
    """Where in a tensor a block is."""
    found = []
    for size, factors in zip(shape, mapping, strict=True):
        factor = factors[0] if factors and factors[0] in parts else None
        count = 1 if factor is None else parts[factor]
        first = 0 if factor is None else at[factor] * (size // count)
        found.append(slice(first, first + size // count))
    return tuple(found)
