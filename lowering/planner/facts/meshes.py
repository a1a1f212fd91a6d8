"""Programs with several meshes: every sharding is rewritten in the axes of one of them, the base mesh.

A sharding on another mesh is rewritten as an equal one in axes of the base mesh, where these can express it: with the
base `x=2, y=4`, the axis `p` of the mesh `p=4, q=2` is `x, y:(1)2`. Where the other mesh has its devices in another
order and the base cannot express the sharding, it is rewritten on a mesh with the base's axes and that device order.
So the partitioner knows one list of axes, with several device orders. A value on a single device is computed by all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sdy_jax.annotate.site import declare_mesh
from sdy_jax.errors import ShardingError, UnsupportedError
from sdy_jax.ir.attributes import shardings_from_attribute
from sdy_jax.ir.graph import Graph, Op, Value
from sdy_jax.ir.meshes import Axes, Mesh, sort_and_merge
from sdy_jax.ir.operations import manual_axes
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.lowering.ops.registry import cuts_no_axes
from sdy_jax.lowering.reshard.plan import ReshardPlan
from sdy_jax.lowering.reshard.planner import Reshards, plan_across
from sdy_jax.lowering.targets.cost_model import CostModel
from sdy_jax.runtime.devices import can_express, coincide, device_ids, expressed, expressed_part, same_devices


class ProgramMeshes:
    """The meshes of a module that is being partitioned."""

    def __init__(self, graph: Graph, base_name: str):
        self.base_name = base_name
        self.base: Mesh = graph.meshes[base_name]
        self._graph = graph
        self._symbols: dict[Mesh, str] = {self.base: base_name}
        self._settled: dict[TensorSharding, TensorSharding] = {}
        self._whole_axes = any(map(cuts_no_axes, graph.ops))
        others = [mesh for mesh in graph.meshes.values() if mesh != self.base and not mesh.is_empty]
        if any(mesh.is_maximal for mesh in others):
            self._check_single_devices()
        if not all(mesh.is_maximal for mesh in others):
            self._check_manual_computations()

    def settled(self, sharding: TensorSharding, rank: int) -> TensorSharding:
        """An equal closed sharding on the base mesh, or on a mesh with its axes and another device order.

        Axes that cannot be expressed there are left out, with all axes behind them in their dimension.

        Raises:
            UnsupportedError: the mesh has other devices than the base.
        """
        if sharding.mesh == self.base_name:
            return sharding
        mesh = self._mesh(sharding.mesh)
        if mesh.is_empty or mesh.is_maximal:
            return TensorSharding.replicated(self.base_name, rank)
        if sharding not in self._settled:
            self._settled[sharding] = self._at_home(self._in_base_axes(sharding, mesh))
        return self._settled[sharding]

    def note(self, sharding: TensorSharding, settled: TensorSharding) -> str | None:
        """A note on the axes that `settled` had to leave out; None where it left out none."""
        mesh = self._mesh(sharding.mesh)
        if mesh.is_maximal:
            return f"is on device {mesh.device_ids[0]} alone by its sharding; every device has it"
        if sharding.shard_counts(mesh) != settled.shard_counts(self.base):
            return f"<{sharding}> cannot be expressed in axes of {self.base}; it is <{settled}>"
        return None

    def name_of_op(self, shardings: Sequence[TensorSharding], values: Sequence[Value]) -> str:
        """The mesh on which an op runs: the one with the most bytes of sharded values; the first of equals."""
        if {sharding.mesh for sharding in shardings} == {self.base_name}:
            return self.base_name
        found: dict[str, float] = {}
        for sharding, value in zip(shardings, values, strict=True):
            if sharding.unreduced_axes or not sharding.is_fully_replicated:
                name = str(sharding.mesh)
                found[name] = found.get(name, 0.0) + value.bytes
        return max(found, key=lambda name: found[name], default=self.base_name)

    def plan(
        self,
        shape: tuple[int, ...],
        itemsize: float,
        source: TensorSharding,
        target: TensorSharding,
        costs: CostModel,
    ) -> ReshardPlan:
        """`Reshards.plan` between settled shardings, also on different meshes."""
        if source.mesh == target.mesh:
            return Reshards(self.base, costs, self._whole_axes).plan(shape, itemsize, source, target)
        meshes = self._mesh(source.mesh), self._mesh(target.mesh)
        return plan_across(shape, itemsize, source, target, meshes, costs)

    def _mesh(self, reference: str | Mesh) -> Mesh:
        return reference if isinstance(reference, Mesh) else self._graph.meshes[reference]

    def _in_base_axes(self, sharding: TensorSharding, own: Mesh) -> TensorSharding:
        self._check_devices(sharding, own)
        target = self._order_of(own)
        dims = [expressed_part(axes, own, target) for axes in sharding.axes]
        unreduced = self._unreduced(sharding, own, target)
        return TensorSharding.closed(self._symbol(target), dims, unreduced, sharding.reduction)

    def _order_of(self, own: Mesh) -> Mesh:
        """The mesh to express shardings of the mesh `own` on: the base's axes, in the device order of `own`."""
        if can_express(own, self.base):
            return self.base
        ids = device_ids(own)
        return Mesh(self.base.axes, () if ids == tuple(range(own.size)) else ids)

    def _unreduced(self, sharding: TensorSharding, own: Mesh, target: Mesh) -> Axes:
        found = [expressed(axis, own, target) for axis in sharding.unreduced_axes]
        if None in found:
            raise UnsupportedError(
                f"<{sharding}> is unreduced along axes of the mesh {own} that cannot be expressed in axes of "
                f"{self.base}, on which the function is partitioned; to fix: reduce it first, or use one mesh"
            )
        return sort_and_merge([axis for axes in found for axis in axes or ()], target)

    def _at_home(self, sharding: TensorSharding) -> TensorSharding:
        """The sharding on the base mesh, if along each of its axes every device has the same coordinate on both meshes;
        otherwise the sharding as it is."""
        mesh, lists = self._mesh(sharding.mesh), (*sharding.axes, sharding.unreduced_axes)
        if sharding.mesh == self.base_name or not all(coincide((a,), mesh, self.base) for axes in lists for a in axes):
            return sharding
        return TensorSharding.closed(self.base_name, sharding.axes, sharding.unreduced_axes, sharding.reduction)

    def _symbol(self, mesh: Mesh) -> str:
        """The symbol of a mesh in the module; a mesh without one is declared."""
        if mesh not in self._symbols:
            known = next((name for name, other in self._graph.meshes.items() if other == mesh), None)
            self._symbols[mesh] = known or self._declare(mesh)
        return self._symbols[mesh]

    def _declare(self, mesh: Mesh) -> str:
        name = declare_mesh(self._graph.module, mesh)
        self._graph.meshes[name] = mesh
        return name

    def _check_devices(self, sharding: TensorSharding, own: Mesh) -> None:
        if not same_devices(own, self.base):
            raise UnsupportedError(
                f"<{sharding}> is on the mesh {own}, the function is partitioned on {self.base}; "
                "all meshes of a function must have the same devices, in any order"
            )

    def _check_single_devices(self) -> None:
        """Checks that no op has values on different single devices."""
        for op in self._graph.main.walk():
            meshes = (self._mesh(v.sharding.mesh) for v in op.results if v.sharding is not None)
            ids = {mesh.device_ids[0]: None for mesh in meshes if mesh.is_maximal}
            if len(ids) > 1:
                raise ShardingError(
                    f"{op.source}: {op.name} has results on the single devices {', '.join(map(str, ids))}; "
                    "an op can be on one of them only"
                )

    def _check_manual_computations(self) -> None:
        """Checks that no other mesh occurs at or in a manual computation, whose body is written for one mesh."""
        for op in self._graph.main.walk():
            if not manual_axes(op):
                continue
            inside = (v.sharding for inner in op.walk() for v in inner.results if v.sharding is not None)
            stated = (s for inner in op.walk() for s in stated_at_manual(inner))
            others = (s for s in (*stated, *inside) if self._mesh(s.mesh) not in (self.base, Mesh(())))
            other = next((s for s in others if not self._mesh(s.mesh).is_maximal), None)
            if other is not None:
                raise UnsupportedError(
                    f"{op.source}: a computation that is manual on {', '.join(manual_axes(op))} has <{other}> on the "
                    f"mesh {self._mesh(other.mesh)}, the function is partitioned on {self.base}; use one mesh for "
                    "both, or partition the function on the other"
                )


def stated_at_manual(op: Op) -> Iterator[TensorSharding]:
    """The shardings that a manual computation states for what it takes and makes; of other ops none."""
    for name in ("in_shardings", "out_shardings"):
        if name in op.attributes:
            yield from shardings_from_attribute(op.attributes[name])
