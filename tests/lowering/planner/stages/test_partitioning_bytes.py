"""What the stages of partitioning send is no more than what jaxlib's own passes do, over random small programs.

Their dimensions divide: jaxlib drops other axes, and computes more on every device instead.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from functools import cache

import jax
import pytest
from jax.extend.mlir import ir
from partitioning_oracle import ours
from partitioning_oracle import wire_bytes as global_bytes
from random_programs import RandomProgram
from random_texts import WITHOUT
from sdy_oracle import Oracle
from sharding_dump import parse

from sdy_jax.ir.graph import Graph
from sdy_jax.ir.operations import module_meshes, pre_order
from sdy_jax.lowering.ops.re_emission import numpy_dtype

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="the passes of older jaxlibs make invalid modules, or are missing"
)


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    with Oracle() as running:
        yield running


FULL = (
    "func.func(sdy-insert-explicit-reshards{enable-full-version=true mark-partial-result-with-unreduced-axes=true})"
    ",canonicalize"
)
RESOLVE = "sdy-resolve-permutation-factors"
COLLECTIVES = "func.func(sdy-reshard-to-collectives),func.func(sdy-optimize-collectives),canonicalize"
PAD = "sdy-pad-for-divisibility"
CHEAPEST = "sdy-convert-global-to-local{combine-multi-dimension-reduce-scatter=true}"
ALL_RESHARDS = "sdy-insert-explicit-reshards{enable-full-version=true}"
PER_INSTRUCTION = "sdy-per-instruction-partitioning"
OURS = "sdy-convert-global-to-local"
COLLECTED = "sdy-resolve-permutation-factors,sdy-reshard-to-collectives,sdy-optimize-collectives"
STAGES = {
    "all": ("", OURS, f"{FULL},{RESOLVE},{COLLECTIVES},{PAD},{CHEAPEST}"),
    "reshards": ("", f"{ALL_RESHARDS},{OURS}", f"{FULL},{RESOLVE},{COLLECTIVES},{PAD},{CHEAPEST}"),
    "permutation factors": ("", f"{RESOLVE},{OURS}", f"{FULL},{RESOLVE},{COLLECTIVES},{PAD},{CHEAPEST}"),
    "pad": (COLLECTED, f"{PAD},{OURS}", f"{PAD},{CHEAPEST}"),
    "local": (COLLECTED, OURS, CHEAPEST),
    "per instruction": ("", PER_INSTRUCTION, f"{FULL},{PER_INSTRUCTION}"),
}
"""Our passes before a stage, if any; the stage and the rest, ours and jaxlib's."""

LEFT_OUT = (
    *WITHOUT,
    *("meshes", "inline", "manual", "one", "functions", "edges", "rules", "named", "priority", "unreduced", "barrier"),
    *("while", "case", "if", "higher_level", "ruleless", "rng_bit_generator", "cholesky", "triangular_solve"),
    *("batch_norm_inference", "top_k"),
)
"""What jaxlib's passes do not take, or sends by other ways than collectives of the main function."""


@cache
def program(seed: int) -> str:
    """A small program after propagation, with no dimension that does not divide."""
    text = RandomProgram(seed, ops=6, without=LEFT_OUT, devices=8).text
    return ours(text, "sdy-propagation-pipeline")


_SENT = {
    "all_gather": lambda n, g: (g - 1) * n,
    "all_reduce": lambda n, g: 2 * (g - 1) / g * n,
    "reduce_scatter": lambda n, g: (g - 1) / g * n,
    "all_to_all": lambda n, g: (g - 1) / g * n,
    "collective_permute": lambda n, g: n,
    "collective_broadcast": lambda n, g: n,
}


def wire_bytes(text: str) -> float:
    """What a device sends in StableHLO's collectives, and in those of the SDY dialect."""
    module = parse(text)
    mesh, total = module_meshes(module.operation)["mesh"], global_bytes(text)
    sizes = {axis.name: axis.size for axis in mesh.axes}
    for op in pre_order(module.operation):
        kind = op.name.removeprefix("stablehlo.")
        if kind in _SENT:
            total += _SENT[kind](sum(map(_size, op.operands)), _group_size(op, sizes))
    return total


def _size(value: ir.Value) -> int:
    type_ = ir.RankedTensorType(value.type)
    return math.prod(type_.shape) * numpy_dtype(str(type_.element_type)).itemsize


def _group_size(op: ir.Operation, sizes: dict[str, int]) -> int:
    if "replica_groups" not in op.attributes:
        return 0
    groups = str(op.attributes["replica_groups"])
    if listed := re.search(r"tensor<\d+x(\d+)xi64>", groups):
        return int(listed[1])
    axes = re.findall(r'axis_ref<name = "(\w+)"(?:, sub_axis_info = [^>]*size = \d+, size = (\d+)>)?', groups)
    assert len(axes) == groups.count("axis_ref<"), groups
    return math.prod(int(size or sizes[name]) for name, size in axes)


def _divides(text: str) -> bool:
    graph = Graph(parse(text).operation)
    stated = [(v, v.sharding) for op in graph.ops for v in op.results]
    stated += zip(graph.outputs, graph.result_shardings(graph.main), strict=True)
    return all(
        not n % g
        for value, sharding in [*stated, *((v, v.sharding) for v in graph.arguments)]
        if sharding is not None
        for n, g in zip(value.shape or (), sharding.shard_counts(graph.meshes["mesh"]), strict=True)
    )


def sent(seed: int, stage: str, oracle: Oracle) -> tuple[float, float] | None:
    """What is sent after our passes and after jaxlib's; None where dimensions do not divide or jaxlib refuses."""
    before, own, theirs = STAGES[stage]
    text = program(seed)
    if not _divides(text):
        return None
    text = ours(text, before) if before else text
    after = oracle.run(text, theirs)
    return None if after is None else (wire_bytes(ours(text, own)), wire_bytes(after))


SEEDS = (11, 22, 31, 43, 81, 110, 146)


def check(stage: str, seeds: Iterable[int], oracle: Oracle) -> int:
    """How many programs were compared."""
    compared = 0
    for seed in seeds:
        found = sent(seed, stage, oracle)
        if found is not None:
            compared += 1
            assert found[0] <= found[1] + 1e-6, f"seed {seed}: {found[0]} instead of {found[1]} B\n{program(seed)}"
    return compared


@pytest.mark.parametrize("stage", STAGES)
def test_no_stage_sends_more_than_jaxlibs_own(stage: str, oracle: Oracle) -> None:
    assert check(stage, SEEDS, oracle) >= 5


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_no_stage_sends_more_than_jaxlibs_own_over_many_programs(stage: str, oracle: Oracle) -> None:
    """Without a program that MLIR prints so that nobody reads it, a dynamic_slice without indices, and one of which
    jaxlib's passes gather a dimension without elements."""
    assert check(stage, set(range(200)) - {8, 102}, oracle) >= 80
