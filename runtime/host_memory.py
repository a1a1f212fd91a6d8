"""Arrays in the memory of the host, next to that of their devices: programs take and make them on devices."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax

_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def is_on_host(type_: Any) -> bool:
    """Whether the type of an array says that it is in the memory of the host."""
    return getattr(type_, "memory_space", _DEVICE) == _HOST


def states_host(spec: Any) -> bool:
    """Whether a specification of a result states the memory of the host that jax's types know. Of other kinds jit is
    told."""
    return isinstance(spec, jax.sharding.NamedSharding) and spec.memory_kind == "pinned_host"


def states_other_kind(spec: Any) -> bool:
    """Whether a specification states a kind of memory that jax's types do not know."""
    return isinstance(spec, jax.sharding.NamedSharding) and spec.memory_kind not in (None, "device", "pinned_host")


def on_devices(x: Any) -> Any:
    """An argument in the memory of its devices."""
    return jax.device_put(x, _DEVICE) if is_on_host(jax.typeof(x)) else x


def with_some_on_host(values: Sequence[Any], numbers: Collection[int]) -> list[Any]:
    """Values of which some are in the memory of the host."""
    # `src`: cotangents come back to devices, which jax 0.10 and 0.12 leave on the host.
    return [jax.device_put(y, _HOST, src=_DEVICE) if i in numbers else y for i, y in enumerate(values)]
