"""The functions that custom ops stand for. A module names them, they stay in the process that traced it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import PartitionSpec

from sdy_jax.errors import ShardingError

TARGET = "sdy_jax.custom_op"
"""The custom call's target; its backend configuration is a key of `CUSTOM_OPS`."""

Specs = Sequence[PartitionSpec]
"""In axes of the mesh of the surrounding `shard_map`."""


@dataclass(frozen=True, slots=True, eq=False)
class CustomOp:
    """What devices run: `run` takes local blocks and returns the local results as a list.

    `reduction`: how results combine along reduction factors; None: these are whole. `padding`: what they have to hold
    behind the end of a dimension that does not divide; None: they are split evenly or not at all. `placed`: what gives
    `run` for the specs of operands and results, where it depends on them.
    """

    title: str
    run: Callable[..., Sequence[Any]]
    reduction: str | None = "sum"
    padding: Any | None = None
    placed: Callable[[Specs, Specs], Callable[..., Sequence[Any]]] | None = None


CUSTOM_OPS: dict[str, CustomOp] = {}
"""By key; a program that has been traced holds the key."""


def custom_op_of(key: str, where: str) -> CustomOp:
    """The custom op of a call.

    Raises:
        ShardingError: the function is not in this process; `where` names the call.
    """
    found = CUSTOM_OPS.get(key)
    if found is None:
        title = key.rpartition(":")[0] or key
        raise ShardingError(
            f"{where}: the function `{title}` of a custom_op is not known here; a program with custom ops runs in the "
            "process that traced it"
        )
    return found
