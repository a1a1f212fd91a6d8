"""Runs the modules that plans write in a process of its own, which knows nothing of sdy_jax."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

_RUNNER = """
import importlib.util, pickle, sys
from pathlib import Path

import jax
import numpy as np

for given in sorted(Path(sys.argv[1]).glob("*.args")):
    args, kwargs, wide = pickle.loads(given.read_bytes())
    spec = importlib.util.spec_from_file_location(given.stem, given.with_suffix(".py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    *_, function = [value for value in vars(module).values() if hasattr(value, "lower")]
    with jax.enable_x64(wide):
        found = jax.tree.map(np.asarray, function(*args, **kwargs))
    given.with_suffix(".found").write_bytes(pickle.dumps(found))
assert not any(name.startswith("sdy_jax") for name in sys.modules)
"""


class Modules:
    """Modules in a folder, and what they are called with."""

    def __init__(self, folder: Path):
        self.folder = folder

    def add(self, name: str, plan: Any, *args: Any, wide: bool = False, **kwargs: Any) -> str:
        """Writes the module of a plan, and returns its text."""
        text = plan.to_python(self.folder / f"{name}.py")
        given = jax.tree.map(np.asarray, (args, kwargs))
        (self.folder / f"{name}.args").write_bytes(pickle.dumps((*given, wide)))
        return text

    def run(self) -> dict[str, Any]:
        """What each module returns, in one fresh process on as many devices as this one."""
        (self.folder / "runner").write_text(_RUNNER)
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        command = [sys.executable, "runner", "."]
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4000:]
        return {path.stem: pickle.loads(path.read_bytes()) for path in self.folder.glob("*.found")}


def assert_alike(found: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    """Trees of arrays whose leaves have the same types, and the same numbers up to rounding."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    for x, y in pairs:
        y = np.asarray(y)
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        if x.dtype.kind not in "biufc":
            x, y = x.astype(np.float32), y.astype(np.float32)
        size = np.abs(y[np.isfinite(y)]).max(initial=1.0) if y.dtype.kind in "fc" else 0.0
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance * size)
