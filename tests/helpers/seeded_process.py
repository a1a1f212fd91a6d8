"""What code prints in a process of its own, whose sets and dicts of strings have an order of their own."""

import os
import subprocess
import sys
from pathlib import Path


def printed(code: str, seed: str, folder: Path) -> str:
    """The output of code that imports the test modules of a folder; `seed`: that of Python's hashes."""
    environment = os.environ | {"PYTHONHASHSEED": seed}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout
