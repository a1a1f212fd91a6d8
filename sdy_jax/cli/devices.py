"""The devices of a command: real ones, virtual ones on the CPU, or slices of accelerators that are only described."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils, topologies

from sdy_jax.base.errors import SdyError
from sdy_jax.cli import UsageError
from sdy_jax.cli.main import DESCRIBED, FORMS, GPU, check_compiler
from sdy_jax.ir.jax_shardings import AnyMesh, bytes_text, flops_text
from sdy_jax.ir.meshes import Mesh
from sdy_jax.lowering.targets.target import device_memory
from sdy_jax.plan.estimates import MemoryUse, compiled_memory
from sdy_jax.plan.page.text import aligned
from sdy_jax.plan.profile import collectives_in_hlo, overlapped, totals
from sdy_jax.runtime.devices import describe_slices, mesh_on_devices, too_few_devices
from sdy_jax.runtime.meshes import abstract_mesh

# The devices of a command: real ones, or virtual ones on the CPU where there are too few; none where it only plans.

_FLAG = "xla_force_host_platform_device_count"


_FEW = 64
"""So many virtual devices are made for a function that may make arrays or meshes when its module is imported, although
it is only planned. Measured (2026-11): they take 0.1 s; 65,536 would take minutes."""


def request_for_plan(count: int) -> None:
    """As `request`, where a plan does without."""
    request(count if count <= _FEW else 1)


def request(count: int) -> None:
    """Sees to it that there will be so many devices on the CPU, if jax has not looked for its devices yet."""
    if count > 1 and _FLAG not in os.environ.get("XLA_FLAGS", ""):
        try:
            jax.config.update("jax_num_cpu_devices", count)
        except RuntimeError:  # it has; what there is, `devices` says
            return


def devices(count: int) -> list[jax.Device]:
    """The first devices, or virtual ones.

    Raises:
      ShardingError: there are too few of both.
    """
    real = jax.devices()
    if len(real) >= count:
        return real[:count]
    try:
        virtual = jax.devices("cpu")
    except RuntimeError:  # jax is told not to use the CPU
        virtual = []
    if len(virtual) < count:
        remedy = "use a smaller mesh, and leave JAX_PLATFORMS and XLA_FLAGS to this command"
        raise too_few_devices("the command", count, max(len(real), len(virtual)), remedy)
    print(f"note: {len(real)} {real[0].platform} at hand, so {count} virtual CPU devices are used", file=sys.stderr)
    return virtual[:count]


def mesh_for_plan(mesh: Mesh, count: int) -> AnyMesh:
    """As `mesh_on`, of `count` devices that need not be there: they are then like those at hand."""
    is_there = len(jax.devices()) >= count
    if is_there or mesh.size > count or mesh.device_ids or not mesh.axes:
        return mesh_on(mesh, count)
    return abstract_mesh([axis.size for axis in mesh.axes], mesh.axis_names)


def mesh_on(mesh: Mesh, count: int) -> jax.sharding.Mesh:
    """A mesh on the first of `count` devices, in its order.

    Raises:
      ShardingError: it has more than `count`.
    """
    return mesh_on_devices(mesh, devices(count), f"say --devices {mesh.size}, or leave it out")


# GPUs that programs are compiled for, though none is there.
#
# XLA's compiler for GPUs needs to be told what it would ask a GPU for: a text of its `GpuTargetConfigProto`. Those of
# usual ones lie in `targets`, with the numbers of NVIDIA's data sheets, and of what the CUDA runtime says of them.

COMPILER_OPTIONS: dict[str, str | bool] = {"xla_gpu_autotune_level": "0"}
"""XLA measures no variants of kernels, for which it would need the GPU."""

_SHAPE = re.compile(r"[1-9]\d*(x[1-9]\d*){0,2}")


def gpu_kinds() -> list[str]:
    """The GPUs whose targets are known by name."""
    return sorted(file.name.removesuffix(".textproto") for file in files(__package__).joinpath("targets").iterdir())


def described_gpus(name: str) -> tuple[tuple[Any, ...], int]:
    """Devices to compile for, slice by slice, and how many slices there are.

    Args:
        name: `h100:8x1x8`: a known kind, or a file of such a text, and how many there are: slices x hosts x GPUs. A
            slice is what NVLink joins. Of fewer numbers the last ones are meant: `h100:8`.

    Raises:
        UsageError: there is no such kind or file, or it has no number of GPUs.
        SdyError: there is no compiler for them.
    """
    kind, _, shape = name.rpartition(":")
    if not kind or not _SHAPE.fullmatch(shape):
        raise UsageError(f"--topology gpu:{name}; expected a kind and slices x hosts x GPUs, as in {GPU.example}")
    target = _target(kind)
    check_compiler("gpu")
    sizes = "x".join([*["1"] * (2 - shape.count("x")), shape])
    try:
        found = topologies.get_topology_desc(
            platform="cuda", topology_name=Path(kind).stem, topology=sizes, target_config=target
        )
    except (RuntimeError, NotImplementedError, ValueError) as error:
        raise SdyError(f"--topology gpu:{name}: {str(error).splitlines()[0]}") from None
    devices, slices = tuple(found.devices), int(sizes.partition("x")[0])
    describe_slices(devices, slices)
    return devices, slices


def _target(kind: str) -> str:
    """The text of a known kind, or of a file."""
    if kind in gpu_kinds():
        return files(__package__).joinpath("targets", f"{kind}.textproto").read_text()
    try:
        return Path(kind).read_text()
    except (OSError, UnicodeDecodeError):
        raise UsageError(
            f"--topology gpu:{kind}; expected {', '.join(gpu_kinds())}, or a file with the text of a "
            "GpuTargetConfigProto, as XLA has it"
        ) from None


# Slices of accelerators that are described and not there: meshes of their chips, and what a compiler says of a
# program for them.


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
            reason = str(error).splitlines()[0]
            known = "" if platform in DESCRIBED else f"; expected one of {FORMS}"
            raise SdyError(f"--topology {text}: {reason}{known}") from None
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
    return "\n".join([f"compiled for {topology}: per device", *aligned(rows)])


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
