"""The families of devices that are known, and whose a device is.

A new accelerator is a module beside `tpu.py` with its `Family`, and its place in `FAMILIES`; or a call of `register`
from wherever it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from sdy_jax.errors import SdyError
from sdy_jax.lowering.targets.cpu import CPU
from sdy_jax.lowering.targets.family import Family
from sdy_jax.lowering.targets.gpu import GPU
from sdy_jax.lowering.targets.machine import Machine
from sdy_jax.lowering.targets.tpu import TPU
from sdy_jax.lowering.targets.unknown import UNKNOWN
from sdy_jax.runtime.devices import lowering_platforms
from sdy_jax.runtime.forms import Forms

FAMILIES = {family.name: family for family in (CPU, TPU, GPU)}
"""By the platform, as jax names it."""


def register(family: Family) -> Family:
    """Makes a family known, whose machines `CostModel.of_machine` then knows.

    Raises:
        SdyError: the platform, or the name of a machine, is taken.
    """
    if family.name in FAMILIES:
        raise SdyError(f"the platform {family.name!r} is registered already")
    taken = sorted(set(family.machines) & set(machines()))
    if taken:
        raise SdyError(f"the machine {taken[0]!r} of {family.name!r} is registered already")
    FAMILIES[family.name] = family
    return family


def family_of_platform(platform: str) -> Family:
    """The family of devices of a platform."""
    return FAMILIES.get(platform, UNKNOWN)


def platforms_whose(forms: Callable[[Forms], bool]) -> list[str]:
    """The platforms of whose forms something holds, by the names by which jax lowers for them."""
    return [name for family in FAMILIES.values() if forms(family.forms) for name in lowering_platforms(family.name)]


def family_of_machine(name: str) -> Family:
    """The family of a machine of this name, which is there."""
    return next(family for family in FAMILIES.values() if name in family.machines)


def machines() -> dict[str, Machine]:
    """All machines whose rates are published, by name."""
    return {name: machine for family in FAMILIES.values() for name, machine in family.machines.items()}


def machine_called(name: str) -> str | None:
    """The machine that a name means, however it is spelt: with or without its platform, in capitals, with dashes.

    >>> [machine_called(name) for name in ("tpu v5e", "v5e", "TPU-v5p", "H100", "v5")]
    ['tpu v5e', 'tpu v5e', 'tpu v5p', 'h100', None]
    """
    meant = _spelt(name)
    return next((known for known in machines() if meant in (_spelt(known), _spelt(known).removeprefix("tpu"))), None)


def _spelt(name: str) -> str:
    return re.sub(r"[\s_-]", "", str(name)).lower()


def usual_machines() -> dict[str, str]:
    """Per family the name of its usual machine, empty where it has none."""
    return {name: family.usual for name, family in sorted(FAMILIES.items())}


def machine_name(device_kind: str) -> str | None:
    """The name of a kind of device, as `jax.Device.device_kind` says it; None where its rates are not known.

    >>> [machine_name(kind) for kind in ("TPU v5 lite", "NVIDIA H100 80GB HBM3", "cpu")]
    ['tpu v5e', 'h100', None]
    """
    return next((name for name, machine in machines().items() if machine.is_of(device_kind)), None)


def device_memory(device_kind: str) -> float:
    """The bytes of its memory that programs can have on a kind of device; 0 where that is not known.

    >>> [device_memory(kind) / 2**30 for kind in ("TPU v5 lite", "NVIDIA A100-SXM4-80GB", "cpu")]
    [15.75, 60.0, 0.0]
    """
    name = machine_name(device_kind)
    return 0.0 if name is None else machines()[name].memory_of(device_kind)
