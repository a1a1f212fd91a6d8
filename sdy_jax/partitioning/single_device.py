"""Values that are stated to be on one device."""

from __future__ import annotations

from jax.extend.mlir import ir

from sdy_jax.errors import UnsupportedError
from sdy_jax.ir.locations import source_line
from sdy_jax.ir.operations import body_of, functions, module_meshes, pre_order, rank, returned_by
from sdy_jax.ir.stored_shardings import function_shardings, mesh_of, set_function_shardings, set_sharding, sharding_of
from sdy_jax.partitioning.reshards import base_mesh
from sdy_jax.representation.sharding import TensorSharding


def resolve_single_device_shardings(
    module: ir.Operation, *, partition_count: str = "1", replica_count: str = "1"
) -> None:
    """`sdy-resolve-single-device-sharding`: what is on one device is on all, each of which computes it.

    So nothing has to be sent from that device to the others. A module without a mesh that has axes stays as it is.

    Args:
      module: a `builtin.module`, edited in place.
      partition_count, replica_count: change nothing here; nothing is sent.

    Raises:
      UnsupportedError: an op with side effects is on one device, and must not run on all.
    """
    base, meshes = base_mesh(module), module_meshes(module)
    if base is None:
        return

    def is_single(sharding: TensorSharding | None) -> bool:
        return sharding is not None and mesh_of(meshes, sharding).is_maximal

    for op in pre_order(module):
        if op.name in ("func.func", "builtin.module"):
            continue
        if not any(is_single(sharding_of(result)) for result in op.results):
            continue
        if "has_side_effect" in op.attributes and ir.BoolAttr(op.attributes["has_side_effect"]).value:
            raise UnsupportedError(
                f"{source_line(op.location)}: {op.name} has side effects and is on one device; to fix: take its "
                "sharding away to run it on every device, or its side effects"
            )
        for result in op.results:
            set_sharding(result, TensorSharding.replicated(base, rank(result)))
    for function in functions(module).values():
        sides = {"arg_attrs": list(body_of(function).arguments), "res_attrs": returned_by(function)}
        for side, values in sides.items():
            single = [i for i, s in enumerate(function_shardings(function, side)) if is_single(s)]
            whole = {i: TensorSharding.replicated(base, rank(values[i])) for i in single}
            set_function_shardings(function, side, whole)
