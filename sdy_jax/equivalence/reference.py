"""What a module computes on one device, by XLA alone: the answer that partitioning may not change."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.mlir import ir
from jax.sharding import NamedSharding, PartitionSpec

from sdy_jax.equivalence.extraction import extracted, is_manual, on_whole_arrays
from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.ir.operations import copied
from sdy_jax.jax_internals.jit import jit
from sdy_jax.loading.program_calls import program_p
from sdy_jax.lowering.emission.re_emission import numpy_dtype


def run_plain(
    module: ir.Operation,
    arguments: Sequence[np.ndarray],
    devices: jax.sharding.Mesh | None = None,
    shardings: tuple[Sequence[NamedSharding], Sequence[NamedSharding]] | None = None,
) -> list[np.ndarray]:
    """The results of `main` of a module in plain StableHLO, compiled for one device. Where it holds manual
    computations, for `devices`; with `shardings` of arguments and results, partitioned by XLA."""
    written = io.BytesIO()
    module.write_bytecode(written)
    types = tuple(_aval(value) for value in Graph(module).outputs)
    parameters = {"module": written.getvalue(), "name": "plain", "results": types, "foreign": False}
    options: dict[str, Any] = {}
    if shardings is not None:
        options = {"in_shardings": tuple(shardings[0]), "out_shardings": list(shardings[1])}
    elif devices is not None and is_manual(module):
        options = {"in_shardings": NamedSharding(devices, PartitionSpec())}
    with jax.enable_x64(True):
        found = jit(lambda *xs: program_p.bind(*xs, **parameters), **options)(*arguments)
        return [np.asarray(x) for x in found]


def meaning(
    ops: Sequence[Op],
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    arguments: Sequence[np.ndarray],
    devices: jax.sharding.Mesh | None = None,
) -> list[np.ndarray]:
    """What ops of a module make of whole arrays, by XLA; collectives of the sdy dialect do nothing to these."""
    return run_plain(on_whole_arrays(extracted(ops, inputs, outputs)), arguments, devices)


def results_of(
    module: ir.Operation, arguments: Sequence[np.ndarray], devices: jax.sharding.Mesh | None = None
) -> list[np.ndarray]:
    """What the main function of a module, at any stage, returns for whole arguments."""
    return run_plain(on_whole_arrays(copied(module)), arguments, devices)


def _aval(value: Value) -> jax.core.ShapedArray:
    return jax.core.ShapedArray(value.shape or (), numpy_dtype(value.dtype))
