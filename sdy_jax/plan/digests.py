"""All that a plan depends on: as plain data and back, and as digests, the same in every process, that name it."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.extend.mlir import ir, passmanager

from sdy_jax.annotate.program import Program
from sdy_jax.base.errors import SdyError
from sdy_jax.base.files import SharedFolder
from sdy_jax.base.version import __version__
from sdy_jax.ir.custom_ops import ASKED_ABOUT, calls_of_functions, keys_in, keys_of, set_keys, target_of, title_of
from sdy_jax.ir.jax_shardings import bytes_of_text
from sdy_jax.ir.locations import RUN_AGAIN, STRICT, is_computed_again, place_of
from sdy_jax.ir.meshes import Mesh, braces
from sdy_jax.ir.operations import body_of, copied, pre_order
from sdy_jax.lowering.ops.collectives.packing import PACKABLE
from sdy_jax.lowering.planner.report import CollectiveRecord
from sdy_jax.lowering.planner.rewrites.recomputation_prices import Mark
from sdy_jax.lowering.planner.setting import CONSTRAINTS, LAYOUTS, UNEVEN, Combining, Policy
from sdy_jax.lowering.targets.axis_rates import PerAxis
from sdy_jax.lowering.targets.cost_model import CostModel
from sdy_jax.lowering.targets.rates import Copies
from sdy_jax.lowering.targets.target import FAMILIES, UNKNOWN, Target
from sdy_jax.plan.record.recorded_plan import (
    RecordedChoices,
    RecordedCosts,
    RecordedLine,
    RecordedPolicy,
    RecordedRate,
    RecordedTarget,
)
from sdy_jax.plan.stages import PlannedWith

# What a plan was made with as plain data and back: costs, devices, the decisions of the user.

_BY_AXIS = ("latency", "bandwidth", "start", "peers")
_UNSAID = -1
"""Given: what stands in records for a number that nobody states."""


def recorded_costs(costs: CostModel) -> RecordedCosts:
    """A cost model as data."""
    said = {field.name: getattr(costs, field.name) for field in fields(RecordedCosts)}
    said |= {name: _rates(said[name]) for name in _BY_AXIS}
    return RecordedCosts(**{**said, "copies": tuple(map(float, said["copies"]))})


def _rates(given: PerAxis) -> tuple[RecordedRate, ...]:
    pairs = [("", given)] if isinstance(given, (int, float)) else dict(given).items()
    return tuple(RecordedRate(axis, float(value)) for axis, value in pairs)


def costs_from(recorded: RecordedCosts) -> CostModel:
    """The cost model that data says."""
    said: dict[str, Any] = {field.name: getattr(recorded, field.name) for field in fields(recorded)}
    said |= {name: _per_axis(said[name]) for name in _BY_AXIS}
    sent, exchanged, lanes, *others = recorded.copies
    return CostModel(**{**said, "copies": Copies(sent, exchanged, int(lanes), *others)})


def _per_axis(rates: tuple[RecordedRate, ...]) -> PerAxis:
    found = {rate.axis: rate.value for rate in rates}
    return found[""] if "" in found else tuple(found.items())


def recorded_target(target: Target) -> RecordedTarget:
    """The devices of a plan as data."""
    lines = tuple(RecordedLine(axis, parts) for axis, parts in target.lines)
    return RecordedTarget(target.family.name, target.memory, lines)


def target_from(recorded: RecordedTarget) -> Target:
    """The devices that data says.

    Raises:
        SdyError: they are of a family that is not known here.
    """
    known = {UNKNOWN.name: UNKNOWN, **FAMILIES}
    if recorded.family not in known:
        raise SdyError(f"it was made for {recorded.family!r} devices, of which nothing is known here")
    lines = tuple((line.axis, tuple(map(_line_part, line.parts))) for line in recorded.lines)
    return Target(known[recorded.family], recorded.memory, lines)


def _line_part(said: tuple[int, ...]) -> tuple[int, int, int]:
    """A part of an axis; older plans did not say how far its next chip is."""
    size, dimension, far = (*said, 1)[:3]
    return size, dimension, far


def recorded_policy(policy: Policy) -> RecordedPolicy:
    """The user's decisions as data."""
    combine = policy.combine
    return RecordedPolicy(
        policy.optimize_collectives,
        policy.uneven,
        policy.layouts,
        _UNSAID if policy.memory is None else policy.memory,
        policy.recompute,
        _UNSAID if policy.effort is None else int(policy.effort),
        policy.halo_exchange,
        tuple(sorted(combine.kinds)),
        tuple(sorted(combine.packed)),
        tuple(sorted(combine.stacked)),
        _UNSAID if combine.sent is None else combine.sent,
        policy.constraints,
    )


