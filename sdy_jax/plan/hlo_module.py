"""The text of optimised HLO, read: computations, their instructions, and how often each runs."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from sdy_jax.base.errors import ParseError
from sdy_jax.ir.text.cursor import closing, split_list

_SHOWN = 80
"""Characters of HLO that an error shows. Chosen: a line."""

WireFormula = Callable[[int, int], float]

WIRE_BYTES: dict[str, WireFormula] = {
    "all-reduce": lambda g, operand: 2 * (g - 1) / g * operand,
    "all-gather": lambda g, operand: (g - 1) * operand,
    "reduce-scatter": lambda g, operand: (g - 1) / g * operand,
    "all-to-all": lambda g, operand: (g - 1) / g * operand,
    "ragged-all-to-all": lambda g, operand: (g - 1) / g * operand,
    "collective-permute": lambda senders, operand: operand if senders else 0,
    "slice-send": lambda _, operand: operand,
}
"""Bytes that one device sends in a group of g, from the local bytes of the operands. Given by ring algorithms. For a
permute the first number is that of the devices that send: some may rest, but a step waits for the busiest. A send over
the network between slices of TPUs is of what a device gives to it, of a permute as of a sum."""


@dataclass(frozen=True, slots=True)
class HloCollective:
    """One collective instruction of a compiled program.

    `group_size`: devices per group; for a collective-permute the number of devices that send to another one, for a send
    between slices 2, the least.
    `bytes`: local bytes of its operands. `wire_bytes`: bytes that a device sends in one execution. `count`: executions
    per run of the program, 0 in a branch that sends less than another one.
    `group`: the first group, by the numbers of its devices; empty for what is sent from one device to another.
    `pairs`: which send to which, in a collective-permute.
    """

    kind: str
    group_size: int
    bytes: int
    wire_bytes: float
    count: int
    group: tuple[int, ...] = field(default=(), compare=False, repr=False)
    pairs: tuple[tuple[int, int], ...] = field(default=(), compare=False, repr=False)

    @property
    def total_wire_bytes(self) -> float:
        return self.wire_bytes * self.count


@dataclass(frozen=True, slots=True)
class HloInstruction:
    name: str
    type: str
    opcode: str  # without `-start`
    operands: tuple[str, ...]
    attributes: str
    is_start: bool = False

    @property
    def cycles(self) -> int:
        """The cycles that a TPU's compiler expects it to take; 0 where it states none."""
        found = _CYCLES.search(self.attributes)
        return int(found[1]) if found else 0

    @property
    def is_kernel(self) -> bool:
        """Whether it calls a kernel of a TPU, whose compiler states no cycles for it."""
        return self.opcode == "custom-call" and _BODY.search(self.attributes) is not None

    @property
    def kernel_body(self) -> bytes:
        """What a kernel was compiled from, in which its names are, as bytecode of MLIR."""
        found = _BODY.search(self.attributes)
        return base64.b64decode(found[1]) if found else b""

    @property
    def stated_work(self) -> tuple[float, float]:
        """The floating-point operations, and the bytes of memory, that its `pl.CostEstimate` states; zeros without."""
        found = _ESTIMATE.search(self.attributes)
        return (float(found[1]), float(found[2])) if found else (0.0, 0.0)

    def ends(self, start: HloInstruction) -> bool:
        """Whether it waits for what another instruction started."""
        if start.name.startswith(_ASYNC_START):
            return self.name == start.name.replace(_ASYNC_START, "async-collective-done")
        return self.opcode.endswith("-done") and start.name in self.operands


