"""An entry of the cache: what planning made of a program, and its per-device program, as bytes and back."""

from __future__ import annotations

import hashlib
import io
import json
import types
import zlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import jax
from jax.extend.mlir import ir

from sdy_jax.base.files import SharedFolder
from sdy_jax.base.jax_tracing import lowering_options
from sdy_jax.ir.custom_ops import set_keys
from sdy_jax.ir.jax_shardings import AnyMesh
from sdy_jax.ir.meshes import AxisRef, Mesh
from sdy_jax.ir.operations import body_of, copied
from sdy_jax.lowering.planner.op_times import OpTimes
from sdy_jax.lowering.planner.report import CollectiveRecord, InParts, LayoutChoice, Note, Recomputed
from sdy_jax.plan.border import AutomaticLayouts
from sdy_jax.plan.digests import MODULE, Key, RecordedSetting, digest_of

# What a plan says as JSON and back: dataclasses and named tuples as lists of their fields, by their declared types.
#
# Entries are read by the version that wrote them, so nothing says what a field is. Locations of MLIR stand in a
# table.


class JsonWriter:
    """Makes JSON; `locations` has what it refers to."""

    def __init__(self) -> None:
        self.locations: list[ir.Location] = []
        self._numbers: dict[ir.Attribute, int] = {}

    def written(self, data: Any) -> Any:
        """What JSON can say of data."""
        if isinstance(data, ir.Location):
            return self._number(data)
        if isinstance(data, Mapping):
            return [[self.written(key), self.written(value)] for key, value in data.items()]
        if is_dataclass(data) and not isinstance(data, type):
            return [self.written(getattr(data, name)) for name, _ in _fields(type(data))]
        if isinstance(data, frozenset):
            return sorted(map(self.written, data))
        return [self.written(each) for each in data] if isinstance(data, (tuple, list)) else data

    def _number(self, location: ir.Location) -> int:
        key = location.attr
        if key not in self._numbers:
            self._numbers[key] = len(self.locations)
            self.locations.append(location)
        return self._numbers[key]


class Reader:
    """Makes data of JSON; `locations`: what it refers to."""

    def __init__(self, locations: Sequence[ir.Location]):
        self._locations = locations

    def read(self, kind: Any, data: Any) -> Any:
        """The data of a type."""
        if data is None or kind in (str, int, bool, Any):
            return data
        if kind is float:
            return float(data)
        if kind is ir.Location:
            return self._locations[data]
        origin, arguments = get_origin(kind), get_args(kind)
        if origin is Literal:
            return data
        if origin in (Union, types.UnionType):
            return self.read(arguments[0], data)  # the others are None, or meshes that programs do not write inline
        if origin in (tuple, frozenset, list):
            return origin(self._entries(origin, arguments, data))
        if origin is not None and issubclass(origin, Mapping):
            return {self.read(arguments[0], key): self.read(arguments[1], value) for key, value in data}
        found = _fields(kind)
        return kind(**{name: self.read(hint, each) for (name, hint), each in zip(found, data, strict=True)})

    def _entries(self, origin: type, arguments: tuple[Any, ...], data: Sequence[Any]) -> list[Any]:
        if origin is tuple and arguments[-1] is not Ellipsis:
            return [self.read(kind, each) for kind, each in zip(arguments, data, strict=True)]
        return [self.read(arguments[0], each) for each in data]


@cache
def _fields(kind: Any) -> list[tuple[str, Any]]:
    """The fields that a dataclass, or a named tuple, is made of, with their types."""
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind) if field.init] if is_dataclass(kind) else kind._fields
    return [(name, hints[name]) for name in names]


# An entry of the cache: what planning made of a program, as bytes.
#
# The modules of its stages are MLIR's bytecode, all else is JSON. Nothing in it is executed when it is read, and
# nothing is read before its digest was compared.

_MAGIC = b"sdy_jax plan 3\n"
_LOCATIONS = "locations"
"""What stands among the stages for the locations that the JSON refers to."""

_DIGEST = 32
"""Given: the bytes of a SHA-256."""


@dataclass(frozen=True, slots=True)
class CachedPlan:
    """What planning found out, but for the stages: as the attributes of `PlanFacts`; `made_with`: of a pinned plan what
    its file says that it was made with."""

    collectives: tuple[CollectiveRecord, ...]
    notes: tuple[Note, ...]
    layouts: LayoutChoice | None
    work_cost: float
    hidden_by_work: float
    op_times: OpTimes
    counted_peak: float
    recomputed: Recomputed | None
    blocked: tuple[InParts, ...]
    automatic: AutomaticLayouts | None
    choices: str | None
    made_with: RecordedSetting | None


class BrokenEntry(Exception):
    """Bytes are no entry, or not all of one."""


def entry_bytes(
    key: Key, source: str, plan: CachedPlan, stages: Mapping[str, ir.Operation], context: ir.Context
) -> bytes:
    """The bytes of an entry.

    Args:
        key: of the program, without which it is not taken.
        source: the line of its shardings.
        plan: what was found out.
        stages: the modules to keep.
        context: of these.

    Raises:
        KeyError: they call other functions of this process than the program that was traced.
    """
    writer = JsonWriter()
    said = writer.written(plan)
    numbers = {function: str(number) for number, function in enumerate(key.functions)}
    blobs = {name: _bytecode(module, numbers) for name, module in stages.items()}
    blobs[_LOCATIONS] = _bytecode(_placed(writer.locations, context), {})
    head = json.dumps(
        {"sources": (key.lines, source), "plan": said, "stages": {name: len(blob) for name, blob in blobs.items()}}
    )
    packed = zlib.compress(b"".join([head.encode(), b"\n", *blobs.values()]), 1)
    return sealed_entry(key.name, packed)


