"""`load` and `loads`: programs from files and text, and what a file with a program is."""

from __future__ import annotations

import os
import re
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from typing import Any

import jax
from jax import export
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from sdy_jax.annotate.arguments import argument_leaves, match_prefix
from sdy_jax.annotate.program import Program
from sdy_jax.annotate.trees import by_argument
from sdy_jax.base.errors import ArgumentError, SdyError, ShardingError, UnsupportedError, with_article
from sdy_jax.base.files import refusal
from sdy_jax.base.jax_calls import api_boundary
from sdy_jax.calls.loaded_modules import part_with, parted, program_module, settle_constants, settle_frontend_shardings
from sdy_jax.ir.collectives import COLLECTIVE_OPS
from sdy_jax.ir.graph import Graph, Value
from sdy_jax.ir.locations import source_line
from sdy_jax.ir.meshes import Mesh
from sdy_jax.ir.operations import body_of, copied, main_function, module_meshes, post_order, replace_op
from sdy_jax.ir.stored_shardings import used_meshes
from sdy_jax.ir.text.modules import SourceError, new_context, text_module
from sdy_jax.ir.validity import RuleError
from sdy_jax.ir.verification import verify_module
from sdy_jax.lowering.ops.re_emission import numpy_dtype
from sdy_jax.mesh_dialects.mesh_annotations import annotated_mesh, drop_mesh_annotations
from sdy_jax.mesh_dialects.meshes import Devices
from sdy_jax.shardy.passes.meshes import drop_shardings_and_meshes

# A portable artifact is MLIR bytecode in VHLO, StableHLO's versioned form. A `jax.export` file is a flatbuffer that
# holds such an artifact and how to call it.

_LOOKED_AT = 1000
"""Characters of a text that are looked at for NUL. Guessed: a binary file has one early."""


class ArtifactKind(Enum):
    """The kinds of files that programs come in, as messages call them."""

    TEXT = "MLIR text"
    BYTECODE = "MLIR bytecode"
    PORTABLE = "a StableHLO portable artifact"
    EXPORTED = "a jax.export file"


_BYTECODE = b"ML\xefR"
_PRODUCER = re.compile(rb"ML\xefR.(StableHLO_v([\d.]+)|[^\0]*)\0", re.DOTALL)

