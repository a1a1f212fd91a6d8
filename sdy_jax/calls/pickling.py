"""Partitioned functions in pickles: the function and its options, devices by their numbers. Plans are made again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from sdy_jax.annotate.arguments import SPEC_TYPES
from sdy_jax.calls.options import Options
from sdy_jax.errors import ShardingError


@dataclass(frozen=True, slots=True)
class MeshRecord:
    """A mesh by the numbers of its devices, or a sharding on it."""

    numbers: np.ndarray
    axis_names: tuple[str, ...]
    axis_types: tuple[jax.sharding.AxisType, ...]
    spec: PartitionSpec | None = None
    memory_kind: str | None = None

    @classmethod
    def of(cls, mesh: jax.sharding.Mesh, **rest: Any) -> MeshRecord:
        numbers = np.vectorize(lambda device: device.id, otypes=[int])(mesh.devices)
        return cls(numbers, mesh.axis_names, mesh.axis_types, **rest)

    def restored(self) -> jax.sharding.Mesh | NamedSharding:
        """
        Raises:
            ShardingError: this process has fewer devices.
        """
        there = {device.id: device for device in jax.devices()}
        missing = [number for number in self.numbers.flat if number not in there]
        if missing:
            raise ShardingError(
                f"the pickled function is partitioned over {self.numbers.size} devices, also on number {missing[0]}, "
                f"which is not among the {len(there)} here"
            )
        devices = np.vectorize(there.__getitem__, otypes=[object])(self.numbers)
        mesh = jax.sharding.Mesh(devices, self.axis_names, axis_types=self.axis_types)
        return mesh if self.spec is None else NamedSharding(mesh, self.spec, memory_kind=self.memory_kind)


def global_name(function: Any) -> str | None:
    """Where a module has this very object; it is pickled as functions are."""
    name, module = getattr(function, "__qualname__", ""), sys.modules.get(getattr(function, "__module__", None) or "")
    return name if module is not None and getattr(module, name, None) is function else None


def recorded(options: Options) -> Options:
    """Options that can be pickled."""
    return _mapped(options, _recorded)


def restored(kind: Callable[..., Any], fun: Callable[..., Any], options: Options) -> Any:
    """The function of options that were `recorded`."""
    return kind(fun, _mapped(options, lambda x: x.restored() if isinstance(x, MeshRecord) else x))


def _recorded(x: Any) -> Any:
    if isinstance(x, jax.sharding.Mesh):
        return MeshRecord.of(x)
    if isinstance(x, NamedSharding) and isinstance(x.mesh, jax.sharding.Mesh):
        return MeshRecord.of(x.mesh, spec=x.spec, memory_kind=x.memory_kind)
    return x


def _mapped(options: Options, change: Callable[[Any], Any]) -> Options:
    trees = {name: getattr(options, name) for name in ("mesh", "in_shardings", "out_shardings")}
    changed = jax.tree.map(change, trees, is_leaf=lambda x: isinstance(x, (*SPEC_TYPES, MeshRecord)))
    return replace(options, **changed)