def sealed_entry(key: str, packed: bytes) -> bytes:
    """The bytes of an entry in which something is packed."""
    return _MAGIC + _digest(key, packed) + packed


def _digest(key: str, packed: bytes) -> bytes:
    return hashlib.sha256(key.encode() + packed).digest()


def checked_entry(key: str, data: bytes) -> bytes:
    """What is packed in the bytes of an entry.

    Raises:
        BrokenEntry: they are not all of one, or are that of another key.
    """
    head, digest, packed = data[: len(_MAGIC)], data[len(_MAGIC) :][:_DIGEST], data[len(_MAGIC) + _DIGEST :]
    if head != _MAGIC or digest != _digest(key, packed):
        raise BrokenEntry("its digest is another one")
    return packed


def _bytecode(module: ir.Operation, numbers: Mapping[str, str]) -> bytes:
    if numbers:
        module = copied(module)
        set_keys(module, numbers)
    found = io.BytesIO()
    module.write_bytecode(found)
    return found.getvalue()


def _placed(locations: Sequence[ir.Location], context: ir.Context) -> ir.Operation:
    """A module with an empty module at each location: that is how bytecode says locations."""
    unknown = ir.Location.unknown(context)
    with context:
        found = ir.Module.create(unknown)
        for location in locations:
            found.body.append(copied(ir.Module.create(location)))
    return found.operation


class Stages(MutableMapping[str, ir.Operation]):
    """The modules of an entry by their names, of which those that are bytes are read when they are first asked for.

    Args:
        found: the modules, or their bytes.
        names: the keys of functions of this process by what the bytes have in their place.
        context: in which they are made.
    """

    def __init__(self, found: Mapping[str, ir.Operation | bytes], names: Mapping[str, str], context: ir.Context):
        self._found, self._names, self._context = dict(found), names, context

    def __getitem__(self, name: str) -> ir.Operation:
        found = self._found[name]
        if isinstance(found, bytes):
            found = self._found[name] = ir.Module.parse(found, self._context).operation
            if self._names:
                set_keys(found, self._names)
        return found

    def __setitem__(self, name: str, module: ir.Operation) -> None:
        self._found[name] = module

    def __delitem__(self, name: str) -> None:
        del self._found[name]

    def __contains__(self, name: object) -> bool:
        return name in self._found

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


class CacheEntry:
    """What the bytes of an entry say. `stages`: its modules, and the one that was traced; `lines`, `source`: a digest
    of the lines of the program's source, and the line of its shardings, as they were.

    Args:
        key: of the program.
        data: the bytes.
        traced: the program that was traced, in whose context the modules are made.

    Raises:
        BrokenEntry: they are none.
    """

    def __init__(self, key: Key, data: bytes, traced: ir.Operation):
        first, _, blobs = zlib.decompress(checked_entry(key.name, data)).partition(b"\n")
        said = json.loads(first)
        names = {str(number): key for number, key in enumerate(key.functions)}
        self._said, self.stages = (
            said["plan"],
            Stages({"traced": traced, **dict(_blobs(said["stages"], blobs))}, names, traced.context),
        )
        self.lines, self.source = said["sources"]
        self._locations = [op.location for op in body_of(self.stages.pop(_LOCATIONS)).operations]

    def plan(self, now: Callable[[ir.Location], ir.Location] | None = None) -> CachedPlan:
        """What planning found out; `now`: says where an op is that was at a location, where that is elsewhere."""
        locations = self._locations if now is None else list(map(now, self._locations))
        found: CachedPlan = Reader(locations).read(CachedPlan, self._said)
        return found


def _blobs(sizes: Mapping[str, int], blobs: bytes) -> Iterator[tuple[str, bytes]]:
    begin = 0
    for name, size in sizes.items():
        yield name, blobs[begin : begin + size]
        begin += size


# Per-device programs that were emitted before, beside the plans that they are of: as modules, with what a caller of
# them has to know.
#
# A program is found by the bytes of its plan's entry, the lines of the source, the mesh on its devices, and jax's
# options. Nothing in it is read before its digest was compared.


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
        signature = json.dumps(JsonWriter().written(program.signature))
        packed = zlib.compress(signature.encode() + b"\n" + program.module, 1)
        self.folder.write(self.key + MODULE, sealed_entry(self.key, packed))


def _devices(mesh: AnyMesh) -> tuple[str, ...]:
    """A mesh, its devices in their order, and of which kind these are."""
    if not isinstance(mesh, jax.sharding.Mesh):
        return repr(mesh), repr(getattr(mesh, "abstract_device", None))
    devices = [(device.id, device.process_index, device.platform, device.device_kind) for device in mesh.devices.flat]
    return repr(mesh.abstract_mesh), repr(devices), str(jax.process_count())
