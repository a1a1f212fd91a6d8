"""The target of a plan: the devices for which a program is planned, the one answer to all that depends on them.

See docs/explanation/costs.md#targets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sdy_jax.lowering.targets.compiler import Compiler
from sdy_jax.lowering.targets.family import Arrays, Family
from sdy_jax.lowering.targets.registry import (
    device_memory,
    family_of_machine,
    family_of_platform,
    machine_name,
    machines,
)
from sdy_jax.lowering.targets.unknown import UNKNOWN
from sdy_jax.representation.named import AnyMesh
from sdy_jax.runtime.devices import allocator_memory, device_kind, device_like, platform_of, torus_lines
from sdy_jax.runtime.forms import Forms

Lines = tuple[tuple[str, tuple[tuple[int, int], ...]], ...]
"""Per mesh axis its parts, major to minor, that each lie along one dimension of a torus: size and dimension. None where
it goes around; axes of devices that do not know their place are left out."""


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
    def of(cls, mesh: AnyMesh, machine: str = "") -> Target:
        """That of a mesh's devices, or of a machine that these stand for, as virtual CPU devices do.

        Args:
            mesh: on whose devices the program runs. Their memory counts where it is known.
            machine: the name of the machine whose rates costs are, where they are of one.
        """
        family = family_of_machine(machine) if machine else family_of(mesh)
        along_lines = family.compiler.collectives.along_lines
        memory = memory_of(mesh) or (machines()[machine].memory_of() if machine else 0.0)
        return cls(family, memory, torus_lines(mesh) if along_lines else ())

    @property
    def compiler(self) -> Compiler:
        """What the devices' compiler does."""
        return self.family.compiler

    @property
    def arrays(self) -> Arrays:
        """How arrays lie in their memory."""
        return self.family.arrays

    @property
    def parts_of_axes(self) -> Mapping[str, tuple[tuple[int, int], ...]]:
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
