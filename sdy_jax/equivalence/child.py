"""The process that verifies: `python -m sdy_jax.equivalence.child FOLDER FIRST`.

It reads `job` in the folder, and adds each outcome to a file there as soon as it is known: what is written stays, if
the process dies.
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys
from pathlib import Path

from sdy_jax.equivalence.trial import outcomes

HOOK = "SDY_JAX_VERIFY_HOOK"
"""An environment variable, for tests: `module:function`, which is called before anything runs."""


def main(folder: Path, first: int) -> None:
    """Runs the trials from one on."""
    if hook := os.environ.get(HOOK):
        module, _, name = hook.partition(":")
        getattr(importlib.import_module(module), name)()
    job = pickle.loads((folder / "job").read_bytes())
    with open(folder / f"outcomes{first}", "wb") as file:
        for outcome in outcomes(job, first):
            pickle.dump(outcome, file)
            file.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
