"""The meshes that the mesh and shard ops of a module are about."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from jax.extend.mlir import ir

from sdy_jax.errors import ShardingError
from sdy_jax.ir.operations import module_of
from sdy_jax.representation.mesh import Mesh, MeshAxis
from sdy_jax.representation.type_text import sizes_text
from sdy_jax.runtime.devices import too_few_devices
from sdy_jax.shard.view import dialect_ops, is_dialect_op, view
from sdy_jax.text.mesh_ops import NOUNS, PARSED_NAMES, own_name


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
