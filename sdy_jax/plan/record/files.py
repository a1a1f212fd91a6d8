"""Plans as files: JSON with a line per op, value and collective, so that two of them can be compared by eye as
well; what a file says is checked when it is read.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from sdy_jax.base.errors import SdyError
from sdy_jax.base.files import explained, write_whole
from sdy_jax.base.jax_calls import api_boundary
from sdy_jax.plan.record.program import RecordedCollective, RecordedFrame, RecordedPlace, RecordedTensor
from sdy_jax.plan.record.record import PlanRecord
from sdy_jax.plan.record.recorded_plan import RecordedChoice, RecordedChoices, RecordedLayout

# Records as JSON and back: dataclasses as objects of the fields that differ from their defaults.
#
# Places, frames, tensors and choices, of which many are alike, stand once in tables, and by their numbers elsewhere.

_TABLES: dict[type, str] = {
    RecordedFrame: "frames",
    RecordedPlace: "places",
    RecordedTensor: "tensors",
    RecordedLayout: "layouts",
    RecordedChoice: "choices",
}
"""What stands in tables; what others contain comes first."""


class Encoder:
    """Makes JSON of records; `tables` has what they share."""

    def __init__(self) -> None:
        self.tables: dict[str, list[Any]] = {name: [] for name in _TABLES.values()}
        self._numbers: dict[Any, int] = {}

    def encoded(self, data: Any) -> Any:
        """What JSON can say of a record, or a part of one."""
        if isinstance(data, tuple):
            return [self.encoded(each) for each in data]
        if isinstance(data, float) and not math.isfinite(data):
            return str(data)
        if not is_dataclass(data):
            return data
        table = _TABLES.get(type(data))
        if table is None:
            return self._object(data)
        if data not in self._numbers:
            made = self._object(data)
            self._numbers[data] = len(self.tables[table])
            self.tables[table].append(made)
        return self._numbers[data]

    def _object(self, data: Any) -> dict[str, Any]:
        values = ((field, getattr(data, field.name)) for field in fields(data))
        return {field.name: self.encoded(value) for field, value in values if value != field.default}


class Decoder:
    """Makes records of JSON.

    Args:
        tables: as the encoder's.

    Raises:
        SdyError: it is not what an encoder makes; the message says where.
    """

    def __init__(self, tables: Any):
        self._tables: dict[type, list[Any]] = {}
        for kind, name in _TABLES.items():
            entries = _checked(tables, dict, "tables").get(name, [])
            self._tables[kind] = []
            for number, entry in enumerate(_checked(entries, list, f"tables.{name}")):
                self._tables[kind].append(self._object(kind, entry, f"tables.{name}[{number}]"))

    def decoded(self, kind: Any, data: Any, where: str) -> Any:
        """The record, or the part of one, that JSON says.

        Args:
            kind: its type.
            where: what messages call it.
        """
        if get_origin(kind) in (Union, types.UnionType):
            return None if data is None else self.decoded(get_args(kind)[0], data, where)
        if get_origin(kind) is tuple:
            inner, entries = get_args(kind)[0], enumerate(_checked(data, list, where))
            return tuple([self.decoded(inner, each, f"{where}[{number}]") for number, each in entries])
        if kind in self._tables:
            number = _checked(data, int, where)
            if not 0 <= number < len(self._tables[kind]):
                raise SdyError(f"{where} is {number}, of {len(self._tables[kind])} {_TABLES[kind]}")
            return self._tables[kind][number]
        if isinstance(kind, type) and is_dataclass(kind):
            return self._object(kind, data, where)
        return _scalar(kind, data, where)

    def attribute(self, kind: type, data: Any, name: str, where: str) -> Any:
        """An attribute of the record that JSON says, without the others."""
        field, hint = next(found for found in _fields(kind) if found[0].name == name)
        given = _checked(data, dict, where)
        if name in given:
            return self.decoded(hint, given[name], f"{where}.{name}")
        if field.default is MISSING:
            raise SdyError(f"{where} has no {name!r}")
        return field.default

    def _object(self, kind: type, data: Any, where: str) -> Any:
        given, found = _checked(data, dict, where), {}
        for field, hint in _fields(kind):
            if field.name in given:
                found[field.name] = self.decoded(hint, given[field.name], f"{where}.{field.name}")
            elif field.default is MISSING:
                raise SdyError(f"{where} has no {field.name!r}")
        return kind(**found)


def choices_text(choices: RecordedChoices) -> str:
    """Choices as text, apart from a plan."""
    encoder = Encoder()
    said = encoder.encoded(choices)
    return json.dumps([encoder.tables, said])


def choices_from_text(text: str) -> RecordedChoices:
    """The choices that a text says.

    Raises:
        SdyError: it is not what `choices_text` makes.
    """
    tables, said = json.loads(text)
    found: RecordedChoices = Decoder(tables).decoded(RecordedChoices, said, "choices")
    return found


def _scalar(kind: type, data: Any, where: str) -> Any:
    if kind is float and (isinstance(data, str) or type(data) is int):
        try:
            return float(data)
        except ValueError:
            pass
    return _checked(data, kind, where)


def _checked(data: Any, kind: type, where: str) -> Any:
    if type(data) is not kind:
        raise SdyError(f"{where} is {data!r:.40}, expected {_NAMES[kind]}")
    return data


_NAMES: Mapping[type, str] = {
    dict: "an object",
    list: "a list",
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
}


@cache
def _fields(kind: Any) -> list[tuple[Field[Any], Any]]:
    """The fields of a dataclass with their types."""
    hints = get_type_hints(kind)
    return [(field, hints[field.name]) for field in fields(kind)]


# What a plan's records call by a number is there: files may say anything.


def check_references(record: PlanRecord) -> None:
    """
    Raises:
        SdyError: a record is of an op that the plan does not have; or an op stands in one that does not come before.
    """
    for where, number in _to_ops(record):
        if not 0 <= number < len(record.ops):
            raise SdyError(f"{where} is {number}, of {len(record.ops)} ops")
    for number, op in enumerate(record.ops):
        if op.parent is not None and not 0 <= op.parent < number:
            raise SdyError(f"plan.ops[{number}].parent is {op.parent}, which is no op before it")


def _to_ops(record: PlanRecord) -> Iterator[tuple[str, int]]:
    """The numbers of ops, and where they stand."""
    for number, value in enumerate(record.values):
        if value.op is not None:
            yield f"plan.values[{number}].op", value.op
    for number, moved in enumerate(record.host):
        if moved.op is not None:
            yield f"plan.host[{number}].op", moved.op
    yield from _of_collectives(record.collectives, "plan.collectives")


def _of_collectives(collectives: Sequence[RecordedCollective], where: str) -> Iterator[tuple[str, int]]:
    for number, each in enumerate(collectives):
        for name, op in (("op", each.op), ("serves", each.serves)):
            if op is not None:
                yield f"{where}[{number}].{name}", op
        yield from _of_collectives(each.members, f"{where}[{number}].members")


# Plans as files: JSON with a line per op, value and collective, so that two of them can be compared by eye as well.

FORMAT = 1
"""The version of what is written. A change that older readers would misunderstand makes it one more; new fields that
have a default do not, since readers leave out what they do not know."""

_KIND = "sdy_jax plan"

_HEAD = 64
"""Characters of a file in which its kind stands. Given by `save_plan`, which writes it first."""


def save_plan(record: PlanRecord, path: str | os.PathLike[str], page: Sequence[str] = ()) -> None:
    """Writes a plan; a file that is there is replaced as a whole.

    Args:
        record: the plan.
        path: of the file.
        page: lines for people who read the file; nobody else does.

    Raises:
        SdyError: the file cannot be written.
    """
    with refused("the plan", path):
        write_whole(path, plan_json(record, page))


def refused(what: str, path: str | os.PathLike[str]) -> AbstractContextManager[None]:
    """Raises an `SdyError` where what is made of a plan cannot be written to a file."""
    fix = "name a file in a directory that is there and can be written to"
    return explained(f"{what} cannot be written to {os.fspath(path)}", fix)


@api_boundary
def load_plan(path: str | os.PathLike[str]) -> PlanRecord:
    """A plan that `Plan.save` wrote. It needs neither the function nor its source: it is printed, compared and asked
    for its collectives like the plan that was saved.

    Args:
        path: of the file.

    Returns:
        The plan as plain data.

    Raises:
        SdyError: the file is not there, is no plan, is damaged, or is of a newer version of sdy_jax.

    Example:
        before = sdy.load_plan("step.plan.json")
        print(step.plan(state, batch).diff(before))

    See also:
        `Plan.save`: writes the file.
        `partition`: its `plan` runs it.
    """
    return plan_from_json(plan_text(path), os.fspath(path))


def plan_text(path: str | os.PathLike[str]) -> str:
    """The text of a plan's file. Raises as `load_plan`, where it cannot be read."""
    try:
        with explained(f"{os.fspath(path)} cannot be read", "name a plan's file"):
            return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise _foreign(path, "it is no text") from None
    except ValueError as error:  # a name that no file can have
        raise SdyError(f"{os.fspath(path)!r} cannot be read: {error}; to fix: name a plan's file") from None


