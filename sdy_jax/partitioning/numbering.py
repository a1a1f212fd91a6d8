"""Whether a mesh's devices are partitions or replicas of an SPMD program."""

from __future__ import annotations

from jax.extend.mlir import ir

from sdy_jax.errors import ParseError
from sdy_jax.ir.operations import module_meshes, pre_order, replace_op

_BY_CHANNEL = frozenset(f"stablehlo.{name}" for name in ("all_to_all", "collective_broadcast", "collective_permute"))
"""Collectives between partitions where they have a channel, and between replicas where they have none. The groups of
the others are of global ids, which number both."""


def number_devices(module: ir.Operation, base: str, partition_count: str, replica_count: str) -> None:
    """Makes the devices of the mesh replicas, where there are several replicas.

    Raises:
      ParseError: a count is none of the mesh, or there are both partitions and replicas.
    """
    partitions, replicas = _count("partition-count", partition_count), _count("replica-count", replica_count)
    if partitions > 1 and replicas > 1:
        raise ParseError(
            f"partition-count={partitions} and replica-count={replicas}: a mesh is made of partitions or of replicas; "
            "to fix: leave one of them 1"
        )
    size = module_meshes(module)[base].size
    for name, count in (("partition-count", partitions), ("replica-count", replicas)):
        if count not in (1, size):
            raise ParseError(
                f"{name}={count}, and the mesh @{base} has {size} devices; to fix: leave it out, or {size}"
            )
    if replicas > 1:
        _number_replicas(module)


def _count(name: str, text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ParseError(f"{name} cannot be {text!r}; it is a number of devices")
    return int(text)


def _number_replicas(module: ir.Operation) -> None:
    for op in list(pre_order(module)):
        if op.name == "stablehlo.partition_id":
            type_, ip = op.results[0].type, ir.InsertionPoint(op)
            replica = ir.Operation.create("stablehlo.replica_id", [type_], loc=op.location, ip=ip)
            replace_op(op, list(replica.results))
        elif op.name in _BY_CHANNEL and "channel_handle" in op.attributes:
            del op.attributes["channel_handle"]
