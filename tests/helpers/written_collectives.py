"""Collectives that a function holds itself, with what they make, and the benchmarks' models."""

from __future__ import annotations

import functools
import importlib.util
import sys

import numpy as np
from jax.sharding import PartitionSpec as P
from places import ROOT

import sdy_jax as sdy


@functools.cache
def workloads():
    path = ROOT / "scripts" / "workloads.py"
    spec = importlib.util.spec_from_file_location("workloads", path)
    module = sys.modules["workloads"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {workload.name: workload for workload in (make() for make in module.WORKLOADS)}


RNG = np.random.default_rng(3)
X = RNG.standard_normal((8, 16)).astype(np.float32)
W = RNG.standard_normal((16, 8)).astype(np.float32)
PARTIAL = '[{"a"}, {}], unreduced={"b"}'


def partial_product(x, w):
    return sdy.reshard(x @ w, PARTIAL)


# What is written, the shardings of arguments and result, and the collectives that run: those alone.
WRITTEN = {
    "all_gather": (lambda x: sdy.all_gather(x, [["b"], []], P(("a", "b"))), P(("a", "b")), P("a"), ["all_gather"]),
    "all_gather of a part": (
        lambda x: sdy.all_gather(x, [["b:(2)2"], []], P(("a", "b"))),
        P(("a", "b")),
        '[{"a", "b":(1)2}, {}]',
        ["all_gather"],
    ),
    "all_slice": (lambda x: sdy.all_slice(x, [["b"], []], P("a")), P("a"), P(("a", "b")), ["all_slice"]),
    "all_to_all": (
        lambda x: sdy.all_to_all(x, [(["b"], 0, 1)], P(("a", "b"))),
        P(("a", "b")),
        P("a", "b"),
        ["all_to_all"],
    ),
    "collective_permute": (
        lambda x: sdy.collective_permute(x, P(("b", "a")), P(("a", "b"))),
        P(("a", "b")),
        P(("b", "a")),
        ["collective_permute"],
    ),
    "all_reduce": (
        lambda x: sdy.all_reduce(partial_product(x, W), ["b"]),
        P("a", "b"),
        P("a"),
        ["all_reduce"],
    ),
    "reduce_scatter": (
        lambda x: sdy.reduce_scatter(partial_product(x, W), [[], ["b"]]),
        P("a", "b"),
        P("a", "b"),
        ["reduce_scatter"],
    ),
    "replicated_to_unreduced": (
        lambda x: sdy.all_reduce(sdy.replicated_to_unreduced(x, ["b"], P("a")), ["b"]),
        P("a"),
        P("a"),
        ["replicated_to_unreduced", "all_reduce"],
    ),
    "sharded_to_unreduced": (
        lambda x: sdy.all_reduce(sdy.sharded_to_unreduced(x, [["b"], []], P(("a", "b"))), ["b"]),
        P(("a", "b")),
        P("a"),
        ["sharded_to_unreduced", "all_reduce"],
    ),
}
