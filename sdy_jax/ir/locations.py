"""Source lines are the user's: what an MLIR location says of the line that made an op and of the call around, and the
frames of a call outside of this package, which does not count, as jax does not.
"""

from __future__ import annotations

import ast
import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple, TypeVar

from jax.extend import source_info_util
from jax.extend.mlir import ir

from sdy_jax.base.jax_calls import BOUNDARY, is_user_file, lines_of_the_stack

# Source lines in plans and profiles are the user's: frames of this package do not count, as those of jax do not.

PACKAGE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
"""The folder of this package. Its wings are links in it, and modules are imported through them."""

source_info_util.register_exclusion(PACKAGE)


_caller: ContextVar[str] = ContextVar("caller", default="")


@contextmanager
def called_from(place: str) -> Iterator[None]:
    """Inside, `caller_line` names this place: the caller is no line of Python."""
    token = _caller.set(place)
    try:
        yield
    finally:
        _caller.reset(token)


def caller_line() -> str:
    """`file:line` of the innermost frame outside of this package."""
    if _caller.get():
        return _caller.get()
    frame, _ = _user_frame("sdy_jax")
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def users_stack_level() -> int:
    """The `stacklevel`, for a warning by the caller, of the innermost frame outside of this package and jax."""
    return _user_frame("sdy_jax", "jax")[1]


def raising_line(error: BaseException) -> str:
    """`file:line` of the innermost frame outside of this package and jax in which an error was raised; empty if there
    is none."""
    found, traceback = "", error.__traceback__
    while traceback is not None:
        if not _is_of(traceback.tb_frame, ("sdy_jax", "jax")):
            found = f"{traceback.tb_frame.f_code.co_filename}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return found


def _is_of(frame: FrameType, packages: Sequence[str]) -> bool:
    module: str = frame.f_globals.get("__name__", "")
    return module == BOUNDARY or module.split(".")[0] in packages


def _user_frame(*packages: str) -> tuple[FrameType, int]:
    """The innermost frame outside of some packages, and its `stacklevel` for the caller's caller."""
    frame, level = sys._getframe(2), 1
    while frame.f_back is not None and _is_of(frame, packages):
        frame, level = frame.f_back, level + 1
    return frame, level


# What an MLIR location says: the user's source line, the library's where one made the op, jax's name and scope of it.
#
# jax writes a name stack, then the frames of the call, innermost first:
#
#     loc("jit(step)/jvp(Net)/Block_0/attention/dot_general"(callsite("Dense.__call__"("/…/site-packages/flax/linear.py"
#         :287:8 to 292:5) at callsite("Attention.__call__"("model.py":13:15 to :46) at ...))))

_FRAME = re.compile(r'(?:"((?:[^"\\]|\\.)*)"\()?"((?:[^"\\]|\\.)+)":(\d+):\d+')
_NAME = re.compile(r'"((?:[^"\\]|\\.)*)"(?=\(| at |\)|$)')
_TRANSFORMED = re.compile(r"(\w+)\((.*)\)")
_ASKED = re.compile(r":\d+$")
_LIBRARIES = re.compile(r"[\\/](?:site|dist)-packages[\\/]")

# What jax itself puts on the name stack for the parts of an op with regions.
_PARTS = frozenset({"while", "body", "cond", "closed_call", "checkpoint", "rematted_computation", "shard_map"})
STRICT = "sdy_strict."
"""How the name scope of a strict region begins: `sdy_strict.error[model]`."""
PIPELINE = "sdy_pipeline."
"""How the name scope of a pipeline begins: `annotate/pipeline_schedules.py`."""
_STRICT = re.compile(r"sdy_strict\.(\w+)\[([^\]]*)\]")
_BRANCH = re.compile(r"branch_\d+_fun")


