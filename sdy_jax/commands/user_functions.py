"""The user's functions, by module and name: `train.py:step`, `package.train:step`."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sdy_jax.errors import SdyError

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
                raise SdyError(f"{module} has no {part!r}; it has {known or 'no functions'}")
            value = getattr(value, part)
        if not callable(value):
            raise SdyError(f"{module}:{name} is a {type(value).__name__}; expected a function")
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
        raise SdyError("No such file or directory")
    sys.path.insert(0, str(Path(file).resolve().parent))
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot read {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
