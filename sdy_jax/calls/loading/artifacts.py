"""What a file with a program is, and the module in it: MLIR text or bytecode, a portable artifact, a `jax.export` file.

A portable artifact is MLIR bytecode in VHLO, StableHLO's versioned form. A `jax.export` file is a flatbuffer that holds
such an artifact and how to call it.
"""

from __future__ import annotations

import os
import re
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

import jax
from jax import export
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from sdy_jax.errors import ArgumentError, SdyError, UnsupportedError, with_article
from sdy_jax.ir.text.modules import SourceError
from sdy_jax.ir.validity import RuleError
from sdy_jax.ir.verification import verify_module

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
    try:
        with open(name, "rb") as file:
            return file.read(), name
    except (OSError, ValueError) as error:  # a name may hold a NUL
        raise SourceError(getattr(error, "strerror", None) or str(error), name) from None


def _standard_input() -> bytes:
    if sys.stdin is None:
        raise SourceError("standard input is closed", "<stdin>")
    return sys.stdin.buffer.read()


def recognise(data: bytes, file: str) -> ArtifactKind:
    """What kind of file this is.

    Raises:
      SourceError: it is none of them; the message says what it seems to be.
    """
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
        raise SourceError(f"unknown kind of file, with NUL characters; expected {_SUPPORTED}", file)
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
        return f"this MLIR bytecode cannot be read: {reason}"
    own = stablehlo.get_current_version()
    return (
        f"this portable artifact of StableHLO {match[2].decode()} cannot be read: {reason} (jaxlib reads versions "
        f"{stablehlo.get_minimum_version()} to {own})"
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
        reason = str(error) or type(error).__name__
        raise SourceError(f"this jax.export file cannot be read by jax {jax.__version__}: {reason}", file) from None
