"""What a plan depends on, as digests by which its entry in the cache is found, and the folder that has the
entries.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

import jax
from jax.extend.mlir import ir

from sdy_jax.annotate.program import Program
from sdy_jax.base.files import SharedFolder
from sdy_jax.errors import SdyError
from sdy_jax.ir.custom_ops import ASKED_ABOUT, calls_of_functions, keys_of, target_of
from sdy_jax.ir.locations import RUN_AGAIN, STRICT, is_computed_again, place_of
from sdy_jax.ir.meshes import Mesh
from sdy_jax.ir.operations import pre_order
from sdy_jax.ir.type_text import bytes_of_text
from sdy_jax.lowering.planner.rewrites.recomputation_prices import Mark
from sdy_jax.plan.digests import bytecode, digest_of, in_every_process
from sdy_jax.plan.pinning.setting import RecordedSetting
from sdy_jax.plan.stages import PlannedWith
from sdy_jax.version import __version__

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
