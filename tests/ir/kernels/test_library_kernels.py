"""The kernels that JAX ships, interpreted on eight devices: the numbers of one device, forward and backward, however
their operands are split; each is split itself where its rule allows it."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from itertools import pairwise

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from kernel_splits import local_grids
from library_kernels import LIBRARY, interpreted
from partitioned_ops import PLANE
from uneven_blocks import PARTITIONED, assert_close

import sdy_jax as sdy

AXES = {"x": ("x",), "y": ("y",), "x and y": ("x", "y")}
"""The axes of 2 x 4 devices, one at a time or both."""


def cases():
    """All dimensions of all kernels by all axes; those along which a kernel is split by both axes come first."""
    for name, library in LIBRARY.items():
        for dim in dict.fromkeys(library.arguments.replace(" ", "")):
            for axes in AXES:
                is_first = dim in library.split and axes == "x and y"
                yield pytest.param(name, dim, axes, marks=() if is_first else pytest.mark.slow)


CASES = [*cases()]


@pytest.fixture(autouse=True)
def _interpreted() -> Iterator[None]:
    with interpreted():
        yield


def steps(grid) -> int:
    """Of a grid, those along dimensions whose extents are known."""
    return math.prod(n for n in grid if isinstance(n, int))


def split(name, dim, axes):
    """A kernel with one dimension of its operands split, as options of `partition`, on whole arguments."""
    library, shards = LIBRARY[name], math.prod(PLANE.shape[axis] for axis in axes)
    sizes = library.sized(dim, shards) if dim in library.split else {**library.sizes}
    specs = library.specs({dim: axes if not sizes[dim] % shards else axes[:1]})
    return library.make(sizes), library.values(sizes), {"mesh": PLANE, "in_shardings": specs, "on_unknown": "ignore"}


def check(name, dim, axes, layouts="local"):
    """It has the numbers of one device, and so have its gradients where it has such."""
    function, args, options = split(name, dim, axes)
    function = LIBRARY[name].gradients(function) if LIBRARY[name].gradient else function
    assert_close(sdy.partition(function, layouts=layouts, **options)(*args), jax.jit(function)(*args), 1e-5)


@pytest.mark.dear(cases=16)
@pytest.mark.parametrize(("name", "dim", "axes"), CASES)
@pytest.mark.more("all dimensions of all kernels, by each axis and both")
def test_numbers(name, dim, axes):
    check(name, dim, AXES[axes])


@pytest.mark.parametrize(("name", "dim", "axes"), CASES)
@pytest.mark.more("all dimensions of all kernels, by each axis and both")
def test_grids_are_split_where_a_rule_allows_it(name, dim, axes):
    library = LIBRARY[name]
    if dim in library.split:
        function, args, options = split(name, dim, AXES[axes])
        partitioned = sdy.partition(function, layouts="local", **options)
        (whole,), (part,) = (local_grids(each, *args) for each in (function, partitioned))
        assert steps(part) * math.prod(PLANE.shape[axis] for axis in AXES[axes]) == steps(whole)
        assert dim in library.gathers or not partitioned.plan(*args).wire_bytes


def first_dim(name):
    return (LIBRARY[name].split or "b")[0]


@pytest.mark.dear(cases=8)
@pytest.mark.parametrize("name", LIBRARY)
def test_numbers_by_the_layouts_that_a_plan_chooses(name):
    check(name, first_dim(name), ("x",), "global")


@pytest.mark.dear(cases=7)
@pytest.mark.parametrize("name", [name for name, library in LIBRARY.items() if len(library.split) > 1])
@pytest.mark.more("two dimensions at a time")
def test_numbers_of_two_dimensions(name):
    library = LIBRARY[name]
    for first, second in pairwise(library.split):
        sizes = {**library.sized(first, 2), second: library.sized(second, 4)[second]}
        function, args = library.make(sizes), library.values(sizes)
        specs = library.specs({first: "x", second: "y"})
        partitioned = sdy.partition(function, mesh=PLANE, in_shardings=specs, layouts="local")
        assert_close(partitioned(*args), jax.jit(function)(*args), 1e-5)
        (whole,) = local_grids(function, *args)
        assert [steps(part) * 8 for part in local_grids(partitioned, *args)] == [steps(whole)]


@pytest.mark.dear(cases=6)
@pytest.mark.parametrize("name", [name for name, library in LIBRARY.items() if library.gradient])
@pytest.mark.more("shards of unequal sizes")
def test_numbers_of_uneven_shards(name):
    """A batch of 3 on 2 devices and 3 heads on 4, split inside of the function."""
    library = LIBRARY[name]
    dims = [dim for dim in library.split if dim not in library.gathers]
    sizes = {**library.sizes, **{dim: library.sized(dim, 3)[dim] for dim in dims}}
    function, args = library.make(sizes), library.values(sizes)
    specs = library.specs(dict(zip(dims, ("x", "y"), strict=False)))

    def uneven(*xs):
        if PARTITIONED.get():
            pairs = zip(xs, specs, strict=True)
            xs = [jax.lax.with_sharding_constraint(x, NamedSharding(PLANE, spec)) for x, spec in pairs]
        return function(*xs)

    step = library.gradients(uneven)
    expected = jax.jit(lambda *xs: step(*xs))(*args)
    token = PARTITIONED.set(True)
    try:
        assert_close(sdy.partition(step, mesh=PLANE, in_shardings=P(), layouts="local")(*args), expected, 1e-5)
    finally:
        PARTITIONED.reset(token)


def test_random_bits_are_those_of_one_device_wherever_they_are_made():
    """Their counts go over the whole array, and so the kernel has to know its place in three dimensions."""
    threefry = importlib.import_module("jax.experimental.pallas.ops.tpu.random.threefry")

    def bits(key):
        return threefry.plthreefry_random_bits(key, 32, (2, 512, 1024))

    key = np.array([1, 2], np.uint32)
    partitioned = sdy.partition(bits, mesh=PLANE, in_shardings=P(), out_shardings=P("x", None, "y"), layouts="local")
    assert_close(partitioned(key), jax.jit(bits)(key))
    assert local_grids(partitioned, key) == [(1, 2, 1)] and not partitioned.plan(key).wire_bytes
