"""The target of a plan: the devices for which a program is planned, and the registry of the families that are known.

A new accelerator is a module beside `tpu.py` with its `Family`, and its place in `FAMILIES`; or a call of `register`
from another package. See docs/explanation/costs.md#targets.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from sdy_jax.base.errors import SdyError
from sdy_jax.ir.jax_shardings import AnyMesh
from sdy_jax.lowering.targets.family import Arrays, Collectives, Compiler, Family, Machine, Order
from sdy_jax.lowering.targets.gpu import GPU
from sdy_jax.lowering.targets.tpu import TPU
from sdy_jax.runtime.devices import (
    LineParts,
    allocator_memory,
    axes_between,
    device_kind,
    device_like,
    lowering_platforms,
    platform_of,
    torus_lines,
)
from sdy_jax.runtime.meshes import Forms

# Devices of which nothing is known.

UNKNOWN = Family("unknown")


# CPUs: virtual devices on which programs for accelerators are tried, as a rule.

_FLOP = 0.1
"""Guessed: replicated work competes for the same cores. With the value of accelerators the example's step on 2 x 4
virtual devices moved 0.96 of jit's bytes in 1.05 of its time, with this one 1.00 of the bytes in 1.01 of the time
(2026-11, medians of 10 pairs on two cores, `scripts/bench_step`)."""

CPU = Family(
    "cpu",
    compiler=Compiler(order=Order(runs_early=True), collectives=Collectives(buckets=frozenset())),
    forms=Forms(at_once=True, apart=True, in_rows=True, in_order=True),
    flop=_FLOP,
)


# The families of devices that are known, and whose a device is.

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

    >>> [machine_called(name) for name in ("tpu v5e", "v5e", "TPU-v5p", "H100-SXM", "v5")]
    ['tpu v5e', 'tpu v5e', 'tpu v5p', 'h100', None]
    """
    meant = _spelt(name)
    return next((known for known, machine in machines().items() if meant in _spellings(known, machine)), None)


def _spellings(name: str, machine: Machine) -> set[str]:
    names = [*map(_spelt, (name, *machine.also))]
    return {*names, *(each.removeprefix("tpu") for each in names)}


def _spelt(name: str) -> str:
    return re.sub(r"[\s_-]", "", str(name)).lower()


# Machines with their hosts: how many devices their links join, and how many such hosts a network does.

