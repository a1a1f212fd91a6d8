"""Which instructions of a compiled program are which collectives of its plan, and of which parts of the model: by the
scopes that profilers show."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from sdy_jax.ir.locations import scope_of
from sdy_jax.lowering.emission.names import scope_name
from sdy_jax.lowering.interface.collective_record import CollectiveRecord
from sdy_jax.plan.hlo_module import WIRE_BYTES

_MODULE = re.compile(r"HloModule ([^\s,]+)")
_COLLECTIVE = re.compile(
    rf"%?(?P<name>[\w.-]+) = .*? (?:{'|'.join(WIRE_BYTES)})(?:-start|-done)?\("
    r'.*metadata=\{[^}]*?op_name="(?P<scope>[^"]*)"'
)
_INSTRUCTION = re.compile(
    r'%?(?P<name>[\w.-]+) = .*? (?P<kind>[\w-]+)\(.*metadata=\{[^}]*?op_name="(?P<scope>(?:[^"\\]|\\.)*)"'
)
_AROUND = frozenset({"while", "conditional", "call"})
"""Instructions whose time is that of others."""
_SENT = re.compile(r"/\(?(?:bucket_\d+_)?\w+\.\w+\[[^\]/]*\] ")
"""What stands before the name of a collective: `/sdy.all_reduce[data] model.py:12`."""


@dataclass(frozen=True, slots=True)
class Scope:
    """The collectives of a plan that profilers show under one name, and the instructions that they became."""

    name: str
    records: tuple[CollectiveRecord, ...]
    instructions: tuple[str, ...]

    @property
    def first(self) -> CollectiveRecord:
        """The collective that they are called after."""
        return _first(self.records[0])


def module_name(text: str) -> str:
    """The name of an HLO module, from its text."""
    found = _MODULE.match(text)
    return found[1] if found else ""


def scopes(records: Iterable[CollectiveRecord], text: str) -> list[Scope]:
    """The collectives of a plan by their scopes, in the order of the plan, with their instructions in the text of its
    optimised HLO."""
    planned: dict[str, list[CollectiveRecord]] = {}
    for record in records:
        planned.setdefault(_scope_of(record), []).append(record)
    found: dict[str, list[str]] = {}
    for match in filter(None, map(_COLLECTIVE.search, text.splitlines())):
        own = [part for part in _parts(match["scope"]) if part in planned]
        if own:
            found.setdefault(own[-1], []).append(match["name"])
    return [Scope(name, tuple(same), tuple(found.get(name, ()))) for name, same in planned.items()]


class Instruction(NamedTuple):
    """An instruction of a compiled program.

    Attributes:
        name: as profilers show it.
        scope: the name scopes of the op that it is of, without transformations; empty where there are none.
        is_backward: it is of a derivative's backward pass.
        is_sending: it is of a collective.
    """

    name: str
    scope: str
    is_backward: bool
    is_sending: bool


def instructions(text: str) -> Iterator[Instruction]:
    """The instructions in the text of an optimised HLO that say of which op they are, without loops and branches, of
    which those inside are listed."""
    for found in filter(None, map(_INSTRUCTION.search, text.splitlines())):
        if found["kind"] in _AROUND:
            continue
        name, *sent = _SENT.split(found["scope"], maxsplit=1)
        scope = scope_of(f"{name}/" if sent else name)
        yield Instruction(found["name"], scope, "transpose(" in name, bool(sent))


def _first(record: CollectiveRecord) -> CollectiveRecord:
    return record.members[0] if record.members else record


def _scope_of(record: CollectiveRecord) -> str:
    first = _first(record)
    return scope_name(f"sdy.{first.kind}", first.axes, first.source)


def _parts(scope: str) -> list[str]:
    """The scopes around an instruction, outermost first; buckets are called after their first member. Where XLA makes
    one of several its name is `around/(of one:of another)`."""
    return [re.sub(r"^\(?(bucket_\d+_)?", "", part) for part in re.split(r"/|:(?=\w+\.\w+\[)", scope)]
