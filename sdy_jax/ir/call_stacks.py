"""The call that an op comes from, whole: jax's name stack and the frames, as a location says them; and functions run as
if called from there, so that jax, which asks Python's stack where it is, says the same of what they compute.

    loc(callsite("mul"("norm"("model.py":9:15 to :37)) at "jit(step)/jvp(mlp)/jit(norm)"("step"("model.py":20:4))))

is a `mul` in the scope `jvp(mlp)/jit(norm)`, at line 9 of `norm`, which line 20 of `step` calls.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any, NamedTuple, TypeVar

from jax.extend.mlir import ir

from sdy_jax.base.jax_calls import is_user_file, lines_of_the_stack
from sdy_jax.ir.operations import named, pre_order

T = TypeVar("T")

_STRING = r'"([^"\\]*(?:\\.[^"\\]*)*)"'
_AT = r":(\d+):(\d+)(?: to (\d*):(\d+))?"
_PART = re.compile(rf"{_STRING}(?:\({_STRING}{_AT}|{_AT})?")
"""A function at a place in a file, or a place alone, or a name."""
_ESCAPED = re.compile(r"\\\\|(?:\\[0-9A-Fa-f]{2})+")
_NAME_STACK = re.compile(r"[/(:]")
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


def locate_bodies(module: ir.Operation) -> None:
    """Adds the locations of manual computations to those of their ops, which jax locates inside of the body."""
    for manual in reversed(named(module, "sdy.manual_computation")):  # inner ones first
        for op in pre_order(manual)[1:]:
            op.location = ir.Location.callsite(op.location, [manual.location], manual.context)


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
    name, function = (function, "") if _NAME_STACK.search(function) else ("", function)
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
    functions = [_function(frame) for frame in reversed(frames)]
    with lines_of_the_stack():
        return call(*functions, fun)


def _call(fun: Callable[..., T], *rest: Any) -> T:
    return fun(*rest)


@lru_cache(maxsize=1 << 14)
def _function(frame: CallFrame) -> FunctionType:
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
