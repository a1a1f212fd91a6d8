"""The rules about shardings, and about tensors that have one."""

from __future__ import annotations

from jax.extend.mlir import ir

from sdy_jax.ir.stored_shardings import sharding_of
from sdy_jax.shard.semantics.checks import check_element, check_whole_device
from sdy_jax.shard.semantics.layout import check_fits, check_layout
from sdy_jax.shard.stated_shardings import defining, stated_sharding
from sdy_jax.shard.verification.scope import MeshScope, element_type, shape_of
from sdy_jax.shard.view import DialectOp


def sharding(op: DialectOp, scope: MeshScope) -> None:
    """What a sharding says by itself."""
    stated = stated_sharding(op.result)
    assert stated is not None
    check_layout(stated.layout, scope.mesh(op))


def shard(op: DialectOp, scope: MeshScope) -> None:
    """A sharding fits the tensor that it is for."""
    shape, stated = shape_of(op, op["src"]), stated_sharding(op["sharding"])
    if stated is None:
        return
    if stated.layout.partial is not None:
        check_element("partial", stated.layout.partial, str(element_type(op["src"])))
    on = scope.meshes.get((stated.dialect, stated.mesh))
    if on is not None:  # else it is said of the sharding itself
        check_fits(stated.layout, on, shape)


def known_sharding(op: DialectOp, scope: MeshScope) -> None:
    """Of a value that a shard op makes, or that has a sharding of the SDY dialect."""
    source: ir.Value = op["source"]
    shape_of(op, source)
    if defining(source, "shard") is None and sharding_of(source) is None:
        op.fail(f"the sharding of {source.get_name()} is not known here; annotate it with {op.dialect}.shard", source)


def shape_of_a_shard(op: DialectOp, scope: MeshScope) -> None:
    sizes = op["shape"] if op.dialect == "mesh" else op["dims"]
    given = len(op.operation.results)
    if given != len(sizes):
        op.fail(f"{given} results, expected {len(sizes)}")
    stated = stated_sharding(op["sharding"])
    on = scope.meshes.get((stated.dialect, stated.mesh)) if stated else None
    if stated is None or on is None:
        return
    check_fits(stated.layout, on, [size if isinstance(size, int) else None for size in sizes])
    for dimension, size in enumerate(sizes):
        if size is None and dimension not in stated.layout.offsets_of(on):
            op.fail(f"size of dimension {dimension} is unknown")
    if op.dialect == "shard":
        check_whole_device(on, op["device"], linear=True)