@dataclass(frozen=True, slots=True)
class HloModule:
    computations: dict[str, list[HloInstruction]]
    entry: str
    devices: int
    instructions: dict[str, HloInstruction]

    @classmethod
    def parse(cls, text: str) -> HloModule:
        computations: dict[str, list[HloInstruction]] = {}
        entry = current = ""
        for line in _lines(text):
            if header := _COMPUTATION.match(line):
                current = header["name"]
                computations[current] = []
                entry = current if header["entry"] else entry
            elif current and (instruction := _parse_instruction(line)):
                computations[current].append(_as_it_runs(instruction, current))
        instructions = {i.name: i for body in computations.values() for i in body}
        header_line = text.split("\n", 1)[0]
        devices = math.prod(int(n) for n in re.findall(r"(?:num_partitions|replica_count)=(\d+)", header_line))
        return cls(computations, entry, devices, instructions)

    def executions(self) -> dict[str, int]:
        """How often each computation runs, those that are called before those that call. Those not reached from the
        entry come last; they, and what the largest branches do not run, run 0 times.

        Every computation is visited once, after all that call it.
        """
        sent = self._sent()
        counts = dict.fromkeys([*sent, *self.computations], 0)
        counts[self.entry] = 1
        for name in reversed(sent):
            for called, runs in self._calls(name, sent):
                counts[called] += runs * counts[name]
        return counts

    def started_by(self, instruction: HloInstruction) -> HloInstruction | None:
        """The collective that an instruction starts and another one ends; on TPUs fusions do that."""
        if instruction.opcode in WIRE_BYTES:
            return instruction if instruction.is_start else None
        if not instruction.name.startswith(_ASYNC_START):
            return None
        inside = (i for name in called_by(instruction) for i in self.computations[name] if i.opcode in WIRE_BYTES)
        return next(inside, None)

    def _sent(self) -> dict[str, float]:
        """The bytes that each computation sends per execution; those that are called come before those that call."""
        sent: dict[str, float] = {}

        def visit(name: str) -> None:
            if name in sent:
                return
            for instruction in self.computations[name]:
                for called in called_by(instruction):
                    visit(called)
            own = [collective_of(i, self, 1).wire_bytes for i in self.computations[name] if i.opcode in WIRE_BYTES]
            sent[name] = sum(own) + sum(runs * sent[called] for called, runs in self._calls(name, sent))

        visit(self.entry)
        return sent

    def _calls(self, name: str, sent: dict[str, float]) -> Iterator[tuple[str, int]]:
        """The computations that one of them runs, and how often."""
        for instruction in self.computations[name]:
            called = called_by(instruction)
            if instruction.opcode == "conditional":
                yield max(called, key=sent.__getitem__), 1
            elif instruction.opcode == "while":
                found, trips = dict(_LOOP.findall(instruction.attributes)), self.trips(instruction)
                yield found["body"], trips
                yield found["condition"], trips + 1
            else:
                yield from ((each, 1) for each in called)

    def trips(self, loop: HloInstruction) -> int:
        """How often a loop runs; 1 where that is not known."""
        known = _TRIPS.search(loop.attributes)
        counted = int(known[1]) if known else self._counted_trips(loop)
        return 1 if counted is None else counted

    def _counted_trips(self, loop: HloInstruction) -> int | None:
        """How often a loop runs whose condition is that a counter, to which its body adds a constant, is below one."""
        computations = dict(_LOOP.findall(loop.attributes))
        below = self.computations[computations["condition"]][-1]
        if below.opcode != "compare" or "direction=LT" not in below.attributes:
            return None
        counter, most = self._source(below.operands[0]), self._constant(below.operands[1])
        index = _INDEX.search(counter.attributes) if counter and counter.opcode == "get-tuple-element" else None
        start, end = self._source(loop.operands[0]), self.computations[computations["body"]][-1]
        if index is None or most is None or start is None or not start.opcode == end.opcode == "tuple":
            return None
        place = int(index[1])
        first, added = self._constant(start.operands[place]), self._source(end.operands[place])
        steps = [self._constant(name) for name in added.operands] if added and added.opcode == "add" else []
        step = next((step for step in steps if step), None)
        return None if first is None or step is None else max(0, -(-(most - first) // step))

    def _source(self, name: str) -> HloInstruction | None:
        """The instruction that makes a value, seen through copies."""
        found = self.instructions.get(name)
        while found is not None and found.opcode in ("copy", "bitcast"):
            found = self.instructions.get(found.operands[0])
        return found

    def _constant(self, name: str) -> int | None:
        found = self._source(name)
        value = found.operands[0] if found is not None and found.opcode == "constant" and found.operands else ""
        return int(value) if value.isdigit() else None

    def bytes_of(self, operand: str) -> int:
        if operand not in self.instructions:
            raise ParseError(f"HLO text names an operand `{operand}` that no instruction before it defines")
        return bytes_of_type(self.instructions[operand].type)


_ASYNC_START = "async-collective-start"
_BROKEN = "kernel_metadata={"
_BETWEEN_SLICES = '_xla_host_transfer_handler_name="xla_megascale_runtime"'
_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\) -> .* \{$")
_RESULT = re.compile(r"\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = ")
_OPCODE = re.compile(r" ?(?P<opcode>[a-z][\w\-]*)\(")
_NAME = re.compile(r"%?([\w.\-]+)$")
_SHAPE = re.compile(r"\b([a-z]+)(\d*)(?:[a-z]\w*)?\[([\d,<= ]*)\]")
_CALLED = re.compile(r"\b(?:body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\b(?:branch_computations|called_computations|calls)=\{([^}]*)\}")
_METADATA = re.compile(r'metadata=\{(?:[^{}"]|"[^"]*")*\}')  # holds the user's names, which may look like anything
_INDEX = re.compile(r"\bindex=(\d+)")
_LOOP = re.compile(r"\b(body|condition)=%?([\w.\-]+)")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_BODY = re.compile(r'"custom_call_config":\{"body":"([^"]*)"')
_ESTIMATE = re.compile(r'"cost_estimate":\{"flops":"(\d+)",.*?"bytes_accessed":"(\d+)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


def _lines(text: str) -> Iterator[str]:
    """The lines of a module. The metadata of a kernel breaks those of all that comes of its call:

    %a = f32[8]{0} copy(%k), frontend_attributes={kernel_metadata={
    "name":"value"
    }}, backend_config={"estimated_cycles":"80"}
    """
    held = ""
    for line in text.splitlines():
        if line.endswith(_BROKEN) or (held and not line.startswith("}")):
            held += line
        else:
            yield held + line
            held = ""


def _parse_instruction(line: str) -> HloInstruction | None:
    """`  %name = type opcode(operands), attributes`; None for lines that are no instruction."""
    result = _RESULT.match(line)
    if not result:
        return None
    rest = line[result.end() :]
    type_end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    opcode = _OPCODE.match(rest, type_end)
    if not opcode:
        return None
    close = _closing(rest, opcode.end() - 1)
    listed = split_list(rest[opcode.end() : close])  # with or without types before the names
    operands = tuple(found[1] for operand in listed if (found := _NAME.search(operand.strip())))
    name = opcode["opcode"].removesuffix("-start")
    attributes, is_start = _METADATA.sub("", rest[close + 1 :]), name != opcode["opcode"]
    return HloInstruction(result["name"], rest[:type_end], name, operands, attributes, is_start)


def _as_it_runs(instruction: HloInstruction, computation: str) -> HloInstruction:
    """An instruction of a computation. TPUs run an all-reduce of which a fusion keeps a part as a reduce-scatter; by
    that their compiler calls it (libtpu 0.0.52: `SingleInputAllReduceScatterFusion`). What devices of several slices
    exchange their compiler makes of sends and receives, with work of the slice's own before and after."""
    if instruction.opcode == "all-reduce" and computation.startswith("all-reduce-scatter"):
        return replace(instruction, opcode="reduce-scatter")
    if instruction.opcode == "send" and _BETWEEN_SLICES in instruction.attributes:
        return replace(instruction, opcode="slice-send", is_start=True)
    return instruction


def _closing(text: str, start: int) -> int:
    """The index of the bracket that closes the one at `start`."""
    found = closing(text, start)
    if found is None:
        raise ParseError(f"HLO text has an unclosed bracket: {text[start : start + _SHOWN]!r}")
    return found


def called_by(instruction: HloInstruction) -> list[str]:
    """The computations that an instruction runs. An asynchronous op's computation is named by its start alone; the
    fusions that a TPU runs meanwhile, and that ends it, hold the op once more."""
    if instruction.opcode.endswith(("-update", "-done")) or instruction.name.startswith("async-collective-done"):
        return []
    names = _CALLED.findall(instruction.attributes)
    for branches in _BRANCHES.findall(instruction.attributes):
        names += [branch.strip().lstrip("%") for branch in branches.split(",")]
    return [name for name in names if not name.startswith("async_collective_fusion")]


def bytes_of_type(type_: str) -> int:
    """Bytes of an HLO type: `f32[4,8]{1,0}` is 128; a tuple is the sum of its parts; tokens are 0."""
    total = 0
    for letters, bits, sizes in arrays_of_type(type_):
        width = 8 if letters == "pred" else bits
        total += (width * math.prod(sizes) + 7) // 8
    return total


def arrays_of_type(type_: str) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    """The arrays of an HLO type: the letters and the bits of their element types, and their sizes."""
    for letters, bits, dims in _SHAPE.findall(type_):
        yield letters, int(bits or 0), tuple(int(d.strip("<= ")) for d in dims.split(",") if d)


def group_size(attributes: str, devices: int) -> int:
    """The devices per group of a collective, from its attributes; the largest group where they differ.

    Reads `replica_groups={{0,1},{2,3}}`, `{}` (all `devices`), `[2,4]<=[8]` with or without a transposition,
    `mesh['x'=2,'y'=4] {'y'}` with sub-axes as `'y':(1)2`, and `source_target_pairs={{0,1},{1,0}}`.
    """
    if "source_target_pairs" in attributes:
        return len(permuted(attributes))
    if listed := re.search(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}", attributes):
        return max((group.count(",") + 1 for group in re.findall(r"\{[\d,]+\}", listed[1])), default=devices)
    return len(first_group(attributes, devices))


def permuted(attributes: str) -> tuple[tuple[int, int], ...]:
    """The devices that send to another one in a collective-permute, each with that one, from its attributes."""
    found = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", attributes)
    pairs = re.findall(r"\{(\d+),(\d+)\}", found[1]) if found else []
    return tuple((int(source), int(target)) for source, target in pairs if source != target)


def first_group(attributes: str, devices: int) -> tuple[int, ...]:
    """The first group of a collective, by the numbers of its devices, from its attributes, as `group_size` reads them;
    empty where they say from which device to which is sent."""
    if "source_target_pairs" in attributes:
        return ()
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes):
        sizes = _numbers(iota[2])
        order = _numbers(iota[3]) if iota[3] else range(len(sizes))
        return tuple(np.arange(math.prod(sizes)).reshape(sizes).transpose(order).ravel()[: int(iota[1])].tolist())
    if named := re.search(r"replica_groups=@?mesh\w*\[([^\]]*)\][^{]*\{([^}]*)\}", attributes):
        return tuple(_first_along(named[1], named[2]).tolist())
    if listed := re.search(r"replica_groups=\{(?:\{([\d,]*)\}|\})", attributes):
        return _numbers(listed[1]) if listed[1] else tuple(range(devices))
    raise ParseError(f"a collective's groups cannot be read: {attributes[:_SHOWN]!r}")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _first_along(mesh: str, axes: str) -> NDArray[np.int64]:
    """The devices of a mesh, `'x'=2,'y'=4`, that lie with the first one along axes, or parts of axes: `'y':(1)2`."""
    found, stride = np.zeros(1, np.int64), 1
    strides = dict[str, tuple[int, int]]()
    for name, size in reversed(re.findall(r"'([^']*)'=(\d+)", mesh)):
        strides[name] = stride, int(size)
        stride *= int(size)
    for name, before, part in re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", axes):
        stride, size = strides[name]
        count = int(part or size)
        step = stride * size // (int(before or 1) * count)
        found = (found[:, None] + step * np.arange(count)).ravel()
    return found


def collective_of(instruction: HloInstruction, module: HloModule, count: int) -> HloCollective:
    is_send = instruction.opcode == "slice-send"
    size = 2 if is_send else group_size(instruction.attributes, module.devices)
    group = () if is_send else first_group(instruction.attributes, module.devices)
    moved = instruction.operands[:1] if instruction.opcode == "ragged-all-to-all" else instruction.operands
    operand = sum(module.bytes_of(name) for name in moved)
    wire = WIRE_BYTES[instruction.opcode](size, operand)
    return HloCollective(instruction.opcode, size, operand, wire, count, group, permuted(instruction.attributes))