@dataclass(frozen=True, slots=True)
class SourcePlace:
    """Where an op comes from.

    Attributes:
        line: `dir/model.py:42`, of the innermost frame in a file of the user's, which is none in `site-packages`; where
            there is none, of the innermost frame; MLIR's text of the location where it has no file.
        library: the line of the innermost frame, if that one is in a library.
        function: the function around `line`; may be empty.
        scope: the name scopes around the op, of flax's modules and of `jax.named_scope`: `Block_2/attention/out`.
        primitive: jax's name of what the op was; may be empty.
        backward: it belongs to a derivative's backward pass.
    """

    line: str
    library: str = ""
    function: str = ""
    scope: str = ""
    primitive: str = ""
    backward: bool = False

    @property
    def lines(self) -> str:
        """`model.py:42 (flax/linen/linear.py:287)`, as one would name them here."""
        return f"{short_source(self.line)} ({short_source(self.library)})" if self.library else short_source(self.line)

    def __str__(self) -> str:
        """`dot_general at model.py:34 in attention`."""
        where = f"{self.lines} in {self.function}" if self.function else self.lines
        return f"{self.primitive} at {where}{' (backward pass)' if self.backward else ''}"


def place_of(location: ir.Location) -> SourcePlace:
    """What a location says."""
    return _place(str(location))


def source_line(location: ir.Location) -> str:
    """`SourcePlace.line` of a location."""
    return place_of(location).line


def user_frames(location: ir.Location) -> tuple[tuple[str, str], ...]:
    """The lines of the user's code around a location, outside of libraries, inner ones first, with their functions; in
    code of libraries alone their lines."""
    return _user_frames(str(location))


def strict_axes(location: ir.Location) -> dict[str, str]:
    """The axes that are strict at a location, each with what becomes of moves along it: "error" or "warn"."""
    text = str(location)
    found = _STRICT.findall(text) if STRICT in text else ()
    return {axis: on_move for on_move, axes in found for axis in axes.split(",")}


def may_mention(module: ir.Operation, scope: str) -> bool:
    """Whether the location of some op of a module may have a scope, such as `STRICT`. Bytecode has each part of a
    location once: it is written in a tenth of the time that the text of all locations takes."""
    written = io.BytesIO()
    module.write_bytecode(written)
    return scope.encode() in written.getvalue()


RUN_AGAIN = "rematted_computation"
"""Given by jax: the scope of what `jax.checkpoint` lets run again."""


def is_computed_again(location: ir.Location) -> bool:
    """Whether `jax.checkpoint` lets an op run again, where a derivative was taken."""
    return RUN_AGAIN in str(location)


def is_line(line: str, asked: str) -> bool:
    """Whether a line of source is the one that is asked for by the end of its path: `model.py:42`, or `In[3]:5` in a
    notebook."""
    if _ASKED.search(asked) is None:
        return False
    return line == asked or line.endswith(f"/{asked}") or (asked.startswith("In[") and short_source(line) == asked)


def is_in_library(file: str) -> bool:
    """Whether a file is one of an installed package."""
    return _LIBRARIES.search(file) is not None


class Frame(NamedTuple):
    """A frame of a call: file, line, and the function's name, which may be empty."""

    file: str
    line: int
    function: str


def frames_of(location: ir.Location) -> list[Frame]:
    """The user's frames, innermost first; those in `site-packages` are left out."""
    frames = _FRAME.finditer(str(location))
    return [Frame(f[2], int(f[3]), f[1] or "") for f in frames if not _LIBRARIES.search(f[2])]


def short_source(source: str) -> str:
    """A source line as one would name it here: relative to the working directory, or to where packages lie; in a
    notebook by its cell, `In[3]:5`."""
    file, _, number = source.rpartition(":")
    if cell := _cell(file):
        return f"{cell}:{number}"
    here = os.path.join(os.getcwd(), "")
    *_, package = _LIBRARIES.split(source)
    return source.removeprefix(here) if source.startswith(here) and package == source else package