def policy_from(recorded: RecordedPolicy) -> Policy:
    """The user's decisions that data says.

    Raises:
        SdyError: there are no such decisions.
    """
    known = {"uneven": UNEVEN, "layouts": LAYOUTS, "constraints": CONSTRAINTS}
    for name, values in known.items():
        if (said := getattr(recorded, name)) not in values:
            raise SdyError(f"{name}={said!r} is not known here")
    return Policy(
        recorded.optimize_collectives,
        recorded.uneven,
        recorded.layouts,
        recorded.constraints,
        _said(recorded.memory),
        recorded.recompute,
        None if recorded.effort == _UNSAID else recorded.effort,
        recorded.halo_exchange,
        Combining(
            frozenset(recorded.combined),
            frozenset(recorded.packed) & PACKABLE,
            frozenset(recorded.stacked),
            _said(recorded.sent),
        ),
    )


def _said(number: float) -> float | None:
    return None if number == _UNSAID else number


@dataclass(frozen=True, slots=True)
class RecordedSetting:
    """What a plan was made with."""

    costs: RecordedCosts
    policy: RecordedPolicy
    target: RecordedTarget

    @classmethod
    def of(cls, given: PlannedWith) -> RecordedSetting:
        """That as data."""
        return cls(recorded_costs(given.costs), recorded_policy(given.policy), recorded_target(given.target))


def planned_with_from(recorded: RecordedChoices | RecordedSetting, inner: bool) -> PlannedWith:
    """With what the plan was made whose choices, or setting, data says.

    Raises:
        SdyError: it names what is not known here.
    """
    costs, policy = costs_from(recorded.costs), policy_from(recorded.policy)
    return PlannedWith(costs, policy, target_from(recorded.target), inner)


# Digests of programs: equal where nothing but source lines differs.


def program_text(module: ir.Operation) -> str:
    """The functions and meshes of a module without the lines of the source, as they read in every process. Its own
    attributes are left out: in them jax counts the devices in context."""
    module = in_every_process(module, keys_in(module))
    return "\n".join([str(op.get_asm()) for op in body_of(module).operations])


def bytecode(module: ir.Operation, with_lines: bool) -> bytes:
    """A module `in_every_process` as bytes; without lines also its own attributes are left out.

    The text of a step of twelve layers takes 0.06 s to write, 0.16 with lines, of the 1.6 s of a first call; the bytes
    take 0.01 (2026-11).
    """
    found = io.BytesIO()
    if not with_lines:
        module = _without_lines(module)
    module.write_bytecode(found)
    return found.getvalue()


def _without_lines(module: ir.Operation) -> ir.Operation:
    """The functions and meshes of a module in one that has no attributes."""
    found = ir.Module.create(ir.Location.unknown(module.context))
    for op in body_of(module).operations:
        found.body.append(copied(op.operation))
    with module.context:
        strip = passmanager.PassManager.parse("builtin.module(strip-debuginfo)")
        strip.enable_verifier(False)
        strip.run(found.operation)
    return found.operation


