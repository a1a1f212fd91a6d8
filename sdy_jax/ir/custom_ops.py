"""The functions that custom ops stand for. A module names them; they live as long as the MLIR context of the module."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from jax.extend.core import Jaxpr
from jax.extend.mlir import ir
from jax.sharding import PartitionSpec

from sdy_jax.errors import ShardingError

TARGET = "sdy_jax.custom_op"
"""The custom call's target; its backend configuration is the key of a custom op."""

Specs = Sequence[PartitionSpec]
"""In axes of the mesh of the surrounding `shard_map`."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class CustomOp:
    """What devices run: `run` takes local blocks and returns the local results as a list.

    `reduction`: how results combine along reduction factors; None: `run` does that itself. `padding`: what they have to
    hold behind the end of a dimension that does not divide; None: they are split evenly or not at all. `placed`: what
    gives `run` for the specs of operands and results, where it depends on them. `traced`: for such specs and the sizes
    of the axes in them, the jaxpr of what a device runs; None where it does not take them.
    """

    title: str
    run: Callable[..., Sequence[Any]]
    reduction: str | None = "sum"
    padding: Any | None = None
    placed: Callable[[Specs, Specs], Callable[..., Sequence[Any]]] | None = None
    traced: Callable[[Specs, Specs, Mapping[str, int]], Jaxpr | None] | None = None


_keys = itertools.count()
_by_key: WeakValueDictionary[str, CustomOp] = WeakValueDictionary()
_of_context: WeakKeyDictionary[ir.Context, dict[str, CustomOp]] = WeakKeyDictionary()
"""What keeps them: every context with a module that calls them."""


def register(op: CustomOp, context: ir.Context) -> str:
    """Keeps a custom op as long as a context; returns its key."""
    key = f"{op.title}:{next(_keys)}"
    _by_key[key] = op
    _of_context.setdefault(context, {})[key] = op
    return key


def custom_op_of(key: str, context: ir.Context, where: str) -> CustomOp:
    """The custom op of a call in a context, which keeps it from now on: the module may have been read from text.

    Raises:
        ShardingError: the function is not in this process, or not any more; `where` names the call.
    """
    found = _by_key.get(key)
    if found is None:
        title = key.rpartition(":")[0] or key
        raise ShardingError(
            f"{where}: the function `{title}` of a custom_op is not known here; a program with custom ops runs in the "
            "process that traced it, as long as what it was traced for is there"
        )
    _of_context.setdefault(context, {})[key] = found
    return found
