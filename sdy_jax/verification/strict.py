"""The rules that the references document and jaxlib does not enforce: `dialect_rules.DOCUMENTED_RULES`.

M7 is about text alone, where `source_text` checks it: jaxlib's parser leaves such device ids out.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend.mlir import ir

from sdy_jax.representation.attributes import manual_axes_from_attribute
from sdy_jax.representation.axes import braces
from sdy_jax.representation.dialect_rules import fail
from sdy_jax.representation.mesh import AxisRef, Mesh
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.verification.values import AttachedSharding, Meshes, attached_shardings, mesh_of, shape_of


def check_documented(op: ir.Operation, meshes: Meshes) -> None:
    """M8, S10 and O2i to O2k of a valid op."""
    if op.name == "sdy.mesh":
        _check_device_count(ir.StringAttr(op.attributes["sym_name"]).value, meshes)
    for attached in attached_shardings(op):
        _check_split(attached)
    if op.name == "sdy.manual_computation":
        _check_manual(op, meshes)


def _check_device_count(name: str, meshes: Meshes) -> None:
    """A mesh has as many devices as the first one of its module; those without axes do not count."""
    mesh, counted = meshes[name], [(other, m) for other, m in meshes.items() if m.axes]
    if not mesh.axes:
        return
    first, expected = counted[0]
    if mesh.size != expected.size:
        fail("M8", f"sdy.mesh @{name}", f"it has {mesh.size} devices, @{first} {expected.size}")


def _check_split(attached: AttachedSharding) -> None:
    """What is split has elements."""
    for dim, (axes, size) in enumerate(zip(attached.sharding.axes, shape_of(attached.type) or (), strict=False)):
        if axes and size == 0:
            fail("S10", f"{attached.where}, dimension {dim}", f"it has size 0 and is split along {braces(axes)}")


def _check_manual(op: ir.Operation, meshes: Meshes) -> None:
    manual, values = manual_axes_from_attribute(op.attributes["manual_axes"]), list(attached_shardings(op))
    found = (mesh_of(attached.sharding, meshes) for attached in values)
    mesh = next((mesh for mesh in found if mesh is not None and mesh.axes), None)
    if mesh is not None:
        _check_manual_axes(manual, mesh, op.name)
    for attached in values:
        if isinstance(attached.type, ir.ShapedType):  # others name no axes
            _check_manual_value(attached.sharding, manual, attached.where)


def _check_manual_axes(manual: Sequence[str], mesh: Mesh, where: str) -> None:
    """They are in the order of their mesh."""
    ordered = sorted(manual, key=mesh.axis_names.index)
    if list(manual) != ordered:
        said, right = (braces([AxisRef(name) for name in names]) for names in (manual, ordered))
        fail("O2j", where, f"the manual axes are {said}", f"write {right}")


def _check_manual_value(sharding: TensorSharding, manual: Sequence[str], where: str) -> None:
    """A sharding of a manual computation names each manual axis, whole."""
    lists = (*sharding.axes, sharding.replicated_axes, sharding.unreduced_axes)
    named = [axis for axes in lists for axis in axes if axis.name in manual]
    part = next((axis for axis in named if axis.sub_axis), None)
    if part is not None:
        fail("O2k", where, f"<{sharding}> names {part}, a part of a manual axis")
    missing = [axis for axis in manual if axis not in {ref.name for ref in named}]
    if missing:
        fail("O2i", where, f'<{sharding}> does not name the manual axis "{missing[0]}"')
