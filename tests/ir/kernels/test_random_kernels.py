"""Kernels drawn at random: their rules are what their descriptions say, and split in all ways that these allow they
have the numbers of one device."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest
from kernel_splits import calls_of, local_grids, rule_of, specs_of, splits_of
from partitioned_ops import PLANE
from random_kernels import drawn_kernel

import sdy_jax as sdy

SIZES = dict(PLANE.shape)


def check(seed, all_splits=False):
    """A kernel in all splits, or in the last one, which is of two dimensions where two may be split."""
    kernel = drawn_kernel(seed)
    args = kernel.arguments()
    (equation,) = calls_of(kernel, *args)
    found, expected = rule_of(equation), jax.jit(kernel)(*args)
    read = [m for m, tensor in zip(found.rule.result_mappings, kernel.results, strict=True) if tensor.is_used]
    factors = [f for f in range(len(found.dims)) if all(any(dim[:1] == (f,) for dim in m) for m in read)]
    assert tuple(found.dims[f] for f in factors) == kernel.factors(), kernel
    splits = [*even(splits_of(factors, SIZES), found.rule)]
    for split in splits if all_splits else splits[-1:]:
        # Of an operand that is broadcast under `vmap` the argument has one dimension less.
        pairs = zip(specs_of(found.rule.operand_mappings, split), args, strict=True)
        specs = tuple(spec if len(spec) <= x.ndim else None for spec, x in pairs)
        options = {"mesh": PLANE, "in_shardings": specs, "out_shardings": specs_of(read, split), "layouts": "local"}
        partitioned = sdy.partition(kernel, **options)
        for part, whole in zip(partitioned(*args), expected, strict=True):
            np.testing.assert_array_equal(part, whole, f"{split} {kernel}")
        grid = list(equation.params["grid_mapping"].grid)
        for factor, count in counts(split).items():
            grid[found.dims[factor]] //= count
        assert local_grids(partitioned, *args) == [tuple(grid)], (split, kernel)


def counts(split):
    """In how many parts factors are split."""
    return {factor: math.prod(SIZES[axis] for axis in axes) for factor, axes in split.items()}


def even(splits, rule):
    """Those of which all parts are of one size."""
    return (s for s in splits if not any(rule.factor_sizes[f] % n for f, n in counts(s).items()))


def test_numbers_of_a_few_kernels():
    for seed in range(20):
        check(seed)


MANY = (
    (25, 31, 32, 33, 34, 35, 37, 45, 47, 49, 54, 55, 63, 65, 66, 68, 70, 76, 78, 81),
    (83, 84, 86, 88, 89, 92, 93, 94, 97, 98, 101, 107, 108, 110, 111, 112, 113, 118, 126, 131),
    (136, 137, 139, 147, 150, 151, 155, 158, 161, 164, 165, 167, 168, 174, 180, 182, 185, 189),
)
"""Seeds that show, beside the first 20, what the first 200 do: kinds of indices by rank of the grid, mode of results,
and `vmap`; places that are read by mode; sets of modes; and how many dimensions may be split."""


@pytest.mark.dear(cases=2)
@pytest.mark.more("many kernels")
@pytest.mark.parametrize("seeds", MANY, ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")
def test_numbers_of_many_kernels(seeds):
    for seed in seeds:
        check(seed)
    jax.clear_caches()


@pytest.mark.slow
@pytest.mark.parametrize("start", range(20, 200, 20))
def test_numbers_of_all_splits(start):
    for seed in range(start, start + 20):
        check(seed, all_splits=True)
    jax.clear_caches()
