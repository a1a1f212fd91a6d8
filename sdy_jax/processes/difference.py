"""Programs of two processes side by side: the first collective, or else the first op, that differs."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import zip_longest

from sdy_jax.ir.locations import short_source
from sdy_jax.plan.estimates.fingerprint import collective_lines, digest
from sdy_jax.plan.plan import Plan

_MOST = 2**20
"""The most characters that are sent of a program. Given by jax's service, which takes messages of 4 MiB."""

_WIDTH = 160
"""Characters of an op in a message. Chosen: for a reader."""

CALLBACK = "callback"
"""Part of the names of custom calls whose other attributes may be addresses in one process."""


@dataclass(frozen=True, slots=True)
class Description:
    """What a process is about to run: the function's name; per collective what it is and its source line; the devices
    of the mesh in order; the program's text, a line per op."""

    name: str
    collectives: tuple[tuple[str, str], ...]
    devices: tuple[int, ...]
    program: tuple[str, ...]

    @classmethod
    def of(cls, plan: Plan, devices: Sequence[int]) -> Description:
        collectives = [
            (line, short_source(record.source)) for record in plan.collectives for line in collective_lines([record])
        ]
        text = plan.program.module.get_asm(enable_debug_info=False, large_elements_limit=None)
        lines = (_without_addresses(line) for line in text.splitlines())
        return cls(plan.name, tuple(collectives), tuple(devices), tuple(lines))

    @property
    def digest(self) -> str:
        """Equal for programs that may run together."""
        return digest([*(line for line, _ in self.collectives), str(self.devices), *self.program])

    def packed(self) -> str:
        """As a short text."""
        text = _packed(self)
        return text if len(text) <= _MOST else _packed(Description(self.name, self.collectives, self.devices, ()))

    @classmethod
    def unpacked(cls, text: str) -> Description:
        name, collectives, devices, program = json.loads(zlib.decompress(base64.b64decode(text)))
        return cls(name, tuple((line, source) for line, source in collectives), tuple(devices), tuple(program))


def difference(a: int, first: Description, b: int, second: Description) -> str:
    """Where the programs of the processes `a` and `b` part."""
    for number, (one, other) in enumerate(zip_longest(first.collectives, second.collectives), 1):
        if (one and one[0]) != (other and other[0]):
            return f"collective {number} differs: {_sends(a, one)}; {_sends(b, other)}"
    if first.devices != second.devices:
        return f"the meshes have their devices in different orders: {_order(a, first)}; {_order(b, second)}"
    for mine, yours in zip_longest(first.program, second.program, fillvalue=""):
        if mine != yours:
            return f"the collectives are equal, the op differs: process {a} has {_op(mine)}; process {b} {_op(yours)}"
    return "what they compute differs"


def _packed(description: Description) -> str:
    return base64.b64encode(zlib.compress(json.dumps(astuple(description)).encode())).decode()


def _without_addresses(line: str) -> str:
    return "".join(c for c in line if not c.isdigit()) if CALLBACK in line else line


def _sends(process: int, collective: tuple[str, str] | None) -> str:
    if collective is None:
        return f"process {process} has none any more"
    line, source = collective
    return f"process {process} has {line}{f', of {source}' if source else ''}"


def _order(process: int, description: Description) -> str:
    some = description.devices[:8]
    return f"process {process} has {', '.join(map(str, some))}{', ...' if len(description.devices) > len(some) else ''}"


def _op(line: str) -> str:
    line = line.strip()
    return f"`{line[:_WIDTH]}{'...' if len(line) > _WIDTH else ''}`" if line else "none"
