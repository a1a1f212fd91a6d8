"""What users state of shardings, as the module keeps it beside what propagation made of it."""

from __future__ import annotations

from collections.abc import Mapping

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Op, Value
from sdy_jax.representation.attributes import shardings_from_attribute
from sdy_jax.representation.sharding import TensorSharding

STATED = "sdy.stated"
"""On constraints and data-flow ops: per result, the sharding that is stated for it."""

STATED_INSIDE = "sdy.stated_inside"
"""On computations: per argument of the body, the sharding stated for what flows in, in outer terms."""

IN_GROUP = "sdy.group"
"""On reshards: the number of the group that the value is in."""

DERIVED = "sdy.derived"
"""On ops: the indices of the results whose shardings are those that JAX's typing rules gave them, on Explicit axes.
These are proposals."""

RETURNED = "sdy.returned"
"""On results of functions: the sharding is that in which an argument, which the result replaces, is passed."""

WRITTEN = "sdy.written"
"""On constraints that the user wrote, until those that JAX wrote for derived types are gone."""

STATEMENTS = frozenset({STATED, STATED_INSIDE, IN_GROUP, DERIVED, RETURNED})


def derived_results(attributes: Mapping[str, ir.Attribute]) -> tuple[int, ...]:
    """The indices in the attribute `DERIVED`."""
    return tuple(ir.DenseI64ArrayAttr(attributes[DERIVED])) if DERIVED in attributes else ()


def derive(result: ir.OpResult) -> None:
    """Records that the sharding of a result is derived."""
    attributes = result.owner.attributes
    _set_derived(attributes, [*derived_results(attributes), result.result_number])


def state(value: ir.Value) -> None:
    """Records that the sharding of a value, whatever it was, is stated."""
    if is_derived(value):
        attributes = value.owner.attributes
        _set_derived(attributes, [n for n in derived_results(attributes) if n != value.result_number])


def is_derived(value: ir.Value) -> bool:
    """Whether the sharding of a value is derived."""
    return isinstance(value, ir.OpResult) and value.result_number in derived_results(value.owner.attributes)


def _set_derived(attributes: ir.OpAttributeMap, numbers: list[int]) -> None:
    attributes[DERIVED] = ir.DenseI64ArrayAttr.get(numbers)


def stated_for(value: Value) -> TensorSharding | None:
    """What is stated for the result of a constraint, or for the owner of a data-flow edge."""
    op, name = (value.owner, STATED) if isinstance(value.owner, Op) else (value.owner.parent, STATED_INSIDE)
    found = op.attribute(name)
    return None if found is None else shardings_from_attribute(found)[value.index]


def group_of(op: Op) -> int | None:
    """The number of the group whose member goes through a reshard."""
    return op.int(IN_GROUP) if op.attribute(IN_GROUP) is not None else None