def _cell(file: str) -> str:
    """The cell that IPython compiled under the name of a file that is none; empty if there is no such cell."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    named = getattr(getattr(shell, "compile", None), "format_code_name", None)
    found: tuple[str, str] | None = named(file) if named is not None else None
    return found[1] if found else ""


@lru_cache(maxsize=1 << 12)
def _user_frames(text: str) -> tuple[tuple[str, str], ...]:
    frames = list(_FRAME.finditer(text))
    users = [frame for frame in frames if not _LIBRARIES.search(frame[2])] or frames
    return tuple([(_line(frame), _function(frame)) for frame in users])


def _function(frame: re.Match[str]) -> str:
    return frame[1].rpartition("<locals>.")[2] if frame[1] and _is_function(frame[1]) else ""


@lru_cache(maxsize=1 << 12)
def _place(text: str) -> SourcePlace:
    frames = list(_FRAME.finditer(text))
    inner = frames[0] if frames else None
    head = text[: inner.start()] if inner else text
    if inner and inner[1] and not _is_function(inner[1]):
        head += f'"{inner[1]}"('
    scope, primitive = _stack([name.removesuffix(":") for name in _NAME.findall(head)])
    said = scope, primitive, "transpose(" in head
    if inner is None:
        return SourcePlace(_without_file(text), "", "", *said)
    user = next((frame for frame in frames if not _LIBRARIES.search(frame[2])), inner)
    return SourcePlace(_line(user), "" if user is inner else _line(inner), _function(user), *said)


def _stack(names: list[str]) -> tuple[str, str]:
    """Scope and primitive: the last of the name stack or, without full tracebacks, a name around it."""
    *around, stack = names[:2] or [""]
    if around and not stack.endswith(f"/{around[0]}"):
        stack = f"{stack}/{around[0]}" if around[0].isidentifier() else around[0]
    *scopes, last = stack.split("/")
    return "/".join(filter(None, map(_scope, scopes))), last if last.isidentifier() else ""


def scope_of(name: str) -> str:
    """The scopes in the name of an instruction of a compiled program: `layer/mlp` of
    `jit(step)/transpose(jvp(layer))/mlp/mul`. XLA joins names where it makes one instruction of several: these are the
    first's of `a/mul;b/add`, and those around all of `around/(a/mul:b/add)`."""
    scopes = name.partition(";")[0].partition("/(")[0].split("/")
    scopes = scopes if "/(" in name else scopes[:-1]
    return "/".join(filter(None, map(_scope, scopes)))


def _line(frame: re.Match[str]) -> str:
    return f"{frame[2]}:{frame[3]}"


def _without_file(text: str) -> str:
    return "an unknown line" if re.search(r"\(unknown\)", text) else text.removeprefix("loc(").removesuffix(")")


def _is_function(name: str) -> bool:
    """Of a frame, rather than a name stack that is right around a file."""
    return not re.search(r"[/(:]", name)


def _scope(part: str) -> str:
    """One part of a name stack without transformations: nothing for `jit(f)` and `while`, `Net` for `jvp(Net)`."""
    while match := _TRANSFORMED.fullmatch(part):
        if match[1] in ("jit", "pjit"):
            return ""
        part = match[2]
    return "" if part in _PARTS or part.startswith((STRICT, PIPELINE)) or _BRANCH.fullmatch(part) else part


# The call that an op comes from, whole: jax's name stack and the frames, as a location says them; and functions run as
# if called from there, so that jax, which asks Python's stack where it is, says the same of what they compute.
#
#    loc(callsite("mul"("norm"("model.py":9:15 to :37)) at "jit(step)/jvp(mlp)/jit(norm)"("step"("model.py":20:4))))
#
# is a `mul` in the scope `jvp(mlp)/jit(norm)`, at line 9 of `norm`, which line 20 of `step` calls.

T = TypeVar("T")

_STRING = r'"([^"\\]*(?:\\.[^"\\]*)*)"'
_AT = r":(\d+):(\d+)(?: to (\d*):(\d+))?"
_PART = re.compile(rf"{_STRING}(?:\({_STRING}{_AT}|{_AT})?")
"""A function at a place in a file, or a place alone, or a name."""
_ESCAPED = re.compile(r"\\\\|(?:\\[0-9A-Fa-f]{2})+")
_JIT = "jit("


class CallFrame(NamedTuple):
    """A frame of a call. Lines count from 1, columns from 0."""

    file: str
    function: str
    line: int
    column: int = 0
    end_line: int = 0
    end_column: int = 0


class CallStack(NamedTuple):
    """Where an op comes from.

    Attributes:
        scopes: the parts of the name stack around it, outermost first, with transformations and without the function
            that was traced: `("transpose(jvp(mlp))",)`.
        primitive: jax's name of what the op was; empty where jax has not named it.
        frames: innermost first, as far as the location has them.
    """

    scopes: tuple[str, ...] = ()
    primitive: str = ""
    frames: tuple[CallFrame, ...] = ()