def is_saved_plan(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins as those of `Plan.save` do."""
    try:
        with open(path, encoding="utf-8") as file:
            return f'"kind": "{_KIND}"' in file.read(_HEAD)
    except (OSError, ValueError):
        return False


def plan_json(record: PlanRecord, page: Sequence[str] = ()) -> str:
    """The text of a plan's file, with some lines for people."""
    encoder = Encoder()
    plan = encoder.encoded(record)
    whole: dict[str, Any] = {"kind": _KIND, "format": FORMAT, "written_by": record.versions[0]}
    whole |= {"page": list(page)} if page else {}
    whole |= {"tables": encoder.tables, "plan": plan}
    if record.choices is not None:
        whole["digest"] = _digest(whole)
    return "".join(_lines(whole, 2)) + "\n"


def plan_from_json(text: str, path: str = "the text") -> PlanRecord:
    """The plan that a text says; errors call it `path`."""
    return SavedPlan(text, path).record


class SavedPlan:
    """A plan as text, of which parts are read when they are asked for.

    Args:
        text: that of its file.
        path: what errors call it.

    Raises:
        SdyError: it is no plan, or of a newer version of sdy_jax; where it is damaged, when that is read.
    """

    def __init__(self, text: str, path: str):
        self._path = path
        try:
            whole = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _foreign(path, f"it is no JSON: {error}") from None
        if not isinstance(whole, dict) or whole.get("kind") != _KIND:
            raise _foreign(path, f'it does not say "kind": "{_KIND}"')
        version = whole.get("format")
        if not isinstance(version, int) or version < 1:
            raise SdyError(f"{path} is damaged: its format is {version!r}; to fix: save the plan again")
        if version > FORMAT:
            by = whole.get("written_by", "a newer sdy_jax")
            known = f"which this sdy_jax does not know (it reads up to {FORMAT})"
            raise SdyError(f"{path} is in format {version}, written by {by}, {known}; to fix: upgrade sdy_jax")
        self._whole: Mapping[str, Any] = whole

    @cached_property
    def is_edited(self) -> bool:
        """Whether it says choices, and is not as it was written."""
        said = self._whole.get("plan")
        has_choices = isinstance(said, dict) and said.get("choices") is not None
        return has_choices and self._whole.get("digest") != _digest(self._whole)

    def part(self, name: str) -> Any:
        """An attribute of the record."""
        with self._damaged():
            return self._decoder.attribute(PlanRecord, self._whole.get("plan"), name, "plan")

    @cached_property
    def record(self) -> PlanRecord:
        """All of it."""
        with self._damaged():
            found: PlanRecord = self._decoder.decoded(PlanRecord, self._whole.get("plan"), "plan")
            check_references(found)
        return replace(found, is_edited=True) if self.is_edited else found

    @cached_property
    def _decoder(self) -> Decoder:
        return Decoder(self._whole.get("tables"))

    @contextmanager
    def _damaged(self) -> Iterator[None]:
        try:
            yield
        except SdyError as error:
            raise SdyError(f"{self._path} is damaged: {error}; to fix: save the plan again") from None


def _digest(whole: Mapping[str, Any]) -> str:
    """64 hexadecimal digits that say whether a plan is as it was written; its page is for people."""
    said = json.dumps([whole.get("tables"), whole.get("plan")], sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()


def _foreign(path: str | os.PathLike[str], why: str) -> SdyError:
    return SdyError(f"{os.fspath(path)} is no plan of sdy_jax: {why}; to fix: name a file that plan.save(path) wrote")


def _lines(data: Any, levels: int, indent: str = "") -> Iterator[str]:
    """JSON with the entries of objects, and of the lists in them, on lines of their own."""
    if levels < 0 or not data or not isinstance(data, (dict, list)):
        yield json.dumps(data, ensure_ascii=False)
        return
    is_object = isinstance(data, dict)
    yield "{" if is_object else "["
    inner = indent + " "
    entries = data.items() if isinstance(data, dict) else (("", each) for each in data)
    for number, (name, each) in enumerate(entries):
        yield f"{',' if number else ''}\n{inner}" + (f"{json.dumps(name)}: " if is_object else "")
        yield from _lines(each, levels - 1, inner)
    yield f"\n{indent}{'}' if is_object else ']'}"
