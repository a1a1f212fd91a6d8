"""Per-device programs that were emitted before, beside the plans that they are of: as modules, with what a caller of
them has to know.

A program is found by the bytes of its plan's entry, the lines of the source, the mesh on its devices, and jax's
options. Nothing in it is read before its digest was compared.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
from jax.extend.mlir import ir

from sdy_jax.base.files import SharedFolder
from sdy_jax.base.jax_tracing import lowering_options
from sdy_jax.ir.jax_shardings import AnyMesh
from sdy_jax.ir.meshes import AxisRef, Mesh
from sdy_jax.plan.cache.entry import BrokenEntry, Reader, Writer, checked_entry, sealed_entry
from sdy_jax.plan.cache.key import MODULE, Key
from sdy_jax.plan.digests import digest_of


@dataclass(frozen=True, slots=True)
class CachedAs:
    """What a plan is in the cache: a digest of all its entry says, the partitioned module that this is of, and whether
    the program calls functions of this process."""

    digest: str
    module: ir.Operation
    calls_functions: bool

    @classmethod
    def of(cls, key: Key, data: bytes, module: ir.Operation) -> CachedAs:
        """That of the bytes of an entry."""
        return cls(digest_of("\n".join((key.name, key.lines, digest_of(data)))), module, bool(key.functions))


class LocalType(NamedTuple):
    """The type of an array on one device."""

    shape: tuple[int, ...]
    dtype: str
    weak: bool


@dataclass(frozen=True, slots=True)
class LocalSignature:
    """What a caller has to know of a per-device program.

    Attributes:
        axes: the axes that the program uses, parts of axes among them.
        operands, results: the types of what it takes and returns on one device.
    """

    axes: tuple[AxisRef, ...]
    operands: tuple[LocalType, ...]
    results: tuple[LocalType, ...]


class EmittedProgram(NamedTuple):
    """What every device runs: its signature, and MLIR's bytecode."""

    signature: LocalSignature
    module: bytes


@dataclass(frozen=True, slots=True)
class EmittedEntry:
    """The place of a plan's program in the cache.

    Attributes:
        folder: of the cache.
        key: by what it is found.
        options: jax's, with which it is emitted and lowered.
    """

    folder: SharedFolder
    key: str
    options: str

    @classmethod
    def of(
        cls, folder: SharedFolder, plan: CachedAs, mesh: Mesh, jax_mesh: AnyMesh, used: Sequence[bool]
    ) -> EmittedEntry:
        """That of a plan.

        Args:
            folder: of the cache.
            plan: what it is there.
            mesh, jax_mesh: the program's, and the one that it runs on.
            used: per argument of the partitioned module, whether the program takes it.
        """
        options = lowering_options()
        said = (plan.digest, repr(mesh), *_devices(jax_mesh), repr(list(used)), options)
        return cls(folder, digest_of("\n".join(said)), options)

    def read(self) -> EmittedProgram | None:
        """The program that is kept; None where there is none, or what is there cannot be read."""
        data = self.folder.read(self.key + MODULE)
        if data is None:
            return None
        try:
            first, _, module = zlib.decompress(checked_entry(self.key, data)).partition(b"\n")
            signature: LocalSignature = Reader(()).read(LocalSignature, json.loads(first))
        except (BrokenEntry, ValueError, zlib.error):
            self.folder.remove(self.key + MODULE)
            return None
        return EmittedProgram(signature, module)

    def write(self, program: EmittedProgram) -> None:
        """Keeps a program.

        Raises:
            OSError: it cannot be written.
        """
        signature = json.dumps(Writer().written(program.signature))
        packed = zlib.compress(signature.encode() + b"\n" + program.module, 1)
        self.folder.write(self.key + MODULE, sealed_entry(self.key, packed))


def _devices(mesh: AnyMesh) -> tuple[str, ...]:
    """A mesh, its devices in their order, and of which kind these are."""
    if not isinstance(mesh, jax.sharding.Mesh):
        return repr(mesh), repr(getattr(mesh, "abstract_device", None))
    devices = [(device.id, device.process_index, device.platform, device.device_kind) for device in mesh.devices.flat]
    return repr(mesh.abstract_mesh), repr(devices), str(jax.process_count())
