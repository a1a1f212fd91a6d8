"""Compiling for TPUs that are not there, and a pytest plugin that compiles so what the op tests partition.

    export ALLOW_MULTIPLE_LIBTPU_LOAD=1 TPU_SKIP_MDS_QUERY=1 PYTHONPATH=tests/helpers
    pytest -p tpu_plugin tests/lowering/ops/test_strategies.py

Needs libtpu. With the plugin `assert_same` plans as ever, for eight virtual CPU devices, but compiles the partitioned
program for a slice of TPUs instead of comparing numbers; it asks for what the TPU compiler does for `jax.jit`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding

import sdy_jax as sdy
from sdy_jax import testing
from sdy_jax.lowering.targets.cost_model import CostModel
from sdy_jax.plan.plan import Plan

SLICES = {8: "v5e:2x4", 16: "v5e:4x4"}


@functools.cache
def chips(count: int) -> np.ndarray:
    """The chips of a whole slice."""
    return np.array(topologies.get_topology_desc(platform="tpu", topology_name=SLICES[count]).devices)


def tpu_mesh(*sizes: int, names: tuple[str, ...]) -> Mesh:
    return Mesh(chips(int(np.prod(sizes))).reshape(sizes), names)


def on_tpus(mesh: Mesh) -> Mesh:
    """The same mesh with a chip in the place of each of the eight virtual devices."""
    places = np.vectorize({device: place for place, device in enumerate(jax.devices())}.get)(mesh.devices)
    return Mesh(chips(8)[places], mesh.axis_names, axis_types=mesh.axis_types)


def shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), jax.typeof(x).dtype), tree)


def failure(function: Any, *args: Any, **kwargs: Any) -> str:
    """Why a jitted or partitioned function does not compile; empty if it does."""
    try:
        function.lower(*args, **kwargs).compile()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def jit_failure(fun: Any, *args: Any, **kwargs: Any) -> str:
    """Why one chip's program does not compile: what TPUs lack, we lack as well."""
    whole = NamedSharding(Mesh(chips(8)[:1], "x"), jax.sharding.PartitionSpec())
    return failure(jax.jit(lambda a, k: fun(*a, **k), in_shardings=whole, out_shardings=whole), args, kwargs)


def assert_compiles(fun: Any, *args: Any, costs: CostModel | None = None, **options: Any) -> None:
    """Asserts that a function partitioned over chips compiles, if it does for one chip."""
    problem = failure(sdy.partition(fun, costs=costs, **options), *shapes(args))
    assert not problem or jit_failure(fun, *shapes(args)), problem


def compile_instead(
    fun: Any, *args: Any, mesh: Mesh, rtol: float = 0, atol: float = 0, costs: CostModel | None = None, **options: Any
) -> Plan:
    """In the place of `assert_same`: the plan for CPU devices, whose program is compiled for chips."""
    assert_compiles(fun, *args, mesh=on_tpus(mesh), costs=costs or CostModel.of_platform("cpu"), **options)
    plan: Plan = sdy.partition(fun, mesh=mesh, costs=costs, **options).plan(*args)
    return plan


def pytest_configure() -> None:
    testing.assert_same = compile_instead
