"""The border of a computation that has no data-flow edges: its shardings are read and written in the op's lists."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sdy_jax.ir.graph import Op, Value
from sdy_jax.propagation.edges import add_free_axes, erase_manual_axes, manual_axes
from sdy_jax.representation.attributes import shardings_from_attribute, shardings_to_attribute
from sdy_jax.representation.sharding import TensorSharding

COMPUTATIONS = ("sdy.manual_computation", "sdy.named_computation")


@dataclass(frozen=True, slots=True)
class ShardingSlot:
    """Where a computation keeps the sharding of a body argument (`in_shardings`) or of a result (`out_shardings`)."""

    op: Op
    name: str
    index: int

    @classmethod
    def of(cls, op: Op, value: Value) -> ShardingSlot:
        return cls(op, "out_shardings" if value.defining_op is op else "in_shardings", value.index)

    def read(self) -> TensorSharding | None:
        """The sharding as the value has it: a body argument has no manual axes."""
        given = _listed(self.op, self.name)
        if not given:
            return None
        return erase_manual_axes(given[self.index], manual_axes(self.op)) if self._is_inside else given[self.index]

    def outer(self, sharding: TensorSharding) -> TensorSharding:
        """The list's entry, with manual axes, for a value that has `sharding`."""
        given = _listed(self.op, self.name)
        if not (self._is_inside and given and self.op.name == "sdy.manual_computation"):
            return sharding
        return add_free_axes(given[self.index], sharding, manual_axes(self.op))

    @property
    def _is_inside(self) -> bool:
        return self.name == "in_shardings"


def write_slots(found: Iterable[tuple[ShardingSlot, TensorSharding | None]]) -> None:
    """Stores shardings in the lists of their ops; values that never had one are open on the same mesh."""
    new: dict[tuple[Op, str], dict[int, TensorSharding]] = {}
    for slot, sharding in found:
        if sharding is not None:
            new.setdefault((slot.op, slot.name), {})[slot.index] = slot.outer(sharding)
    for (op, name), by_index in new.items():
        mesh = next(iter(by_index.values())).mesh
        values = op.operands if name == "in_shardings" else op.results
        given = _listed(op, name) or tuple(TensorSharding.fully_open(mesh, v.rank) for v in values)
        filled = tuple(by_index.get(i, sharding) for i, sharding in enumerate(given))
        op.mlir.attributes[name] = shardings_to_attribute(filled, op.mlir.context)


def _listed(op: Op, name: str) -> tuple[TensorSharding, ...]:
    attributes = op.mlir.attributes
    return tuple(shardings_from_attribute(attributes[name])) if name in attributes else ()
