"""The random suites: test modules with a function `fuzz(seed)`.

It raises an error that holds what shows the mistake, and returns how many cases of each kind it had, as
`{"numeric": 3}`: "numeric" are runs compared with the plain program, "oracle" modules compared with what jaxlib makes
of them, "text" inputs that have to be taken or refused clearly. None is one case of the kind "numeric".
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

Suite = Callable[[int], Mapping[str, int] | None]


def suite_paths() -> dict[str, Path]:
    """Where the suites are, by name."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"), key=lambda path: path.stem)
    return {path.stem: path for path in paths if "\ndef fuzz(" in path.read_text()}


def chosen_suites(names: Sequence[str]) -> list[str]:
    """Those named, or all."""
    known = suite_paths()
    unknown = [name for name in names if name not in known]
    if unknown:
        sys.exit(f"scripts/fuzz: no suite is called {unknown[0]!r}; the suites are {', '.join(known)}")
    return list(names or known)


def loaded_suites(names: Sequence[str]) -> dict[str, Suite]:
    """The functions of suites, whose modules are imported."""
    paths = suite_paths()
    sys.path[:0] = sorted({str(paths[name].parent) for name in names})
    return {name: importlib.import_module(name).fuzz for name in names}
