"""An entry of the cache: what planning made of a program, as bytes.

The modules of its stages are MLIR's bytecode, all else is JSON. Nothing in it is executed when it is read, and nothing
is read before its digest was compared.
"""

from __future__ import annotations

import hashlib
import io
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass

from jax.extend.mlir import ir

from sdy_jax.ir.custom_ops import set_keys
from sdy_jax.ir.operations import body_of, copied
from sdy_jax.lowering.interface.collective_record import CollectiveRecord
from sdy_jax.lowering.interface.notes import Note
from sdy_jax.lowering.interface.outcomes import InParts, LayoutChoice, Recomputed
from sdy_jax.plan.border.auto_layout_notes import AutomaticLayouts
from sdy_jax.plan.cache.data import Reader, Writer
from sdy_jax.plan.cache.key import Key
from sdy_jax.plan.pinning.setting import RecordedSetting

_MAGIC = b"sdy_jax plan 2\n"
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
    writer = Writer()
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


class Entry:
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
