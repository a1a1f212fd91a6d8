"""What a command line names: functions by module, arguments and shardings as literals; and its errors in words."""

from __future__ import annotations

import argparse
import ast
import errno
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from sdy_jax.annotate.arguments import AUTO
from sdy_jax.base.errors import InternalError, SdyError, did_you_mean, with_article
from sdy_jax.base.files import refusal
from sdy_jax.cli import UsageError
from sdy_jax.cli.terminal import described_bug
from sdy_jax.ir.jax_shardings import long_dtype_name
from sdy_jax.ir.locations import PACKAGE
from sdy_jax.ir.meshes import Mesh
from sdy_jax.ir.text.cursor import Position
from sdy_jax.ir.text.modules import SourceError
from sdy_jax.ir.validity import RuleError

# The user's functions, by module and name: `train.py:step`, `package.train:step`.

_FUNCTION = re.compile(r"(?P<module>.+?):(?P<name>[A-Za-z_][\w.]*)")


def module_and_name(text: str) -> tuple[str, str] | None:
    """Of `train.py:step`; None for what is a file, or has no such form."""
    match = _FUNCTION.fullmatch(text)
    return (match["module"], match["name"]) if match and not os.path.exists(text) else None


def check_no_python(program: str) -> None:
    """
    Raises:
        SdyError: it is a file or a module of Python, of which a function is to be named.
    """
    file = program.removesuffix(":")
    if not file.endswith(".py") and os.path.isfile(f"{file}.py") and not os.path.exists(file):
        file = f"{file}.py"
    if not file.endswith(".py") or not os.path.isfile(file):
        return
    names = [node.name for node in ast.parse(Path(file).read_bytes(), file).body if isinstance(node, ast.FunctionDef)]
    public = [f"{file}:{name}" for name in names if not name.startswith("_")]
    known = ", or ".join(public) or f"{file}:NAME, which is not among what it defines by `def`"
    raise SdyError(f"{file} is Python; to fix: name a function in it, {known}")


class UserModules:
    """The modules that a command imports, each once."""

    def __init__(self) -> None:
        self._imported: dict[str, Any] = {}

    def function(self, module: str, name: str) -> Callable[..., Any]:
        """
        Raises:
            SdyError: there is no such module, or no such function in it.
        """
        value = self._module(module)
        for part in name.split("."):
            if not hasattr(value, part):
                known = ", ".join(n for n, v in vars(value).items() if callable(v) and not n.startswith("_"))
                near = did_you_mean(part, vars(value))
                raise SdyError(f"{module} has no {part!r}; {near}it has {known or 'no functions'}")
            value = getattr(value, part)
        if not callable(value):
            raise SdyError(f"{module}:{name} is {with_article(type(value))}; expected a function")
        found: Callable[..., Any] = value
        return found

    def _module(self, module: str) -> Any:
        key = os.path.realpath(module) if module.endswith(".py") else module
        if key not in self._imported:
            self._imported[key] = (_imported_file if module.endswith(".py") else _imported_module)(module)
        return self._imported[key]


def _imported_module(name: str) -> Any:
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # what the module imports
        raise SdyError(f"there is no module {error.name!r}, neither installed nor in {os.getcwd()}") from None


