"""GPUs that programs are compiled for, though none is there.

XLA's compiler for GPUs needs to be told what it would ask a GPU for: a text of its `GpuTargetConfigProto`. Those of
usual ones lie in `targets`, with the numbers of NVIDIA's data sheets, and of what the CUDA runtime says of them.
"""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from typing import Any

from jax.experimental import topologies

from sdy_jax.commands import UsageError
from sdy_jax.commands.described_platforms import GPU, check_compiler
from sdy_jax.errors import SdyError
from sdy_jax.runtime.devices import describe_slices

COMPILER_OPTIONS: dict[str, str | bool] = {"xla_gpu_autotune_level": "0"}
"""XLA measures no variants of kernels, for which it would need the GPU."""

_SHAPE = re.compile(r"[1-9]\d*(x[1-9]\d*){0,2}")


def gpu_kinds() -> list[str]:
    """The GPUs whose targets are known by name."""
    return sorted(file.name.removesuffix(".textproto") for file in files(__package__).joinpath("targets").iterdir())


def described_gpus(name: str) -> tuple[tuple[Any, ...], int]:
    """Devices to compile for, slice by slice, and how many slices there are.

    Args:
        name: `h100:1x8x8`: a known kind, or a file of such a text, and how many there are: slices x hosts x GPUs. A
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