_HOSTS = re.compile(r"(?:(?P<hosts>[1-9]\d*)\s*x\s*)?(?P<name>.+?)(?:\s*x\s*(?P<devices>[1-9]\d*))?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Hosts:
    """Machines by name, and how they are joined: `h100`, `h100 x8`, `4 x h100 x8`.

    Attributes:
        machine: the name of one.
        count: how many hosts there are, which the network joins. A host is what the machine's own links join: a server,
            a rack, or a slice of a pod.
        devices: those of each host; 0 where nothing is said of hosts, and the links join all.
    """

    machine: str
    count: int = 1
    devices: int = 0

    @classmethod
    def of(cls, text: str) -> Hosts:
        """
        >>> str(Hosts.of("4x H100-SXM x8")), Hosts.of("v5e")
        ('4 x h100 x8', Hosts(machine='tpu v5e', count=1, devices=0))

        Raises:
            SdyError: no machine is called so, or it has other hosts.
        """
        said = _HOSTS.fullmatch(str(text).strip())
        whole = machine_called(text)
        name = whole or (machine_called(said["name"]) if said else None)
        if name is None:
            raise SdyError(no_machine(said["name"] if said else text))
        if whole or said is None:
            return cls(name)
        found = cls(name, int(said["hosts"] or 1), int(said["devices"] or 0))
        found._check(text)
        return found

    def _check(self, text: str) -> None:
        links = machines()[self.machine].links
        if self.count > 1 and not self.devices:
            example = f"{self.count} x {self.machine} x{links.joins or 8}"
            raise SdyError(f"{text!r} does not say how many devices each host has; to fix: as in {example!r}")
        if 0 < links.joins < self.devices:
            fits = f"{-(-self.count * self.devices // links.joins)} x {self.machine} x{links.joins}"
            raise SdyError(
                f"{links.name} joins {links.joins} {self.machine} devices, not {self.devices}; as in {fits!r}"
            )

    def __str__(self) -> str:
        hosts = f"{self.count} x " if self.count > 1 else ""
        return f"{hosts}{self.machine} x{self.devices}" if self.devices else self.machine

    def usual(self, count: int) -> Hosts:
        """Those of so many devices: where nothing is said of hosts, as many full ones as it takes.

        >>> str(Hosts("h100").usual(64)), str(Hosts("tpu v5e").usual(64))
        ('8 x h100 x8', 'tpu v5e')

        Raises:
            SdyError: these are no full hosts.
        """
        links = machines()[self.machine].links
        if self.devices or not links.joins or count <= links.joins:
            return self
        if count % links.joins:
            fewest = next(n for n in range(-(-count // links.joins), count + 1) if count % n == 0)
            raise SdyError(
                f"{links.name} joins {links.joins} {self.machine} devices, and {count} do not fill such hosts; to "
                f"fix: say how many each has, as in '{fewest} x {self.machine} x{count // fewest}'"
            )
        return Hosts(self.machine, count // links.joins, links.joins)

    def network_axes(self, axes: Mapping[str, int], ids: Sequence[int] = ()) -> dict[str, int]:
        """The axes of a mesh along which its devices, host by host in the mesh's order, are of several hosts, as
        `runtime.devices.network_axes`.

        Raises:
            SdyError: the mesh has another number of devices.
        """
        size, there = math.prod(axes.values()), self.count * self.devices
        if not self.devices or (self.count == 1 and size <= there):
            return {}
        if size != there:
            mesh = ", ".join(f"{name}={each}" for name, each in axes.items())
            raise SdyError(f"{str(self)!r} are {there} devices, and the mesh {mesh} has {size}")
        place = np.array(ids or range(size)).reshape(*axes.values()) // self.devices
        return axes_between(place, list(axes))


def no_machine(name: str) -> str:
    """Says that no machine is called so, and which there are."""
    names = [each for known, machine in machines().items() for each in (known, *machine.also)]
    near = difflib.get_close_matches(name.lower(), names, 1)
    meant = f"did you mean {near[0]!r}? Known" if near else "known"
    return f"no machine is called {name!r}; {meant} are {', '.join(names)}. Or give CostModel your own rates"


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


# The target of a plan: the devices for which a program is planned, the one answer to all that depends on them.
#
# See docs/explanation/costs.md#targets.

Lines = tuple[tuple[str, LineParts], ...]
"""How each mesh axis lies on a torus; axes of devices that do not know their place are left out."""


@dataclass(frozen=True, slots=True)
class Target:
    """For which devices a program is planned.

    Attributes:
        family: what they have in common with others of their kind.
        memory: the bytes of a device that programs can have; 0 where that is not known.
        lines: how the axes of the mesh lie on them, where reduce-scatters depend on it.
    """

    family: Family = UNKNOWN
    memory: float = 0.0
    lines: Lines = ()

    @classmethod
    def of(cls, mesh: AnyMesh, machine: str = "", lines: Lines = ()) -> Target:
        """That of a mesh's devices, or of a machine that these stand for, as virtual CPU devices do.

        Args:
            mesh: on whose devices the program runs. Their memory counts where it is known.
            machine: the name of the machine whose rates costs are, where they are of one.
            lines: how the axes would lie on it, where devices have no places.
        """
        family = family_of_machine(machine) if machine else family_of(mesh)
        along_lines = family.compiler.collectives.along_lines
        memory = memory_of(mesh) or (machines()[machine].memory_of() if machine else 0.0)
        return cls(family, memory, (torus_lines(mesh) or lines) if along_lines else ())

    @property
    def compiler(self) -> Compiler:
        """What the devices' compiler does."""
        return self.family.compiler

    @property
    def arrays(self) -> Arrays:
        """How arrays lie in their memory."""
        return self.family.arrays

    @property
    def parts_of_axes(self) -> Mapping[str, LineParts]:
        """`lines` by axis."""
        return dict(self.lines)


def family_of(mesh: AnyMesh) -> Family:
    """The family of a mesh's devices, by their kind where that is known: of devices that are described jax says no
    more."""
    name = machine_of(mesh)
    return family_of_machine(name) if name else family_of_platform(platform_of(mesh))


def machine_of(mesh: AnyMesh) -> str:
    """The name of the machine that a mesh's devices are; empty where its rates are not known."""
    return machine_name(device_kind(mesh)) or ""


def memory_of(mesh: AnyMesh) -> float:
    """The bytes of memory of a mesh's devices; 0 where that is not known.

    What is known of their kind comes first, so that a plan for devices that are described is the one on the machine.
    """
    return device_memory(device_kind(mesh)) or allocator_memory(mesh)


def forms_for(mesh: AnyMesh) -> Forms:
    """In which forms the compiler of the devices on which a program runs takes collectives, where they are known: those
    are not always the target's."""
    device = device_like(mesh)
    return Forms() if device is None else family_of_platform(device.platform).forms


# Code in the form that the compiler for which a program is lowered takes best: it may be for other devices than those
# for which it was traced, by an abstract mesh or `lower(lowering_platforms=...)`.

Branch = Callable[..., jax.Array]


def where_forms(has: Callable[[Forms], bool], *operands: jax.Array, then: Branch, otherwise: Branch) -> jax.Array:
    """What one of two functions makes of operands: `then` on the platforms whose forms have something."""
    branches = dict.fromkeys(platforms_whose(has), then)
    return jax.lax.platform_dependent(*operands, default=otherwise, **branches)
