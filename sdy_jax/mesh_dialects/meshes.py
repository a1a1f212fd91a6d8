"""The meshes and shardings that mesh and shard ops of a module are about, and these meshes as meshes of SDY."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from jax.extend.mlir import ir

from sdy_jax.base.errors import ShardingError
from sdy_jax.ir.jax_shardings import sizes_text
from sdy_jax.ir.meshes import Mesh, MeshAxis
from sdy_jax.ir.operations import module_of
from sdy_jax.ir.text.mesh_dialects import NOUNS, PARSED_NAMES, own_name
from sdy_jax.mesh_dialects.semantics.layout import Layout, normalized
from sdy_jax.mesh_dialects.view import DialectOp, dialect_ops, is_dialect_op, view
from sdy_jax.runtime.devices import too_few_devices

# The meshes that the mesh and shard ops of a module are about.


@dataclass(frozen=True, slots=True)
class DeviceMesh:
    """A `mesh.mesh` or `shard.grid`. The size of an axis is None where the text says `?`."""

    dialect: str
    symbol: str
    shape: tuple[int | None, ...]

    @property
    def noun(self) -> str:
        return NOUNS[self.dialect]

    @property
    def subject(self) -> str:
        return f"@{self.symbol}"

    def label(self, axis: int) -> str:
        return str(axis)

    @property
    def rank(self) -> int:
        return len(self.shape)

    def group_size(self, axes: Sequence[int]) -> int | None:
        """How many devices differ along these axes alone; None where that is not known, or there are none at all."""
        sizes = [self.shape[axis] for axis in axes]
        return math.prod(size for size in sizes if size) if all(sizes) else None

    def has_the_sizes_of(self, mesh: Mesh) -> bool:
        """Whether it has the axes of a mesh of SDY in order, as far as its sizes are known."""
        return self.rank == len(mesh.axes) and all(
            size in (None, axis.size) for size, axis in zip(self.shape, mesh.axes, strict=True)
        )

    def check_declared(self, declared: Mesh | None) -> None:
        """Raises `ShardingError` if the SDY mesh of its name, which is the same mesh, has other sizes."""
        if declared is not None and not self.has_the_sizes_of(declared):
            symbol = f"@{self.symbol}"
            raise ShardingError(f"{symbol} is {self}, but sdy.mesh {symbol} is {declared}; they are one mesh")

    def unlike(self, sizes: Iterable[int]) -> str:
        """What to say of a mesh of other sizes."""
        return f"@{self.symbol} is {self}, the devices form {sizes_text(sizes)}"

    def __str__(self) -> str:
        return sizes_text(self.shape)


def device_meshes(module: ir.Operation) -> Mapping[tuple[str, str], DeviceMesh]:
    """The meshes at the top of a module, by dialect and symbol; the first where several have one name.

    Raises:
      RuleError: a mesh op lacks its name or shape.
    """
    found: dict[tuple[str, str], DeviceMesh] = {}
    for op in module.regions[0].blocks[0].operations:
        if is_dialect_op(op.operation) and (mesh := view(op.operation)).name == "mesh":
            found.setdefault(
                (mesh.dialect, mesh["sym_name"]), DeviceMesh(mesh.dialect, mesh["sym_name"], mesh["shape"])
            )
    return found


def resolved_sizes(named: DeviceMesh, count: int) -> tuple[int, ...]:
    """The sizes of a mesh on `count` devices. A mesh without `?` may leave some of them out.

    Raises:
        ShardingError: the devices are too few or do not fill it, an axis has size 0, or several sizes are not known.
    """
    known = [size for size in named.shape if size is not None]
    for axis, size in enumerate(named.shape):
        if size == 0:
            raise ShardingError(f"axis {axis} of @{named.symbol} has size 0")
    open_ = named.rank - len(known)
    if open_ > 1:
        raise ShardingError(f"@{named.symbol} = {named} has several unknown sizes; pass a mesh")
    product = math.prod(known)
    if count < product:
        raise too_few_devices(f"@{named.symbol} = {named}", product, count)
    if open_ and count % product:
        raise ShardingError(f"{count} devices do not fill @{named.symbol} = {named}")
    return tuple(count // product if size is None else size for size in named.shape)


def mesh_of(sizes: Sequence[int], names: Sequence[str] = ()) -> Mesh:
    """A mesh of SDY with axes of these sizes; they are called `axis0`, `axis1`, ... if there is not a name for each."""
    if len(names) != len(sizes):
        names = [f"axis{number}" for number in range(len(sizes))]
    return Mesh(tuple(map(MeshAxis, names, sizes)))


def symbols(module: ir.Operation) -> set[str]:
    """What is defined at the top of a module, meshes of the dialects among it."""
    ops = [op.operation for op in module.regions[0].blocks[0].operations]
    found = {symbol for _, symbol in device_meshes(module)}
    return found | {ir.StringAttr(op.attributes["sym_name"]).value for op in ops if "sym_name" in op.attributes}


def rename_mesh(module: ir.Operation, mesh: DeviceMesh, symbol: str) -> None:
    """Gives a mesh of a module another name, in the ops that are about it too."""
    reference = ir.FlatSymbolRefAttr.get(symbol, module.context)
    for op in list(dialect_ops(module)):
        if op.dialect != mesh.dialect or module_of(op.operation) != module:
            continue
        if op.values.get("mesh") == mesh.symbol:
            op.operation.attributes[own_name(op.dialect, "mesh")] = reference
        elif op.name == "mesh" and op["sym_name"] == mesh.symbol:
            name = next(name for name in ("sym_name", PARSED_NAMES["sym_name"]) if name in op.operation.attributes)
            op.operation.attributes[name] = ir.StringAttr.get(symbol, module.context)


# The meshes that annotations are about, as meshes of SDY: with all sizes known, and with names for their axes.


class MeshError(ShardingError):
    """A mesh, of this symbol, that cannot be laid over the devices."""

    def __init__(self, symbol: str, message: str):
        self.symbol, self.message = symbol, message
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class Devices:
    """What the meshes of a program are laid over.

    Attributes:
        mesh: the mesh that the program is to run on. Meshes of the program that have its shape are this one.
        axis_names: what the axes of meshes with as many axes are called; by default `axis0`, `axis1`, ...
        count: how many devices there are, where there is no mesh to say it.
    """

    mesh: Mesh | None = None
    axis_names: tuple[str, ...] = ()
    count: int | None = None


def annotated_meshes(meshes: Iterable[DeviceMesh], declared: Mapping[str, Mesh], devices: Devices) -> dict[str, Mesh]:
    """The meshes by symbol.

    Args:
        meshes: those of the mesh and shard dialects in a module.
        declared: its SDY meshes by symbol; one with the name of a dialect's mesh is the same mesh.
        devices: what they are laid over.

    Raises:
        MeshError: a size that does not fit or cannot be known, or meshes of different numbers of devices.
    """
    meshes = tuple(meshes)
    _check_some_fits([mesh for mesh in meshes if mesh.symbol not in declared], devices)
    found = {}
    for mesh in meshes:
        try:
            mesh.check_declared(declared.get(mesh.symbol))
            found[mesh.symbol] = _resolved(mesh, declared.get(mesh.symbol), devices)
        except ShardingError as error:
            raise MeshError(mesh.symbol, str(error)) from None
    if found:
        _check_counts({**found, **declared})
    return found


def _resolved(mesh: DeviceMesh, declared: Mesh | None, devices: Devices) -> Mesh:
    if declared is not None:
        return declared
    if devices.mesh is not None and mesh.has_the_sizes_of(devices.mesh):
        return devices.mesh
    return mesh_of(_sizes(mesh, devices), devices.axis_names)


def _sizes(mesh: DeviceMesh, devices: Devices) -> tuple[int, ...]:
    count = devices.count if devices.mesh is None else devices.mesh.size
    known = [size for size in mesh.shape if size is not None]
    if len(known) == mesh.rank:
        count = math.prod(known)
    elif count is None and len(known) == mesh.rank - 1:
        raise ShardingError(f"@{mesh.symbol} = {mesh} has an unknown size; say how many devices there are")
    return resolved_sizes(mesh, count or 0)


def _check_some_fits(meshes: Sequence[DeviceMesh], devices: Devices) -> None:
    """The mesh of the program is one of those that it is annotated with."""
    if devices.mesh is None or not meshes or any(mesh.has_the_sizes_of(devices.mesh) for mesh in meshes):
        return
    raise MeshError(meshes[0].symbol, meshes[0].unlike(devices.mesh.sizes.values()))


def _check_counts(meshes: Mapping[str, Mesh]) -> None:
    counts = {symbol: mesh.size for symbol, mesh in meshes.items() if mesh.axes}
    first = next(iter(counts))
    for symbol, count in counts.items():
        if count != counts[first]:
            raise MeshError(
                first,
                f"@{first} has {counts[first]} devices, @{symbol} {count}; one program runs on one set of devices",
            )


# Shardings as mesh and shard ops state them: what a value of type `!mesh.sharding` is.

Size: TypeAlias = int | ir.Value
"""A number, or the value that has it in the run."""


@dataclass(frozen=True, slots=True)
class StatedSharding:
    """What a `sharding` op says: its dialect (`mesh` or `shard`), the symbol of the mesh, and the layout on it."""

    dialect: str
    mesh: str
    layout: Layout

    def normalized(self, on: DeviceMesh) -> StatedSharding:
        """The sharding in its one form."""
        return replace(self, layout=normalized(self.layout, on))

    def means_the_same(self, other: StatedSharding, on: DeviceMesh) -> bool:
        """Whether two shardings are the same, however they are written."""
        return self.normalized(on) == other.normalized(on)


def stated_sharding(value: ir.Value) -> StatedSharding | None:
    """What a value of a sharding type is; None if the program does not say that here.

    Raises:
      RuleError: the op that states it is malformed.
    """
    op = defining(value, "sharding", "get_sharding")
    if op is None:
        return None
    if op.name == "get_sharding":
        shard = defining(op["source"], "shard")
        return stated_sharding(shard["sharding"]) if shard else None
    halos, offsets = (map(folded_size, op[f"static_{name}"]) for name in ("halo_sizes", "sharded_dims_offsets"))
    layout = Layout(op["split_axes"], op["partial_type"], op["partial_axes"], tuple(halos), tuple(offsets))
    return StatedSharding(op.dialect, op.mesh, layout)


def defining(value: ir.Value, *names: str) -> DialectOp | None:
    """The op that makes a value, if it is one of the dialects with one of these names."""
    if isinstance(value, ir.BlockArgument) or not is_dialect_op(value.owner.operation):
        return None
    op = view(value.owner.operation)
    return op if op.name in names else None


def folded_size(size: Size) -> Size:
    """The number that a value is, if it is a constant."""
    if isinstance(size, (int, ir.BlockArgument)):
        return size
    op = size.owner.operation
    if op.name != "arith.constant" or not isinstance(op.attributes["value"], ir.IntegerAttr):
        return size
    return int(ir.IntegerAttr(op.attributes["value"]).value)
