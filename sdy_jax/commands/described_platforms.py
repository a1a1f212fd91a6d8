"""Platforms whose devices need not be there to compile for them: what the command line says and sets for each.

Without jax, so that `--help` is quick.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field

from sdy_jax.errors import SdyError


@dataclass(frozen=True, slots=True)
class CompilerPackage:
    """What compiles for devices that are not there.

    Attributes:
        name: as people call it.
        modules: those of which one is there where it is installed.
        install: what pip installs it by.
        uses: packages with what they are for, as `doctor` says it.
    """

    name: str
    modules: tuple[str, ...]
    install: str
    uses: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DescribedPlatform:
    """A platform that `--topology` names.

    Attributes:
        example: devices of it, as they are named.
        sizes: what the sizes in it count, where the platform has no names of its own for them.
        compiler: what has to be installed.
        environment: variables to be set before jax looks for devices.
    """

    example: str
    sizes: str
    compiler: CompilerPackage
    environment: Mapping[str, str]


TPU = DescribedPlatform(
    "tpu:v5e:16x16",
    "",
    CompilerPackage("libtpu", ("libtpu",), "libtpu", {"libtpu": "plans for TPU pods"}),
    # It asks no cloud, which might not answer, and compiles beside other processes.
    {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"},
)

GPU = DescribedPlatform(
    "gpu:h100:1x8x8",
    "slices x hosts x GPUs",
    CompilerPackage("jax's plugin for CUDA", ("jax_cuda13_plugin", "jax_cuda12_plugin"), "'sdy_jax[gpu-topologies]'"),
    # It loads without the libraries that programs run with.
    {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"},
)

DESCRIBED = {"tpu": TPU, "gpu": GPU}
"""By the platform, as `--topology` begins with it."""

EXAMPLE = TPU.example

FORMS = ", or ".join(
    f"{', '.join(filter(None, (each.example, each.sizes)))} (needs {each.compiler.name})" for each in DESCRIBED.values()
)
"""What `--topology` may be, with what has to be installed."""


def check_compiler(platform: str) -> None:
    """Raises:
    SdyError: the platform is known, and its compiler is not installed.
    """
    if platform not in DESCRIBED:
        return
    compiler = DESCRIBED[platform].compiler
    if not any(importlib.util.find_spec(module) for module in compiler.modules):
        raise SdyError(
            f"--topology {platform}:... compiles with {compiler.name}, which is not installed; to fix: "
            f"pip install {compiler.install}"
        )