def in_every_process(module: ir.Operation, keys: Sequence[str]) -> ir.Operation:
    """A module that is the same in every process: the `keys_in` it, by which each finds functions of its own, are
    numbered."""
    if keys:
        module = copied(module)
        set_keys(module, {key: f"{title_of(key)}:{number}" for number, key in enumerate(keys)})
    return module


def digest_of(data: str | bytes) -> str:
    """64 hexadecimal digits that say whether two texts, or two strings of bytes, are the same."""
    given = data if isinstance(data, bytes) else data.encode(errors="surrogateescape")
    return hashlib.sha256(given).hexdigest()


# What has to be equal in all processes that run a program together: the collectives of its plan, in their order.

_DIGITS = 32
"""Given: 128 bits, of which two programs have the same by no accident."""


def fingerprint_of(mesh: Mesh, collectives: Iterable[CollectiveRecord]) -> str:
    """32 hexadecimal digits that depend on the mesh and on `collective_lines` alone."""
    return digest([str(mesh), *collective_lines(collectives)])


def digest(lines: Iterable[str]) -> str:
    """32 hexadecimal digits, the same in every process and run."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:_DIGITS]


def collective_lines(collectives: Iterable[CollectiveRecord]) -> Iterator[str]:
    """What each collective is: kind, axes (which on a mesh are groups), types, and the loops and branches around it.
    Where its source stands, and what it costs, is not part of that."""
    for record in collectives:
        yield _line(record)
        yield from (f"in bucket {record.bucket}: {line}" for line in collective_lines(record.members))


def _line(record: CollectiveRecord) -> str:
    said = [record.kind, *filter(None, [record.moved.reduction]), record.detail or f"over {braces(record.axes)}"]
    said.append(f"of {record.dtype}[{','.join(map(str, record.shape))}] to <{record.result}>")
    if record.depth:
        said.append(f"in {record.depth} loops, {record.times}{'' if record.times_known else ' or more'} times")
    said += [f"in branch {number} of conditional {conditional}" for conditional, number in record.branches]
    said += ["one trip ahead"] * record.is_ahead + ["again"] * record.again
    return " ".join(said)


# Where plans are kept that were made before.

FOLDER = "SDY_JAX_CACHE_DIR"
LIMIT = "SDY_JAX_CACHE_SIZE"

_DEFAULT_LIMIT = 1 << 30
"""Bytes. Chosen: an entry of an 8B model with 32 unrolled layers takes a few MiB, so hundreds of such have room."""

SUFFIXES = (PLAN, MODULE) = (".plan", ".module")
"""Of the files there: plans, and the programs that were emitted for them."""

_BESIDE = "sdy_jax_plans"


def cache_folder() -> SharedFolder | None:
    """The folder that `SDY_JAX_CACHE_DIR` names, else one in that of jax's compilation cache, where that is on and on a
    file system; None where plans are not kept, as where the variable is empty, or 0.

    Raises:
        SdyError: `SDY_JAX_CACHE_SIZE` is no size.
    """
    stated = os.environ.get(FOLDER)
    if stated is None:
        is_on: bool = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
        of_jax: str | None = jax.config.jax_compilation_cache_dir if is_on else None  # type: ignore[attr-defined]
        if not of_jax or "://" in of_jax:
            return None
        return SharedFolder(Path(of_jax) / _BESIDE, SUFFIXES, _limit())
    return SharedFolder(Path(stated).expanduser(), SUFFIXES, _limit()) if stated not in ("", "0") else None


def _limit() -> int:
    text = os.environ.get(LIMIT)
    found = bytes_of_text(text) if text else float(_DEFAULT_LIMIT)
    if found is None:
        raise SdyError(f"{LIMIT}={text}; expected the bytes that plans may take in the cache, such as 512MiB")
    return int(found)


# What a plan depends on, as digests by which its entry in the cache is found.

_INSTALLED = ("site-packages", "dist-packages")


def can_be_cached(program: Program, calls: Iterable[ir.Operation]) -> bool:
    """Whether all that a plan depends on can be told: not of ops whose functions say how they may be split. `calls` are
    those of functions of this process."""
    is_outer = any(isinstance(constant, jax.core.Tracer) for constant in program.constants)
    return not is_outer and not any(target_of(call) in ASKED_ABOUT for call in calls)


@dataclass(frozen=True, slots=True)
class Key:
    """What a plan is found by.

    Attributes:
        name: 64 hexadecimal digits, those of all that the plan depends on.
        lines: likewise of the lines of the program's source, which it only says.
        functions: the keys of the functions of this process that it calls.
    """

    name: str
    lines: str
    functions: tuple[str, ...]

    @classmethod
    def of(
        cls,
        program: Program,
        given: PlannedWith,
        source: str,
        held: Collection[Mark],
        calls: Iterable[ir.Operation] | None = None,
        pin: str | None = None,
    ) -> Key:
        """That of a program.

        Args:
            program, given, source: as of `build_plan`.
            calls: those of functions of this process in the program, if they are known.
            held: the lines and types of values that are held where anything fits by that.
            pin: the digest of the plan that is pinned, if one is.
        """
        functions = keys_of(calls_of_functions(program.module) if calls is None else calls)
        module = in_every_process(program.module, functions)
        with_lines = bytecode(module, with_lines=True)
        said = [
            *_versions(),
            *_of_program(program),
            repr(RecordedSetting.of(given)),
            repr((given.inner, pin)),
            *_of_locations(program.module, with_lines, held),
            digest_of(bytecode(module, with_lines=False)),
        ]
        lines = digest_of(source.encode(errors="surrogateescape") + b"\n" + with_lines)
        return cls(digest_of("\n".join(said)), lines, tuple(functions))


def _of_locations(module: ir.Operation, with_lines: bytes, held: Collection[Mark]) -> Iterator[str]:
    """All of the locations of ops on which plans depend: which are the same, and which are of ops that
    `jax.checkpoint` lets run again, or of values that are held."""
    ops, numbers = pre_order(module), dict[ir.Attribute, int]()
    yield repr([numbers.setdefault(op.location.attr, len(numbers)) for op in ops])
    if RUN_AGAIN.encode() in with_lines:
        yield repr([number for number, op in enumerate(ops) if is_computed_again(op.location)])
    if STRICT.encode() in with_lines:  # scopes say where, and an op may keep that of before
        yield digest_of(with_lines)
    if held:
        lines = {line for line, _ in held}
        yield repr([number for number, op in enumerate(ops) if place_of(op.location).line in lines])
        yield repr(sorted(type_ for _, type_ in held))


def _of_program(program: Program) -> Iterator[str]:
    yield repr((program.mesh_name, len(program.constants), program.inputs, program.outputs))
    for mesh in (program.mesh, program.uncut or Mesh(())):
        yield repr(mesh)
    for found in (
        program.unreduced_arguments,
        program.automatic_arguments,
        program.automatic_results,
        program.host_arguments,
        program.host_results,
    ):
        yield repr(sorted(found))
    yield repr((program.is_typed, program.unchecked))
    yield repr([(info.shape, str(info.dtype)) for info in (*program.in_info, *program.out_info)])


@cache
def _versions() -> tuple[str, ...]:
    """Of what plans are made by; of a checkout, which changes while its version stays, those of all files."""
    home = Path(__file__).resolve().parents[2]
    files = () if any(name in home.parts for name in _INSTALLED) else tuple(_files(home))
    return __version__, jax.__version__, version("jaxlib"), *files


def _files(home: Path) -> Iterator[str]:
    for folder, folders, names in os.walk(home, followlinks=True):
        folders.sort()
        for name in sorted(name for name in names if name.endswith(".py")):
            status = os.stat(os.path.join(folder, name))
            yield f"{folder}/{name} {status.st_size} {status.st_mtime_ns}"