def call_stack(location: ir.Location) -> CallStack:
    """What a location says of the call."""
    return _call_stack(str(location))


def _call_stack(text: str) -> CallStack:
    frames, names = list[CallFrame](), list[str]()
    for name, file, *place in _PART.findall(text):
        if file or place[4]:
            name, frame = _frame(name, file, *place[:4]) if file else _frame("", name, *place[4:])
            frames.append(frame)
        if name and not name.endswith(":"):  # that of the primitive once more
            names.append(name)
    # A callee's name comes before its caller's.
    parts = [part for name in reversed(names) for part in _plain(name).split("/") if part]
    if not parts or not parts[0].startswith(_JIT):
        return CallStack(tuple(parts), "", tuple(frames))
    return CallStack(tuple(parts[1:-1]), parts[-1] if len(parts) > 1 else "", tuple(frames))


@lru_cache(maxsize=1 << 14)
def _frame(function: str, file: str, line: str, column: str, end_line: str, end_column: str) -> tuple[str, CallFrame]:
    """The name stack that is right around a frame, where its function is left out; and the frame."""
    name, function = ("", function) if _is_function(function) else (function, "")
    begin = int(line), int(column)
    end = (int(end_line or line), int(end_column)) if end_column else begin
    return name, CallFrame(_plain(file), _plain(function), *begin, *end)


def _plain(text: str) -> str:
    """A string of MLIR's text without its escapes."""
    return _ESCAPED.sub(_decoded, text) if "\\" in text else text


def _decoded(escaped: re.Match[str]) -> str:
    bytes_ = escaped[0].replace("\\", "")
    return bytes.fromhex(bytes_).decode(errors="replace") if bytes_ else "\\"


def callers() -> list[tuple[str, str]]:
    """Files and functions of the frames around the caller in the user's code, and in libraries; innermost first."""
    found, frame = list[tuple[str, str]](), sys._getframe().f_back
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            found.append((frame.f_code.co_filename, frame.f_code.co_qualname))
        frame = frame.f_back
    return found


def inside_of(frames: tuple[CallFrame, ...], outer: Sequence[tuple[str, str]]) -> tuple[CallFrame, ...]:
    """The frames of a call that are not those of `callers` around it. jax leaves out the outer ones of many."""
    named = [(frame.file, frame.function) for frame in frames]
    for count in range(len(frames)):
        pairs = list(zip(named[count:], outer, strict=False))
        if pairs and all(mine == theirs for mine, theirs in pairs):
            return frames[:count]
    return frames


def alike_from_start(some: Sequence[object], others: Sequence[object]) -> int:
    """With how many equal entries two lists begin, of scopes, of frames or of axes.

    >>> alike_from_start(["step", "layer", "mlp"], ["step", "layer", "attention", "softmax"])
    2
    """
    count = 0
    for mine, other in zip(some, others, strict=False):
        if mine != other:
            break
        count += 1
    return count


def called_through(frames: Sequence[CallFrame], fun: Callable[[], T]) -> T:
    """The result of a function, which is called as if from these frames, the innermost first."""
    call: Callable[..., T] = _call
    functions = [_function_at(frame) for frame in reversed(frames)]
    with lines_of_the_stack():
        return call(*functions, fun)


def _call(fun: Callable[..., T], *rest: Any) -> T:
    return fun(*rest)


@lru_cache(maxsize=1 << 14)
def _function_at(frame: CallFrame) -> FunctionType:
    """A function at a place in a file that calls its first argument with the others."""
    module = ast.parse("def _(fun, *rest): return fun(*rest)")
    end_line, end_column = max((frame.line, frame.column), (frame.end_line, frame.end_column))
    for node in ast.walk(module):
        if "lineno" in node._attributes:
            node.lineno, node.col_offset = frame.line, frame.column  # type: ignore[attr-defined]
            node.end_lineno, node.end_col_offset = end_line, end_column  # type: ignore[attr-defined]
    made = compile(module, frame.file, "exec")
    (code,) = (constant for constant in made.co_consts if isinstance(constant, CodeType))
    named = code.replace(co_name=frame.function.rpartition(".")[2], co_qualname=frame.function)
    return FunctionType(named, {"__name__": __name__})
