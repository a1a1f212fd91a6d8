"""Values inside of a partitioned program, as devices hold them while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import numpy as np
from jax.sharding import PartitionSpec

from sdy_jax.equivalence.blocks import cut, joined
from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.jax_internals.jit import jit
from sdy_jax.lowering.emission.emit import local_function_of_ops, used_axes, value_shardings
from sdy_jax.lowering.emission.re_emission import numpy_dtype
from sdy_jax.lowering.targets.target import forms_for
from sdy_jax.representation.mesh import Mesh
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.runtime.mesh import RefinedMesh


@dataclass(frozen=True)
class Observed:
    """A partitioned module on devices.

    Attributes:
        graph: the module.
        mesh: that of the program, and `devices` those it runs on.
    """

    graph: Graph
    mesh: Mesh
    devices: jax.sharding.Mesh

    @cached_property
    def shardings(self) -> dict[Value, TensorSharding]:
        """How values lie that are not whole everywhere."""
        return value_shardings(self.graph)

    @cached_property
    def refined(self) -> RefinedMesh:
        """The mesh that the devices' program is on."""
        found = RefinedMesh.of(self.mesh, used_axes(self.graph), forms_for(self.devices))
        return found.with_meshes(self.graph.meshes)

    def run(
        self, ops: Sequence[Op], inputs: Sequence[Value], outputs: Sequence[Value], arguments: Sequence[np.ndarray]
    ) -> list[list[np.ndarray]]:
        """Runs ops on the blocks of whole arguments. Returns the arrays that devices then hold of each output: one for
        each group of devices that should hold the same."""
        given = [cut(x, self.shardings.get(v), self.refined) for x, v in zip(arguments, inputs, strict=True)]
        local = local_function_of_ops(self.graph, self.refined, ops, inputs, outputs)
        on_devices = self.refined.to_jax(self.devices.devices)
        spec = PartitionSpec(on_devices.axis_names)

        def run(*blocks: jax.Array) -> list[jax.Array]:
            return [x[None] for x in local(*(block[0] for block in blocks))]

        mapped = jax.shard_map(run, mesh=on_devices, in_specs=spec, out_specs=spec, check_vma=False)
        with jax.enable_x64(True):
            found = [np.asarray(x) for x in jit(mapped)(*given)]
        return [self._joined(x, value) for x, value in zip(found, outputs, strict=True)]

    def _joined(self, blocks: np.ndarray, value: Value) -> list[np.ndarray]:
        blocks = blocks.astype(numpy_dtype(value.dtype), copy=False)
        return joined(blocks, value.shape or (), self.shardings.get(value), self.refined)
