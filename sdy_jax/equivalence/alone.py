"""A few ops of a partitioned program, run alone: beside what they mean for whole arrays."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from sdy_jax.equivalence.bisection import worst_of
from sdy_jax.equivalence.comparison import Difference
from sdy_jax.equivalence.observation import Observed
from sdy_jax.equivalence.reference import meaning
from sdy_jax.ir.graph import Graph
from sdy_jax.ir.operations import copied
from sdy_jax.loading.load import loads
from sdy_jax.runtime.devices import mesh_on_devices


def difference_alone(text: str, arguments: Sequence[np.ndarray]) -> Difference:
    """How the results of a partitioned module differ from those of the same ops on whole arrays, on one device.

    Nothing is planned: the module's ops and collectives run in the layouts that it says. A reproducer of `sdy.verify`
    is a call of this.

    Args:
        text: a module as `plan.mlir("partitioned")` prints it; its arguments and results may be partial sums, and need
            not be split evenly.
        arguments: whole arrays for its main function.

    Returns:
        What differs most.

    Raises:
        SdyError: the text is wrong, or there are fewer devices than its mesh has.
    """
    program = loads(text)
    graph = Graph(copied(program.module))
    devices = mesh_on_devices(program.mesh)
    ops, given = graph.main.blocks[0].ops[:-1], [np.asarray(x) for x in arguments]
    with jax.enable_x64(True):
        wanted = meaning(ops, graph.arguments, graph.outputs, given, devices)
        found = Observed(graph, program.mesh, devices).run(ops, graph.arguments, graph.outputs, given)
    differences = [worst_of(x, y)[0] for x, y in zip(found, wanted, strict=True)]
    return max(differences, key=lambda difference: (not difference.ok, difference.largest), default=Difference())
