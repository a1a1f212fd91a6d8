"""Slices of accelerators that are described and not there: meshes of their chips, and what a compiler says of a program
for them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils, topologies

from sdy_jax.commands import UsageError
from sdy_jax.commands.described_platforms import DESCRIBED, check_compiler
from sdy_jax.commands.gpu_targets import COMPILER_OPTIONS, described_gpus
from sdy_jax.errors import SdyError
from sdy_jax.lowering.targets.registry import device_memory
from sdy_jax.plan.estimates.memory import MemoryUse, compiled_memory
from sdy_jax.plan.hlo import collectives_in_hlo, totals
from sdy_jax.plan.hlo_schedule import overlapped
from sdy_jax.representation.mesh import Mesh
from sdy_jax.representation.type_text import bytes_text, flops_text


@dataclass(frozen=True)
class Topology:
    """The chips of one or more slices, by slices, as the command line names them."""

    text: str
    slices: int
    devices: tuple[Any, ...]

    @classmethod
    def of(cls, text: str, slices: int = 1) -> Topology:
        """`tpu:v5e:16x16`: a platform, and a slice as its compiler names it; of GPUs as `described_gpus` does.

        Raises:
            SdyError: there is no such slice, or no compiler for it.
        """
        platform, _, name = text.partition(":")
        if not name:
            examples = " or ".join(described.example for described in DESCRIBED.values())
            raise UsageError(f"--topology {text}; expected a platform and a slice of it, as in {examples}")
        if platform == "gpu":
            return cls._of_gpus(text, name, slices)
        check_compiler(platform)
        several = {"num_slices": slices} if slices > 1 else {}
        try:
            found = topologies.get_topology_desc(platform=platform, topology_name=name, **several)
        except (RuntimeError, NotImplementedError, ValueError) as error:
            raise SdyError(f"--topology {text}: {str(error).splitlines()[0]}") from None
        devices = sorted(found.devices, key=lambda device: getattr(device, "slice_index", None) or 0)
        return cls(text, slices, tuple(devices))

    @classmethod
    def _of_gpus(cls, text: str, name: str, slices: int) -> Topology:
        if slices != 1:
            raise UsageError(f"--slices {slices}; GPUs have their slices in their name, as in gpu:h100:{slices}x1x8")
        devices, counted = described_gpus(name)
        return cls(text, counted, devices)

    @property
    def is_gpu(self) -> bool:
        """Whether the chips are GPUs, whose slices are a part of their name; else they are TPUs, as a rule."""
        return self.text.startswith("gpu:")

    @property
    def compiler_options(self) -> dict[str, str | bool] | None:
        """The options with which the compiler takes a program for chips that are not there."""
        return COMPILER_OPTIONS if self.is_gpu else None

    def __str__(self) -> str:
        slices = f"{self.slices} x " if self.slices > 1 and not self.is_gpu else ""
        return f"{slices}{self.text}, {len(self.devices)} {self.devices[0].device_kind} devices"

    def mesh(self, mesh: Mesh) -> jax.sharding.Mesh:
        """A mesh on all chips. The first axis is the one over slices.

        Raises:
            UsageError: its sizes do not fit.
        """
        sizes = tuple(axis.size for axis in mesh.axes)
        if mesh.size != len(self.devices):
            raise UsageError(f"the mesh {mesh} has {mesh.size} devices; expected all of {self}")
        if sizes[0] % self.slices:
            first = mesh.axes[0]
            raise UsageError(f"the first axis runs over slices; got {first} for {self}, expected a multiple of them")
        return jax.sharding.Mesh(np.concatenate([self._slice(i, sizes) for i in range(self.slices)]), mesh.axis_names)

    def _slice(self, number: int, sizes: tuple[int, ...]) -> np.ndarray:
        """The chips of a slice in its part of a mesh, neighbours beside each other."""
        count = len(self.devices) // self.slices
        own, shape = self.devices[number * count :][:count], (sizes[0] // self.slices, *sizes[1:])
        try:
            found: np.ndarray = mesh_utils.create_device_mesh(shape, own, allow_split_physical_axes=True)
        except (NotImplementedError, ValueError):  # no such mesh follows the links
            return np.array(own).reshape(shape)
        return found


def prepare() -> None:
    """Before jax looks for devices: none are needed, and where there are some, others may use them."""
    for platform in DESCRIBED.values():
        for name, value in platform.environment.items():
            os.environ.setdefault(name, value)
    if not getattr(jax.config, "jax_platforms", None):
        jax.config.update("jax_platforms", "cpu")


def compiled_report(lowered: jax.stages.Lowered, topology: Topology) -> str:
    """What the compiler makes of a program: memory of a device, costs and collectives.

    Raises:
        SdyError: it does not compile, for example because it takes more memory than there is.
    """
    try:
        compiled = lowered.compile(topology.compiler_options)
    except jax.errors.JaxRuntimeError as error:
        raise SdyError(f"the compiler for {topology} says: {str(error).splitlines()[0]}") from None
    rows = [
        *_memory(compiled_memory(compiled), device_memory(topology.devices[0].device_kind)),
        *_costs(compiled.cost_analysis()),
        *_collectives(compiled.as_text() or ""),
    ]
    width = max(len(name) for name, _ in rows)
    lines = (f"  {name:<{width}}  {value}" for name, value in rows)
    return "\n".join([f"compiled for {topology}: per device", *lines])


def _memory(found: MemoryUse | None, available: float) -> list[tuple[str, str]]:
    """What a device holds, of what is known to be available to a program."""
    if found is None:
        return []
    of = f" of {bytes_text(available)}" if available else ""
    reused = f", {bytes_text(found.shared)} of it in donated arguments" if found.shared else ""
    return [
        ("memory", f"{bytes_text(found.peak)}{of}"),
        ("  arguments", bytes_text(found.arguments)),
        ("  results", bytes_text(found.results) + reused),
        ("  temporary", bytes_text(found.temporaries)),
    ]


def _costs(found: Any) -> list[tuple[str, str]]:
    """The compiler's cost figures; the body of a loop counts once."""
    told = found or {}
    rows = [
        ("operations", flops_text(told["flops"])) if "flops" in told else None,
        ("bytes accessed", bytes_text(told["bytes accessed"])) if "bytes accessed" in told else None,
        ("time at best", f"{told['optimal_seconds'] * 1e3:.3g} ms") if told.get("optimal_seconds", 0) > 0 else None,
    ]
    return [row for row in rows if row is not None]


def _collectives(hlo: str) -> list[tuple[str, str]]:
    sent, hidden = totals(collectives_in_hlo(hlo)), overlapped(hlo)
    kinds = [(f"  {kind}", f"{count} x, {bytes_text(wire)}") for kind, (count, wire) in sorted(sent.by_kind.items())]
    if not kinds:
        return [("collectives", "none")]
    beside = [("  beside other work", f"{hidden.count} x, {bytes_text(hidden.wire_bytes)}")] if hidden.count else []
    return [("collectives", f"{sent.count}, {bytes_text(sent.wire_bytes)} on the wire"), *kinds, *beside]