def _imported_file(file: str) -> Any:
    if not os.path.exists(file):
        raise SdyError(refusal(FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)), file))
    sys.path.insert(0, str(Path(file).resolve().parent))
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot read {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# Shardings and types as one writes them in Python, from the command line: literals, without running any code.

_EMPTY = re.compile(r"\b(\w+)\[\s*\]")


def parse_mesh(text: str) -> Mesh:
    """`data=2,model=4`."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (piece.strip() for piece in part.partition("="))
        if not name or not size.isdecimal() or int(size) < 1 or name in sizes:
            raise UsageError(
                f"--mesh {text}: got {part.strip()!r}; expected different names with sizes, data=2,model=4"
            )
        sizes[name] = int(size)
    return Mesh.of(**sizes)


def parse_shardings(text: str, option: str) -> Any:
    """`P('data'), {'w': P(None, 'model')}, None, AUTO`."""
    return _parsed(text, option, _sharding, "P('data', None), None, AUTO, a string, or a tuple, list or dict of them")


def parse_types(text: str, option: str) -> tuple[Any, ...]:
    """`f32[64,128], {'w': bf16[128]}`: one entry per argument; numbers and strings stand for themselves."""
    text = _EMPTY.sub(r"\1[()]", text)
    found = _parsed(text, option, _type, "f32[64,128], i32[], a number, or a tuple, list or dict of them")
    return found if isinstance(found, tuple) else (found,)


def _parsed(text: str, option: str, leaf: Callable[[ast.expr], Any], expected: str) -> Any:
    try:
        body = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UsageError(f"{option} {text}: {getattr(error, 'msg', error)}; expected {expected}") from None
    try:
        return _evaluated(body, leaf)
    except _Unknown as unknown:
        found = ast.unparse(unknown.node)
        raise UsageError(f"{option} {text}: {unknown.reason or 'got'} {found}; expected {expected}") from None


class _Unknown(Exception):
    def __init__(self, node: ast.expr, reason: str = ""):
        self.node, self.reason = node, reason


def _evaluated(node: ast.expr, leaf: Callable[[ast.expr], Any]) -> Any:
    if isinstance(node, ast.Tuple):
        return tuple(_evaluated(n, leaf) for n in node.elts)
    if isinstance(node, ast.List):
        return [_evaluated(n, leaf) for n in node.elts]
    if isinstance(node, ast.Dict):
        if any(key is None for key in node.keys):
            raise _Unknown(node)
        return {_constant(k): _evaluated(v, leaf) for k, v in zip(node.keys, node.values, strict=True) if k is not None}
    return leaf(node)


def _constant(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise _Unknown(node) from None


def _sharding(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id == "AUTO":
        return AUTO
    if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, str)):
        return node.value
    if isinstance(node, ast.Call) and _is_spec(node.func) and not node.keywords:
        return PartitionSpec(*map(_entry, node.args))
    raise _Unknown(node)


def _is_spec(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("P", "PartitionSpec")


def _entry(node: ast.expr) -> Any:
    if isinstance(node, ast.Attribute) and _is_spec(node.value) and node.attr == "UNCONSTRAINED":
        return PartitionSpec.UNCONSTRAINED
    value = _constant(node)
    names = value if isinstance(value, tuple) else (value,)
    if value is not None and not all(isinstance(name, str) for name in names):
        raise _Unknown(node, "no mesh axis:")
    return value


def _type(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if not isinstance(node, ast.Subscript) or not isinstance(node.value, ast.Name):
        raise _Unknown(node)
    dims = _constant(node.slice)
    shape = dims if isinstance(dims, tuple) else (dims,)
    if not all(isinstance(n, int) and n >= 0 for n in shape):
        raise _Unknown(node, "no sizes in")
    return jax.ShapeDtypeStruct(shape, _dtype(node.value))


def _dtype(node: ast.Name) -> Any:
    try:
        return jnp.dtype(long_dtype_name(node.id))
    except TypeError:
        raise _Unknown(node, "no element type:") from None


# What goes wrong while a program is planned or run, in words: no traceback reaches the user.

_JAX = re.compile(r"[/\\]jax(lib)?[/\\]")


@contextmanager
def explained(file: str) -> Iterator[None]:
    """Errors get the file before them, where they do not begin with a line of it; what is our mistake is called so.

    Args:
      file: the file, or `module:function`.

    Raises:
      SourceError: in place of every other error.
    """
    try:
        yield
    except (BrokenPipeError, SourceError, UsageError):
        raise
    except InternalError as error:
        raise SourceError(described_bug(error), file) from error
    except RuleError as error:
        position = _position(error, file)
        raise SourceError(error.message if position else str(error), file, position) from error
    except SdyError as error:
        place, _, rest = str(error).partition(": ")
        inside = place.startswith(f"{file}:") and rest
        raise SourceError(rest if inside else str(error), place if inside else file) from error
    except SyntaxError as error:
        position = Position(error.lineno or 1, error.offset or 1)
        raise SourceError(f"{type(error).__name__}: {error.msg}", error.filename or file, position) from error
    except Exception as error:
        raise SourceError(_described(error), file) from error


def _position(error: RuleError, file: str) -> Position | None:
    """The place in the file that an error is about, if its location has one."""
    match = re.search(rf'"{re.escape(file)}":(\d+):(\d+)', error.location or "")
    return Position(int(match[1]), int(match[2])) if match else None


def _described(error: Exception) -> str:
    """What the user's code raised, with its line; or else a bug of ours."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _JAX.search(frame.filename)]
    if frames[-1].filename.startswith(PACKAGE):
        return described_bug(error)
    return f"{type(error).__name__}: {error} ({frames[-1].filename}:{frames[-1].lineno})"


# The arguments that a command line gives: types by `--args`, or what a function returns by `--args-from`.


def given_arguments(options: argparse.Namespace, modules: UserModules) -> tuple[Any, ...] | None:
    """The arguments, as types or values; None where nothing is said of them.

    Raises:
        UsageError: what is said names no types, and no function.
        SdyError: there is no such function, or it fails.
    """
    if options.args:
        return parse_types(options.args, "--args")
    if not options.args_from:
        return None
    function, text = module_and_name(options.args_from), options.args_from
    if function is None and text.isidentifier() and (program := module_and_name(options.program)) is not None:
        function, text = (program[0], text), f"{program[0]}:{text}"
    if function is None:
        raise UsageError(f"--args-from {text}: expected module:function or file.py:function")
    with explained(text):
        returned = (_values if _runs_with_values(options) else _types)(modules.function(*function))
    return returned if type(returned) is tuple else (returned,)


def _runs_with_values(options: argparse.Namespace) -> bool:
    """Whether what the function returns is passed as it is."""
    return options.command == "run" and not options.inputs and options.random is None


def _values(make: Callable[[], Any]) -> Any:
    return make()


def _types(make: Callable[[], Any]) -> Any:
    """The types of what a function returns, which computes nothing, unless it has to look at its numbers."""
    others: list[Any] = []

    def arrays() -> list[Any]:
        leaves, tree = jax.tree.flatten(make())
        others[:] = [tree, [None if _is_array(leaf) else leaf for leaf in leaves]]
        return [leaf for leaf in leaves if _is_array(leaf)]

    try:
        types = iter(jax.eval_shape(arrays))
    except jax.errors.JAXTypeError:
        return jax.tree.map(lambda leaf: jax.typeof(leaf) if _is_array(leaf) else leaf, make())
    tree, kept = others
    return jax.tree.unflatten(tree, [next(types) if leaf is None else leaf for leaf in kept])


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray))