_OTHERS = (
    (b"PK\x03\x04", "a zip archive, such as numpy's .npz"),
    (b"\x93NUMPY", "a numpy array (.npy)"),
    (b"\x1f\x8b", "compressed by gzip; unpack it first"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd; unpack it first"),
    (b"BZh", "compressed by bzip2; unpack it first"),
    (b"\x80", "a Python pickle"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x7fELF", "an executable or a shared library"),
    (b"BC\xc0\xde", "LLVM bitcode"),
    (b"HloModule", "the text of an HLO module, which is no MLIR; save the StableHLO (`lowered.as_text()`)"),
)
"""Files that are given by mistake, by how they begin."""

_SUPPORTED = ", ".join(kind.value for kind in ArtifactKind)

_VERSIONS = range(1, 64)
"""A flatbuffer begins with the offset of its root table. That of jax.export has its version as the first field.
Published (jax.export: versions from 2 to 12 are in use with jax 0.10 to 0.12); the end is far off, and a text is none
of these."""


def contents(source: str | os.PathLike[str] | bytes) -> tuple[bytes, str]:
    """The bytes of a file, or of standard input for `-`, and its name for errors.

    Raises:
      SourceError: the file cannot be read.
      ArgumentError: `source` names none.
    """
    if isinstance(source, (bytes, bytearray, memoryview)):
        return bytes(source), "<bytes>"
    if source == "-":
        return _standard_input(), "<stdin>"
    if not isinstance(source, (str, os.PathLike)):
        raise ArgumentError(f"load got {with_article(type(source))}; expected a path, or the bytes of a program")
    name = os.fspath(source)
    if str(name).endswith(".py") and os.path.isfile(name):
        raise SourceError(
            "this is Python; to fix: partition a function of it, on the command line as sdy-jax plan FILE.py:FUNCTION",
            name,
        )
    if isinstance(name, str) and _PROGRAM.match(name):
        raise SourceError("this is the text of a program, no file's name; to fix: sdy_jax.loads(text)", "<text>")
    try:
        with open(name, "rb") as file:
            return file.read(), name
    except (OSError, ValueError) as error:  # a name may hold a NUL
        raise SourceError(refusal(error, name), name) from None


def _standard_input() -> bytes:
    if sys.stdin is None:
        raise SourceError("standard input is closed", "<stdin>")
    return sys.stdin.buffer.read()


_PROGRAM = re.compile(r"\s*(?:module\b|func\.func\b|sdy\.mesh\b|//|#\w+ *=)[^\n]*[\n{]")
"""How the text of a program begins."""


def recognise(data: bytes, file: str) -> ArtifactKind:
    """What kind of file this is.

    Raises:
      SourceError: it is none of them; the message says what it seems to be.
    """
    if not data.strip():
        raise SourceError(f"this is empty; expected {_SUPPORTED}", file)
    if data.startswith(_BYTECODE):
        match = _PRODUCER.match(data)
        return ArtifactKind.PORTABLE if match and match[2] else ArtifactKind.BYTECODE
    for beginning, what in _OTHERS:
        if data.startswith(beginning):
            raise SourceError(f"this is {what}; expected {_SUPPORTED}", file)
    if re.match(rb'\{\s*"', data):
        raise SourceError(f"this is JSON, as saved plans are, which load_plan reads; expected {_SUPPORTED}", file)
    if _is_exported(data):
        return ArtifactKind.EXPORTED
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        found = f"byte {data[error.start]:#04x} at offset {error.start} is no UTF-8 text"
        raise SourceError(f"unknown kind of file: {found}; expected {_SUPPORTED}", file) from None
    if "\0" in text[:_LOOKED_AT]:
        raise SourceError(f"unknown kind of file, with NUL characters; expected {_SUPPORTED}, whole", file)
    return ArtifactKind.TEXT


def _is_exported(data: bytes) -> bool:
    """The bytes begin as a flatbuffer whose root's first field is a version of jax.export's."""
    try:
        (root,) = struct.unpack_from("<I", data, 0)
        (back,) = struct.unpack_from("<i", data, root)
        size, _, first = struct.unpack_from("<HHH", data, root - back)
        (version,) = struct.unpack_from("<H", data, root + first)
    except struct.error:
        return False
    return root >= 4 and root - back >= 4 and size >= 8 and first >= 4 and version in _VERSIONS


@contextmanager
def damage_noticed(file: str) -> Iterator[None]:
    """
    Raises:
      SourceError: in place of what the bindings raise where a name in a module is no UTF-8 text.
    """
    try:
        yield
    except SdyError:
        raise
    except (RuntimeError, UnicodeError):
        raise SourceError("this file is damaged: a name in it is no UTF-8 text", file) from None


def binary_module(data: bytes, context: ir.Context, file: str) -> ir.Module:
    """A verified StableHLO module from MLIR bytecode or a portable artifact.

    Raises:
      SourceError: the bytes are damaged, or of a version that jaxlib cannot read.
    """
    said: list[str] = []

    def listen(diagnostic: ir.Diagnostic) -> bool:
        try:
            said.append(diagnostic.message)
        except (RuntimeError, UnicodeError):  # it quotes damaged bytes
            said.append("damaged")
        return True

    handler = context.attach_diagnostic_handler(listen)
    try:
        module = stablehlo.deserialize_portable_artifact(context, data)
    except (ValueError, ir.MLIRError) as error:
        raise SourceError(_unreadable(data, said or [str(error)]), file) from None
    finally:
        handler.detach()
    _check_names(module.operation, file)
    try:
        verify_module(module.operation)
    except RuleError as error:
        raise SourceError(error.message, file) from None
    return module


_DAMAGED = "to fix: if it was cut short or changed on its way, copy it or export it again"

_STRING = r'"(?:[^"\\]|\\.)*"'
_NAME = re.compile(rf"@{_STRING}|{_STRING}(?= = )|(?:(?<={{)|(?<=, )){_STRING}(?=[,}}])")
_ESCAPED = re.compile(rb"\\([0-9A-F]{2})")


def _check_names(module: ir.Operation, file: str) -> None:
    """jaxlib ends the process when it is asked for the name of an attribute that is no UTF-8 text (0.10 to 0.12)."""
    for match in _NAME.finditer(module.get_asm(large_elements_limit=0)):
        name = _ESCAPED.sub(lambda code: bytes.fromhex(code[1].decode()), match[0].encode())
        try:
            name.decode()
        except UnicodeDecodeError:
            raise SourceError(f"this file is damaged: it has the name {match[0].lstrip('@')}", file) from None


def _unreadable(data: bytes, said: list[str]) -> str:
    match = _PRODUCER.match(data)
    reason = "; ".join(dict.fromkeys(said))
    if not match or not match[2]:
        return f"this MLIR bytecode cannot be read: {reason}; {_DAMAGED}"
    own = stablehlo.get_current_version()
    return (
        f"this portable artifact of StableHLO {match[2].decode()} cannot be read: {reason} (jaxlib reads versions "
        f"{stablehlo.get_minimum_version()} to {own}); {_DAMAGED}"
    )


def exported_of(data: bytes, file: str) -> export.Exported:
    """What a `jax.export` file holds.

    Raises:
      SourceError: the bytes are damaged, or of a version that jax cannot read.
      UnsupportedError: flatbuffers is not installed.
    """
    try:
        return export.deserialize(bytearray(data))
    except ImportError:
        raise UnsupportedError(
            f"{file}: to read a jax.export file, jax needs the package flatbuffers: pip install flatbuffers"
        ) from None
    except SdyError:
        raise
    except Exception as error:  # what a damaged flatbuffer raises is not known
        reason = f"its {len(data)} bytes are not all" if isinstance(error, struct.error) else str(error)
        reason = reason or type(error).__name__
        raise SourceError(
            f"this jax.export file cannot be read by jax {jax.__version__}: {reason}; {_DAMAGED}", file
        ) from None


_FORWARDING = frozenset(
    (
        "sdy.sharding_constraint",
        "sdy.reshard",
        "sdy.propagation_barrier",
        "sdy.data_flow_edge",
        *COLLECTIVE_OPS,
    )
)
"""Ops whose result is their operand, sharded otherwise."""


def drop_annotations(module: ir.Operation) -> None:
    """Removes shardings, meshes and what the sdy dialect says about them; what the module computes stays the same.

    Raises:
      ShardingError: a manual computation is left, which is made for its mesh.
    """
    drop_mesh_annotations(module)
    for op in post_order(module):
        if op.name in _FORWARDING:
            replace_op(op, op.operands)
        elif op.name == "sdy.sharding_group":
            op.erase()
        elif op.name == "sdy.named_computation":
            _drop(op, "in_shardings", "out_shardings")
        elif op.name == "sdy.manual_computation":
            raise ShardingError(
                f"the sdy.manual_computation at {source_line(op.location)} computes on the blocks of its mesh; its "
                "shardings cannot be dropped"
            )
        else:
            _drop(op, "sdy.sharding_rule")
    drop_shardings_and_meshes(module)


def _drop(op: ir.Operation, *names: str) -> None:
    for name in names:
        if name in op.attributes:
            del op.attributes[name]


@api_boundary
def load(
    source: str | os.PathLike[str] | bytes,
    *,
    function: str | None = None,
    shardings: bool = True,
    any_platform: bool = False,
    strict: bool = True,
) -> Program:
    """A program from a file: one to look at, to run passes on, and to partition.

    The file holds MLIR text (StableHLO with or without SDY), MLIR bytecode, a StableHLO portable artifact, or what
    `jax.export` serialized; which of them is found out from its bytes. Reading the last kind needs the package
    flatbuffers. Binary files are trusted to come from where they should: jaxlib's reader is not safe against bytes that
    somebody made up.

    Args:
        source: a path, `-` for standard input, or the bytes themselves. For text there is `loads`.
        function: the function that the program begins at, by its name; None: the only one, or `main`. What it does not
            call is left out. Where lines `// -----` part a text into modules, or it has modules in it, the one that
            defines the function is taken.
        shardings: keep the shardings and meshes that the program has. Without them it can be partitioned on any mesh.
        any_platform: let a `jax.export` file run on platforms that it was not exported for. Right where it holds
            nothing but StableHLO; calls of a platform's libraries will not be found.
        strict: refuse a `mesh.shard` of what another has annotated in the same way, which the dialect leaves undefined.
            Else it reshards.

    Returns:
        The program. `partition(program, mesh=...)` gives a function of its arguments: of a `jax.export` file those of
        the exported function, trees included, else one array per argument of `@main`, called `arg0`, `arg1`, ... A mesh
        may be left out where the program's shardings name one; shardings of its arguments and results hold where no
        others are given.

    Raises:
        SdyError: the file is none of these, or damaged. Errors in text have the line and column.

    Example:
        >>> program = load(b'''
        ... func.func @main(%x: tensor<8x4xf32>) -> tensor<8x4xf32> {
        ...   %y = stablehlo.tanh %x : tensor<8x4xf32>
        ...   return %y : tensor<8x4xf32>
        ... }''')
        >>> program.inputs
        ('arg0',)

    See also:
        `loads`: of text.
        `partition`: takes what it returns.
    """
    data, file = contents(source)
    kind = recognise(data, file)
    with damage_noticed(file):
        if kind is ArtifactKind.EXPORTED:
            if function is not None:
                raise ArgumentError(f"{file}: a jax.export file has one function; to fix: leave out function=")
            program = _from_exported(exported_of(data, file), file, any_platform)
        elif kind is ArtifactKind.TEXT:
            program = _from_text(data.decode(), file, function, strict)
        else:
            program = _from_module(binary_module(data, new_context(), file), function)
    return program if shardings else _without_shardings(program)


@api_boundary
def loads(text: str, *, function: str | None = None, shardings: bool = True, strict: bool = True) -> Program:
    """A program from MLIR text: `load` for a string that is the program, not the path of one.

    Args:
        text: StableHLO, with or without SDY and the mesh and shard dialects, whose ops may be in the pretty or in the
            generic form.
        function, shardings, strict: as for `load`.

    Returns:
        The program. One on local arrays, which communicates itself, runs by `sdy_jax.shard.run_local(program)`.

    Raises:
        SdyError: the text is wrong; with its line and column.

    Example:
        >>> program = loads('''
        ... func.func @main(%x: tensor<8x4xf32>) -> tensor<8x4xf32> {
        ...   %y = stablehlo.tanh %x : tensor<8x4xf32>
        ...   return %y : tensor<8x4xf32>
        ... }''')
        >>> program.inputs
        ('arg0',)

    See also:
        `load`: of a file, or bytes of any kind.
    """
    if not isinstance(text, str):
        raise SdyError(
            f"loads got {with_article(type(text))}; expected the text of a program. Bytes and files are read by load"
        )
    if re.fullmatch(r"[\w./\\~-]+\.\w+", text.strip()):
        raise SdyError(f"loads got {text.strip()!r}, the name of a file; to fix: sdy_jax.load({text.strip()!r})")
    if not text.strip():
        raise SourceError("this is empty; expected the text of a program", "<text>")
    with damage_noticed("<text>"):
        program = _from_text(text, "<text>", function, strict)
    return program if shardings else _without_shardings(program)


def _from_text(text: str, file: str, function: str | None, strict: bool) -> Program:
    try:
        module = text_module(part_with(text, function), new_context(), file, strict)
    except SourceError as error:
        raise parted(error, text) from None
    return _from_module(module, function)


def _without_shardings(program: Program) -> Program:
    module = copied(program.module)
    with module.context, ir.Location.unknown(module.context):
        drop_annotations(module)
    return replace(program, module=module, mesh=Mesh(()), mesh_name="")


def _from_module(module: ir.Module, function: str | None) -> Program:
    # A copy of its own: an operation does not keep its module object alive.
    settle_constants(module.operation)
    operation = program_module(module.operation, function)
    settle_frontend_shardings(operation)
    graph = Graph(operation)
    results = tuple(map(_type_of, graph.outputs))
    tree = jax.tree.structure(0 if len(results) == 1 else (0,) * len(results))
    return Program(
        operation,
        *_own_mesh(operation),
        constants=(),
        inputs=tuple(f"arg{i}" for i in range(len(graph.arguments))),
        outputs=_paths(tree, "result"),
        in_info=tuple(map(_type_of, graph.arguments)),
        out_info=results,
        in_tree=jax.tree.structure(((0,) * len(graph.arguments), {})),
        out_tree=tree,
        name=function or _name(operation),
    )


def _type_of(value: Value) -> jax.ShapeDtypeStruct | None:
    """The shape and dtype of a value, with `?` for sizes that the text leaves open; None for what jax has no arrays
    of."""
    type_ = value.mlir.type
    if not isinstance(type_, ir.RankedTensorType):
        return None
    sizes: list[Any] = ["?" if type_.is_dynamic_dim(i) else type_.get_dim_size(i) for i in range(type_.rank)]
    try:
        return jax.ShapeDtypeStruct(tuple(sizes), numpy_dtype(str(type_.element_type)))
    except UnsupportedError:
        return None


def _type_of_aval(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _name(module: ir.Operation) -> str:
    """What jax called the function, else the name of the module."""
    name = module.attributes.get("sym_name")
    return "main" if name is None else str(ir.StringAttr(name).value).removeprefix("jit_")


def _from_exported(exported: export.Exported, file: str, any_platform: bool) -> Program:
    if exported.ordered_effects:
        effects = ", ".join(map(str, exported.ordered_effects))
        raise UnsupportedError(
            f"{file}: {exported.fun_name} has ordered effects ({effects}), which cannot be partitioned yet; to fix: "
            "export a function that returns the values, and print them or call back with them outside"
        )
    if any_platform:
        checks = (*exported.disabled_safety_checks, export.DisabledSafetyCheck.platform())
        exported = replace(exported, disabled_safety_checks=checks)
    module = binary_module(exported.mlir_module_serialized, new_context(), file)
    operation = copied(module)
    if 'mhlo.sharding = "{devices=' in operation.get_asm(large_elements_limit=0):
        raise UnsupportedError(
            f"{file}: the program's shardings are in XLA's form (mhlo.sharding), because it was exported with "
            "jax_use_shardy_partitioner=False; export it with Shardy, or without shardings"
        )
    return Program(
        operation,
        *_own_mesh(operation),
        constants=(),
        inputs=_input_paths(exported, operation),
        outputs=_paths(exported.out_tree, "result"),
        in_info=tuple(map(_type_of_aval, exported.in_avals)),
        out_info=tuple(map(_type_of_aval, exported.out_avals)),
        in_tree=exported.in_tree,
        out_tree=exported.out_tree,
        name=exported.fun_name,
        exported=exported,
    )


_NAMED = re.compile(r'^loc\("([A-Za-z_]\w*)[^"]*"\)$')


def _input_paths(exported: export.Exported, module: ir.Operation) -> tuple[str, ...]:
    """The leaves of an exported function's arguments, which are called as the module's locations say, if they do."""
    positional, keyword = by_argument(exported.in_tree)
    leaves = sorted(exported.module_kept_var_idx)
    values = list(body_of(main_function(module)).arguments)
    kept = dict(zip(leaves, values[len(values) - len(leaves) :], strict=True))
    names = []
    for _, which in positional:
        found = {_NAMED.sub(r"\1", str(kept[leaf].location)) for leaf in which if leaf in kept}
        names += [name for name in found if name.isidentifier()] if len(found) == 1 else []
    known = len(names) == len(positional) == len({*names, *keyword}) - len(keyword)
    arguments, named = jax.tree.unflatten(exported.in_tree, [object() for _ in exported.in_avals])
    return tuple(leaf.path for leaf in argument_leaves(None, arguments, named, names if known else ()))


def _paths(tree: Any, root: str) -> tuple[str, ...]:
    whole = jax.tree.unflatten(tree, [object() for _ in range(tree.num_leaves)])
    return tuple(leaf.path for leaf in match_prefix(None, whole, root, ""))


def _own_mesh(module: ir.Operation) -> tuple[Mesh, str]:
    """The mesh that the shardings of a module are on, and its symbol: the first with axes, or else a declared one."""
    meshes = module_meshes(module)

    def named(mesh: str | Mesh) -> tuple[Mesh, str]:
        return (meshes[mesh], mesh) if isinstance(mesh, str) else (mesh, "")

    candidates = (*map(named, used_meshes(module)), annotated_mesh(module, Devices()), *map(named, meshes))
    return next((found for found in candidates if found[0].axes), (Mesh(()), ""))
