"""What users state of shardings, as the module keeps it beside what propagation made of it."""

from __future__ import annotations

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
"""On ops whose results have the shardings that JAX's typing rules gave them, on Explicit axes: these are proposals."""

WRITTEN = "sdy.written"
"""On constraints that the user wrote, until those that JAX wrote for derived types are gone."""

STATEMENTS = frozenset({STATED, STATED_INSIDE, IN_GROUP, DERIVED})


def stated_for(value: Value) -> TensorSharding | None:
    """What is stated for the result of a constraint, or for the owner of a data-flow edge."""
    op, name = (value.owner, STATED) if isinstance(value.owner, Op) else (value.owner.parent, STATED_INSIDE)
    found = op.attribute(name)
    return None if found is None else shardings_from_attribute(found)[value.index]


def group_of(op: Op) -> int | None:
    """The number of the group whose member goes through a reshard."""
    return op.int(IN_GROUP) if op.attribute(IN_GROUP) is not None else None
